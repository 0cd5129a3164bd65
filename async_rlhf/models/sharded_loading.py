"""Models whose weights are read after they have been sharded: each rank reads its own share from the files.

Such a model is built on the meta device: it has all modules, hooks and buffers, but its weights are only names and
shapes. What else is asked of whole weights, their checksums and what a file lacks, comes from the files, a few
megabytes at a time. Once the model is sharded, :func:`fill` makes room for this rank's share and reads it, tensor by
tensor.

Every rank reads for itself; rank 0 does not read for all. FSDP shards rows, and rows lie side by side in a file, so
the ranks of a host together read it once, at the same time, and nothing goes over the network. Of experts that are
sharded otherwise each rank reads all, one after the other, and keeps its part. Each host needs the files, as it needs
the configuration and the tokenizer: on a file system that it shares, or in the hub's cache, which locks what it
downloads, so that a host downloads it once. That all hosts have the same files is found by their checksums
(:func:`share_digests`). DeepSpeed's ZeRO-3 spreads whole weights of rank 0 by itself: :func:`fill_in_turn` gives it one
at a time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from async_rlhf.config import ConfigError
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.models.quantised import stored
from async_rlhf.models.weight_sources import DTYPE, OnlyWholeError, Origin, Read, reading, rows, unread_tensors
from async_rlhf.models.weights import digest, digests, named_weights, saved_buffers

_KINDS = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}
_SOURCE = "_weights_to_read"
"""The attribute of a model that says where its weights are."""


@dataclass
class Source:
    """Where the weights of a model come from that has none yet."""

    origins: dict[str, Origin]
    """By the name of the parameter, in the model's order; a tied one has its first name."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of the weights in float32, as far as they are known."""

    def digest(self, name: str) -> str:
        """The checksum of a weight, as :func:`~async_rlhf.models.weights.digests` gives it for the whole tensor."""
        if name not in self.digests:
            origin = self.origins[name]
            self.digests[name] = digest(DTYPE, tuple(origin.shape), rows(origin))
        return self.digests[name]

    def identity(self) -> Any:
        """Equal on two ranks only if both read the same tensors from the same files of the same host."""
        files = {file for origin in self.origins.values() if not isinstance(origin, Tensor) for file in origin.files}
        found = [Path(file).stat() for file in sorted(files)]
        said = [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found]
        return socket.gethostname(), said, list(self.origins)


