"""Frozen weights of linear layers, held in few bits by bitsandbytes: below adapters, and of a user's own models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from async_rlhf.config.base import require


def require_bitsandbytes(value: int | str | None, key: str) -> None:
    """Require what a key needs unless it is null; to be called before anything is loaded.

    Raises:
        ConfigError: says how to install it.
    """
    rule = "needs bitsandbytes: pip install 'async-rlhf[quantized]'"
    require(value is None or find_spec("bitsandbytes") is not None, key, value, rule)


def quantised(dtype: torch.dtype) -> BitsAndBytesConfig:
    """How transformers loads a policy whose linear layers but the head are in 4 bits, as nf4 (Dettmers et al., "QLoRA",
    2023), and compute in ``dtype``.
    """
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def saved_tensors(model: nn.Module) -> dict[str, Tensor] | None:
    """All tensors that decide the output of a quantised model, the scales of its blocks too, which are no parameters;
    None for other models.

    To be read before the first forward pass, in which bitsandbytes may pack weights otherwise and round their scales.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return None
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def is_quantised(model: nn.Module) -> bool:
    """Whether some of a model's weights are held in fewer bits."""
    return getattr(model, "hf_quantizer", None) is not None


def unquantised(model: PreTrainedModel) -> PretrainedConfig:
    """The configuration of a model that holds the same numbers in the usual types."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def numbers(parameter: Tensor) -> Tensor:
    """What a parameter stands for: the matrix that one in 4 bits is multiplied as, in float32; any other as it is."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.data
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state).float()


def reader(parameter: Tensor) -> Callable[[], Tensor]:
    """Gives the :func:`numbers` of a parameter whenever it is called."""
    return parameter.detach if getattr(parameter, "quant_state", None) is None else partial(numbers, parameter)


def like_numbers(parameter: Tensor) -> Tensor:
    """A tensor of the shape and type of :func:`numbers`, maybe without any."""
    state = getattr(parameter, "quant_state", None)
    return parameter if state is None else torch.empty(state.shape, dtype=torch.float32, device="meta")


def stored(name: str, parameter: Tensor) -> dict[str, Tensor]:
    """What a parameter is held as: its data, and the scales of one in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    return {name: parameter.data} if state is None else {name: parameter.data, f"{name}.absmax": state.absmax}


def keep_format(model: nn.Module) -> None:
    """Stop bitsandbytes from packing 4-bit weights otherwise when they first compute without gradient on a CPU: that
    rounds their scales, and training would go on with other weights.
    """
    for layer in _layers(model):
        layer.support_avx512bf16_for_cpu = False


@contextmanager
def as_plain_layers(model: nn.Module) -> Iterator[None]:
    """Within, layers in 4 bits compute as plain ones do, with whatever weight is put in place of their own."""
    layers = _layers(model)
    for layer in layers:
        layer.forward = partial(_linear, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    return nn.functional.linear(inputs, layer.weight, layer.bias)


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(getattr(module, "weight", None), "quant_state")]
