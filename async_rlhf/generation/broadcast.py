"""Sends weights from the learner's memory to a server's over the network, without a shared folder.

Learner and server stay connected from one transfer to the next. The learner opens a port for them once
(:mod:`async_rlhf.system.guarded_port`), on the address under which the server sees it, with a secret that the server is
told over HTTP; a stranger gets no weights and gives none. After anything that goes wrong both sides let go, and the
next transfer begins with a new port and a new secret: so a server that was restarted has nothing to join again, and
nobody waits for one that is gone. Between CPUs the bytes go over the connections that this port has accepted; between
GPUs by NCCL, whose group is made over them.

What is sent is the snapshot's memory as it is. Over a connection it flows into the tensors one after the other. NCCL
has to be told of every message, so there the tensors come in buckets, many in each.
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
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from async_rlhf.models.publish import TensorSpec, tensors_in
from async_rlhf.system.guarded_port import GuardedPort, connect
from async_rlhf.system.subprocesses import environment_changed

TIMEOUT = timedelta(seconds=120)
BUCKET = 1 << 26
"""Bytes that NCCL is given at a time. A larger tensor is sent in several parts."""
_BLOCK = 1 << 24
"""Bytes that must be transferred within TIMEOUT."""
_LONGEST_LINE = 1 << 16
_TAKEN = b"\1"


class Sender:
    """The learner's end: connected to a server's processes from the first transfer until one fails.

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
        self._channels: list[socket.socket] = []
        self._group: _NCCLGroup | None = None
        self._stream = own_stream(device)

    def invitation(self, specs: Sequence[TensorSpec]) -> dict[str, Any]:
        """The arguments of :meth:`Receiver.receive`, for JSON.

        Args:
            specs: places of the tensors that are to be sent, in order.
        """
        return {
            "host": self._host,
            "port": self._port.port,
            "secret": self._port.secret.hex(),
            "new": not self._channels,
            "world": self._receivers + 1,
            "backend": "nccl" if by_nccl(self.device) else "tcp",
            "tensors": [
                [spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch."), spec.offset] for spec in specs
            ],
        }

    def is_connected(self) -> bool:
        """Whether every receiver is still there, as far as this host knows."""
        return bool(self._channels) and not any(map(_is_over, self._channels))

    def send(self, memory: Tensor, specs: Sequence[TensorSpec]) -> None:
        """Send the tensors that lie in this memory. Blocks until every receiver has all of them.

        Args:
            memory: of a snapshot, as uint8.
            specs: places of the tensors in it.

        Raises:
            ConnectionError: a receiver did not connect, or disconnected. Nothing more can be sent then.
        """
        try:
            if not self._channels:
                seconds = TIMEOUT.total_seconds()
                self._channels = list(self._port.accept(range(1, self._receivers + 1), seconds).values())
                for channel in self._channels:
                    _keep(channel)
            if by_nccl(self.device):
                self._send_by_nccl(memory, specs)
            else:
                data = memory[: specs[-1].end].numpy().data
                with ThreadPoolExecutor(len(self._channels)) as pool:
                    list(pool.map(lambda channel: _send_all(channel, data), self._channels))
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, RuntimeError)):
                raise ConnectionError(str(error)) from error
            raise

    def _send_by_nccl(self, memory: Tensor, specs: Sequence[TensorSpec]) -> None:
        with ExitStack() as stack:
            if self._group is None:
                store = dist.HashStore()
                stack.enter_context(forwarded(store, self._channels))  # until they have met
                self._group = _NCCLGroup(store, 0, self._receivers + 1)
            stack.enter_context(self._stream)
            for bucket in _buckets(specs):
                for part in memory[bucket[0].offset : bucket[-1].end].split(BUCKET):
                    self._group.broadcast(part.to(self.device, non_blocking=True))
            self._group.finish()

    def close(self) -> None:
        """Let go of the receivers, in any thread: who waits for one gets an error."""
        self._port.close()
        for channel in self._channels:
            _end(channel)
        if self._group is not None:
            self._group.abort()


