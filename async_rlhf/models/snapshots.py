"""Numbered snapshots of the policy's weights: publish, fetch, verify.

S + 1 snapshots suffice for staleness S, and none is ever overwritten or deleted while it can be read: version v is
needed by batches up to v + 1 + S; version v + S + 1 takes its place only after batch v + S + 1 has been trained on,
so after it has been sampled. Snapshots are in memory that the processes of one host share, or in a folder that several
hosts share.

Publishing has two parts. The weights are copied at once, by all ranks, and may change after that; their digests, files
and whatever else makes the copy available come later, in another thread if there is one. A version counts as
published, under its number and as the newest, when all of that is done.
"""

from __future__ import annotations

import inspect
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from async_rlhf.models.adapters import has_adapters, is_adapter, merged_parameters
from async_rlhf.models.leaving import Later, Leaving, at_once, pinned
from async_rlhf.models.quantised import like_numbers, numbers
from async_rlhf.ranks.parallel import ALONE, Parallel

_ALIGNMENT = 64


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
    parallel.meet("reading weights", model)
    for name, parameters, compute in _parameters(model, adapters_only):
        like = like_numbers(parameters[0])
        rounded = dtype if dtype is not None and dtype.itemsize < like.itemsize and like.is_floating_point() else None
        with parallel.unsharded(parameters, compute, rounded if parallel.spreads_weights else None) as tensor:
            yield name, tensor
    if not adapters_only:
        yield from saved_buffers(model)


def collected_weights(
    model: nn.Module,
    adapters_only: bool = False,
    parallel: Parallel = ALONE,
    copied: bool = False,
    at_hand: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The same, unsharded, in the memory of rank 0's host. Every rank must call it; the others get nothing.

    Args:
        model: a policy.
        adapters_only: see :func:`iterate_weights`.
        parallel: see there.
        copied: none of it may be the model's own memory, so that training can go on.
        at_hand: tensors to take instead, by name.
    """
    found = {}
    if parallel.takes_part:
        for name, tensor in iterate_weights(model, adapters_only, parallel):
            if parallel.ranks.leads:
                known = (at_hand or {}).get(name)
                found[name] = tensor.to("cpu", copy=copied) if known is None else known
    return found


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are saved with a model."""
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _parameters(
    model: nn.Module, adapters_only: bool
) -> Iterator[tuple[str, list[nn.Parameter], Callable[[], Tensor]]]:
    if has_adapters(model) and not adapters_only:
        yield from merged_parameters(model)
        return
    for name, parameter in model.named_parameters():
        if is_adapter(name) or not adapters_only:
            yield name, [parameter], partial(numbers, parameter)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A 128-bit checksum of type, shape and bytes of each tensor."""
    return {name: digest(tensor.dtype, tuple(tensor.shape), [tensor]) for name, tensor in tensors.items()}


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


class Snapshots(Protocol):
    """Where workers find numbered weights."""

    published: dict[int, dict[str, str]]
    """The available versions, with the digest of each tensor."""

    def publish(self, model: nn.Module, version: int, parallel: Parallel = ALONE, later: Later = at_once) -> None:
        """Copy the weights, which may change when this returns, and make the copy available.

        Every rank must call it, see :func:`iterate_weights`.

        Args:
            model: has them.
            version: their number; the one before must be available.
            parallel: how they are sharded over ranks.
            later: does what need not be done now.
        """

    def views(self, version: int) -> Mapping[str, Tensor | None]:
        """The tensors of a version; on ranks other than 0, None in place of each."""

    @property
    def newest(self) -> int:
        """The version published last."""

    def close(self) -> None:
        """Free what is held."""


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


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that any process of this user on this host can map: where the tensors of one version lie."""

    path: str
    start: int
    size: int
    specs: tuple[TensorSpec, ...]


class SharedTensors(dict[str, Tensor]):
    """Tensors by name, in a region that other processes can map."""

    def __init__(self, tensors: Mapping[str, Tensor], region: Region) -> None:
        super().__init__(tensors)
        self.region = region


class SnapshotRing:
    """S + 1 snapshots in memory that processes share through a file descriptor, without a name.

    Nameless memory cannot leak: the kernel frees it with the last process that holds it, however that one ends.

    Args:
        specs: the tensors of one snapshot.
        slot_bytes: of one snapshot.
        slots: S + 1. The number of the newest version is stored before the first slot.
        memory: all slots, as uint8.
        fd: the file descriptor of the memory; -1 for none.
        adapters_only: see iterate_weights.
        dtype: see there.
    """

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        slot_bytes: int,
        slots: int,
        memory: Tensor,
        fd: int = -1,
        adapters_only: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.specs, self.slot_bytes, self.slots = specs, slot_bytes, slots
        self.adapters_only, self.dtype = adapters_only, dtype
        self._bytes, self.fd = memory, fd
        self._pinned = ExitStack()
        self.published: dict[int, dict[str, str]] = {}

    def __reduce__(self) -> tuple[object, ...]:
        """A child process gets the same memory, not a copy."""
        return _attach, (self.specs, self.slot_bytes, self.slots, DupFd(self.fd))

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        dtype: torch.dtype,
        slots: int,
        adapters_only: bool = False,
        parallel: Parallel = ALONE,
    ) -> SnapshotRing:
        """A ring that fits the model's weights, its parameters rounded to ``dtype``."""
        specs, slot_bytes = layout(model, dtype, adapters_only, parallel)
        memory, fd = cls._allocated(_ALIGNMENT + slot_bytes * slots, model)
        memory[:8].view(torch.int64)[0] = -1
        ring = cls(specs, slot_bytes, slots, memory, fd, adapters_only, dtype)
        if fd >= 0 and (parallel.device or next(model.parameters()).device).type == "cuda":
            ring._pinned.enter_context(pinned(memory))
        return ring

    @staticmethod
    def _allocated(size: int, model: nn.Module) -> tuple[Tensor, int]:
        """Memory and its file descriptor. Every page is touched now, or the first publications would wait for the
        kernel to allocate them.
        """
        fd = nameless_file(size)
        return _mapped(fd).zero_(), fd

    def views(self, version: int) -> dict[str, Tensor]:
        """The tensors of a version's slot, without a copy."""
        tensors = tensors_in(self.slot(version), self.specs)
        if self.fd < 0:
            return tensors
        region = Region(f"/proc/{os.getpid()}/fd/{self.fd}", self._start(version), self.slot_bytes, self.specs)
        return SharedTensors(tensors, region)

    def slot(self, version: int) -> Tensor:
        """A version's memory, as uint8."""
        start = self._start(version)
        return self._bytes[start : start + self.slot_bytes]

    def _start(self, version: int) -> int:
        return _ALIGNMENT + version % self.slots * self.slot_bytes

    @property
    def newest(self) -> int:
        """The version published last, seen from any process; -1 for none."""
        return int(self._bytes[:8].view(torch.int64)[0])

    def publish(self, model: nn.Module, version: int, parallel: Parallel = ALONE, later: Later = at_once) -> None:
        """Copy the weights into the version's slot."""
        self.published.pop(version - self.slots, None)
        views, leaving = self.views(version), Leaving(model, parallel, later)
        with torch.no_grad():
            for name, tensor in iterate_weights(model, self.adapters_only, parallel, self.dtype):
                leaving.copy(tensor, views[name])
        leaving.end(partial(self._finish, version))

    def _finish(self, version: int) -> None:
        self.published[version] = digests(self.views(version))
        self._bytes[:8].view(torch.int64)[0] = version  # last, so that readers of the number find the whole version

    def close(self) -> None:
        """Free the memory. Views taken before keep it alive until they are gone."""
        self._pinned.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.published.clear()


