"""Which answers of which episodes an engine samples together.

Within a request of an exact run, episodes take turns together: all that go on are decoded in one call, then all
environments answer, however long each takes. So what is decoded together depends on no time, and the run is exact. In
flight an answer gets a place as soon as its environment is done, and others decode meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.episodes.playing import Player
from async_rlhf.generation.protocol import Completions, Sampler, drawing
from async_rlhf.types import Prompt, Sample, Turn

T = TypeVar("T")
_LOOK_SECONDS = 0.5
_TICKS = 4
"""Steps of the event loop between two steps of decoding: an answer passes through a few of them."""


class EpisodeSampler:
    """Samples the episodes of prompts, K of each.

    Without an environment each of them ends with the policy's first answer.

    Args:
        engine: samples the policy's answers; its ``params`` say how episodes are played.
        ranks: of the learner, if they sample together; rank 0 alone plays.
        heartbeat: called often while environments are waited for: a sign of life.
    """

    def __init__(self, engine: Any, ranks: Ranks | None = None, heartbeat: Callable[[], None] = lambda: None) -> None:
        episodes = engine.params.episodes
        self.engine, self.player = engine, None if episodes is None else Player(episodes)
        self._ranks, self._heartbeat = ranks or Ranks(), heartbeat

    def generate(self, prompts: Sequence[Prompt], evaluated: int | None = None) -> Completions:
        """See :class:`~async_rlhf.generation.protocol.Sampler`; in an evaluation, ``evaluated`` is the version."""
        if self.player is None:
            return self.engine.generate(prompts)
        if self._ranks.is_main:
            return _run(self._take_turns(self.player, prompts, evaluated))
        while self._ranks.broadcast("another turn", lambda: False):
            self._answers([])
        return []

    def take_seconds(self) -> float:
        """Seconds that environments took since this was last called, those of all episodes added."""
        return 0.0 if self.player is None else self.player.take_seconds()

    def _answers(self, turns: Sequence[Turn]) -> list[Sample]:
        with drawing(self.engine, replace(self.engine.params, samples_per_prompt=1)):
            return [sample for (sample,) in self.engine.generate(turns)]

    async def _take_turns(self, player: Player, prompts: Sequence[Prompt], evaluated: int | None) -> Completions:
        under_way = _UnderWay(player, self.engine, evaluated)
        try:
            for prompt in prompts:
                under_way.begin(prompt)
            while under_way.left:
                while len(under_way.asked) < len(under_way.left):
                    await under_way.changed_within(_LOOK_SECONDS)
                    self._heartbeat()
                if len(under_way.left) > 0 and self._ranks.broadcast("another turn", lambda: True):
                    turns = under_way.take(len(under_way.asked))
                    for turn, sample in zip(turns, self._answers(turns), strict=True):
                        under_way.answer(turn, sample)
            self._ranks.broadcast("another turn", lambda: False)
        finally:
            await under_way.end()
        return [samples for _, samples in sorted(under_way.complete())]

    def stream(self, more: Callable[[int], Sequence[Prompt]]) -> Iterator[tuple[int, tuple[Sample, ...]]]:
        """See :class:`~async_rlhf.generation.protocol.Engine`."""
        if self.player is None:
            yield from self.engine.stream(more)
            return
        loop = asyncio.new_event_loop()
        under_way = _UnderWay(self.player, self.engine)
        try:
            yield from self._stream(under_way, loop, more)
        finally:
            loop.run_until_complete(under_way.end())
            loop.close()

    def _stream(
        self, under_way: _UnderWay, loop: asyncio.AbstractEventLoop, more: Callable[[int], Sequence[Prompt]]
    ) -> Iterator[tuple[int, tuple[Sample, ...]]]:
        decoding: dict[int, Turn] = {}
        """Turns that the engine has, by its number."""
        samples_per_prompt = self.engine.params.samples_per_prompt

        def tick() -> None:
            for _ in range(_TICKS):
                loop.run_until_complete(asyncio.sleep(0))

        async def begin(places: int) -> None:
            wanted = max(0, places - len(under_way.asked)) // samples_per_prompt
            # The samples of one prompt may be more than all places: they take turns.
            for prompt in more(max(wanted, int(not under_way.left))):
                under_way.begin(prompt)

        def turns(places: int) -> Sequence[Turn]:
            loop.run_until_complete(begin(places))
            tick()
            # What is complete is given at once, though all others wait for environments: the engine's stream ends.
            while not (decoding or under_way.asked or under_way.finished) and under_way.left:
                loop.run_until_complete(under_way.changed_within(_LOOK_SECONDS))
                self._heartbeat()
                loop.run_until_complete(begin(places))
            taken = under_way.take(places)
            decoding.update({next(numbers): turn for turn in taken})
            return taken

        while True:
            numbers = count()
            with drawing(self.engine, replace(self.engine.params, samples_per_prompt=1)):
                for number, (sample,) in self.engine.stream(turns):
                    under_way.answer(decoding.pop(number), sample)
                    tick()
                    yield from under_way.complete()
            tick()
            yield from under_way.complete()
            if not under_way.left:
                return


class _UnderWay:
    """Episodes that have begun, and what they wait for. Used within one event loop."""

    def __init__(self, player: Player, engine: Sampler, evaluated: int | None = None) -> None:
        self._player, self._params, self._evaluated = player, engine.params, evaluated
        self.asked: dict[tuple[int, int], tuple[Turn, asyncio.Future[Sample]]] = {}
        """Turns that wait for an engine, by the prompt's and the sample's number."""
        self._decoding: dict[int, asyncio.Future[Sample]] = {}
        """Who waits for a turn that an engine has, by the turn's id."""
        self._begun = 0
        self.finished: list[tuple[int, tuple[Sample, ...]]] = []
        """What :meth:`complete` will give."""
        self.left: set[asyncio.Task[None]] = set()
        """Episodes that have not ended."""
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    def begin(self, prompt: Prompt) -> None:
        """Begin the K episodes of a prompt."""
        ended: dict[int, Sample] = {}
        for number in range(self._params.samples_per_prompt):
            task = asyncio.get_running_loop().create_task(self._play(prompt, (self._begun, number), ended))
            self.left.add(task)
            task.add_done_callback(self._ended)
        self._begun += 1

    async def _play(self, prompt: Prompt, key: tuple[int, int], ended: dict[int, Sample]) -> None:
        def ask(turn: Turn) -> asyncio.Future[Sample]:
            future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
            self.asked[key] = turn, future
            self._changed.set()
            return future

        ended[key[1]] = await self._player.play(prompt, key[1], self._params, ask, self._evaluated)
        if len(ended) == self._params.samples_per_prompt:
            self.finished.append((key[0], tuple(ended[k] for k in sorted(ended))))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.left.discard(task)
        if not task.cancelled():
            error = task.exception()  # of every task: asyncio complains of those that nobody asks for
            self._error = self._error or error
        self._changed.set()

    async def changed_within(self, seconds: float) -> None:
        """Wait until an episode asks or ends, but not for long. Raises what one has raised."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()
        if self._error is not None:
            raise self._error

    def take(self, most: int) -> list[Turn]:
        """The first of the turns that wait, in the order of the prompts."""
        if self._error is not None:
            raise self._error
        turns = []
        for key in sorted(self.asked)[:most]:
            turn, future = self.asked.pop(key)
            self._decoding[id(turn)] = future
            turns.append(turn)
        return turns

    def answer(self, turn: Turn, sample: Sample) -> None:
        """Give the policy's answer to whom asked for it."""
        future = self._decoding.pop(id(turn))
        if not future.done():  # an agent may have stopped waiting
            future.set_result(sample)

    def complete(self) -> list[tuple[int, tuple[Sample, ...]]]:
        """The prompts whose episodes have all ended since it was last called, by their numbers."""
        finished, self.finished = self.finished, []
        return finished

    async def end(self) -> None:
        """Cancel what has not ended; its environments are closed."""
        tasks = list(self.left)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._player.close()


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where a loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, main).result()