class Receiver:
    """A server process's end. It stays connected to the learner that has sent last."""

    def __init__(self) -> None:
        self._secret = ""
        self._channel: socket.socket | None = None
        self._group: _NCCLGroup | None = None

    def receive(
        self, invitation: Mapping[str, Any], rank: int, device: torch.device
    ) -> Iterator[tuple[str, Tensor]] | None:
        """Names and tensors as they arrive; None if the learner believes this process to be connected, and it is not.

        Args:
            invitation: of the :class:`Sender`: its host, port and secret in hexadecimal digits, whether it waits for
                ``new`` connections, the ``world`` of learner and receivers, and name, shape and dtype of each tensor,
                and its place in the memory that is sent.
            rank: from 1.
            device: where the tensors are needed; on a GPU they come by NCCL.

        Raises:
            ConnectionError: the learner cannot be reached, or went away.
        """
        secret = invitation["secret"]
        if secret != self._secret:
            self.close()
            if not invitation["new"]:
                return None
            host, port = invitation["host"], invitation["port"]
            self._channel = connect(host, port, bytes.fromhex(secret), rank, TIMEOUT.total_seconds())
            self._secret = secret
            _keep(self._channel)
            if by_nccl(device):
                store = dist.HashStore()
                store.set_timeout(TIMEOUT)
                self._channel.settimeout(None)  # nothing comes between two transfers
                hear(store, self._channel)
                self._group = _NCCLGroup(store, rank, invitation["world"])
        specs = [
            TensorSpec(name, tuple(shape), getattr(torch, dtype), at)
            for name, shape, dtype, at in invitation["tensors"]
        ]
        return self._taken(specs, device)

    def _taken(self, specs: Sequence[TensorSpec], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        assert self._channel is not None
        try:
            if self._group is None:
                yield from _from_connection(self._channel, specs)
                self._channel.sendall(_TAKEN)
            else:
                yield from _from_nccl(self._group, specs, device)
                self._group.finish()
        except BaseException:  # also if the tensors are not taken to the end
            self.close()
            raise

    def close(self) -> None:
        """Let go of the learner."""
        self._secret = ""
        if self._channel is not None:
            _end(self._channel)
        if self._group is not None:
            self._group.abort()
        self._channel = self._group = None


def _buckets(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Tensors that travel together, whole."""
    buckets: list[list[TensorSpec]] = []
    for spec in specs:
        if not buckets or spec.end - buckets[-1][0].offset > BUCKET:
            buckets.append([])
        buckets[-1].append(spec)
    return buckets


def _from_nccl(group: _NCCLGroup, specs: Sequence[TensorSpec], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for bucket in _buckets(specs):
        start = bucket[0].offset
        # Not used again for the next one: who takes the tensors may keep them.
        memory = torch.empty(bucket[-1].end - start, dtype=torch.uint8, device=device)
        for part in memory.split(BUCKET):
            group.broadcast(part, wait=True)
        yield from tensors_in(memory, [replace(spec, offset=spec.offset - start) for spec in bucket]).items()


def _from_connection(channel: socket.socket, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    at = 0
    for spec in specs:
        _receive_into(channel, memoryview(bytearray(spec.offset - at)))  # between two tensors
        memory = torch.empty(spec.end - spec.offset, dtype=torch.uint8)
        _receive_into(channel, memory.numpy().data)
        yield from tensors_in(memory, [replace(spec, offset=0)]).items()
        at = spec.end


def _keep(channel: socket.socket) -> None:
    """Limit what is sent and received at a time, and have the system notice a host that is gone meanwhile."""
    channel.settimeout(TIMEOUT.total_seconds())
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):  # not on every system
            channel.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _is_over(channel: socket.socket) -> bool:
    """Whether the other end of an idle connection is gone."""
    limit = channel.gettimeout()
    try:
        channel.settimeout(0)
        channel.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        channel.settimeout(limit)
        return False
    except OSError:
        pass
    return True


def _end(channel: socket.socket) -> None:
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it, which close() does not
    channel.close()


def _send_all(channel: socket.socket, data: memoryview) -> None:
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


def by_nccl(device: torch.device) -> bool:
    """Whether tensors reach this device by NCCL."""
    return device.type == "cuda"


def gpu_of(device: torch.device) -> str | None:
    """The GPU itself, under whatever number a process sees it; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Within, any number of times, the device works on a stream of its own: training does not wait for a server."""
    return torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None)


_MAKING = threading.Lock()
"""Held while a group is made, by one thread at a time: the environment is the process's."""


class _NCCLGroup:
    """NCCL's group of the learner and a server's processes.

    NCCL only queues a broadcast, and a group that ends aborts what is still queued. So every transfer waits until the
    device has done everything. A group ends by being aborted: to shut it down would wait for processes that may be
    gone.
    """

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * TIMEOUT  # we notice first
        # torch would watch the group in a thread that ends this process if another one of the group is gone. It leaves
        # that to us if we say that we wait for everything, as we do.
        with _MAKING, environment_changed({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
            self._group: Any = dist.ProcessGroupNCCL(store, rank, world, options)
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()

    def broadcast(self, data: Tensor, wait: bool = False) -> None:
        """Broadcast bytes from rank 0.

        Args:
            data: contiguous, as uint8.
            wait: whether what this thread queues on the device after it waits for it; this thread does not.
        """
        if data.numel() == 0:
            return
        work = self._group.broadcast([data], dist.BroadcastOptions())
        if wait:
            work.synchronize()
        self._under_way.append((work, data))
        self.finish(1)  # the next one is copied to the device meanwhile

    def finish(self, left: int = 0) -> None:
        """Wait until no more than ``left`` broadcasts are under way.

        Raises:
            ConnectionError: one takes too long.
            RuntimeError: one has failed, as others of the group are gone.
        """
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while len(self._under_way) > left:
            if self._under_way[0][0].is_completed():
                self._under_way.popleft()[0].wait()  # raises what has gone wrong: then, too, it is completed
            elif time.monotonic() > deadline:
                raise ConnectionError(f"NCCL has not sent a bucket within {TIMEOUT.total_seconds():g} s")
            else:
                time.sleep(0.0002)

    def abort(self) -> None:
        """End it, without a word to the other processes."""
        self._group.abort()


@contextmanager
def forwarded(store: dist.Store, channels: Sequence[socket.socket]) -> Iterator[None]:
    """Within, forward what NCCL writes to this store, such as its group's id, to every receiver: no other port."""
    over = threading.Event()

    def tell() -> None:
        seen: set[str] = set()
        while not over.wait(0.005):
            for key in set(store.list_keys()) - seen:
                line = json.dumps([key, store.get(key).hex()]).encode() + b"\n"
                seen.add(key)
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


def hear(store: dist.Store, channel: socket.socket) -> None:
    """From now on, until the learner is gone, write to this store what it forwards."""

    def listen() -> None:
        with suppress(OSError, ValueError), channel.makefile("rb") as lines:  # NCCL's own timeout reports them
            while line := lines.readline(_LONGEST_LINE):
                key, value = json.loads(line)
                store.set(key, bytes.fromhex(value))  # type: ignore[arg-type]  # it takes both

    threading.Thread(target=listen, daemon=True).start()


def own_address(url: str) -> str:
    """The address that this host uses to reach a server."""
    parts = urlsplit(url)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket, sends nothing
        return probe.getsockname()[0]