class DeviceRing(SnapshotRing):
    """The same in memory of the learner's device, shared by CUDA IPC on a GPU: for workers on that device, so nothing
    crosses the bus.
    """

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, arguments = reduce_tensor(self._bytes)
        return _attach_device, (self.specs, self.slot_bytes, self.slots, rebuild, arguments)

    @staticmethod
    def _allocated(size: int, model: nn.Module) -> tuple[Tensor, int]:
        return torch.zeros(size, dtype=torch.uint8, device=next(model.parameters()).device), -1


class SnapshotFolder:
    """S + 1 snapshots as safetensors files in a folder that several hosts share; each appears whole or not at all.

    Args:
        folder: belongs to this run only; made here and removed by :meth:`close`.
        dtype: parameters are rounded to it.
        slots: S + 1.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, slots: int) -> None:
        self.folder, self.dtype, self.slots = folder, dtype, slots
        self.published: dict[int, dict[str, str]] = {}
        self.newest = -1
        self._copies: dict[str, Tensor] = {}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def file(self, version: int) -> Path:
        """The file of one version."""
        return self.folder / f"version-{version}.safetensors"

    def publish(self, model: nn.Module, version: int, parallel: Parallel = ALONE, later: Later = at_once) -> None:
        """Copy the weights; the file is written later."""
        buffers, leaving, copies = dict(model.named_buffers()), Leaving(model, parallel, later), {}
        with torch.no_grad():
            for name, tensor in iterate_weights(model, parallel=parallel, dtype=self.dtype):
                if name not in self._copies:  # else that of the version before, which is in its file
                    dtype = _kept_dtype(name, tensor, buffers, self.dtype)
                    self._copies[name] = torch.empty(tensor.shape, dtype=dtype, device="cpu")
                copies[name] = self._copies[name]
                leaving.copy(tensor, copies[name])
        leaving.end(partial(self._finish, version, copies))

    def _finish(self, version: int, tensors: dict[str, Tensor]) -> None:
        try:
            temporary = self.file(version).with_suffix(".tmp")
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.replace(self.file(version))
        except SafetensorError as error:  # a full disk comes as this, not as an OSError
            raise OSError(f"{str(self.file(version))!r} could not be written: {error}") from error
        self.published[version] = digests(tensors)
        for old in [v for v in self.published if v <= version - self.slots]:
            del self.published[old]
            self.file(old).unlink()
        self.newest = version

    def views(self, version: int) -> dict[str, Tensor]:
        """The tensors of a version, read back."""
        return load_file(self.file(version))

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.published.clear()


class NoSnapshots:
    """Snapshots on ranks other than 0: they send their shares of the weights to rank 0 and keep only the names.

    Args:
        dtype: of rank 0's snapshots.
        adapters_only: see iterate_weights.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, adapters_only: bool = False) -> None:
        self.dtype, self.adapters_only, self.newest = dtype, adapters_only, -1
        self.published: dict[int, dict[str, str]] = {}
        self._names: list[str] = []

    def publish(self, model: nn.Module, version: int, parallel: Parallel = ALONE, later: Later = at_once) -> None:
        """Take part while rank 0 gathers the weights. There are no digests here."""
        if parallel.takes_part:
            self._names = [name for name, _ in iterate_weights(model, self.adapters_only, parallel, self.dtype)]
        self.newest = version

    def views(self, version: int) -> Mapping[str, None]:
        """The names of a version's tensors."""
        return dict.fromkeys(self._names)

    def close(self) -> None:
        """Do nothing."""


