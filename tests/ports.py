"""Ports that a test's own servers listen on."""

import secrets
import socket
from contextlib import ExitStack, suppress


def free_port(count: int = 1) -> int:
    """The first of so many free ports that follow one another.

    It is below the ports that connections get by themselves: one of these may be taken before a server listens there.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), ExitStack() as bound:
            for number in range(count):
                bound.enter_context(socket.create_server(("127.0.0.1", port + number)))
            return port
