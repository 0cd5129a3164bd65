"""Agents: code that owns its loop and asks the policy as an OpenAI-compatible endpoint, ``/v1/chat/completions``.

What was sampled is kept as tokens. A request whose history goes on from an earlier answer continues with those very
tokens; one that has another history starts anew, which is counted.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from async_rlhf.generation.episodes.environment import Message
from async_rlhf.generation.episodes.requests import RefusedError, Settings
from async_rlhf.system.files import from_json

if TYPE_CHECKING:
    from aiohttp import web

Chat = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], Awaitable[tuple[Message, str, int, int]]]
"""Has the policy answer messages, with schemas of tools. Returns its message, the reason why it ended, and how many
tokens it read and wrote.

Raises:
    RefusedError: it cannot.
"""


@dataclass(frozen=True)
class Client:
    """The policy, for the agent of one episode: by :meth:`chat`, or by any OpenAI client with these three."""

    base_url: str
    """On this host alone."""
    api_key: str
    """Names the episode."""
    answer: Chat = field(repr=False)
    settings: Settings = field(repr=False)
    """What a request may say."""
    loop: asyncio.AbstractEventLoop = field(repr=False)
    """In which answers are made; agents run elsewhere."""
    model: str = "policy"

    async def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Message:
        """The policy's next message.

        Args:
            messages: the whole conversation.
            tools: schemas of functions that it may call.

        Raises:
            RefusedError: the episode has no room or no turn left, or these are no messages.
        """

        async def answered() -> Message:
            return (await self.answer(messages, tools))[0]

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answered(), self.loop))


class Endpoint:
    """Serves the agents of the episodes that are under way, within one event loop."""

    def __init__(self) -> None:
        self._agents: dict[str, Client] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._port = 0

    async def open(self, answer: Chat, settings: Settings) -> Client:
        """Make a client for an episode."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        url, loop = f"http://127.0.0.1:{self._port}/v1", asyncio.get_running_loop()
        client = Client(url, secrets.token_urlsafe(24), answer, settings, loop)
        self._agents[client.api_key] = client
        return client

    def forget(self, client: Client) -> None:
        """Answer an episode's agent no more."""
        del self._agents[client.api_key]

    async def close(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _start(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/chat/completions", self._completions)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _completions(self, request: web.Request) -> web.Response:
        client = self._agents.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if client is None:
            return _refused(
                401, "invalid_api_key", "must be the api_key that the agent was given, while its episode lasts"
            )
        try:
            asked = await request.json(loads=from_json)
            client.settings.check(asked)
            answering = client.answer(asked["messages"], asked.get("tools") or ())
            message, reason, read, written = await answering
        except RefusedError as error:
            return _refused(400, error.code, str(error))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return _refused(400, "invalid_request", f"{type(error).__name__}: {error}")
        except Exception as error:  # of any kind: it ends the run, which tells of it; aiohttp would print its traceback
            return _refused(500, "server_error", f"the policy could not answer: {type(error).__name__}: {error}")
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": client.model}
        if asked.get("stream"):
            return _streamed(head, _spoken(message), reason, usage)
        choice = {"index": 0, "message": _spoken(message), "finish_reason": reason, "logprobs": None}
        return _json({**head, "object": "chat.completion", "choices": [choice], "usage": usage})


def _refused(status: int, code: str, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return _json({"error": error}, status)


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    from aiohttp import web

    return web.json_response(body, status=status)


def _streamed(head: Mapping[str, Any], message: Message, reason: str, usage: Mapping[str, int]) -> web.Response:
    """An answer for a client that reads a stream: all of it at once, then why it ended, then how long it was."""
    from aiohttp import web

    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {"choices": [], "usage": usage},
    ]
    events = [json.dumps({**head, "object": "chat.completion.chunk", **part}) for part in parts]
    text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    return web.Response(text=text, content_type="text/event-stream")


def _spoken(message: Message) -> Message:
    """A message of the policy as OpenAI's API has it: calls with ids, and arguments as text."""
    calls = [
        {
            "id": call.get("id", f"call{number:05}"),
            "type": "function",
            "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for number, call in enumerate(message.get("tool_calls", ()))
    ]
    return {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
