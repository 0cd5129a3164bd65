"""Numbered snapshots of the policy's weights: publish, fetch, verify.

S + 1 snapshots suffice for staleness S, and none is ever overwritten or deleted while it can be read: version v is
needed by batches up to v + 1 + S; version v + S + 1 takes its place only after batch v + S + 1 has been trained on,
so after it has been sampled. Snapshots are in memory that the processes of one host share, or in a folder that several
hosts share.

What is published, and how each tensor is read, is one list that is found at the start; every version is published by
walking it. The weights are copied at once, by all ranks, and may change after that; their digests, files and whatever
else makes the copy available come later, in another thread if there is one. A version counts as published, under its
number and as the newest, when all of that is done.

On the host a copy goes straight to its place. On a GPU the weights are rounded and copied within the device, which
takes milliseconds; they cross the bus on a stream of their own, so that neither the host nor its next kernels wait.
"""

from __future__ import annotations

import inspect
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.weights import HASHING, Weight, digests, fold, fold_digests, weights_of
from async_rlhf.system.files import naming

logger = logging.getLogger(__name__)

ALIGNMENT = 64
Work = Callable[[], None]
Later = Callable[[Work], "Future[None]"]
"""Does work some time, in the order in which it is handed over."""
_LEAST_ROOM = 1 << 30


def run_now(work: Work) -> Future[None]:
    """Do it now."""
    work()
    done: Future[None] = Future()
    done.set_result(None)
    return done


