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
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.copy_stream import AsyncCopy, Later, at_once, pinned
from async_rlhf.models.weights import (
    ALIGNMENT,
    HASHING,
    TensorSpec,
    digests,
    iterate_weights,
    layout,
    mapped,
    nameless_file,
    tensors_in,
)

Specs: TypeAlias = tuple[TensorSpec, ...]


class Snapshots:
    """Where workers find numbered weights.

    Args:
        dtype: parameters are rounded to it; None copies them as they are.
        slots: S + 1.
        adapters_only: see :func:`iterate_weights`.
    """

    def __init__(self, dtype: torch.dtype | None, slots: int, adapters_only: bool = False) -> None:
        self.dtype, self.slots, self.adapters_only = dtype, slots, adapters_only
        self.published: dict[int, dict[str, str]] = {}
        """The available versions, with the digest of each tensor."""
        self._newest = -1
        self._held = ExitStack()
        self._hashing = 1

    @property
    def newest(self) -> int:
        """The version published last; -1 for none."""
        return self._newest

    def publish(self, model: nn.Module, version: int, parallel: Parallel = ALONE, later: Later = at_once) -> None:
        """Copy the weights, which may change when this returns, and make the copy available.

        Every rank must call it, see :func:`iterate_weights`.

        Args:
            model: has them.
            version: their number; the one before must be available.
            parallel: how they are sharded over ranks.
            later: does what need not be done now.
        """
        self.published.pop(version - self.slots, None)
        copies = AsyncCopy(model, parallel, later)
        with torch.no_grad():
            if parallel.takes_part:
                places = self._places(model, version, parallel)
                for name, tensor in iterate_weights(model, self.adapters_only, parallel, self.dtype):
                    if name in places:
                        copies.copy(tensor, places[name])
        copies.end(partial(self.make_available, version))

    def pin(self, memory: Tensor) -> None:
        """This memory of the host is filled from a GPU, or read by one: by itself, while cores compute checksums."""
        self._held.enter_context(pinned(memory))
        self._hashing = HASHING

    def _places(self, model: nn.Module, version: int, parallel: Parallel) -> Mapping[str, Tensor]:
        """Where a version's tensors are copied to, by name."""
        raise NotImplementedError

    def make_available(self, version: int) -> None:
        """Make a copy available whose tensors are in their places."""
        raise NotImplementedError

    def views(self, version: int) -> Mapping[str, Tensor | None]:
        """The tensors of a version; on ranks other than 0, None in place of each."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what is held."""
        self._held.close()
        self.published.clear()


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


class SnapshotRing(Snapshots):
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
        specs: Specs,
        slot_bytes: int,
        slots: int,
        memory: Tensor,
        fd: int = -1,
        adapters_only: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype, slots, adapters_only)
        self.specs, self.slot_bytes = specs, slot_bytes
        self.memory, self.fd = memory, fd

    def __reduce__(self) -> tuple[object, ...]:
        """A child process gets the same memory, not a copy."""
        return _attach, (self.specs, self.slot_bytes, self.slots, DupFd(self.fd))

    @classmethod
    def for_model(
        cls, model: nn.Module, dtype: torch.dtype, slots: int, adapters_only: bool = False, parallel: Parallel = ALONE
    ) -> SnapshotRing:
        """A ring that fits the model's weights, its parameters rounded to ``dtype``."""
        specs, slot_bytes = layout(model, dtype, adapters_only, parallel)
        memory, fd = cls._allocated(ALIGNMENT + slot_bytes * slots, model)
        memory[:8].view(torch.int64)[0] = -1
        ring = cls(specs, slot_bytes, slots, memory, fd, adapters_only, dtype)
        if fd >= 0 and _leaves_a_gpu(model, parallel):
            ring.pin(memory)
        return ring

    @staticmethod
    def _allocated(size: int, model: nn.Module) -> tuple[Tensor, int]:
        """Memory and its file descriptor. Every page is touched now, or the first publications would wait for the
        kernel to allocate them.
        """
        fd = nameless_file(size)
        return mapped(fd).zero_(), fd

    def views(self, version: int) -> dict[str, Tensor]:
        """The tensors of a version's slot, without a copy."""
        tensors = tensors_in(self.slot(version), self.specs)
        if self.fd < 0:
            return tensors
        region = Region(self.path, self._start(version), self.slot_bytes, self.specs)
        return SharedTensors(tensors, region)

    @property
    def path(self) -> str:
        """Where other processes of this user on this host find the memory; no file if they cannot."""
        return _path(self.fd)

    def slot(self, version: int) -> Tensor:
        """A version's memory, as uint8."""
        start = self._start(version)
        return self.memory[start : start + self.slot_bytes]

    def _start(self, version: int) -> int:
        return ALIGNMENT + version % self.slots * self.slot_bytes

    @property
    def newest(self) -> int:
        """The version published last, seen from any process; -1 for none."""
        return int(self.memory[:8].view(torch.int64)[0])

    def _places(self, model: nn.Module, version: int, parallel: Parallel) -> Mapping[str, Tensor]:
        return self.views(version)

    def make_available(self, version: int) -> None:
        self.published[version] = digests(self.views(version), self._hashing)
        self.memory[:8].view(torch.int64)[0] = version  # last, so that readers of the number find the whole version

    def close(self) -> None:
        """Free the memory. Views taken before keep it alive until they are gone."""
        super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class DeviceRing(SnapshotRing):
    """The same in memory of the learner's device, shared by CUDA IPC on a GPU: for workers on that device, so nothing
    crosses the bus.
    """

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, arguments = reduce_tensor(self.memory)
        return _attach_device, (self.specs, self.slot_bytes, self.slots, rebuild, arguments)

    @staticmethod
    def _allocated(size: int, model: nn.Module) -> tuple[Tensor, int]:
        return torch.zeros(size, dtype=torch.uint8, device=next(model.parameters()).device), -1


