"""The schedule of run/schedule.py as a simulation of events: who is busy when, given how long everything takes.

Version v of the weights is published after batch v; batch b is sampled by version max(0, b - 1 - S), so publishing
version v lets batches up to v + 1 + S begin. Every generator samples its share of each batch, one batch after the
other. Reward functions judge a batch as soon as all its shares are ready, one batch after the other, and the learner
takes the batches in order, each as soon as it is judged.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LEARNER = -1


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of every batch of a run, the first batch first.

    Args:
        generate: for each batch, the seconds of each generator for its share.
        learn: seconds of the learner for each batch, up to the update.
        publish: seconds of publishing version 0, 1, ...
        other: seconds of the learner after each batch.
        rewards: seconds of the reward functions for each batch; none if empty.
    """

    generate: Sequence[Sequence[float]]
    learn: Sequence[float]
    publish: Sequence[float]
    other: Sequence[float]
    rewards: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A period of work by a generator or the LEARNER; for publishing, ``batch`` is the version."""

    track: int
    name: str
    batch: int
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated run.

    Args:
        step_seconds: from batch to batch, once the pipeline has filled and before it runs dry.
        generator_idle: share of that time in which a generator does nothing, mean over generators.
        learner_idle: the same for the learner.
        spans: all of them, in the order in which they ended.
    """

    step_seconds: float
    generator_idle: float
    learner_idle: float
    spans: list[Span]

    @property
    def efficiency(self) -> float:
        """Share of the time in which the busier side is busy: 1 is perfect overlap."""
        return 1 - min(self.generator_idle, self.learner_idle)


class _Generators:
    """The generators and what each samples. Time passes equally for all busy ones."""

    def __init__(self, generate: Sequence[Sequence[float]]) -> None:
        self.generate = generate
        count = len(generate[0])
        self.missing = [count] * len(generate)
        """Shares of each batch that are still to come."""
        self.sampled = [math.inf] * len(generate)
        """When the last share of each batch came."""
        self.spans: list[Span] = []
        self._released = 0
        self._next = [0] * count
        self._idle = list(range(count))
        self._busy: list[tuple[float, int, float]] = []
        """Clock at the end of the share, generator, and when it began."""
        self._clock = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._busy)

    def release(self, batches: int, now: float) -> None:
        """Let the first ``batches`` batches begin."""
        self._released = min(batches, len(self.generate))
        waiting, self._idle = self._idle, []
        for generator in waiting:
            self._begin(generator, now)

    def _begin(self, generator: int, now: float) -> None:
        batch = self._next[generator]
        if batch >= self._released:
            self._idle.append(generator)
            return
        heapq.heappush(self._busy, (self._clock + self.generate[batch][generator], generator, now))

    def left(self) -> float:
        """Seconds of work until the next share is done; infinite if no generator is busy."""
        return max(0.0, self._busy[0][0] - self._clock) if self._busy else math.inf

    def work(self, seconds: float) -> None:
        """Let all busy generators work this long."""
        self._clock += seconds

    def finish(self, now: float) -> None:
        """Complete the next share; its generator continues."""
        self._clock, generator, started = heapq.heappop(self._busy)
        batch = self._next[generator]
        self._next[generator] += 1
        self.missing[batch] -= 1
        if not self.missing[batch]:
            self.sampled[batch] = now
        self.spans.append(Span(generator, "generate", batch + 1, started, now))
        self._begin(generator, now)


def _learner(work: Work, staleness: int) -> Iterator[tuple[str, int, float]]:
    """What the learner does, in order: name, batch or version, seconds. It is the loop of run/loop.py."""
    batches = len(work.learn)
    yield "publish", 0, work.publish[0]
    for batch in range(1, batches + 1):
        yield "wait", batch, 0.0
        yield "learn", batch, work.learn[batch - 1]
        if batch + 1 + staleness <= batches:  # else no batch is left for this version to sample
            yield "publish", batch, work.publish[batch]
        yield "other", batch, work.other[batch - 1]


def simulate(work: Work, staleness: int, slowdown: float = 1.0) -> Outcome:
    """Simulate a run.

    Args:
        work: how long everything takes, for more than 4 (S + 1) batches.
        staleness: S.
        slowdown: how many times longer everything takes while learner and generators are both busy.
    """
    generators = _Generators(work.generate)
    spans = generators.spans
    now = judged = 0.0
    for name, batch, seconds in _learner(work, staleness):
        started, left = now, seconds
        if name == "wait":
            now, judged = _wait(generators, batch, work.rewards, now, judged)
            continue
        while (until := generators.left()) < left:
            now += until * slowdown
            generators.work(until)
            generators.finish(now)
            left -= until
        now += left * (slowdown if generators.busy else 1.0)
        generators.work(left)
        spans.append(Span(LEARNER, name, batch, started, now))
        if name == "publish":
            generators.release(batch + 1 + staleness, now)
    return _outcome(spans, len(work.generate[0]), len(work.learn), staleness)


def _wait(
    generators: _Generators, batch: int, rewards: Sequence[float], now: float, judged: float
) -> tuple[float, float]:
    """Let time pass until a batch is sampled and its reward functions are done.

    Args:
        generators: which go on with other batches.
        batch: from 1.
        rewards: seconds of the functions for each batch, one batch after the other; none if empty.
        now: the time.
        judged: when the functions were done with the batch before.

    Returns:
        The time then, and when the functions were done.
    """
    while generators.missing[batch - 1]:
        seconds = generators.left()
        now += seconds
        generators.work(seconds)
        generators.finish(now)
    judged = max(judged, generators.sampled[batch - 1]) + (rewards[batch - 1] if rewards else 0.0)
    while (until := generators.left()) < judged - now:
        now += until
        generators.work(until)
        generators.finish(now)
    if judged > now:
        generators.work(judged - now)
        now = judged
    return now, judged


def _outcome(spans: list[Span], generators: int, batches: int, staleness: int) -> Outcome:
    """Sum up the part of a run in which the pipeline is full: the first batches fill it, the last ones drain it."""
    ends = [span.ended for span in spans if span.name == "other"]
    first, last = 2 * (staleness + 1), batches - 1 - staleness  # batches trained on, before and after
    if last <= first:
        raise ValueError(f"{batches} batches are too few for staleness {staleness}; more than {3 * (staleness + 1)}")
    begin, end = ends[first - 1], ends[last - 1]
    busy = [0.0, 0.0]
    for span in spans:
        busy[span.track == LEARNER] += max(0.0, min(span.ended, end) - max(span.started, begin))
    seconds = end - begin
    generator_idle, learner_idle = (1 - busy[0] / generators / seconds, 1 - busy[1] / seconds) if seconds else (0, 0)
    return Outcome(seconds / (last - first), generator_idle, learner_idle, spans)
