"""An agent's episode: its conversations with the policy, as tokens that were sampled and tokens that were not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rlhf.config import ConfigError
from async_rlhf.data.rendering import Renderer
from async_rlhf.generation.episodes.environment import Message
from async_rlhf.generation.episodes.episode import Ask, Episode, joined
from async_rlhf.generation.episodes.requests import RefusedError, check_chat
from async_rlhf.models.chats import as_messages
from async_rlhf.types import CONVERSATION, Prompt, Sample


@dataclass
class _Conversation:
    """Requests each of which goes on from the one before."""

    episode: Episode
    renderer: Renderer
    history: list[tuple[Any, ...]]
    """All messages so far, as far as they are compared."""


class Session:
    """What an agent asks of the policy, one request at a time.

    Args:
        begin: makes a conversation without tokens, whose first answer has that position.
        renderer: of the run; without tools.
        max_turns: most answers.
        ask: has the policy answer.
    """

    def __init__(self, begin: Callable[[int], Episode], renderer: Renderer, max_turns: int | None, ask: Ask) -> None:
        self._begin, self._renderer, self._max_turns, self._ask = begin, renderer, max_turns, ask
        self._conversations: list[_Conversation] = []
        self._lock = asyncio.Lock()
        self._turns = 0
        self.refused = False
        """Whether a request had to be refused: there was no room or no turn left."""
        self.error: Exception | None = None
        """What kept the policy from answering."""
        self.limit: asyncio.Timeout | None = None
        """Of the agent, while the policy does not keep it waiting."""
        self.seconds: float | None = None
        self.waited = 0.0
        """Seconds that it waited for the policy."""

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Message, str, int, int]:
        """See :data:`~async_rlhf.generation.episodes.endpoint.Chat`."""
        async with self._lock:
            check_chat(messages, tools)
            if self._turns == self._max_turns:
                raise self._refused(
                    "max_turns", f"the episode has had its {self._max_turns} turns (generation.max_turns)"
                )
            try:
                chat = as_messages(messages, "messages")
                conversation = self._going_on(chat, tools)
            except ConfigError as error:  # of the template, too
                raise RefusedError("invalid_request", str(error)) from error
            episode = conversation.episode
            turn = episode.turn()
            self._reschedule(None)
            started = time.monotonic()
            try:
                written = episode.add(await self._ask(turn))
            except asyncio.CancelledError:  # the agent has stopped waiting, and may ask once more
                episode.take_back()
                raise
            except Exception as error:
                self.error = error
                raise
            if not conversation.history:
                self._conversations.append(conversation)
            self.waited += time.monotonic() - started
            self._reschedule(self.seconds)
            self._turns += 1
            message = conversation.renderer.message(written, turn.tokens)
            episode.say([*chat[len(conversation.history) :], message])
            conversation.history = [_compared(each) for each in [*chat, message]]
            reason = "tool_calls" if message.get("tool_calls") else episode.finish_reason
            return message, reason, len(turn.tokens), len(written)

    def _going_on(self, chat: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Conversation:
        """The conversation that a request continues, or a new one."""
        history = [_compared(message) for message in chat]
        renderer = self._renderer.with_tools(tools)
        for known in reversed(self._conversations):
            length = len(known.history)
            goes_on = history[:length] == known.history and len(history) > length and history[length][0] != "assistant"
            if goes_on and known.renderer.tools == renderer.tools:
                self._extend(known.episode, renderer.observation(chat[length:], known.episode.last, renderer.is_chat))
                return known
        episode = self._begin(len(self._conversations) * CONVERSATION)
        opening = renderer.opening(Prompt(0, 0, (), messages=[] if renderer.is_chat else None), chat)
        try:
            episode.open(opening, ())
        except ValueError as error:
            raise self._refused("context_length_exceeded", str(error)) from error
        return _Conversation(episode, renderer, [])

    def _extend(self, episode: Episode, tokens: tuple[int, ...]) -> None:
        if episode.finish_reason == "length" or not episode.observe(tokens):
            raise self._refused("context_length_exceeded", "the episode has no room left (generation.episode_length)")

    def _refused(self, code: str, message: str) -> RefusedError:
        self.refused = True
        return RefusedError(code, message)

    def _reschedule(self, seconds: float | None) -> None:
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    def last(self) -> Episode:
        """The last conversation; one of which nothing was asked, if there is none."""
        if not self._conversations:
            self._conversations.append(_Conversation(self._begin(0), self._renderer, []))
        return self._conversations[-1].episode

    def end(self, reward: float) -> None:
        """Give the agent's reward for the last answer of the last conversation.

        Raises:
            ValueError: the agent asked nothing.
        """
        if not self.last().turns:
            raise ValueError("the agent asked the policy nothing")
        if self.refused:
            self.last().finish_reason = "length"
        self.last().end(reward, {"conversations": float(len(self._conversations)), "turns": float(self._turns)})

    def sample(self) -> Sample:
        """All conversations, in the order in which they began."""
        return joined([each.episode.sample() for each in self._conversations])


def _compared(message: Message) -> tuple[Any, ...]:
    """What two messages that say the same have in common, however a client writes them."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], message["content"], calls