class DraftSnapshots(Snapshots):
    """The weights are copied into memory of this process, which is read before the next version is copied."""

    specs: tuple[TensorSpec, ...] = ()
    memory: Tensor
    draft: dict[str, Tensor]

    def _places(self, model: nn.Module, version: int, parallel: Parallel) -> Mapping[str, Tensor]:
        if not self.specs:
            self.specs, size = layout(model, self.dtype or torch.float32, self.adapters_only, parallel)
            self.memory = torch.empty(size, dtype=torch.uint8)
            self.draft = tensors_in(self.memory, self.specs)
            if _leaves_a_gpu(model, parallel):
                self.pin(self.memory)
        return self.draft


class SnapshotFolder(DraftSnapshots):
    """S + 1 snapshots as safetensors files in a folder that several hosts share; each appears whole or not at all.

    Args:
        folder: belongs to this run only; made here and removed by :meth:`close`.
        dtype: parameters are rounded to it.
        slots: S + 1.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, slots: int) -> None:
        super().__init__(dtype, slots)
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def file(self, version: int) -> Path:
        """The file of one version."""
        return self.folder / f"version-{version}.safetensors"

    def make_available(self, version: int) -> None:
        try:
            temporary = self.file(version).with_suffix(".tmp")
            save_file(self.draft, temporary, metadata={"format": "pt"})
            temporary.replace(self.file(version))
        except SafetensorError as error:  # a full disk comes as this, not as an OSError
            raise OSError(f"{str(self.file(version))!r} could not be written: {error}") from error
        self.published[version] = digests(self.draft, self._hashing)
        self.file(version - self.slots).unlink(missing_ok=True)
        self._newest = version

    def views(self, version: int) -> dict[str, Tensor]:
        """The tensors of a version, read back."""
        return load_file(self.file(version))

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        super().close()


class NoSnapshots(Snapshots):
    """Snapshots on ranks other than 0: they send their shares of the weights to rank 0 and keep only the names.

    Args:
        dtype: of rank 0's snapshots.
        adapters_only: see iterate_weights.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, adapters_only: bool = False) -> None:
        super().__init__(dtype, 1, adapters_only)
        self._names: list[str] = []

    def _places(self, model: nn.Module, version: int, parallel: Parallel) -> Mapping[str, Tensor]:
        self._names = [spec.name for spec in layout(model, torch.float32, self.adapters_only, parallel)[0]]
        return {}

    def make_available(self, version: int) -> None:
        pass

    def views(self, version: int) -> Mapping[str, None]:
        """The names of a version's tensors."""
        return dict.fromkeys(self._names)


def _leaves_a_gpu(model: nn.Module, parallel: Parallel) -> bool:
    return (parallel.device or next(model.parameters()).device).type == "cuda"


def _path(fd: int) -> str:
    """Where other processes of this user on this host find the memory of a file descriptor."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def _attach(specs: Specs, slot_bytes: int, slots: int, fd: Any) -> SnapshotRing:
    own = fd.detach()
    return SnapshotRing(specs, slot_bytes, slots, mapped(own), own)


def _attach_device(specs: Specs, slot_bytes: int, slots: int, rebuild: Any, arguments: tuple[Any, ...]) -> DeviceRing:
    if rebuild is rebuild_cuda_tensor and arguments[_DEVICE] >= torch.cuda.device_count():
        # This process sees only its own GPU, as the first.
        arguments = (*arguments[:_DEVICE], 0, *arguments[_DEVICE + 1 :])
    return DeviceRing(specs, slot_bytes, slots, rebuild(*arguments))


_DEVICE = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")