def _kept_dtype(name: str, tensor: Tensor, buffers: Mapping[str, Tensor], dtype: torch.dtype) -> torch.dtype:
    """Parameters are rounded, buffers are not: rounding would harm the frequencies of rotary positions."""
    return dtype if name not in buffers and tensor.is_floating_point() else tensor.dtype


def layout(
    model: nn.Module, dtype: torch.dtype, adapters_only: bool = False, parallel: Parallel = ALONE
) -> tuple[tuple[TensorSpec, ...], int]:
    """The places of a snapshot's tensors within a slot, and the bytes of a slot. Needs no other rank."""
    specs, offset = [], 0
    buffers = dict(model.named_buffers())
    # Merging an adapter keeps the shape of the weight below it, which comes first.
    sizes: list[tuple[str, Tensor, torch.Size]] = []
    for name, own, _ in _parameters(model, adapters_only):
        like = like_numbers(own[0])
        sizes.append((name, like, parallel.shape_of(own[0]) if like is own[0] else like.shape))
    sizes += [(name, buffer, buffer.shape) for name, buffer in saved_buffers(model) if not adapters_only]
    for name, tensor, shape in sizes:
        kept = _kept_dtype(name, tensor, buffers, dtype)
        specs.append(TensorSpec(name, tuple(shape), kept, offset))
        size = shape.numel() * kept.itemsize
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return tuple(specs), offset


def region_for(tensors: Mapping[str, Tensor]) -> tuple[tuple[TensorSpec, ...], int]:
    """The places of these tensors in a region, and its bytes."""
    specs, offset = [], 0
    for name, tensor in tensors.items():
        specs.append(TensorSpec(name, tuple(tensor.shape), tensor.dtype, offset))
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
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


def _attach(specs: tuple[TensorSpec, ...], slot_bytes: int, slots: int, fd: Any) -> SnapshotRing:
    own = fd.detach()
    return SnapshotRing(specs, slot_bytes, slots, _mapped(own), own)


def _attach_device(
    specs: tuple[TensorSpec, ...], slot_bytes: int, slots: int, rebuild: Any, arguments: tuple[Any, ...]
) -> DeviceRing:
    if rebuild is rebuild_cuda_tensor and arguments[_DEVICE] >= torch.cuda.device_count():
        # This process sees only its own GPU, as the first.
        arguments = (*arguments[:_DEVICE], 0, *arguments[_DEVICE + 1 :])
    return DeviceRing(specs, slot_bytes, slots, rebuild(*arguments))


_DEVICE = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")


def _mapped(fd: int) -> Tensor:
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
