"""What a user writes: an environment, which answers the policy's messages until it says that the episode is over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_rlhf.models.chats import Message

Tool = Callable[..., Any]
"""A function, `def` or `async def`, whose parameters have types and whose docstring explains each of them."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers to a message of the policy."""

    messages: Sequence[Message] = ()
    """What the policy reads next."""
    reward: float = 0.0
    """For the message that was just answered."""
    done: bool = False
    """The episode is over; messages are not read any more."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log; of equal names in one episode the last one counts."""


class Environment(Protocol):
    """One instance plays one episode.

    If :meth:`reset` and :meth:`step` depend on nothing but their arguments and on the steps before, a run with
    environments can be repeated and resumed bit for bit. They may be plain functions or coroutines. A call of a plain
    function has a thread of its own; a coroutine must not block, as all episodes of a process share one event loop.
    """

    def reset(
        self, row: Mapping[str, Any], seed: int
    ) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Begin an episode.

        Args:
            row: the row of the data set, with all its columns.
            seed: for random numbers: equal for all episodes of one prompt, and for the same prompt of a repeated run.

        Returns:
            Messages that follow the prompt of the row, if any.
        """

    def step(self, message: Message) -> Observation | Awaitable[Observation]:
        """Answer a message of the policy."""

    def close(self) -> None:
        """Free what is held. It is called once, however the episode ended."""
