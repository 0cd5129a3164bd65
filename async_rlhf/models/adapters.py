"""Low-rank adapters by peft: adding them, switching them off for the reference, merging them for generators and
checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from async_rlhf.config import AdapterConfig, ConfigError
from async_rlhf.config.base import require
from async_rlhf.models.quantised import numbers, reader, unquantised
from async_rlhf.system.files import naming


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has put adapters on the model."""
    return getattr(model, "peft_config", None) is not None


def are_trained(model: nn.Module) -> bool:
    """Whether the model has adapters that change what it computes; one without weights has none."""
    changes = (not p.is_meta and bool(p.any()) for name, p in model.named_parameters() if ".lora_B." in name)
    return has_adapters(model) and any(changes)


def trained_further(base: PreTrainedModel, name: str) -> PreTrainedModel:
    """The model with the adapters that a folder or a hub name has, to be trained: transformers loads them frozen."""
    from peft import PeftModel

    return unwrap(PeftModel.from_pretrained(base, str(Path(name).expanduser()), is_trainable=True))


def add_adapters(model: PreTrainedModel, config: AdapterConfig, seed: int, task: str = "CAUSAL_LM") -> PreTrainedModel:
    """Freeze the model and add trainable adapters to it, in place.

    Args:
        model: a plain model.
        config: with a rank above 0.
        seed: decides the adapters' initial weights.
        task: peft's name of the model's task: "CAUSAL_LM" or "SEQ_CLS".

    Raises:
        ConfigError: peft is not installed, the model has none of the modules, or one of them cannot be merged.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("lora.rank: needs peft; pip install 'async-rlhf[peft]'") from error
    named = () if config.target_modules == "all-linear" else config.target_modules
    modules = list(named) or _linear_layers(model)
    options: dict[str, Any] = {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
    }
    if type(model).__name__.startswith("GPT2"):
        options["fan_in_fan_out"] = True  # its Conv1D stores weights transposed
    try:
        base = model.config.name_or_path or None
        adapters = peft.LoraConfig(task_type=task, base_model_name_or_path=base, **options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(adapters, model)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules: got {config.target_modules!r}: {error}") from error
    _require_mergeable(model, "lora.target_modules", config.target_modules)
    return model


def _linear_layers(model: PreTrainedModel) -> str | list[str]:
    """What peft is told to adapt: every linear layer but the head. Of a mixture peft itself would take the experts and
    routers, too, which are no layers of the model but parameters.
    """
    if not any(name.endswith("_proj") and parameter.dim() == 3 for name, parameter in model.named_parameters()):
        return "all-linear"
    heads = [model.get_output_embeddings(), getattr(model, "score", None)]
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return [name for name, module in linear.items() if not any(module is head for head in heads)]


def _require_mergeable(model: nn.Module, key: str, value: object) -> None:
    """Require all adapters to be on linear layers whose weights are theirs alone, so that what is merged, published and
    saved computes what was trained.
    """
    parameters = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    count = Counter(number for _, number in parameters)
    tied = {name.partition(".base_layer.")[0] for name, number in parameters if count[number] > 1}
    for name, layer in _layers(model).items():
        base = layer.get_base_layer()
        why = "shares its weight with another one (tie_word_embeddings)" if name in tied else ""
        if not isinstance(base, (nn.Linear, Conv1D)):
            why = f"is a {type(base).__name__} and no linear layer"
        require(not why, key, value, f"{name} {why}; must be linear layers with weights of their own, such as q_proj")


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model within a ``peft.PeftModel``, with its adapters; any other model as it is.

    Raises:
        ConfigError: the adapters are not plain LoRA, so they cannot be merged for the generators.
    """
    if not has_adapters(model):
        return model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for name, config in model.peft_config.items():
        plain = config.peft_type == "LORA" and not (config.use_dora or config.modules_to_save or config.bias != "none")
        if not plain:
            raise ConfigError(
                f"model: got the adapter {name!r} of type {config.peft_type}; must be LoRA without DoRA, biases and "
                "modules_to_save, which can be merged"
            )
        _require_mergeable(base, "model", f"the adapter {name!r}")
    return base


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, the model computes as before its adapters were added."""
    layers = list(_layers(model).values())
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def names_below_adapters(model: nn.Module) -> dict[str, str]:
    """For every parameter with an adapter: its name in the model without adapters, and its current name."""
    return {name.replace(".base_layer.", "."): name for name, _ in model.named_parameters() if ".base_layer." in name}


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], Callable[[], Tensor]]]:
    """Every parameter as if the adapters were merged into the weights, one by one.

    Names and order are those of the model without adapters; the model itself does not change.

    Yields:
        The name, the parameters that the merged one is computed from, and a function that computes it.
    """
    layers = _layers(model)
    for name, parameter in model.named_parameters():
        owner, _, rest = name.partition(".base_layer.")
        if rest == "weight" and owner in layers:
            layer = layers[owner]
            adapters = [p for key, p in layer.named_parameters() if is_adapter(f".{key}")]
            yield f"{owner}.{rest}", [parameter, *adapters], partial(_merged, layer, parameter)
        elif rest and owner in layers:
            yield f"{owner}.{rest}", [parameter], reader(parameter)
        elif not any(name.startswith(f"{layer}.lora_") for layer in layers):
            yield name, [parameter], reader(parameter)


def _merged(layer: Any, weight: nn.Parameter) -> Tensor:
    deltas = (layer.get_delta_weight(adapter).detach() for adapter in layer.active_adapters)
    return sum(deltas, numbers(weight))


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return ".lora_" in name


def write_base(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the model below the adapters in the format of transformers, parameters rounded to ``dtype``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace(".base_layer.", "."): numbers(parameter).to(dtype).cpu().contiguous()
        for name, parameter in model.named_parameters()
        if not is_adapter(name)
    }
    with naming(folder):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = unquantised(model)
    config.architectures = [type(model).__name__]  # the configuration of a model made from one lacks the model's class
    config.save_pretrained(folder)


def only_adapter(model: Any) -> Any:
    """The configuration of the model's one adapter.

    Raises:
        ConfigError: it has none, or several.
    """
    configs = getattr(model, "peft_config", None) or {}
    if len(configs) != 1:
        raise ConfigError(f'lora.publish: got "adapter" with {len(configs)} adapters on the model; must have one')
    return next(iter(configs.values()))


def write_adapter(config: Any, parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Write an adapter as peft does.

    Args:
        config: peft's, of this adapter.
        parameters: under their names in the model; names in the file omit the adapter's own name.
        folder: must exist.
    """
    from safetensors.torch import save_file

    tensors = {
        "base_model.model." + re.sub(r"(\.lora_[AB])\.[^.]+\.", r"\1.", name): tensor.cpu().contiguous()
        for name, tensor in parameters.items()
    }
    with naming(folder):
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def save_adapters(model: PreTrainedModel, parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters as peft does, for ``peft.PeftModel.from_pretrained``; all but "default" in subfolders."""
    for name, config in model.peft_config.items():
        subfolder = folder if name == "default" else folder / name
        subfolder.mkdir(parents=True, exist_ok=True)
        write_adapter(config, {key: tensor for key, tensor in parameters.items() if f".{name}." in key}, subfolder)


def _layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
