"""Environments for tests of episodes: answers that depend on everything the policy wrote, with rewards and lengths."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from async_rlhf.generation.episodes.endpoint import RefusedError
from async_rlhf.generation.episodes.environment import Message, Observation

SLOW: list[float] = []
"""Seconds that a step of :class:`Echo` may take; nothing for none. Set by tests, in the process that plays."""


class Echo:
    """Answers each message with a checksum of all of them and gives a part of it as the reward; ends after 2 to 4."""

    opening: Sequence[Message] = ()

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self.seen, self.turns, self.closed = f"{row['name']} {seed}", 0, False
        return self.opening

    async def step(self, message: Message) -> Observation:
        self.seen, self.turns = f"{self.seen} {message['content']}", self.turns + 1
        number = zlib.crc32(self.seen.encode())
        if SLOW:
            await asyncio.sleep(random.SystemRandom().choice(SLOW))
        answer = [{"role": "user", "content": f"[{number % 1000}]"}]
        last = {"last": number % 5}
        return Observation(answer, reward=number % 7 / 7, done=self.turns >= 2 + number % 3, metrics=last)

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class Greeting(Echo):
    """The same, with an opening of its own."""

    opening = ({"role": "user", "content": "hello "},)


class Fickle(Echo):
    """Says something else each time that it is asked."""

    async def step(self, message: Message) -> Observation:
        observed = await super().step(message)
        number = random.SystemRandom().randrange(100)
        more = [{"role": "user", "content": f"<{number}>"}]
        return Observation(more, number / 100, done=number < 30, metrics={**observed.metrics, "number": float(number)})


class Sleepy(Echo):
    """The same as Echo, but each step takes 20 to 50 ms, in whichever process it is."""

    async def step(self, message: Message) -> Observation:
        await asyncio.sleep(random.SystemRandom().uniform(0.02, 0.05))
        return await super().step(message)


class Patient(Sleepy):
    """The same, but a game of batch b waits after its first message until the weights after batch b-1 are published, as
    a file of that name in the row's folder says: whatever the machine does, new weights come between its turns.
    """

    begun = count()

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:  # not in a thread: in their order
        self.awaited = Path(row["published"], str(next(self.begun) // row["batch_size"]))
        return super().reset(row, seed)

    async def step(self, message: Message) -> Observation:
        while not self.awaited.exists():
            await asyncio.sleep(0.01)
        return await super().step(message)


async def forget(client, row):
    """An agent that asks the same twice, in conversations of their own, and sometimes goes on with the first."""
    chat = [{"role": "user", "content": f"{row['name']}: "}]
    said = [await client.chat(chat) for _ in range(2)]
    with suppress(RefusedError):
        await client.chat([*chat, said[0], {"role": "user", "content": "more "}])
    return float(len(said[1]["content"]) % 3)
