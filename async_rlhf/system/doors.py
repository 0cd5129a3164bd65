"""Ports that accept only connections that know a secret.

Both sides prove that they know it by a keyed hash of the other's random nonce (HMAC-SHA256, RFC 2104); neither sends
the secret. Every message before the proof has a fixed length and a deadline, so a peer that sends nothing, rubbish or
too much is disconnected and delays nobody.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

_NONCE = 32
_PROOF = 32
_NUMBER = 4
_PATIENCE = 10.0
"""Seconds within which a guest (a connecting peer) must send the proof."""
_CROWD = 64
"""Guests that may be waiting at a time; if more come, the earliest is disconnected."""


class Door:
    """A listening port that admits guests who know its secret.

    Args:
        host: the address to listen on; "" for all of this host's.

    Attributes:
        port: a free port that was chosen.
        secret: generated for this door; give it to the guests over another channel.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=_CROWD)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self.secret = os.urandom(32)

    def admit(self, numbers: Collection[int], seconds: float) -> dict[int, socket.socket]:
        """Wait for the guests of these numbers, then close the door.

        Args:
            numbers: of the guests, from 0; each number is admitted once.
            seconds: within which all of them must be admitted.

        Returns:
            A connection to each, by number.

        Raises:
            TimeoutError: a guest did not come.
        """
        inside: dict[int, socket.socket] = {}
        waiting: list[_Guest] = []
        deadline = time.monotonic() + seconds
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._server, selectors.EVENT_READ)
                while len(inside) < len(numbers):
                    if time.monotonic() > deadline:
                        missing = ", ".join(str(number) for number in sorted(set(numbers) - inside.keys()))
                        raise TimeoutError(f"number {missing} did not come within {seconds:g} s")
                    for key, _ in selector.select(0.5):
                        if key.data is None:
                            self._welcome(selector, waiting)
                        elif key.data in waiting:
                            self._hear(selector, waiting, key.data, numbers, inside)
                    now = time.monotonic()
                    for guest in [one for one in waiting if now > one.until]:
                        _send_away(selector, waiting, guest)
        except BaseException:
            for connection in inside.values():
                connection.close()
            raise
        finally:
            for guest in waiting:
                guest.connection.close()
            self.close()
        return inside

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _welcome(self, selector: selectors.BaseSelector, waiting: list[_Guest]) -> None:
        try:
            connection, _ = self._server.accept()
            connection.setblocking(False)
        except OSError:  # the guest is gone again, or no file descriptor is left
            return
        guest = _Guest(connection)
        try:
            connection.send(guest.nonce)
        except OSError:
            connection.close()
            return
        selector.register(connection, selectors.EVENT_READ, guest)
        waiting.append(guest)
        if len(waiting) > _CROWD:
            _send_away(selector, waiting, waiting[0])

    def _hear(
        self,
        selector: selectors.BaseSelector,
        waiting: list[_Guest],
        guest: _Guest,
        numbers: Collection[int],
        inside: dict[int, socket.socket],
    ) -> None:
        """Read from a guest; admit it once its proof is complete and right."""
        length = _NUMBER + _NONCE + _PROOF
        try:
            part = guest.connection.recv(length - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        guest.said += part
        if part and len(guest.said) < length:
            return
        said, proof = guest.said[:-_PROOF], guest.said[-_PROOF:]
        number = int.from_bytes(said[:_NUMBER], "big")
        known = len(guest.said) == length and hmac.compare_digest(
            _proof(self.secret, b"guest", guest.nonce, said), proof
        )
        if not known or number not in numbers or number in inside:
            _send_away(selector, waiting, guest)
            return
        try:
            guest.connection.send(_proof(self.secret, b"host", guest.nonce, said))
        except OSError:
            _send_away(selector, waiting, guest)
            return
        selector.unregister(guest.connection)
        waiting.remove(guest)
        guest.connection.setblocking(True)
        inside[number] = guest.connection


@dataclass(eq=False)
class _Guest:
    connection: socket.socket
    nonce: bytes = field(default_factory=lambda: os.urandom(_NONCE))
    said: bytes = b""
    until: float = field(default_factory=lambda: time.monotonic() + _PATIENCE)


def _send_away(selector: selectors.BaseSelector, waiting: list[_Guest], guest: _Guest) -> None:
    selector.unregister(guest.connection)
    waiting.remove(guest)
    guest.connection.close()


def knock(host: str, port: int, secret: bytes, number: int, seconds: float) -> socket.socket:
    """Connect to a door as a guest.

    Args:
        host: address of the door.
        port: see host.
        secret: of the door.
        number: of this guest.
        seconds: time limit for everything.

    Raises:
        ConnectionError: nothing listens there, or the listener does not know the secret.
    """
    try:
        connection = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise ConnectionError(f"nobody lets in at {host}:{port}: {error}") from error
    deadline = time.monotonic() + seconds
    try:
        theirs = _read(connection, _NONCE, deadline)
        said = number.to_bytes(_NUMBER, "big") + os.urandom(_NONCE)
        connection.sendall(said + _proof(secret, b"guest", theirs, said))
        answer = _read(connection, _PROOF, deadline)
        if not hmac.compare_digest(answer, _proof(secret, b"host", theirs, said)):
            raise ConnectionError(f"who listens at {host}:{port} does not know the secret of this run")
    except OSError as error:
        with suppress(OSError):
            connection.close()
        if isinstance(error, ConnectionError):
            raise
        raise ConnectionError(f"who listens at {host}:{port} does not let in: {error}") from error
    connection.settimeout(None)
    return connection


def _proof(secret: bytes, who: bytes, nonce: bytes, said: bytes) -> bytes:
    """The proof from the host's nonce, the guest's nonce and the guest's number; neither side's works for the other."""
    return hmac.digest(secret, b"async_rlhf " + who + b"\0" + nonce + said, "sha256")


def _read(connection: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the other side went away")
        data += part
    return data
