"""The GPUs of a simulated machine, in every process of a run.

``SIMULATED_MACHINE=8x80:FOLDER`` is a host with eight GPUs of 80 GB. A process has those that CUDA_VISIBLE_DEVICES
shows it, numbered from 0. Memory is counted in FOLDER, which all processes of the host share: each has a file of its
own there, and what a killed process had is free again. Models are tiny, so a byte of theirs counts as :data:`SCALE`.
"""

from __future__ import annotations

import atexit
import mmap
import os
import re
import socket
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import simulated_device
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor

SCALE = int(os.environ.get("SIMULATED_SCALE", "1000"))
"""Bytes of a GPU's memory for each that a tensor has here: a model of 1 MB takes 1 GB."""
WAYS = ("to_host", "pinned", "pageable")
"""What is counted of the bus, in bytes: copies to the host, and those to a GPU by the memory that they come from."""


class Host:
    """One host's GPUs, as one of its processes sees them.

    Args:
        number: of its GPUs.
        size: bytes of each.
        folder: for what its processes count.
    """

    def __init__(self, number: int, size: int, folder: Path) -> None:
        self.number, self.size, self.folder = number, size, folder
        self.visible = visible_of(os.environ.get("CUDA_VISIBLE_DEVICES"), number)
        self._lock, self._within = threading.RLock(), threading.local()
        self._counters: tuple[int, Any] | None = None
        self._tensors: Counter[tuple[int, int]] = Counter()
        """Those that lie in a memory: by GPU and address."""

    def _own(self) -> Any:
        """The counters of this process: bytes of each GPU, then of each way over the bus."""
        if self._counters is None or self._counters[0] != os.getpid():  # also after a fork
            self._tensors.clear()
            path = self.folder / f"{os.getpid()}.counts"
            made = path.with_suffix(".new")
            made.write_bytes(bytes(8 * (self.number + len(WAYS))))
            made.replace(path)
            with path.open("r+b") as file:
                self._counters = os.getpid(), mmap.mmap(file.fileno(), 0)
        return self._counters[1]

    def _add(self, place: int, amount: int) -> None:
        own = self._own()
        (held,) = struct.unpack_from("q", own, 8 * place)
        struct.pack_into("q", own, 8 * place, held + amount)

    def crossed(self, way: str, size: int) -> None:
        """Count bytes on the bus."""
        with self._lock:
            self._add(self.number + WAYS.index(way), size)

    def used(self, gpu: int) -> int:
        """Bytes that all living processes have on a GPU, by its number on the host."""
        return sum(counts[gpu] for pid, counts in counts_in(self.folder).items() if _lives(pid))

    def free(self, index: int) -> int:
        """Bytes that are free on a GPU that this process sees."""
        return max(0, self.size - self.used(self.visible[index]))

    def take(self, index: int, size: int) -> None:
        """Count bytes as taken, or as given back.

        Raises:
            torch.OutOfMemoryError: there are not so many.
        """
        with self._lock:
            if size > 0 and self.free(index) < size:
                left = (
                    f"GPU {index} has a total capacity of {self.size / 1e9:g} GB of which {self.free(index) / 1e9:g} GB"
                )
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size / 1e9:g} GB. {left} is free."
                )
            self._add(self.visible[index], size)

    @contextmanager
    def within_share(self) -> Iterator[None]:
        """What this thread makes within lies in memory that has been taken before."""
        self._within.share = True
        try:
            yield
        finally:
            self._within.share = False

    def hold(self, index: int, address: int, size: int, tensor: Any) -> None:
        """Count a memory from its first tensor to the end of its last one."""
        place = (index, address)
        with self._lock:
            if size == 0 or address in simulated_device.foreign or getattr(self._within, "share", False):
                return
            if not self._tensors[place]:
                self.take(index, SCALE * size)
            self._tensors[place] += 1
        weakref.finalize(tensor, self._drop, os.getpid(), place, SCALE * size).atexit = False

    def _drop(self, pid: int, place: tuple[int, int], size: int) -> None:
        with self._lock:
            if pid != os.getpid() or not self._tensors[place]:
                return
            self._tensors[place] -= 1
            if not self._tensors[place]:
                self._add(self.visible[place[0]], -size)


def visible_of(shown: str | None, number: int) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows, as CUDA reads it: up to the first that does not exist."""
    if shown is None:
        return list(range(number))
    found: list[int] = []
    for word in filter(None, shown.split(",")):
        if not word.strip().isdecimal() or int(word) >= number or int(word) in found:
            break
        found.append(int(word))
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def counts_in(folder: Path) -> dict[int, tuple[int, ...]]:
    """What each process has counted, living or not: bytes of each GPU, then by :data:`WAYS`."""
    found = {}
    for path in folder.glob("*.counts"):
        data = path.read_bytes()
        found[int(path.stem)] = struct.unpack(f"{len(data) // 8}q", data)
    return found


host: Host
"""This process's."""


