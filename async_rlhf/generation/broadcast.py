"""Sends weights from the learner's memory to a server's over the network, without a shared folder.

Each transfer has a port of its own (:mod:`async_rlhf.system.guarded_port`), on the address under which the server sees
the learner, and a secret of its own, which the server is told over HTTP. So a server that was restarted has nothing to
join again, nobody waits for one that is gone, and a stranger gets no weights and gives none. Between CPUs the bytes go
over the connections that this port has accepted; between GPUs by NCCL, whose group is made over them.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from async_rlhf.system.guarded_port import GuardedPort, connect

TIMEOUT = timedelta(seconds=120)
_BLOCK = 1 << 24
"""Bytes that must be transferred within TIMEOUT."""
_LONGEST_LINE = 1 << 16
_TAKEN = b"\1"


class Sender:
    """The learner's end of one transfer.

    Args:
        url: of the server; decides which of the learner's addresses it can reach.
        receivers: number of the server's processes.
        device: of the learner; on a GPU the transfer goes by NCCL.
    """

    def __init__(self, url: str, receivers: int, device: torch.device) -> None:
        self.device = device
        self._receivers = receivers
        self._host = own_address(url)
        self._port = GuardedPort(self._host)

    def invitation(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The arguments of :func:`receive`, for JSON."""
        return {
            "host": self._host,
            "port": self._port.port,
            "secret": self._port.secret.hex(),
            "world": self._receivers + 1,
            "backend": "nccl" if by_nccl(self.device) else "tcp",
            "tensors": [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()],
        }

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send them in order. Blocks until every receiver has all of them.

        Raises:
            ConnectionError: a receiver did not connect, or disconnected.
        """
        try:
            with ExitStack() as stack:
                accepted = self._port.accept(range(1, self._receivers + 1), TIMEOUT.total_seconds())
                channels = [stack.enter_context(channel) for channel in accepted.values()]
                for channel in channels:
                    channel.settimeout(TIMEOUT.total_seconds())
                if by_nccl(self.device):
                    self._send_by_nccl(channels, tensors)
                else:
                    with ThreadPoolExecutor(len(channels)) as pool:
                        list(pool.map(lambda channel: _send_all(channel, tensors), channels))
        except (OSError, RuntimeError) as error:
            raise ConnectionError(str(error)) from error

    def _send_by_nccl(self, channels: Sequence[socket.socket], tensors: Mapping[str, Tensor]) -> None:
        store = dist.HashStore()
        with forwarded(store, channels), _NCCLGroup(store, 0, self._receivers + 1) as group, own_stream(self.device):
            for tensor in tensors.values():
                group.broadcast(tensor.to(self.device))


def receive(
    host: str,
    port: int,
    secret: str,
    world: int,
    rank: int,
    device: torch.device,
    tensors: Sequence[Sequence[Any]],
) -> Iterator[tuple[str, Tensor]]:
    """A server process's end: yields names and tensors as they arrive.

    Args:
        host: of the learner.
        port: see host.
        secret: of the learner's port, in hexadecimal digits.
        world: number of processes, learner and receivers.
        rank: from 1.
        device: where the tensors are needed; on a GPU they come by NCCL.
        tensors: name, shape and dtype of each.
    """
    seconds = TIMEOUT.total_seconds()
    with ExitStack() as stack:
        channel = stack.enter_context(connect(host, port, bytes.fromhex(secret), rank, seconds))
        channel.settimeout(seconds)
        group = None
        if by_nccl(device):
            store = dist.HashStore()
            store.set_timeout(TIMEOUT)
            stack.enter_context(received(store, channel))
            group = stack.enter_context(_NCCLGroup(store, rank, world))
        for name, shape, dtype in tensors:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            if group is None:
                _receive_into(channel, _bytes(tensor))
            else:
                group.broadcast(tensor)
            yield name, tensor
        if group is None:
            channel.sendall(_TAKEN)


def _send_all(channel: socket.socket, tensors: Mapping[str, Tensor]) -> None:
    for tensor in tensors.values():
        data = _bytes(tensor.cpu())
        for start in range(0, len(data), _BLOCK):
            channel.sendall(data[start : start + _BLOCK])
    if channel.recv(1) != _TAKEN:
        raise ConnectionError("a receiver went away")


def _receive_into(channel: socket.socket, data: memoryview) -> None:
    while data:
        count = channel.recv_into(data)
        if count == 0:
            raise ConnectionError("the learner went away")
        data = data[count:]


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, without a copy if it is contiguous."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def by_nccl(device: torch.device) -> bool:
    """Whether tensors reach this device by NCCL."""
    return device.type == "cuda"


def gpu_of(device: torch.device) -> str | None:
    """The GPU itself, under whatever number a process sees it; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Within, the device works on a stream of its own, so that training does not wait for a server."""
    return torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None)


class _NCCLGroup:
    """NCCL's group for one transfer.

    NCCL only queues a broadcast, and a group that is dropped aborts what is still queued. So the group waits until the
    device has done everything, and is shut down after that. After an error it is aborted at once.
    """

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * TIMEOUT  # we notice first; NCCL would end the process
        self._group: Any = dist.ProcessGroupNCCL(store, rank, world, options)
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()

    def __enter__(self) -> _NCCLGroup:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._group.abort()
            return
        self._finish(0)
        self._group.shutdown()

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast from rank 0. What this thread queues on the device after it waits for it, but not this thread."""
        if tensor.numel() == 0:
            return
        # As bytes: not every backend supports every type.
        data = tensor.contiguous().view(-1).view(torch.uint8)
        work = self._group.broadcast([data], dist.BroadcastOptions())
        work.wait()
        self._under_way.append((work, data))
        self._finish(1)  # the next one is copied to the device meanwhile

    def _finish(self, left: int) -> None:
        """Wait until no more than ``left`` broadcasts are under way.

        Raises:
            ConnectionError: one takes too long.
        """
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while len(self._under_way) > left:
            if self._under_way[0][0].is_completed():
                self._under_way.popleft()
            elif time.monotonic() > deadline:
                self._group.abort()
                raise ConnectionError(f"NCCL has not sent a tensor within {TIMEOUT.total_seconds():g} s")
            else:
                time.sleep(0.0002)


