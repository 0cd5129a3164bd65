"""The tensors that decide a model's output: their names, how each is read, and checksums."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.adapters import has_adapters, is_adapter, merged_parameters
from async_rlhf.models.quantised import like_numbers, reader

logger = logging.getLogger(__name__)

HASHING = min(8, os.cpu_count() or 1)
"""Threads that compute checksums of what leaves a GPU: one takes 1.3 s for 8 billion parameters."""


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that decide a model's output: parameters, tied ones once, and the buffers that are saved with it.

    Adapters are merged; the names are those of the model without adapters.
    """
    return dict(iterate_weights(model))


class Weight(NamedTuple):
    """One of the tensors that decide a model's output."""

    shape: torch.Size
    dtype: torch.dtype
    """That it is needed in."""
    read: Callable[[], Tensor]
    """Gives the whole of it as it is now, maybe in a wider type. If it is sharded, every rank must call it."""


def weights_of(
    model: nn.Module, adapters_only: bool = False, parallel: Parallel = ALONE, dtype: torch.dtype | None = None
) -> dict[str, Weight]:
    """The same, not read yet: to be found once, and read whenever the model has changed.

    Args:
        model: a policy, whose sharded weights are not gathered now.
        adapters_only: give the adapters' own parameters instead.
        parallel: how its weights are sharded over ranks; they are gathered one by one.
        dtype: that parameters are rounded to, where possible before they are gathered. Buffers are not: rounding would
            harm the frequencies of rotary positions.
    """
    weights = {}
    if has_adapters(model) and not adapters_only:
        readers = merged_parameters(model)
    else:
        named = model.named_parameters()
        readers = ((name, [p], reader(p)) for name, p in named if is_adapter(name) or not adapters_only)
    for name, parameters, read in readers:
        # Merging an adapter keeps the shape of the weight below it, which comes first.
        like = like_numbers(parameters[0])
        shape = parallel.shape_of(parameters[0]) if like is parameters[0] else like.shape
        kept = dtype if dtype is not None and like.is_floating_point() else like.dtype
        if parallel.is_sharded:
            read = partial(parallel.unsharded, parameters, read, kept if kept.itemsize < like.itemsize else None)
        weights[name] = Weight(shape, kept, read)
    for name, buffer in () if adapters_only else saved_buffers(model):
        weights[name] = Weight(
            buffer.shape, buffer.dtype, partial(model.get_buffer, name)
        )  # a model may put in another
    return weights


