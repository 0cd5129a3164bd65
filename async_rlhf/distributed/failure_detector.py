"""When one rank fails, all ranks end within seconds and report why.

Every rank has a connection to rank 0, which carries only failures. A connection that closes without a farewell means
that the process is gone, whatever its main thread was waiting for, and however it ended. Only ranks can connect: rank 0
sends them a secret through their process group.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from async_rlhf.distributed.collectives import Ranks
from async_rlhf.system.files import from_json
from async_rlhf.system.guarded_port import GuardedPort, connect
from async_rlhf.system.signals import RankError

logger = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that a rank has to clean up once another has failed."""
_PATIENCE = 1.0
"""Seconds to wait for the report of another rank's end, which may arrive after errors that it causes."""
_SIGNAL = signal.SIGUSR2
_WELL = "well"
_ARRIVAL = 60.0
"""Seconds within which every rank must connect."""
_LONGEST = 1 << 20
"""Most bytes of a message."""
_LOOPBACK = "127.0.0.1"


class FailureDetector:
    """Connections between ranks that report failures.

    Args:
        ranks: the ranks; with one there is nothing to watch.
    """

    def __init__(self, ranks: Ranks) -> None:
        # Do not keep the Ranks object: a thread that outlives the main one must not hold its process group.
        self._rank = ranks.rank
        self.failure: str | None = None
        self._watching = False
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._has_spoken = False
        self._connections: dict[int, socket.socket] = {}
        if ranks.count > 1:
            self._connect(ranks)

    def _connect(self, ranks: Ranks) -> None:
        """Rank 0 listens; the others connect and prove who they are."""
        master = os.environ.get("MASTER_ADDR", "localhost")
        host = _LOOPBACK if ranks.local_count == ranks.count else master
        if ranks.is_main:
            guarded = open_port(host)
            ranks.broadcast("watch", lambda: (guarded.port, guarded.secret))
            self._connections = guarded.accept(range(1, ranks.count), _ARRIVAL)
        else:
            port, secret = ranks.broadcast("watch", lambda: (0, b""))
            self._connections = {0: connect(host, port, secret, ranks.rank, _ARRIVAL)}
        for rank, connection in self._connections.items():
            _notice_lost_hosts(connection)
            threading.Thread(target=self._listen, args=(rank, connection), daemon=True).start()

    def _listen(self, rank: int, connection: socket.socket) -> None:
        end = _read_end(connection)
        if end is None:
            self._fail(f"rank {rank} is gone, without a word (killed, or out of memory?)")
        elif end != _WELL:
            self._fail(end)

    def _fail(self, why: str) -> None:
        with self._lock:
            if self.failure is not None or self._has_spoken:
                return
            self.failure = why
        logger.error("ending: %s", why)  # at once: whoever started the ranks may kill this one, too
        self._failed.set()
        self._tell(why)
        if self._watching:
            with suppress(ProcessLookupError):
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
        # A main thread that waits for a GPU cannot be woken.
        timer = threading.Timer(GRACE, self._leave)
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        os._exit(1)

    def _tell(self, end: str) -> None:
        for connection in self._connections.values():
            with suppress(OSError):
                connection.sendall(json.dumps({"end": end}).encode() + b"\n")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, the failure of another rank raises RankError here, and an error here ends the others."""
        if not self._connections:
            yield
            return
        if self.failure is not None:  # the failure came between two uses of watching()
            raise RankError(self.failure)
        if self._watching:  # an enclosing use does it all
            yield
            return
        before: Any = None
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(_SIGNAL, self._raise)
            self._watching = True
        self._outer = before
        try:
            yield
            self._watching = False
            if before is not None:
                signal.signal(_SIGNAL, before)
        except BaseException as error:
            if before is not None:
                signal.signal(_SIGNAL, signal.SIG_IGN)  # another rank's report may arrive at any moment
            if isinstance(error, SystemExit) and not error.code:
                self.close()
                raise
            if isinstance(error, RuntimeError):  # perhaps from a collective, because another rank has just died
                self._failed.wait(_PATIENCE)
            if self.failure is not None:
                raise RankError(self.failure) from error
            with self._lock:
                self._has_spoken = True
            self._tell(f"rank {self._rank} failed: {_described(error)}")
            raise

    def _raise(self, number: int, frame: object) -> None:
        if self.failure is None:  # the signal is for an enclosing watch
            self._outer(number, frame)
        signal.signal(_SIGNAL, signal.SIG_IGN)
        raise RankError(self.failure)

    def close(self) -> None:
        """Send the farewell."""
        with self._lock:
            self._has_spoken = True
        self._tell(_WELL)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def open_port(host: str) -> GuardedPort:
    """Open a port on the address of this host that the other ranks use.

    If none of this host's interfaces has that address (a service in front of it, or a name that only this host resolves
    to its loopback address), listen on all interfaces.
    """
    with suppress(OSError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        if host in (address, "localhost") or not ipaddress.ip_address(address).is_loopback:
            return GuardedPort(address)
    logger.warning("MASTER_ADDR: %s is no interface of this host; ranks are let in on all of them", host)
    return GuardedPort("")


def _described(error: BaseException) -> str:
    """The error and the place in the code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[: _LONGEST // 8]}{location}"


def _notice_lost_hosts(connection: socket.socket) -> None:
    """Notice a lost host within about 6 seconds, if the system can; else only ended processes are noticed at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 6000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _read_end(connection: socket.socket) -> str | None:
    """How the other side has ended; None if it is gone or sends something else."""
    with suppress(OSError, ValueError, TypeError, KeyError), connection.makefile("rb") as messages:
        return str(from_json(messages.readline(_LONGEST))["end"])
    return None