class BackgroundThread:
    """Does work in order. After an error nothing more is done, and :meth:`require` raises it."""

    def __init__(self, name: str) -> None:
        # A thread begins on GPU 0, where whatever it does there would open a context for this rank, too.
        here = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        self._pool = ThreadPoolExecutor(1, name, here)
        self._failure: BaseException | None = None
        self.began: float | None = None
        """When the first work began since this was last set to None, on the monotonic clock."""

    def __call__(self, work: Work) -> Future[None]:
        """Hand over work. Returns at once."""
        return self._pool.submit(self._do, work)

    def _do(self, work: Work) -> None:
        if self._failure is None:
            self.began = self.began or time.monotonic()
            try:
                work()
            except BaseException as error:  # of any kind: it is raised where the run next asks
                self._failure = error

    def require(self) -> None:
        """Raise what has gone wrong so far."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait until everything is done, and raise what has gone wrong."""
        self._pool.submit(int).result()
        self.require()

    def close(self) -> None:
        """Wait for what is under way, and end the thread."""
        self._pool.shutdown()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all versions: torch has 32 streams, and a new one is in the end one that somebody else works on."""
    return torch.cuda.Stream(device)


class AsyncCopy:
    """Copies of tensors on their way to where they are needed.

    What is under way on a device takes no more than gradients would, which nobody holds between two updates.

    Args:
        model: that they leave.
        parallel: how its weights are sharded.
        later: does what need not be done now.
    """

    folds: dict[str, Tensor]
    """See :func:`~async_rlhf.models.weights.fold`: by name, of what was copied with one."""

    def __init__(self, model: nn.Module, parallel: Parallel, later: Later) -> None:
        self.folds = {}
        self._device = device = parallel.device or next(model.parameters()).device
        self._stream = _stream_of(device) if device.type == "cuda" else None
        self._later = later
        held = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        self._room = max(_LEAST_ROOM, held // (parallel.shards if parallel.is_sharded else 1))
        self._under_way: deque[tuple[int, Future[None]]] = deque()
        tensors = (getattr(tensor, "_local_tensor", tensor) for tensor in (*model.parameters(), *model.buffers()))
        self._own = {tensor.untyped_storage().data_ptr() for tensor in tensors} if self._stream is not None else set()

    def copy(self, tensor: Tensor, target: Tensor, name: str | None = None) -> None:
        """Copy a tensor, which may change as soon as this returns.

        Args:
            tensor: of any type.
            target: for it; filled once what :meth:`end` is given begins.
            name: for its checksum, computed before it leaves the device; None for none.
        """
        if self._stream is None or tensor.device == target.device:
            target.copy_(tensor)
            if name is not None:
                self.folds[name] = fold(target).to(self._device)
            return
        # Rounded before it crosses the bus: a copy that rounds moves the wider type, and rounds on the host.
        copied = tensor.to(target.dtype)
        if copied.untyped_storage().data_ptr() in self._own:  # else it was rounded, gathered or merged
            copied = copied.clone()
        while self._under_way and sum(size for size, _ in self._under_way) + copied.nbytes > self._room:
            self._under_way.popleft()[1].result()
        work = partial(self._on_stream, self._ready(), partial(self._leave, copied, target, name))
        self._under_way.append((copied.nbytes, self._later(work)))

    def _leave(self, copied: Tensor, target: Tensor, name: str | None) -> None:
        target.copy_(copied, non_blocking=True)
        if name is not None:
            self.folds[name] = fold(copied)

    def end(self, work: Work) -> Future[None]:
        """Have this done when all copies are in place."""
        return self._later(partial(self._on_stream, self._ready(), work))

    def _ready(self) -> Any:
        """Marks what the device has been asked to do so far."""
        if self._stream is None:
            return None
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))  # not of the current device, which may be another GPU
        return ready

    def _on_stream(self, ready: Any, work: Callable[[], Any]) -> None:
        """Do work that needs what was marked, apart from what the device is asked to do meanwhile."""
        if self._stream is None:
            work()
            return
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            work()
            self._stream.synchronize()


@contextmanager
def pinned(memory: Tensor) -> Iterator[None]:
    """Within, a GPU copies to this memory of the host by itself; where that cannot be had, copies are slower."""
    runtime: Any = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        size = memory.nbytes / 1e9
        with suppress(RuntimeError):  # else whatever the thread does next there raises the error that is pending
            torch.zeros(1, device="cuda")
        logger.warning("%.3g GB of the host cannot be pinned (CUDA error %d): weights leave more slowly", size, error)
    try:
        yield
    finally:
        if not error:
            runtime.cudaHostUnregister(memory.data_ptr())


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


Specs: TypeAlias = tuple[TensorSpec, ...]


def layout(tensors: Mapping[str, Weight | Tensor]) -> tuple[Specs, int]:
    """The places of these tensors within a slot or region, and its bytes."""
    specs, offset = [], 0
    for name, tensor in tensors.items():
        specs.append(TensorSpec(name, tuple(tensor.shape), tensor.dtype, offset))
        offset += -(-tensor.shape.numel() * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT
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


class Snapshots:
    """Where workers find numbered weights.

    Args:
        dtype: parameters are rounded to it; None copies them as they are.
        slots: S + 1.
        adapters_only: see :func:`~async_rlhf.models.weights.weights_of`.
    """

    def __init__(self, dtype: torch.dtype | None, slots: int, adapters_only: bool = False) -> None:
        self.dtype, self.slots, self.adapters_only = dtype, slots, adapters_only
        self.published: dict[int, dict[str, str]] = {}
        """The available versions, with the digest of each tensor."""
        self._newest = -1
        self._model: nn.Module | None = None
        self._weights: dict[str, Weight] = {}
        """What is read of that model for each version."""
        self._held = ExitStack()
        self._hashing = 1
        self.folded = False
        """Whether checksums are computed on GPUs: on the learner's before weights leave it, and where they arrive."""
        self._folds: dict[str, Tensor] = {}

    @property
    def newest(self) -> int:
        """The version published last; -1 for none."""
        return self._newest

    def publish(self, model: nn.Module, version: int, parallel: Parallel = ALONE, later: Later = run_now) -> None:
        """Copy the weights, which may change when this returns, and make the copy available.

        Every rank must call it.

        Args:
            model: has them.
            version: their number; the one before must be available.
            parallel: how they are sharded over ranks.
            later: does what need not be done now.
        """
        self.published.pop(version - self.slots, None)
        copies = AsyncCopy(model, parallel, later)
        self._folds = copies.folds
        with torch.no_grad():
            if parallel.takes_part:
                parallel.barrier("reading weights", model)
                if model is not self._model:  # not before: until it is sharded, a model has other parameters
                    self._model, self._weights = model, weights_of(model, self.adapters_only, parallel, self.dtype)
                places = self._places(model, version, parallel)
                for name, weight in self._weights.items():
                    tensor = weight.read()  # on all ranks, in one order
                    if name in places:
                        copies.copy(tensor, places[name], name if self.folded else None)
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
        self._model, self._weights = None, {}


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that any process of this user on this host can map: where the tensors of one version lie."""

    path: str
    start: int
    size: int
    specs: tuple[TensorSpec, ...]


class SharedTensors(dict[str, Tensor]):
    """Tensors by name, in a region that other processes can map.

    Args:
        tensors: by name.
        region: where they lie.
        folded: whether their checksums are computed on GPUs.
    """

    def __init__(self, tensors: Mapping[str, Tensor], region: Region, folded: bool = False) -> None:
        super().__init__(tensors)
        self.region, self.folded = region, folded


def are_folded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the checksums of these tensors are those of :func:`~async_rlhf.models.weights.fold`."""
    if isinstance(tensors, SharedTensors):
        return tensors.folded
    return any(tensor.is_cuda for tensor in tensors.values())


