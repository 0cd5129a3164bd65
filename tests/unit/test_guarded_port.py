"""A guarded port lets in who knows the secret; strangers neither get in, nor hold anybody up, nor break anything."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from async_rlhf.distributed import failure_detector
from async_rlhf.distributed.failure_detector import FailureDetector, open_port
from async_rlhf.system import guarded_port
from async_rlhf.system.guarded_port import GuardedPort, connect
from async_rlhf.system.signals import RankError

HERE = "127.0.0.1"
LENGTH = 4 + 32 + 32


class Admitting:
    """A port that somebody waits at, in a thread."""

    def __init__(self, numbers=(1,), seconds: float = 30.0) -> None:
        self.port, self.accepted, self.error = GuardedPort(HERE), {}, None
        self.thread = threading.Thread(target=self._admit, args=(numbers, seconds))
        self.thread.start()

    def _admit(self, numbers, seconds) -> None:
        try:
            self.accepted = self.port.accept(numbers, seconds)
        except BaseException as error:
            self.error = error

    def connect(self, number: int = 1) -> socket.socket:
        return connect(HERE, self.port.port, self.port.secret, number, 20.0)

    def stranger(self) -> socket.socket:
        return socket.create_connection((HERE, self.port.port), timeout=20)

    def end(self) -> dict[int, socket.socket]:
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        for connection in self.accepted.values():
            connection.close()
        return self.accepted


def test_guests_are_let_in_by_their_numbers():
    there = Admitting((1, 2, 5))
    mine = {number: there.connect(number) for number in (5, 1, 2)}
    there.thread.join(timeout=60)
    for number, connection in mine.items():
        connection.sendall(b"%d" % number)
        assert there.accepted[number].recv(1) == b"%d" % number
        there.accepted[number].sendall(b"!")
        assert connection.recv(1) == b"!"
        connection.close()
    assert there.end().keys() == {1, 2, 5}


def wrong_secret(there: Admitting) -> None:
    with pytest.raises(ConnectionError):
        connect(HERE, there.port.port, os.urandom(32), 1, 20.0)


def wrong_number(there: Admitting) -> None:
    with pytest.raises(ConnectionError):
        connect(HERE, there.port.port, there.port.secret, 7, 20.0)


def rubbish(there: Admitting) -> None:
    with there.stranger() as one:
        one.sendall(b'{"key": "x", "rank": 1}\n' * 40)
        one.settimeout(20)
        try:
            while one.recv(4096):  # sent away, without a proof
                pass
        except ConnectionResetError:
            pass


def an_endless_length(there: Admitting) -> None:
    with there.stranger() as one, suppress(ConnectionResetError, BrokenPipeError):
        for _ in range(10_000):
            one.sendall(b"\xff" * 65536)
        raise AssertionError("650 MB were taken")


def gone_at_once(there: Admitting) -> None:
    there.stranger().close()


def an_old_proof(there: Admitting) -> None:
    """What a peer has said at another time does not open the port again."""
    earlier = GuardedPort(HERE)
    earlier.secret = there.port.secret
    said = []

    def overhear() -> None:
        earlier._server.setblocking(True)
        connection, _ = earlier._server.accept()
        with connection:
            connection.sendall(os.urandom(32))
            said.append(connection.recv(LENGTH, socket.MSG_WAITALL))

    thread = threading.Thread(target=overhear)
    thread.start()
    with pytest.raises(ConnectionError):
        connect(HERE, earlier.port, earlier.secret, 1, 20.0)
    thread.join(timeout=20)
    earlier.close()
    with there.stranger() as one:
        assert len(one.recv(32, socket.MSG_WAITALL)) == 32
        one.sendall(said[0])
        assert one.recv(1) == b""


@pytest.mark.parametrize(
    "stranger", [wrong_secret, wrong_number, rubbish, an_endless_length, gone_at_once, an_old_proof]
)
def test_a_stranger_is_sent_away_and_the_guest_still_let_in(stranger):
    there = Admitting()
    stranger(there)
    there.connect().close()
    assert there.end().keys() == {1}


def test_strangers_who_say_nothing_hold_nobody_up():
    """More of them than may be at the port."""
    there = Admitting()
    silent = [there.stranger() for _ in range(guarded_port._MOST_WAITING + 20)]
    started = time.monotonic()
    there.connect().close()
    assert there.end().keys() == {1}
    assert time.monotonic() - started < guarded_port._PROOF_SECONDS  # nobody waited for one of them
    for one in silent:
        one.close()


def test_who_is_silent_for_long_is_sent_away(monkeypatch):
    monkeypatch.setattr(guarded_port, "_PROOF_SECONDS", 0.2)
    there = Admitting()
    with there.stranger() as one:
        assert len(one.recv(32, socket.MSG_WAITALL)) == 32
        assert one.recv(1) == b""
    there.connect().close()
    there.end()


def test_a_number_is_let_in_once():
    there = Admitting((1, 2))
    first = there.connect(1)
    with pytest.raises(ConnectionError):
        there.connect(1)
    second = there.connect(2)
    assert there.end().keys() == {1, 2}
    first.close()
    second.close()


def test_somebody_who_does_not_come_is_named():
    there = Admitting((1, 2), seconds=1.0)
    first = there.connect(1)
    with pytest.raises(TimeoutError, match="number 2 did not come within 1 s"):
        there.end()
    assert first.recv(1) == b""
    first.close()


def test_a_guest_leaves_a_host_that_does_not_know_the_secret():
    with socket.create_server((HERE, 0)) as false_host:

        def pretend() -> None:
            connection, _ = false_host.accept()
            with connection:
                connection.sendall(os.urandom(32))
                connection.recv(LENGTH, socket.MSG_WAITALL)
                connection.sendall(os.urandom(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionError, match="does not know the secret of this run"):
            connect(HERE, false_host.getsockname()[1], os.urandom(32), 1, 20.0)
        thread.join(timeout=20)


def test_a_peer_gives_up_on_a_host_that_says_nothing():
    with (
        socket.create_server((HERE, 0)) as silent,
        pytest.raises(ConnectionError, match=r"does not let in: .*timed out"),
    ):
        connect(HERE, silent.getsockname()[1], os.urandom(32), 1, 0.3)


class TwoRanks:
    """Of one host, in threads: what rank 0 says reaches the other."""

    def __init__(self, rank: int, said: dict[str, object], ready: threading.Event) -> None:
        self.rank, self.count, self.local_count = rank, 2, 2
        self.is_main = rank == 0
        self._said, self._ready = said, ready

    def broadcast(self, point, compute):
        if self.is_main:
            self._said["value"] = compute()
            self._ready.set()
        assert self._ready.wait(timeout=20)
        return self._said["value"]


def test_ranks_of_one_host_watch_each_other_on_its_loopback_address_past_strangers():
    said: dict[str, object] = {}
    ready, watches = threading.Event(), {}
    threads = [threading.Thread(target=lambda: watches.update({0: FailureDetector(TwoRanks(0, said, ready))}))]
    threads[0].start()
    assert ready.wait(timeout=20)
    port, _ = said["value"]
    strangers = [socket.create_connection((HERE, port), timeout=20) for _ in range(3)]
    strangers[0].sendall(b'{"key": "", "rank": 1}\n' + b"x" * 200)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other_address(), port), timeout=20).close()
    watches[1] = FailureDetector(TwoRanks(1, said, ready))
    threads[0].join(timeout=60)
    strangers[1].close()
    for number in (1, 0):
        watches[number].close()
    assert watches[0].failure is None
    for one in strangers:
        one.close()


def test_a_failure_is_raised_in_the_outer_use_after_an_inner_one_has_ended():
    """A command, the making of its run and its training use one detector, each within the other.

    In a process of its own: a rank that does not end by itself is ended a few seconds after a failure.
    """
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 1 is gone, without a word (killed, or out of memory?)\n"


def lose_rank_1_within_two_uses() -> None:
    said: dict[str, object] = {}
    ready, watches = threading.Event(), {}
    other = threading.Thread(target=lambda: watches.update({1: FailureDetector(TwoRanks(1, said, ready))}))
    other.start()
    watches[0] = FailureDetector(TwoRanks(0, said, ready))
    other.join(timeout=60)
    try:
        with watches[0].watching():
            with watches[0].watching():
                pass
            for connection in watches[1]._connections.values():
                connection.shutdown(socket.SHUT_RDWR)
            time.sleep(4)
    except RankError as error:
        print(error.__cause__)


def other_address() -> str:
    """Of this host, but another than 127.0.0.1: all of 127.0.0.0/8 is."""
    return "127.0.0.2"


def test_a_name_that_is_no_interface_of_this_host_opens_all_of_them_and_says_so(caplog):
    port = open_port("192.0.2.1")  # of a network that is none
    assert "MASTER_ADDR: 192.0.2.1 is no interface of this host" in caplog.text
    socket.create_connection((other_address(), port.port), timeout=20).close()
    port.close()


@pytest.mark.parametrize("host", ["localhost", HERE])
def test_a_named_interface_is_the_only_one(host, caplog):
    port = open_port(host)
    assert caplog.text == ""
    assert port._server.getsockname()[0] in (HERE, "::1")
    port.close()


def test_a_message_without_an_end_is_none(monkeypatch):
    monkeypatch.setattr(failure_detector, "_LONGEST", 1000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x" * 2000)
        assert failure_detector._read_end(ours) is None


if __name__ == "__main__":
    lose_rank_1_within_two_uses()
