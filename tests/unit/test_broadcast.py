"""Weights over the network: every receiver gets every byte, strangers get none, and one that stays away is an error."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from async_rlhf.generation import broadcast, server_generator
from async_rlhf.generation.broadcast import Receiver, Sender, forwarded, hear
from async_rlhf.models.publish import TensorSpec, tensors_in

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


def packed(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, tuple[TensorSpec, ...]]:
    """Tensors as they lie in a snapshot: their memory, and their places in it."""
    specs, end = [], 0
    for name, tensor in tensors.items():
        specs.append(TensorSpec(name, tuple(tensor.shape), tensor.dtype, -(-end // 64) * 64))
        end = specs[-1].end
    memory = torch.full((end,), 255, dtype=torch.uint8)
    for name, view in tensors_in(memory, specs).items():
        view.copy_(tensors[name])
    return memory, tuple(specs)


MEMORY, SPECS = packed(TENSORS)


class Takers:
    """Processes of a server, as threads. They stay connected from one transfer to the next."""

    def __init__(self, count: int) -> None:
        self.receivers = [Receiver() for _ in range(count)]
        self.found: dict[int, dict[str, torch.Tensor] | BaseException] = {}

    def take(self, sender: Sender, specs=SPECS) -> list[threading.Thread]:
        invitation = sender.invitation(specs)

        def receive(rank: int, receiver: Receiver) -> None:
            try:
                taken = receiver.receive(invitation, rank, CPU)
                self.found[rank] = {} if taken is None else dict(taken)
            except (ConnectionError, RuntimeError) as error:
                self.found[rank] = error

        threads = [threading.Thread(target=receive, args=taker) for taker in enumerate(self.receivers, start=1)]
        for thread in threads:
            thread.start()
        return threads

    def transfer(self, sender: Sender, tensors=TENSORS) -> list[dict[str, torch.Tensor]]:
        """Send tensors to all of them."""
        memory, specs = packed(tensors)
        threads = self.take(sender, specs)
        sender.send(memory, specs)
        for thread in threads:
            thread.join()
        return [self.found[rank] for rank in sorted(self.found)]


def transfer(receivers: int, before=lambda invitation: None, backend: str = "tcp") -> list[dict[str, torch.Tensor]]:
    """Send TENSORS to receivers in threads. ``before`` is called once the port is open."""
    sender = Sender(URL, receivers, CPU)
    invitation = sender.invitation(SPECS)
    before(invitation)
    assert invitation["backend"] == backend
    return Takers(receivers).transfer(sender)


@pytest.mark.parametrize(("receivers", "block"), [(1, 1 << 24), (2, 1000)])
def test_every_receiver_gets_every_tensor(receivers, block, monkeypatch):
    monkeypatch.setattr(broadcast, "_BLOCK", block)
    taken = transfer(receivers)
    assert len(taken) == receivers
    for tensors in taken:
        require_all(tensors)


def require_all(tensors, expected=TENSORS) -> None:
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


def test_later_transfers_go_over_the_same_connections(monkeypatch):
    """What was taken before is not written over."""
    opened = []
    monkeypatch.setattr(broadcast, "connect", lambda *given, made=broadcast.connect: opened.append(1) or made(*given))
    sender, takers = Sender(URL, 2, CPU), Takers(2)
    assert not sender.is_connected()
    kept = []
    for version in range(3):
        tensors = {name: tensor + version if tensor.dtype != torch.bool else tensor for name, tensor in TENSORS.items()}
        kept.append((takers.transfer(sender, tensors), tensors))
        assert sender.is_connected()
    for found, tensors in kept:
        for taken in found:
            require_all(taken, tensors)
    assert len(opened) == 2


def test_a_receiver_that_is_gone_is_noticed_before_the_next_transfer():
    sender, takers = Sender(URL, 2, CPU), Takers(2)
    takers.transfer(sender)
    takers.receivers[1].close()
    deadline = time.monotonic() + 30
    while sender.is_connected() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not sender.is_connected()
    sender.close()
    require_all(takers.transfer(Sender(URL, 2, CPU))[1])  # whose first receiver lets go of the old connection


def test_a_receiver_that_does_not_know_the_connection_takes_nothing_and_says_so():
    """As after a restart that the learner has not noticed. What it sends then is an error, at the latest when it lets
    go.
    """
    sender, takers = Sender(URL, 1, CPU), Takers(1)
    takers.transfer(sender)
    old, takers.receivers[0] = takers.receivers[0], Receiver()
    for thread in takers.take(sender):
        thread.join()
    assert takers.found[1] == {}
    errors: list[ConnectionError] = []

    def send() -> None:
        try:
            sender.send(MEMORY, SPECS)
        except ConnectionError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.1)
    sender.close()
    thread.join(timeout=30)
    assert len(errors) == 1
    require_all(takers.transfer(Sender(URL, 1, CPU))[0])
    old.close()


def test_who_waits_for_a_receiver_is_woken_when_the_learner_lets_go():
    sender = Sender(URL, 1, CPU)
    threading.Timer(0.2, sender.close).start()
    started = time.monotonic()
    with pytest.raises(ConnectionError, match="the port was closed"):
        sender.send(MEMORY, SPECS)
    assert time.monotonic() - started < 60


def test_a_receiver_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setattr(broadcast, "TIMEOUT", timedelta(seconds=1))
    with pytest.raises(ConnectionError):
        Sender(URL, 1, CPU).send(MEMORY, SPECS)


def test_a_receiver_that_goes_away_is_an_error():
    memory, specs = packed({"small": torch.zeros(3), "large": torch.zeros(1 << 24)})
    sender = Sender(URL, 1, CPU)
    fields = sender.invitation(specs)

    def take_one_and_leave() -> None:
        tensors = Receiver().receive(fields, 1, CPU)
        next(tensors)
        tensors.close()

    thread = threading.Thread(target=take_one_and_leave)
    thread.start()
    with pytest.raises(ConnectionError):
        sender.send(memory, specs)
    thread.join(timeout=30)
    assert not sender.is_connected()


def test_the_learner_listens_where_the_server_sees_it_and_nowhere_else():
    sender = Sender("http://localhost:8000", 1, CPU)
    invitation = sender.invitation(())
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
            hear(store, far)
        stack.enter_context(forwarded(ours, [near for near, _ in pairs]))
        for key, value in (("0", os.urandom(128)), ("later", b"\0\n")):
            ours.set(key, value)
            for store in theirs:
                assert store.get(key) == value


class SlowWork:
    """As NCCL's: the device's work is only ordered after it, and the bytes arrive later."""

    seconds = 0.05
    failed = False

    def __init__(self, group: SlowGroup, work: dist.Work) -> None:
        self.group, self.work, self.since = group, work, time.monotonic()
        group.under_way.append(self)

    def synchronize(self) -> None:
        """The device waits, and not the host."""

    def wait(self) -> None:
        if self.failed:
            raise RuntimeError("NCCL error: remote process exited")

    def is_completed(self) -> bool:
        if time.monotonic() < self.since + self.seconds:
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
        self.group, self.world = None, world
        self.under_way: list[SlowWork] = []
        self.end, self.rank, self.on_own_stream = "dropped", rank, []
        self.watched = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> SlowWork:
        if self.group is None:  # as NCCL's, the processes meet at the first broadcast
            # Gloo's ranks all write to the store, NCCL's first one only: it is not the one that is forwarded.
            self.group = dist.ProcessGroupGloo(self.store, self.rank, self.world, timedelta(seconds=60))
        self.on_own_stream.append(STREAM.entered)
        return SlowWork(self, self.group.broadcast(tensors, options))

    def abort(self) -> None:
        self.end = f"aborted with {len(self.under_way)} under way"


class Stream(threading.local):
    entered = False

    def __enter__(self) -> None:
        self.entered = True

    def __exit__(self, *_: object) -> None:
        self.entered = False


STREAM = Stream()


@pytest.fixture
def slow_groups(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SlowGroup, raising=False)
    monkeypatch.setattr(broadcast, "by_nccl", lambda device: True)
    monkeypatch.setattr(broadcast, "own_stream", lambda device: STREAM)
    monkeypatch.setattr(SlowGroup, "made", [])
    monkeypatch.setattr(SlowGroup, "store", dist.HashStore(), raising=False)
    return SlowGroup.made


@pytest.mark.parametrize(("bucket", "messages"), [(1 << 26, 1), (4096, -(-84000 // 4096) + 1), (300, 280 + 2)])
def test_one_group_serves_every_transfer_and_waits_until_the_device_has_sent_everything(
    slow_groups, monkeypatch, bucket, messages
):
    """A group of NCCL's that ends earlier aborts the transfer, and the last tensor arrives torn.

    All tensors are in one bucket; or the matrix is sent in parts and all others are in one; or the others in two.
    """
    monkeypatch.setattr(broadcast, "BUCKET", bucket)
    monkeypatch.setattr(SlowWork, "seconds", 0.05 if messages < 100 else 0.0005)
    sender, takers = Sender(URL, 2, CPU), Takers(2)
    assert sender.invitation(SPECS)["backend"] == "nccl"
    for version in range(3):
        tensors = {name: tensor + version if tensor.dtype != torch.bool else tensor for name, tensor in TENSORS.items()}
        taken = takers.transfer(sender, tensors)
        assert len(taken) == 2
        for each in taken:
            require_all(each, tensors)
        assert [len(group.under_way) for group in slow_groups] == [0, 0, 0]
    for one in (sender, *takers.receivers):
        one.close()
    assert [group.end for group in slow_groups] == ["aborted with 0 under way"] * 3
    for group in slow_groups:
        assert len(group.on_own_stream) == 3 * messages
        assert set(group.on_own_stream) == {group.rank == 0}  # the learner trains on the other stream


def test_a_transfer_that_fails_is_an_error_and_ends_no_process(slow_groups, monkeypatch):
    """NCCL calls a broadcast completed, too, that has failed because the other host is gone. torch's own watch over the
    group would end this process then.
    """
    monkeypatch.setattr(SlowWork, "failed", True)
    sender, takers = Sender(URL, 1, CPU), Takers(1)
    (thread,) = takers.take(sender)
    with pytest.raises(ConnectionError, match="remote process exited"):
        sender.send(MEMORY, SPECS)
    thread.join(timeout=30)
    assert isinstance(takers.found[1], RuntimeError)
    assert [(group.watched, group.end[:7]) for group in slow_groups] == [(False, "aborted")] * 2
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_a_transfer_that_does_not_end_is_aborted(slow_groups, monkeypatch):
    monkeypatch.setattr(broadcast, "TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(SlowWork, "is_completed", lambda self: False)
    sender, takers = Sender(URL, 1, CPU), Takers(1)
    (thread,) = takers.take(sender)
    with pytest.raises(ConnectionError, match="has not sent a bucket within 2 s"):
        sender.send(MEMORY, SPECS)
    thread.join(timeout=30)
    assert isinstance(takers.found[1], ConnectionError)
    assert [group.end for group in slow_groups] == ["aborted with 1 under way"] * 2
    assert not sender.is_connected()