def source_of(model: nn.Module) -> Source | None:
    """Where the weights of a model are that has not read them yet; None for any other."""
    return getattr(model, _SOURCE, None)


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model has not read its weights yet."""
    return source_of(model) is not None


def give_weight(model: nn.Module, name: str, weight: Tensor) -> bool:
    """Have an unread model take this weight, as it is when the model is sharded. Returns whether its files lack it."""
    source = source_of(model)
    assert source is not None
    before, source.origins[name] = source.origins[name], weight
    source.digests.pop(name, None)
    return isinstance(before, Tensor)


def unread_model(
    kind: Any, config: PretrainedConfig, files: Sequence[str], new: str | None = None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model without weights, in evaluation mode.

    Args:
        kind: transformers' class that chooses the model's by the configuration, such as AutoModelForCausalLM.
        config: of the model.
        files: in the format of safetensors.
        new: a weight that they need not have, zeros then.

    Returns:
        The model, and what its files lack and have too much, as ``from_pretrained`` reports it.

    Raises:
        OnlyWholeError: it can only be read whole.
        ValueError: a tensor has another shape in the file.
    """
    chosen = _class_of(kind, config)
    try:
        with init_empty_weights(include_buffers=False):
            empty = kind.from_config(config, dtype=DTYPE, trust_remote_code=False)
            buffers = dict(empty.named_buffers())
        model, report = chosen.from_pretrained(
            None,
            config=config,
            state_dict=unread_tensors(files),
            dtype=DTYPE,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (RuntimeError, NotImplementedError) as error:
        raise OnlyWholeError(f"it cannot be built without weights ({type(error).__name__}: {error})") from error
    for name, shape, right in report["mismatched_keys"]:
        right = f"must be of the shape {tuple(right)}, as the model's configuration says"
        raise ValueError(f"{name}: got a tensor of the shape {tuple(shape)}; {right}")
    if any(parameter.dtype != DTYPE for parameter in model.parameters()):
        raise OnlyWholeError("not all of its weights are float32")
    if any(model.get_parameter(a) is not model.get_parameter(b) for a, b in model.all_tied_weights_keys.items()):
        raise OnlyWholeError("its files hold tied weights more than once")
    report["missing_keys"].discard(new)
    origins: dict[str, Origin] = {}
    for name, parameter in model.named_parameters():
        origin = getattr(parameter, "origin", None)
        if name == new and origin is None:
            origin = torch.zeros((), dtype=DTYPE).expand(parameter.shape)
        if origin is not None:
            origins[name] = origin
        elif name not in report["missing_keys"]:
            raise OnlyWholeError(f"transformers makes its {name} of other tensors")
    _replace_tensors(model, buffers)
    setattr(model, _SOURCE, Source(origins))
    return model, report


def _replace_tensors(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give a model of :class:`~async_rlhf.models.weight_sources.Unread` usual parameters, on the meta device, and its
    buffers their values: those in its files, else the ones here, such as frequencies.
    """
    plain: dict[Tensor, nn.Parameter] = {}  # tied weights stay one
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            same = plain.setdefault(parameter, nn.Parameter(torch.empty(parameter.shape, device="meta")))
            module.register_parameter(name, same)
    for name, buffer in list(model.named_buffers()):
        owner, _, last = name.rpartition(".")
        if (origin := getattr(buffer, "origin", None)) is not None:
            _copy(buffers[name], origin)
        setattr(model.get_submodule(owner), last, buffers[name])


def _class_of(kind: Any, config: PretrainedConfig) -> Any:
    chosen = _KINDS[kind].get(type(config), None)
    if getattr(config, "quantization_config", None) is not None:
        raise OnlyWholeError("it is quantised")
    if kind.__name__ in (getattr(config, "auto_map", None) or {}):
        raise OnlyWholeError("it brings code of its own")
    if chosen is None or isinstance(chosen, (tuple, list)) or chosen.is_custom_code():
        raise OnlyWholeError("transformers has no model of its own for it")
    if "text_config" in config.sub_configs or getattr(config, "transformers_weights", None) is not None:
        raise OnlyWholeError("it is a part of another model")
    return chosen


def parameter_digests(model: nn.Module, which: Callable[[Tensor], bool] = lambda _: True) -> dict[str, str]:
    """Checksums of a model's parameters, in order; the model, or parts of it, may be unread.

    Args:
        model: its adapters are not merged.
        which: chooses parameters.
    """
    parts = [(f"{path}." if path else "", source_of(module)) for path, module in model.named_modules()]
    on_meta = [(prefix, source) for prefix, source in parts if source is not None]
    found = {}
    for name, parameter in model.named_parameters():
        if not which(parameter):
            continue
        if parameter.is_meta:
            prefix, source = next((prefix, source) for prefix, source in on_meta if name.startswith(prefix))
            found[name] = source.digest(_without_adapters(name.removeprefix(prefix)))
        else:
            found |= digests(stored(name, parameter))
    return found


def weight_digests(model: nn.Module) -> dict[str, str]:
    """Checksums of all that decides a model's output, in order; of an unread one's adapters by themselves."""
    if not is_on_meta(model):
        return digests(named_weights(model))
    return {**parameter_digests(model), **digests(dict(saved_buffers(model)))}


def _without_adapters(name: str) -> str:
    return name.replace(".base_layer.", ".")


def share_digests(ranks: Ranks, models: Mapping[str, nn.Module | None]) -> None:
    """Compute the checksums of all unread weights. Ranks that read the same files of a host compute a share each.

    Every rank must call it, with as many models.
    """
    sources = {key: source for key, model in models.items() if model is not None and (source := source_of(model))}
    mine = {key: source.identity() for key, source in sources.items()}
    everyone = ranks.gather("files of models", mine)
    same = {key: [rank for rank, theirs in enumerate(everyone) if theirs.get(key) == mine[key]] for key in mine}
    shares = {}
    for key, source in sources.items():
        names = list(source.origins)[same[key].index(ranks.rank) :: len(same[key])]
        shares[key] = {name: source.digest(name) for name in names}
    for rank, theirs in enumerate(ranks.gather("checksums of models", shares)):
        for key, source in sources.items():
            if rank in same[key]:
                source.digests.update(theirs[key])


def value_model_like(model: PreTrainedModel, policy: PreTrainedModel) -> PreTrainedModel:
    """A value model with the body of an unread policy and a head, named ``score``, of zeros; unread as well.

    Args:
        model: is completed; its parameters are on the meta device.
        policy: has not read its weights.

    Raises:
        ConfigError: the policy lacks a weight.
    """
    source = source_of(policy)
    assert source is not None
    origins: dict[str, Origin] = {}
    for name, parameter in model.named_parameters():
        if name == "score.weight":
            origins[name] = torch.zeros((), dtype=DTYPE).expand(parameter.shape)
        else:
            theirs = f"{policy.base_model_prefix}.{name.removeprefix(f'{model.base_model_prefix}.')}"
            if theirs not in source.origins:
                raise ConfigError(f"value_model: none can be made from {type(policy).__name__}: it lacks {theirs}")
            origins[name] = source.origins[theirs]
    buffers = dict(policy.base_model.named_buffers())
    for name, buffer in model.base_model.named_buffers():
        buffer.copy_(buffers[name])
    setattr(model, _SOURCE, Source(origins))
    return model


def take_weights(model: PreTrainedModel, saved: PreTrainedModel, within: str = "") -> None:
    """Give a model the weights of another of its kind: at once, or, if it is unread, when it is sharded.

    Args:
        model: gets them.
        saved: has all of them; or is unread, if ``model`` is.
        within: the name of a part; only its weights then.
    """
    source, theirs = source_of(model), source_of(saved)
    if source is None:
        model.get_submodule(within).load_state_dict(saved.get_submodule(within).state_dict())
        return
    whole = dict(saved.named_parameters())
    for name in source.origins:
        if name.startswith(within):
            source.origins[name] = whole[name].data if theirs is None else theirs.origins[name]
            source.digests.pop(name, None)
    own = dict(model.named_buffers())
    for name, buffer in saved.named_buffers():
        if name.startswith(within):
            own[name].copy_(buffer)


@torch.no_grad()
def fill(model: nn.Module, device: torch.device) -> None:
    """Read this rank's share of an unread model, one tensor at a time; does nothing to any other.

    Args:
        model: is sharded.
        device: where its shards belong.
    """
    source = source_of(model)
    if source is None:
        return
    delattr(model, _SOURCE)
    on_meta = {name for name, parameter in model.named_parameters() if parameter.device.type == "meta"}
    # As to_empty does, which would also empty what has values.
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.device.type == "meta" else tensor)
    with reading() as read:
        for name, parameter in model.named_parameters():
            if name in on_meta:
                _fill(parameter, source.origins[_without_adapters(name)], read)


def _fill(parameter: nn.Parameter, origin: Origin, read: Read) -> None:
    mine, places = parameter.data, [slice(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mine, (dim, first) = parameter.to_local(), first_index(parameter)
        places[dim] = slice(first, first + mine.shape[dim])
    if mine.numel() > 0:  # ranks at the end may have no rows
        mine.copy_(read(origin, tuple(places)))


def first_index(parameter: DTensor) -> tuple[int, int]:
    """Which dimension of a parameter is sharded, and where this rank's part begins: FSDP cuts as torch.chunk does."""
    mesh, place = parameter.device_mesh, parameter.placements[-1]
    assert isinstance(place, Shard)
    size = parameter.shape[place.dim]
    return place.dim, min(mesh.get_local_rank(mesh.ndim - 1) * -(-size // mesh.size(mesh.ndim - 1)), size)


@torch.no_grad()
def fill_in_turn(
    model: nn.Module, keep: Callable[[nn.Parameter], None], reads: bool
) -> dict[nn.Parameter, nn.Parameter]:
    """Make each weight of an unread model whole, one after the other, for others to spread; nothing for any other.

    Args:
        model: on the meta device.
        keep: takes each whole weight, and leaves what this rank keeps.
        reads: whether this rank reads them; where it does not, they have no values.

    Returns:
        The new parameters, by those in whose place they are.
    """
    source = source_of(model)
    if source is None:
        return {}
    delattr(model, _SOURCE)
    made: dict[nn.Parameter, nn.Parameter] = {}  # several modules may share one
    for path, module in model.named_modules():
        for name, on_meta in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not on_meta.is_meta:
                continue
            if on_meta not in made:
                whole = torch.empty(on_meta.shape, dtype=on_meta.dtype)
                if reads:
                    _copy(whole, source.origins[_without_adapters(f"{path}.{name}" if path else name)])
                made[on_meta] = nn.Parameter(whole, requires_grad=on_meta.requires_grad)
                keep(made[on_meta])
            module.register_parameter(name, made[on_meta])
    return made


def _copy(whole: Tensor, origin: Origin) -> None:
    start = 0
    whole = whole if whole.dim() else whole[None]
    for part in rows(origin):
        part = part if part.dim() else part[None]
        whole[start : start + len(part)].copy_(part)
        start += len(part)
