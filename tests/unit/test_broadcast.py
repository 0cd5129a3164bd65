"""Weights over the network: every receiver gets every byte, strangers get none, and one that stays away is an error."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from async_rlhf.generation import broadcast, server_generator
from async_rlhf.generation.broadcast import Sender, forwarded, receive, received

CPU = torch.device("cpu")
URL = "http://127.0.0.1:80"
TENSORS = {
    "matrix": torch.randn(300, 70),
    "half": torch.randn(5).to(torch.bfloat16),
    "count": torch.arange(3),
    "truth": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "strided": torch.randn(8, 6).T,
}


def transfer(receivers: int, before=lambda invitation: None, backend: str = "tcp") -> list[dict[str, torch.Tensor]]:
    """Send TENSORS to receivers in threads. ``before`` is called once the port is open."""
    sender = Sender(URL, receivers, CPU)
    invitation = sender.invitation(TENSORS)
    before(invitation)
    assert invitation.pop("backend") == backend
    found: dict[int, dict[str, torch.Tensor]] = {}

    def take(rank: int) -> None:
        found[rank] = dict(receive(rank=rank, device=CPU, **invitation))

    threads = [threading.Thread(target=take, args=(rank,)) for rank in range(1, receivers + 1)]
    for thread in threads:
        thread.start()
    sender.send(TENSORS)
    for thread in threads:
        thread.join()
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize(("receivers", "block"), [(1, 1 << 24), (2, 1000)])
def test_every_receiver_gets_every_tensor(receivers, block, monkeypatch):
    monkeypatch.setattr(broadcast, "_BLOCK", block)
    taken = transfer(receivers)
    assert len(taken) == receivers
    for tensors in taken:
        assert list(tensors) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name], tensor), name


def test_strangers_get_no_weights_and_hold_nothing_up():
    strangers: list[socket.socket] = []

    def come_first(invitation) -> None:
        for said in (b"", b"rubbish", b"\xff" * 68, b"\0" * 100_000):
            stranger = socket.create_connection((invitation["host"], invitation["port"]), timeout=20)
            stranger.sendall(said)
            strangers.append(stranger)

    (tensors,) = transfer(1, before=come_first)
    assert torch.equal(tensors["matrix"], TENSORS["matrix"])
    for stranger in strangers:
        with stranger:
            got = b""
            try:
                while part := stranger.recv(4096):
                    got += part
            except ConnectionResetError:
                pass
            assert len(got) <= 32  # what it would have had to answer, and nothing more


def test_a_receiver_with_another_secret_gets_nothing(monkeypatch):
    monkeypatch.setattr(broadcast, "TIMEOUT", timedelta(seconds=2))
    sender = Sender(URL, 1, CPU)
    fields = sender.invitation(TENSORS) | {"secret": os.urandom(32).hex()}
    fields.pop("backend")
    errors: list[BaseException] = []

    def send() -> None:
        try:
            sender.send(TENSORS)
        except ConnectionError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(ConnectionError):
        list(receive(rank=1, device=CPU, **fields))
    thread.join(timeout=30)
    assert "number 1 did not come" in str(errors[0])


def test_a_receiver_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setattr(broadcast, "TIMEOUT", timedelta(seconds=1))
    with pytest.raises(ConnectionError):
        Sender(URL, 1, CPU).send(TENSORS)


def test_a_receiver_that_goes_away_is_an_error():
    sender = Sender(URL, 1, CPU)
    fields = sender.invitation({"large": torch.zeros(1 << 24)})
    fields.pop("backend")
    tensors = receive(rank=1, device=CPU, **{**fields, "tensors": [["small", [3], "float32"]]})

    def take_one_and_leave() -> None:
        next(tensors)
        tensors.close()

    thread = threading.Thread(target=take_one_and_leave)
    thread.start()
    with pytest.raises(ConnectionError):
        sender.send({"large": torch.zeros(1 << 24)})
    thread.join(timeout=30)


def test_the_learner_listens_where_the_server_sees_it_and_nowhere_else():
    sender = Sender("http://localhost:8000", 1, CPU)
    invitation = sender.invitation({})
    with socket.create_connection((invitation["host"], invitation["port"]), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", invitation["port"]), timeout=5)


@pytest.mark.parametrize(
    ("learner", "servers", "device"),
    [
        ("cuda", [("cuda", "GPU-2")], "cuda"),
        ("cuda", [("cuda", "GPU-2"), ("cuda", "GPU-3")], "cuda"),
        ("cuda", [("cuda", "GPU-2"), ("cuda", "GPU-1")], "cpu"),
        ("cuda", [("cpu", None)], "cpu"),
        ("cpu", [("cuda", "GPU-2")], "cpu"),
        ("cpu", [("cpu", None)], "cpu"),
    ],
)
def test_nccl_is_for_gpus_that_differ(learner, servers, device, monkeypatch):
    """It refuses two processes on one GPU."""
    monkeypatch.setattr(server_generator, "gpu_of", lambda device: "GPU-1" if device.type == "cuda" else None)
    processes = [{"device": kind, "gpu": gpu} for kind, gpu in servers]
    assert server_generator._device(torch.device(learner), processes) == torch.device(device)


def test_what_nccl_notes_reaches_every_receiver_without_a_port_of_its_own():
    """Real stores and connections; NCCL itself needs two GPUs."""
    ours, theirs = dist.HashStore(), [dist.HashStore(), dist.HashStore()]
    pairs = [socket.socketpair() for _ in theirs]
    with ExitStack() as stack:
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
        for store, (_, far) in zip(theirs, pairs, strict=True):
            store.set_timeout(timedelta(seconds=30))
            stack.enter_context(received(store, far))
        stack.enter_context(forwarded(ours, [near for near, _ in pairs]))
        for key, value in (("0", os.urandom(128)), ("later", b"\0\n")):
            ours.set(key, value)
            for store in theirs:
                assert store.get(key) == value


class SlowWork:
    """As NCCL's: waiting for it only orders the device's work, and the bytes arrive later."""

    def __init__(self, group: SlowGroup, work: dist.Work) -> None:
        self.group, self.work, self.since = group, work, time.monotonic()
        group.under_way.append(self)

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        if time.monotonic() < self.since + 0.05:
            return False
        self.work.wait()
        if self in self.group.under_way:
            self.group.under_way.remove(self)
        return True


class SlowGroup:
    """In the place of NCCL's group: gloo's, which really sends, but late; it records what becomes of it."""

    class Options:
        pass

    made: ClassVar[list[SlowGroup]] = []
    store: ClassVar[dist.Store]

    def __init__(self, store: dist.Store, rank: int, world: int, options: object) -> None:
        # Gloo's ranks all write to the store, NCCL's first one only: it is not the one that is forwarded.
        self.group = dist.ProcessGroupGloo(self.store, rank, world, timedelta(seconds=60))
        self.under_way: list[SlowWork] = []
        self.end, self.rank, self.on_own_stream = "dropped", rank, []
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> SlowWork:
        self.on_own_stream.append(STREAM.entered)
        return SlowWork(self, self.group.broadcast(tensors, options))

    def shutdown(self) -> None:
        self.end = f"shut down with {len(self.under_way)} under way"

    def abort(self) -> None:
        self.end = "aborted"


class Stream(threading.local):
    entered = False

    @contextmanager
    def enter(self, device: torch.device) -> Iterator[None]:
        self.entered = True
        yield
        self.entered = False


STREAM = Stream()


@pytest.fixture
def slow_groups(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SlowGroup, raising=False)
    monkeypatch.setattr(broadcast, "by_nccl", lambda device: True)
    monkeypatch.setattr(broadcast, "own_stream", STREAM.enter)
    monkeypatch.setattr(SlowGroup, "made", [])
    monkeypatch.setattr(SlowGroup, "store", dist.HashStore(), raising=False)
    return SlowGroup.made


def test_a_group_is_shut_down_only_when_the_device_has_sent_everything(slow_groups):
    """A group of NCCL's that is dropped earlier aborts the transfer, and the last tensor arrives torn."""
    taken = transfer(2, backend="nccl")
    assert len(taken) == 2
    for tensors in taken:
        for name, tensor in TENSORS.items():
            assert torch.equal(tensors[name], tensor), name
    assert [group.end for group in slow_groups] == ["shut down with 0 under way"] * 3
    for group in slow_groups:
        assert set(group.on_own_stream) == {group.rank == 0}  # the learner trains on the other stream


def test_a_transfer_that_does_not_end_is_aborted(slow_groups, monkeypatch):
    monkeypatch.setattr(broadcast, "TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(SlowWork, "is_completed", lambda self: False)
    sender = Sender(URL, 1, CPU)
    fields = sender.invitation(TENSORS)
    fields.pop("backend")
    errors: list[BaseException] = []

    def take() -> None:
        try:
            list(receive(rank=1, device=CPU, **fields))
        except ConnectionError as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    with pytest.raises(ConnectionError, match="has not sent a tensor within 2 s"):
        sender.send(TENSORS)
    thread.join(timeout=30)
    assert len(errors) == 1
    assert [group.end for group in slow_groups] == ["aborted"] * 2
