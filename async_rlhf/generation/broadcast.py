"""Sends weights from the learner's memory to a server's over the network, without a shared folder.

Each transfer has a door of its own (:mod:`async_rlhf.system.doors`), on the address under which the server sees the
learner, and a secret of its own, which the server is told over HTTP. So a server that was restarted has nothing to
join again, nobody waits for one that is gone, and a stranger gets no weights and gives none. Between CPUs the bytes go
over the connections that the door let in; between GPUs by NCCL, whose group is made over them.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from async_rlhf.system.doors import Door, knock

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
        self._door = Door(self._host)

    def invitation(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The arguments of :func:`receive`, for JSON."""
        return {
            "host": self._host,
            "port": self._door.port,
            "secret": self._door.secret.hex(),
            "world": self._receivers + 1,
            "backend": "nccl" if self.device.type == "cuda" else "tcp",
            "tensors": [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()],
        }

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send them in order. Blocks until every receiver has all of them.

        Raises:
            ConnectionError: a receiver did not connect, or disconnected.
        """
        try:
            with ExitStack() as stack:
                inside = self._door.admit(range(1, self._receivers + 1), TIMEOUT.total_seconds())
                channels = [stack.enter_context(channel) for channel in inside.values()]
                for channel in channels:
                    channel.settimeout(TIMEOUT.total_seconds())
                if self.device.type == "cuda":
                    self._send_by_nccl(channels, tensors)
                else:
                    with ThreadPoolExecutor(len(channels)) as pool:
                        list(pool.map(lambda channel: _send_all(channel, tensors), channels))
        except (OSError, RuntimeError) as error:
            raise ConnectionError(str(error)) from error

    def _send_by_nccl(self, channels: Sequence[socket.socket], tensors: Mapping[str, Tensor]) -> None:
        store = dist.HashStore()
        with telling(store, channels):
            group = _nccl_group(store, 0, self._receivers + 1)
            for tensor in tensors.values():
                _broadcast(group, tensor.to(self.device))


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
        channel = stack.enter_context(knock(host, port, bytes.fromhex(secret), rank, seconds))
        channel.settimeout(seconds)
        group = None
        if device.type == "cuda":
            store = dist.HashStore()
            store.set_timeout(TIMEOUT)
            stack.enter_context(hearing(store, channel))
            group = _nccl_group(store, rank, world)
        for name, shape, dtype in tensors:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            if group is None:
                _receive_into(channel, _bytes(tensor))
            else:
                _broadcast(group, tensor)
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


def _nccl_group(store: dist.Store, rank: int, world: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, world, options)


def _broadcast(group: Any, tensor: Tensor) -> None:
    if tensor.numel():
        # As bytes: not every backend supports every type.
        group.broadcast([tensor.contiguous().view(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()


@contextmanager
def telling(store: dist.Store, channels: Sequence[socket.socket]) -> Iterator[None]:
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
def hearing(store: dist.Store, channel: socket.socket) -> Iterator[None]:
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