class SnapshotRing(Snapshots):
    """S + 1 snapshots in memory that processes share through a file descriptor, without a name.

    Nameless memory cannot leak: the kernel frees it with the last process that holds it, however that one ends.

    Args:
        specs: the tensors of one snapshot.
        slot_bytes: of one snapshot.
        slots: S + 1. The number of the newest version is stored before the first slot.
        memory: all slots, as uint8.
        fd: the file descriptor of the memory; -1 for none.
        adapters_only: see weights_of.
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
        self._version = memory[:8].view(torch.int64)
        """The number of the newest version, seen from any process."""

    def __reduce__(self) -> tuple[object, ...]:
        """A child process gets the same memory, not a copy."""
        return _attach, (self.specs, self.slot_bytes, self.slots, DupFd(self.fd), self.folded)

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        dtype: torch.dtype,
        slots: int,
        adapters_only: bool = False,
        parallel: Parallel = ALONE,
        read_on_gpus: bool = True,
    ) -> SnapshotRing:
        """A ring that fits the model's weights, its parameters rounded to ``dtype``.

        Checksums are computed on GPUs if the model and all readers are there: on cores
        :func:`~async_rlhf.models.weights.fold` is slow.
        """
        specs, slot_bytes = layout(weights_of(model, adapters_only, parallel, dtype))
        memory, fd = cls._allocated(ALIGNMENT + slot_bytes * slots, model)
        ring = cls(specs, slot_bytes, slots, memory, fd, adapters_only, dtype)
        ring._version[0] = -1
        if fd >= 0 and parallel.device_of(model).type == "cuda":
            ring.pin(memory)
            ring.folded = read_on_gpus
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
        return tensors if self.fd < 0 else self.shared(tensors, version)

    def shared(self, tensors: Mapping[str, Tensor], version: int) -> SharedTensors:
        """These tensors of a version, with the place where other processes find them."""
        region = Region(self.path, self._start(version), self.slot_bytes, self.specs)
        return SharedTensors(tensors, region, self.folded)

    @property
    def path(self) -> str:
        """Where other processes of this user on this host find the memory; no file if they cannot."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def slot(self, version: int) -> Tensor:
        """A version's memory, as uint8."""
        start = self._start(version)
        return self.memory[start : start + self.slot_bytes]

    def _start(self, version: int) -> int:
        return ALIGNMENT + version % self.slots * self.slot_bytes

    @property
    def newest(self) -> int:
        """The version published last, seen from any process; -1 for none."""
        return int(self._version[0])

    def _places(self, model: nn.Module, version: int, parallel: Parallel) -> Mapping[str, Tensor]:
        return self.views(version)

    def make_available(self, version: int) -> None:
        views = self.views(version)
        if self.folded:
            self.published[version] = fold_digests(self._folds, views)
        else:
            self.published[version] = digests(views, folded=self.memory.is_cuda)
        self._version[0] = version  # last, so that readers of the number find the whole version

    def close(self) -> None:
        """Free the memory. Views taken before keep it alive until they are gone."""
        super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class DeviceRing(SnapshotRing):
    """The same in memory of the learner's device, shared by CUDA IPC on a GPU: for workers on that device, so nothing
    crosses the bus. The number of the newest version is on the host: who samples in flight reads it in every step, and
    would wait for the device each time.
    """

    def __init__(self, *arguments: Any, version_fd: int | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._version_fd = nameless_file(8) if version_fd is None else version_fd
        self._version = mapped(self._version_fd).view(torch.int64)

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, arguments = reduce_tensor(self.memory)
        return _attach_device, (self.specs, self.slot_bytes, self.slots, DupFd(self._version_fd), rebuild, arguments)

    def close(self) -> None:
        super().close()
        if self._version_fd >= 0:
            os.close(self._version_fd)
            self._version_fd = -1

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
            self.specs, size = layout(weights_of(model, self.adapters_only, parallel, self.dtype))
            self.memory = torch.empty(size, dtype=torch.uint8)
            self.draft = tensors_in(self.memory, self.specs)
            if parallel.device_of(model).type == "cuda":
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
        with naming(self.file(version)):
            temporary = self.file(version).with_suffix(".tmp")
            save_file(self.draft, temporary, metadata={"format": "pt"})
            temporary.replace(self.file(version))
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
        adapters_only: see weights_of.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, adapters_only: bool = False) -> None:
        super().__init__(dtype, 1, adapters_only)

    def _places(self, model: nn.Module, version: int, parallel: Parallel) -> Mapping[str, Tensor]:
        return {}

    def make_available(self, version: int) -> None:
        pass

    def views(self, version: int) -> Mapping[str, None]:
        """The names of a version's tensors."""
        return dict.fromkeys(self._weights)


def _attach(specs: Specs, slot_bytes: int, slots: int, fd: Any, folded: bool) -> SnapshotRing:
    descriptor = fd.detach()
    ring = SnapshotRing(specs, slot_bytes, slots, mapped(descriptor), descriptor)
    ring.folded = folded
    return ring


def _attach_device(
    specs: Specs, slot_bytes: int, slots: int, version: Any, rebuild: Any, arguments: tuple[Any, ...]
) -> DeviceRing:
    if rebuild is rebuild_cuda_tensor and arguments[_DEVICE] >= torch.cuda.device_count():
        # This process sees only its own GPU, as the first.
        arguments = (*arguments[:_DEVICE], 0, *arguments[_DEVICE + 1 :])
    return DeviceRing(specs, slot_bytes, slots, rebuild(*arguments), version_fd=version.detach())


_DEVICE = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")