def iterate_weights(
    model: nn.Module, adapters_only: bool = False, parallel: Parallel = ALONE, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The same, read one by one, so that merged weights need not all be in memory together.

    Arguments are those of :func:`weights_of`. Every rank must iterate to the end.
    """
    parallel.barrier("reading weights", model)
    for name, weight in weights_of(model, adapters_only, parallel, dtype).items():
        tensor = weight.read()
        yield name, tensor if dtype is None else tensor.to(weight.dtype)


def collected_weights(
    model: nn.Module,
    adapters_only: bool = False,
    parallel: Parallel = ALONE,
    copied: bool = False,
    on_device: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The same, unsharded, in the memory of rank 0's host. Every rank must call it; the others get nothing.

    Args:
        model: a policy.
        adapters_only: see :func:`weights_of`.
        parallel: see there.
        copied: none of it may be the model's own memory, so that training can go on.
        on_device: tensors to take instead, by name.
    """
    weights = {}
    if parallel.takes_part:
        for name, tensor in iterate_weights(model, adapters_only, parallel):
            if parallel.ranks.is_main:
                known = (on_device or {}).get(name)
                weights[name] = tensor.to("cpu", copy=copied) if known is None else known
    return weights


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are saved with a model."""
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def digests(tensors: Mapping[str, Tensor], threads: int = 1, folded: bool = False) -> dict[str, str]:
    """A 128-bit checksum of type, shape and bytes of each tensor.

    Args:
        tensors: by name.
        threads: that compute; they hold no lock of Python's meanwhile.
        folded: give :func:`fold_digests` instead.
    """
    if folded:
        return fold_digests({name: fold(tensor) for name, tensor in tensors.items()}, tensors)

    if threads == 1:
        return {name: digest(tensor) for name, tensor in tensors.items()}
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))


def digest(tensor: Tensor) -> str:
    """The checksum of one tensor."""
    hasher = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    hasher.update(_bytes(tensor))
    return hasher.hexdigest()


def fold(tensor: Tensor) -> Tensor:
    """A 128-bit checksum of a tensor's bytes, (2,) int64, computed where they are: nothing leaves a GPU.

    Every word of 8 bytes is mixed (Appleby's finaliser of MurmurHash3), multiplied by an odd number that depends on its
    place, and summed modulo 2^64: twice, by different numbers.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = nn.functional.pad(data, (0, -data.numel() % 8))  # a copy, with zeros at its end
    words_N = data.view(torch.int64)
    return _fold_on(words_N.untyped_storage().device)(words_N)  # where the memory is, of whatever kind the tensor is


@cache
def _fold_on(device: torch.device) -> Callable[[Tensor], Tensor]:
    """What folds words there: on a GPU one kernel, which Triton compiles, if it computes what torch's operations do."""
    if device.type != "cuda":
        return _fold_words
    try:
        from async_rlhf.models.fold_kernel import fold_words

        kernel, words_N = partial(fold_words, keys=_KEYS, factors=_FACTORS), torch.arange(9999, device=device)
        if torch.equal(kernel(words_N), _fold_words(words_N)):
            return kernel
        problem = "the kernel computes something else"
    except Exception as error:  # of any kind: there may be no Triton, no C compiler, or a GPU that it does not know
        problem = f"{type(error).__name__}: {error}"
    logger.warning("checksums of weights take longer on %s, as their kernel cannot be used: %s", device, problem)
    return _fold_words


def _fold_words(words_N: Tensor) -> Tensor:
    found_2, start = torch.zeros(2, dtype=torch.int64, device=words_N.device), 0
    for part_N in words_N.split(_FOLDED):
        mixed_N = _mixed(part_N)
        places_N = torch.arange(start + 1, start + 1 + len(part_N), device=words_N.device)
        found_2 += torch.stack([(mixed_N * (_mixed(places_N * key) | 1)).sum() for key in _KEYS])
        start += len(part_N)
    return found_2


_FOLDED = 1 << 22
"""Words that are folded at a time: what lies between takes some hundred megabytes."""
_KEYS = (-7046029254386353131, -4417276706812531889)
"""2^64 / golden ratio, and a prime of xxHash, as signed numbers."""
_FACTORS = (-49064778989728563, -4265267296055464877)
"""Of the finaliser."""


def _mixed(words_N: Tensor) -> Tensor:
    for factor in _FACTORS:
        words_N = (words_N ^ (words_N >> 33 & 0x7FFFFFFF)) * factor
    return words_N ^ (words_N >> 33 & 0x7FFFFFFF)


def fold_digests(folded: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A checksum of type, shape and bytes of each tensor, from what :func:`fold` gave, in one copy to the host."""
    numbers = torch.stack(list(folded.values())).tolist() if folded else []
    words = (f"{first & _ALL:016x}{second & _ALL:016x}" for first, second in numbers)
    return {
        name: f"{tensors[name].dtype} {tuple(tensors[name].shape)} {word}"
        for name, word in zip(folded, words, strict=True)
    }


_ALL = (1 << 64) - 1


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A 128-bit checksum over names, types, shapes and bytes, in order."""
    return xxhash.xxh3_128(repr(digests(tensors)).encode()).hexdigest()


def differing(actual: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """A text naming the tensors whose digests differ; "" if none do."""
    names = [name for name in {**expected, **actual} if actual.get(name) != expected.get(name)]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} of {len(expected)} tensors: {', '.join(names[:5])}{more}" if names else ""


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def as_in_checkpoints(config: PretrainedConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """What ``save_pretrained`` would write, one layer at a time. Other programs, such as vLLM, know only those tensors.

    Args:
        config: of the model.
        tensors: of the model, layer by layer, under their names there.
    """
    model = _without_weights(config.model_type, config.to_json_string())
    if model is None or not get_model_conversion_mapping(model, add_legacy=False):
        yield from tensors
        return
    for _, layer in groupby(tensors, key=lambda named: layer_of(named[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()


@lru_cache(maxsize=4)
def _without_weights(model_type: str, config: str) -> PreTrainedModel | None:
    """A model that knows how its tensors are converted; None for one that brings its own code, which converts none."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    known = AutoConfig.for_model(**json.loads(config))
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(known, trust_remote_code=False)
    return model


def layer_of(name: str) -> str:
    """``model.layers.3`` for all tensors of that layer; the name itself for one that is in no layer."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return name if match is None else match.group(1)
