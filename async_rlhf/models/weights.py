"""The tensors that decide a model's output: their names, checksums, and places in memory that processes share."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.adapters import has_adapters, is_adapter, merged_parameters
from async_rlhf.models.quantised import like_numbers, numbers

ALIGNMENT = 64
HASHING = min(8, os.cpu_count() or 1)
"""Threads that compute checksums of what leaves a GPU: one takes 1.3 s for 8 billion parameters."""


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that decide a model's output: parameters, tied ones once, and the buffers that are saved with it.

    Adapters are merged; the names are those of the model without adapters.
    """
    return dict(iterate_weights(model))


def iterate_weights(
    model: nn.Module, adapters_only: bool = False, parallel: Parallel = ALONE, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The same, one tensor at a time, so that merged weights need not all be in memory together.

    Args:
        model: a policy.
        adapters_only: give the adapters' own parameters instead.
        parallel: how its weights are sharded over ranks; they are gathered one by one, and every rank must iterate to
            the end.
        dtype: that they are needed in: sharded weights of a wider type are rounded before they are gathered.
    """
    parallel.barrier("reading weights", model)
    for name, parameters, compute in published_parameters(model, adapters_only):
        like = like_numbers(parameters[0])
        rounded = dtype if dtype is not None and dtype.itemsize < like.itemsize and like.is_floating_point() else None
        with parallel.unsharded(parameters, compute, rounded if parallel.is_sharded else None) as tensor:
            yield name, tensor
    if not adapters_only:
        yield from saved_buffers(model)


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
        adapters_only: see :func:`iterate_weights`.
        parallel: see there.
        copied: none of it may be the model's own memory, so that training can go on.
        on_device: tensors to take instead, by name.
    """
    found = {}
    if parallel.takes_part:
        for name, tensor in iterate_weights(model, adapters_only, parallel):
            if parallel.ranks.is_main:
                known = (on_device or {}).get(name)
                found[name] = tensor.to("cpu", copy=copied) if known is None else known
    return found


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are saved with a model."""
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def published_parameters(
    model: nn.Module, adapters_only: bool
) -> Iterator[tuple[str, list[nn.Parameter], Callable[[], Tensor]]]:
    if has_adapters(model) and not adapters_only:
        yield from merged_parameters(model)
        return
    for name, parameter in model.named_parameters():
        if is_adapter(name) or not adapters_only:
            yield name, [parameter], partial(numbers, parameter)


def digests(tensors: Mapping[str, Tensor], threads: int = 1) -> dict[str, str]:
    """A 128-bit checksum of type, shape and bytes of each tensor.

    Args:
        tensors: by name.
        threads: that compute; they hold no lock of Python's meanwhile.
    """

    def of(tensor: Tensor) -> str:
        return digest(tensor.dtype, tuple(tensor.shape), [tensor])

    if threads == 1:
        return {name: of(tensor) for name, tensor in tensors.items()}
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(tensors, pool.map(of, tensors.values()), strict=True))


def digest(dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[Tensor]) -> str:
    """The checksum of one tensor, given in parts that follow each other in memory."""
    found = xxhash.xxh3_128(f"{dtype} {shape}".encode())
    for part in parts:
        found.update(_bytes(part))
    return found.hexdigest()


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A 128-bit checksum over names, types, shapes and bytes, in order."""
    return of_digests(digests(tensors))


def of_digests(found: Mapping[str, str]) -> str:
    """:func:`checksum` of tensors whose checksums are known."""
    return xxhash.xxh3_128(repr(dict(found)).encode()).hexdigest()


def differing(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """A text naming the tensors whose digests differ; "" if none do."""
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} of {len(expected)} tensors: {', '.join(names[:5])}{more}" if names else ""


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The place of one tensor within a slot."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        """Where its bytes end."""
        return self.offset + torch.Size(self.shape).numel() * self.dtype.itemsize


def kept_dtype(name: str, tensor: Tensor, buffers: Mapping[str, Tensor], dtype: torch.dtype) -> torch.dtype:
    """Parameters are rounded, buffers are not: rounding would harm the frequencies of rotary positions."""
    return dtype if name not in buffers and tensor.is_floating_point() else tensor.dtype


def layout(
    model: nn.Module, dtype: torch.dtype, adapters_only: bool = False, parallel: Parallel = ALONE
) -> tuple[tuple[TensorSpec, ...], int]:
    """The places of a snapshot's tensors within a slot, and the bytes of a slot. Needs no other rank."""
    buffers = dict(model.named_buffers())
    # Merging an adapter keeps the shape of the weight below it, which comes first.
    sizes: list[tuple[str, Tensor, torch.Size]] = []
    for name, own, _ in published_parameters(model, adapters_only):
        like = like_numbers(own[0])
        sizes.append((name, like, parallel.shape_of(own[0]) if like is own[0] else like.shape))
    sizes += [(name, buffer, buffer.shape) for name, buffer in saved_buffers(model) if not adapters_only]
    return _specs((name, shape, kept_dtype(name, tensor, buffers, dtype)) for name, tensor, shape in sizes)


def region_for(tensors: Mapping[str, Tensor]) -> tuple[tuple[TensorSpec, ...], int]:
    """The places of these tensors in a region, and its bytes."""
    return _specs((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())


def _specs(sizes: Iterable[tuple[str, torch.Size, torch.dtype]]) -> tuple[tuple[TensorSpec, ...], int]:
    specs, offset = [], 0
    for name, shape, dtype in sizes:
        specs.append(TensorSpec(name, tuple(shape), dtype, offset))
        offset += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return tuple(specs), offset


def tensors_in(memory: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """The tensors of a slot, without a copy.

    Args:
        memory: the slot, as uint8.
        specs: their places.
    """
    views = {}
    for spec in specs:
        views[spec.name] = memory[spec.offset : spec.end].view(spec.dtype).view(spec.shape)
    return views


def mapped(fd: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)


def nameless_file(size: int) -> int:
    """The file descriptor of so many bytes of memory, all zero."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("async_rlhf_weights", os.MFD_CLOEXEC)
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def mapped_at(path: str) -> Tensor:
    """Memory of another process of this user on this host, as ``/proc/PID/fd/FD`` names it.

    Raises:
        OSError: it cannot be seen from here.
    """
    fd = os.open(path, os.O_RDWR)
    try:
        return mapped(fd)
    finally:
        os.close(fd)