def install() -> None:
    """Give this process the GPUs that its environment describes."""
    global host
    kind, _, folder = os.environ["SIMULATED_MACHINE"].partition(":")
    match = re.fullmatch(r"(\d+)x(\d+)", kind)
    assert match is not None, kind
    host = Host(int(match[1]), int(match[2]) * 10**9, Path(folder))
    socket.gethostname = lambda: host.folder.name
    if not host.visible:
        return
    host.folder.mkdir(parents=True, exist_ok=True)
    simulated_device.GPUS = len(host.visible)
    simulated_device.install()
    simulated_device.allocations.append(host.hold)
    simulated_device.crossings.append(host.crossed)
    _add_what_a_whole_run_asks()
    atexit.register(torch.cuda.synchronize)


def _add_what_a_whole_run_asks() -> None:
    from torch.multiprocessing import reductions

    cuda: Any = torch.cuda
    reductions.reduce_tensor = simulated_device.share_tensor
    reductions.rebuild_cuda_tensor = simulated_device.shared
    cuda.mem_get_info = lambda device=None: (host.free(simulated_device._on(_named(device))), host.size)
    cuda.get_device_properties = lambda device=None: _properties(simulated_device._on(_named(device)))
    cuda.can_device_access_peer = lambda *pair: True
    for name in ("memory_reserved", "memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
    for name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        setattr(cuda, name, lambda device=None: None)
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # the compiler asks for it when it is imported
    begin = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend=None, **options: begin("gloo", **options)
    torch.distributed.ProcessGroupNCCL = SimulatedNCCL
    torch.nn.parallel.DistributedDataParallel = SimulatedDDP
    _fsdp_init._move_states_to_device = _move
    kind: Any = DTensor
    kind.device, kind.is_cuda = (property(attrgetter(f"_local_tensor.{name}")) for name in ("device", "is_cuda"))
    run = threading.Thread.run

    def with_gpus(self: threading.Thread) -> None:
        simulated_device._here()
        run(self)

    threading.Thread.run = with_gpus


class SimulatedNCCL:
    """NCCL's group between processes that torch did not start together: its broadcasts, at once.

    Args:
        store: tells the other ranks where rank 0 is, as it tells them NCCL's id.
        rank: of this process.
        world: ranks.
        options: without a meaning here.
    """

    class Options:
        """Takes any."""

    def __init__(self, store: Any, rank: int, world: int, options: Any) -> None:
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                store.set("id", str(server.getsockname()[1]))
                self._others = [server.accept()[0] for _ in range(world - 1)]
        else:
            self._others = []
            self._first = socket.create_connection(("127.0.0.1", int(store.get("id"))))

    def broadcast(self, tensors: list[Any], options: Any) -> SimpleNamespace:
        """Of bytes on a GPU, from rank 0."""
        (data,) = tensors
        assert data.is_cuda, "NCCL knows no tensor of the host"
        view = data.held.numpy().data
        for other in self._others:
            other.sendall(view)
        while not self._others and view:
            view = view[self._first.recv_into(view) :]
        return SimpleNamespace(wait=lambda: None, synchronize=lambda: None, is_completed=lambda: True)

    def abort(self) -> None:
        """End it."""
        for channel in self._others or [self._first]:
            channel.close()


class SimulatedDDP(nn.Module):
    """In place of DDP, which makes its buckets in C++, where there are no simulated GPUs: the mean of each gradient.

    Args:
        module: to be trained on every rank.
        gradient_as_bucket_view: without a meaning here.
    """

    def __init__(self, module: nn.Module, gradient_as_bucket_view: bool = False) -> None:
        super().__init__()
        self.module, self._meets = module, True
        for parameter in module.parameters():
            torch.distributed.broadcast(parameter.data, 0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._meet)

    def _meet(self, parameter: Tensor) -> None:
        if self._meets:
            assert parameter.grad is not None
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= torch.distributed.get_world_size()

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, every rank keeps its own."""
        self._meets = False
        try:
            yield
        finally:
            self._meets = True


def _move(parameters: Iterable[Tensor], buffers: Iterable[Tensor], device: torch.device) -> None:
    """To a rank's device, in place of FSDP's own, which sets ``data``: that of a tensor of the CPU stays there."""
    for tensor in (*parameters, *buffers):
        if tensor.device != device and tensor.device.type != "meta":
            torch.utils.swap_tensors(tensor, tensor.detach().to(device).requires_grad_(tensor.requires_grad))


def _named(device: Any) -> Any:
    return "cuda" if device is None else device


def _properties(index: int | None) -> SimpleNamespace:
    gpu = host.visible[index or 0]
    uuid = f"{host.folder.name}-{gpu}"
    return SimpleNamespace(name="simulated GPU", uuid=uuid, total_memory=host.size, major=9, minor=0,
                           multi_processor_count=100)  # fmt: skip


if "SIMULATED_MACHINE" in os.environ:
    install()
