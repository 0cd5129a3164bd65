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
_PROOF_SECONDS = 10.0
"""Seconds within which a peer must send the proof."""
_MOST_WAITING = 64
"""Peers that may be waiting at a time; if more come, the earliest is disconnected."""


class GuardedPort:
    """A listening port that accepts peers who know its secret.

    Args:
        host: the address to listen on; "" for all of this host's.

    Attributes:
        port: a free port that was chosen.
        secret: generated for this port; give it to the peers over another channel.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=_MOST_WAITING)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self.secret = os.urandom(32)
        self._accepted: dict[int, socket.socket] = {}
        self._waiting: list[_Peer] = []

    def accept(self, numbers: Collection[int], seconds: float) -> dict[int, socket.socket]:
        """Wait for the peers of these numbers, then close the port.

        Args:
            numbers: of the peers, from 0; each number is accepted once.
            seconds: within which all of them must be accepted.

        Returns:
            A connection to each, by number.

        Raises:
            TimeoutError: a peer did not come.
            ConnectionAbortedError: the port was closed meanwhile.
        """
        deadline = time.monotonic() + seconds
        try:
            with selectors.DefaultSelector() as self._selector:
                self._selector.register(self._server, selectors.EVENT_READ)
                while missing := sorted(set(numbers) - self._accepted.keys()):
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"number {', '.join(map(str, missing))} did not come within {seconds:g} s")
                    if self._server.fileno() < 0:
                        raise ConnectionAbortedError("the port was closed")
                    for key, _ in self._selector.select(0.5):
                        if key.data is None:
                            self._accept_one()
                        elif key.data in self._waiting:
                            self._read_from(key.data, numbers)
                    now = time.monotonic()
                    for peer in [one for one in self._waiting if now > one.until]:
                        self._disconnect(peer)
        except BaseException:
            for connection in self._accepted.values():
                connection.close()
            raise
        finally:
            for peer in self._waiting:
                peer.connection.close()
            self.close()
        return self._accepted

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _accept_one(self) -> None:
        try:
            connection, _ = self._server.accept()
            connection.setblocking(False)
        except OSError:  # the peer is gone again, or no file descriptor is left
            return
        peer = _Peer(connection)
        try:
            connection.send(peer.nonce)
        except OSError:
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._waiting.append(peer)
        if len(self._waiting) > _MOST_WAITING:
            self._disconnect(self._waiting[0])

    def _read_from(self, peer: _Peer, numbers: Collection[int]) -> None:
        """Read from a peer; accept it once its proof is complete and right."""
        length = _NUMBER + _NONCE + _PROOF
        try:
            part = peer.connection.recv(length - len(peer.said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        peer.said += part
        if part and len(peer.said) < length:
            return
        said, proof = peer.said[:-_PROOF], peer.said[-_PROOF:]
        number = int.from_bytes(said[:_NUMBER], "big")
        known = len(peer.said) == length and hmac.compare_digest(_proof(self.secret, b"peer", peer.nonce, said), proof)
        self._selector.unregister(peer.connection)
        self._waiting.remove(peer)
        try:
            if not known or number not in numbers or number in self._accepted:
                raise ConnectionRefusedError
            peer.connection.send(_proof(self.secret, b"host", peer.nonce, said))
            peer.connection.setblocking(True)
            self._accepted[number] = peer.connection
        except OSError:
            peer.connection.close()

    def _disconnect(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        self._waiting.remove(peer)
        peer.connection.close()


@dataclass(eq=False)
class _Peer:
    connection: socket.socket
    nonce: bytes = field(default_factory=lambda: os.urandom(_NONCE))
    said: bytes = b""
    until: float = field(default_factory=lambda: time.monotonic() + _PROOF_SECONDS)


def connect(host: str, port: int, secret: bytes, number: int, seconds: float) -> socket.socket:
    """Connect to a guarded port.

    Args:
        host: of the port.
        port: see host.
        secret: of the port.
        number: of this peer.
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
        connection.sendall(said + _proof(secret, b"peer", theirs, said))
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
    """The proof from the host's nonce, the peer's nonce and the peer's number; neither side's works for the other."""
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
