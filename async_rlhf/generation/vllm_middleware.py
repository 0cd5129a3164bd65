"""Middleware of a vLLM server: every request needs the key, except one that only asks whether the server is up.

vLLM's own check guards the paths below /v1, /v2, /inference and /cohere. The other paths that this package uses
(loading weights, pause, resume, reset, calling methods by name) would be open to anyone who reaches the port.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from async_rlhf.config.secrets import API_KEY_VARIABLE

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_REFUSED = b'{"error": {"message": "the key of this server is needed", "type": "Unauthorized", "code": 401}}'


class OnlyWithKey:
    """An ASGI middleware (``--middleware``). The key is in the environment, so process lists do not show it.

    Args:
        app: the application behind it.

    Raises:
        KeyError: there is no key, so the server must not start.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._expected = _digest(os.environ[API_KEY_VARIABLE].encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _asks_health(scope) or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSED})

    def _knows(self, scope: Message) -> bool:
        headers = [value for name, value in scope.get("headers", []) if name.lower() == b"authorization"]
        scheme, _, key = (headers[0] if len(headers) == 1 else b"").partition(b" ")
        return hmac.compare_digest(_digest(key), self._expected) and scheme.lower() == b"bearer"


def _asks_health(scope: Message) -> bool:
    return scope["type"] == "http" and scope["path"] == "/health" and scope["method"] in ("GET", "HEAD")


def _digest(key: bytes) -> bytes:
    """A digest, so that comparing takes the same time for every length."""
    return hashlib.sha256(key).digest()