@contextmanager
def forwarded(store: dist.Store, channels: Sequence[socket.socket]) -> Iterator[None]:
    """Within, forward what NCCL writes to this store, such as its group's id, to every receiver: no other port."""
    over = threading.Event()

    def tell() -> None:
        told: set[str] = set()
        while not over.wait(0.005):
            for key in set(store.list_keys()) - told:
                line = json.dumps([key, store.get(key).hex()]).encode() + b"\n"
                told.add(key)
                for channel in channels:
                    with suppress(OSError):  # the receiver is gone: NCCL's own timeout reports it
                        channel.sendall(line)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def received(store: dist.Store, channel: socket.socket) -> Iterator[None]:
    """Within, write to this store what the learner forwards."""

    def hear() -> None:
        try:
            with channel.makefile("rb") as lines:
                while line := lines.readline(_LONGEST_LINE):
                    key, value = json.loads(line)
                    store.set(key, bytes.fromhex(value))  # type: ignore[arg-type]  # it takes both
        except (OSError, ValueError):  # the learner is gone: NCCL's own timeout reports it
            return

    thread = threading.Thread(target=hear, daemon=True)
    thread.start()
    try:
        yield
    finally:
        channel.shutdown(socket.SHUT_RDWR)
        thread.join()


def own_address(url: str) -> str:
    """The address that this host uses to reach a server."""
    place = urlsplit(url)
    family, kind, _, _, address = socket.getaddrinfo(place.hostname, place.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket, sends nothing
        return probe.getsockname()[0]
