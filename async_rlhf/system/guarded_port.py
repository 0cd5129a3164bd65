"""Ports that accept only connections that know a secret.

Both sides prove that they know it by a keyed hash of the other's random nonce (HMAC-SHA256, RFC 2104); neither sends
the secret. Every message before the proof has a fixed length and a deadline, so a peer that sends nothing, rubbish or
too much is disconnected and delays nobody.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import time
from collections.abc import Collection
from contextlib import suppress

_NONCE = 32
_PROOF = 32
_NUMBER = 4
_PROOF_SECONDS = 10.0
"""Seconds within which a peer must send the proof."""
_MOST_WAITING = 64
"""Peers that may be waiting at a time; if more come, the earliest is disconnected."""
_LOOK_SECONDS = 0.02
"""Between two looks whether all have come, or the port was closed."""


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
        try:
            asyncio.run(self._accept(numbers, seconds))  # which ends by sending away whoever still waits
        except BaseException:
            for connection in self._accepted.values():
                connection.close()
            raise
        finally:
            self.close()
        return self._accepted

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    async def _accept(self, numbers: Collection[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        listening = asyncio.create_task(self._listen(numbers))
        while missing := sorted(set(numbers) - self._accepted.keys()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"number {', '.join(map(str, missing))} did not come within {seconds:g} s")
            if self._server.fileno() < 0:
                raise ConnectionAbortedError("the port was closed")
            await asyncio.sleep(_LOOK_SECONDS)
        listening.cancel()

    async def _listen(self, numbers: Collection[int]) -> None:
        waiting: list[asyncio.Task[None]] = []
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._server)
            except (OSError, ValueError):  # the peer is gone, no file descriptor is left, or the port was closed
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            waiting = [peer for peer in waiting if not peer.done()]
            waiting.append(asyncio.create_task(self._check(connection, numbers)))
            if len(waiting) > _MOST_WAITING:
                waiting[0].cancel()

    async def _check(self, connection: socket.socket, numbers: Collection[int]) -> None:
        """Accept a peer whose proof comes in time and is right; disconnect any other."""
        loop, nonce, said = asyncio.get_running_loop(), os.urandom(_NONCE), b""
        length = _NUMBER + _NONCE + _PROOF
        try:
            async with asyncio.timeout(_PROOF_SECONDS):
                await loop.sock_sendall(connection, nonce)
                while len(said) < length and (part := await loop.sock_recv(connection, length - len(said))):
                    said += part
            said, proof = said[:-_PROOF], said[-_PROOF:]
            number = int.from_bytes(said[:_NUMBER], "big")
            known = hmac.compare_digest(_proof(self.secret, b"peer", nonce, said), proof)
            if known and number in numbers and number not in self._accepted:
                connection.setblocking(True)
                connection.sendall(_proof(self.secret, b"host", nonce, said))
                self._accepted[number] = connection
        except OSError:  # it is gone, or was silent for long
            pass
        finally:
            if connection not in self._accepted.values():
                connection.close()


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
