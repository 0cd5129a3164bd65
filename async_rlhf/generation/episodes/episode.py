"""One episode while it is played: its tokens, who wrote them, and what is known of them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from async_rlhf.generation.episodes.environment import Message, Observation
from async_rlhf.generation.episodes.spec import EpisodeSpec
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.system.user_code import own_copy
from async_rlhf.types import FinishReason, Prompt, Sample, Turn

Ask = Callable[[Turn], Awaitable[Sample]]
"""Has the policy answer: returns the turn's tokens with the answer behind them."""


def number(value: Any, what: str) -> float:
    """A reward or a metric.

    Raises:
        ValueError: it is no finite number.
    """
    try:
        as_float = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        as_float = math.nan
    if not math.isfinite(as_float):
        raise ValueError(f"{what} {value!r:.200}; must be a finite number")
    return as_float


class Episode:
    """What an episode has so far, or one conversation of an agent's; ``first`` is the position of its first answer."""

    def __init__(self, spec: EpisodeSpec, params: SamplingParams, prompt: Prompt, number: int, first: int = 0) -> None:
        self.prompt, self.number, self.chat = prompt, number, prompt.messages is not None
        self._first = first
        self.turns: list[Sample] = []
        self.finish_reason: FinishReason = "length"
        self._params, self._room = params, spec.generation.longest_episode
        self._tokens: tuple[int, ...] = prompt.tokens
        self._opening = len(self._tokens)
        self._answers: list[tuple[int, Sample]] = []
        """Where each answer begins, and its turn."""
        self._rewards: dict[int, float] = {}
        self._messages: list[Message] = []
        self._metrics: dict[str, float] = {}

    @property
    def last(self) -> int:
        """The last token."""
        return self._tokens[-1]

    def open(self, tokens: tuple[int, ...], messages: Sequence[Message]) -> None:
        """Begin with the prompt and what follows it."""
        self._room -= len(tokens) - len(self._tokens)
        if self._room < 1:
            raise ValueError("what reset() returned leaves no room for an answer (generation.episode_length)")
        self._tokens, self._opening = tokens, len(tokens)
        self.say(messages)

    def turn(self) -> Turn:
        """What the policy is to go on with."""
        offset, prompt = len(self._tokens) - self._opening, self.prompt
        limit, position = min(self._params.response_length, self._room - offset), self._first + offset
        past = getattr(self.turns[-1], "past", None) if self.turns else None
        return Turn(prompt.draw, prompt.row, self._tokens, sample=self.number, offset=position, limit=limit, past=past)

    def add(self, turn: Sample) -> tuple[int, ...]:
        """Add an answer of the policy's. Returns its tokens without the stop token."""
        start, self._tokens = len(self._tokens), tuple(turn.tokens.tolist())
        self._answers.append((start, turn))
        self.turns.append(turn)
        self.finish_reason = turn.finish_reason
        answer = self._tokens[start:]
        return answer[:-1] if turn.finish_reason == "stop" else answer

    def note(self, message: Message, observed: Observation) -> None:
        """Note the policy's message, and what the environment says of it."""
        self.end(number(observed.reward, "step() gave the reward"), observed.metrics)
        self.say([message, *observed.messages])

    def say(self, messages: Sequence[Message]) -> None:
        """Note messages of the conversation, as they are now."""
        self._messages += own_copy(list(messages))

    def end(self, reward: float, metrics: Mapping[str, float]) -> None:
        """Give a reward for the last answer, and metrics, at the end."""
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics are {metrics!r:.200}; must be a mapping from names to numbers")
        self._rewards[len(self._tokens) - 1] = reward
        self._metrics |= {name: number(value, f"the metric {name!r} is") for name, value in metrics.items()}

    def observe(self, tokens: tuple[int, ...]) -> bool:
        """Add what the policy reads next; False if that leaves no room for an answer."""
        if not tokens:
            raise ValueError("step() gave no message to go on with; must give one, or done=True")
        fits = len(self._tokens) + len(tokens) - self._opening < self._room
        if fits:
            self._tokens += tokens
        else:
            self.finish_reason = "length"
        return fits

    def take_back(self) -> None:
        """Forget what was observed since the last answer."""
        if self.turns:
            self._tokens = tuple(self.turns[-1].tokens.tolist())

    def fail(self) -> None:
        """It has no reward."""
        self.finish_reason = "length"
        self._rewards[len(self._tokens) - 1] = math.nan
        self._metrics["failed"] = 1.0

    def sample(self) -> Sample:
        """The whole episode: up to its last answer."""
        tokens = np.array(self._tokens, np.int32)
        sampled, rewards = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.float32)
        logprobs, versions = np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32)
        for start, turn in self._answers:
            span = slice(start, len(turn.tokens))
            sampled[span], logprobs[span], versions[span] = True, turn.logprobs[start:], turn.versions[start:]
        for position, reward in self._rewards.items():
            rewards[position] = reward
        return Sample(
            tokens=tokens,
            sampled=sampled,
            logprobs=logprobs,
            versions=versions,
            finish_reason=self.finish_reason,
            rewards=rewards,
            messages=self._messages,
            metrics={"turns": float(len(self.turns)), **self._metrics},
            routes_TLE=_first_routes(self.turns),
        )


def _first_routes(turns: Sequence[Sample]) -> np.ndarray | None:
    """The routes of each token when it was first read: rounding may change them when a later turn reads it again."""
    if not turns or turns[-1].routes_TLE is None:
        return None
    routes_TLE = turns[-1].routes_TLE.copy()
    for turn in turns[-2::-1]:
        assert turn.routes_TLE is not None
        routes_TLE[: len(turn) - 1] = turn.routes_TLE[:-1]  # its last token was read in the next turn
    return routes_TLE


def joined(conversations: Sequence[Sample]) -> Sample:
    """One sample of all conversations of an episode, in their order; it has the last one's end and metrics."""
    *_, last = conversations
    starts = accumulate(len(each) for each in conversations[:-1])
    names = ["tokens", "sampled", "logprobs", "versions", "rewards"]
    names += [] if last.routes_TLE is None else ["routes_TLE"]
    arrays = {name: np.concatenate([getattr(each, name) for each in conversations]) for name in names}
    messages = [message for each in conversations for message in each.messages or ()]
    return replace(last, **arrays, messages=messages, starts=tuple(starts))
