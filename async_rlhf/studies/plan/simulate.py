"""The schedule of run/schedule.py as a simulation of events: who is busy when, given how long everything takes.

Version v of the weights is published after batch v; batch b is sampled by version max(0, b - 1 - S), so publishing
version v lets batches up to v + 1 + S begin. Requests of batches, and of evaluations behind the batches that were asked
for before, lie in one queue, and a free generator takes the first. A thread brings each version to the generators while
the learner goes on. Reward functions judge a batch as soon as all its requests are there, one batch after the other,
and the learner takes the batches in order, each as soon as it is judged.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LEARNER, PUBLISHER = -1, -2


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of every batch of a run, the first batch first.

    Args:
        generate: for each batch, the seconds of each of its requests, at speed 1.
        learn: seconds of the learner for each batch, up to the update.
        publish: of version 0, 1, ...: seconds of the learner.
        other: seconds of the learner after each batch.
        rewards: seconds of the reward functions for each batch; none if empty.
        speeds: of each generator; if empty, there are as many as the first batch has requests, all of speed 1.
        transfer: of version 0, 1, ...: seconds until the generators have it, while the learner goes on; none if empty.
        evaluate: seconds of each request of an evaluation.
        eval_steps: batches between two evaluations; 0 for none.
        unstaged: seconds more of a request of a batch whose weights arrive while its generator waits for them: only
            beside other work they are copied to it before they are needed.
    """

    generate: Sequence[Sequence[float]]
    learn: Sequence[float]
    publish: Sequence[float]
    other: Sequence[float]
    rewards: Sequence[float] = ()
    speeds: Sequence[float] = ()
    transfer: Sequence[float] = ()
    evaluate: Sequence[float] = ()
    eval_steps: int = 0
    unstaged: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """A period of work by a generator, the LEARNER or the PUBLISHER; for publishing and evaluations, ``batch`` is the
    version.
    """

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


Task = tuple[str, int]
"""What a request belongs to: "generate" and a batch, or "evaluate" and a version."""


class _Simulation:
    """The loop of run/loop.py, with the time that passes in it. It passes equally for all busy generators."""

    def __init__(self, work: Work, staleness: int, slowdown: float) -> None:
        self.work, self.staleness, self.slowdown = work, staleness, slowdown
        self.batches = len(work.learn)
        self.speeds = work.speeds or (1.0,) * len(work.generate[0])
        self.spans: list[Span] = []
        self.now = 0.0
        self.judged = 0.0
        """When the reward functions were done with the last batch."""
        self.arrived = 0.0
        """When the generators had the last version."""
        self.asked: int | None = None
        """The version that is evaluated."""
        self.missing: dict[Task, int] = {}
        """Requests that are still to come."""
        self.ended: dict[Task, float] = {}
        """When the last request came."""
        self._queue: deque[tuple[Task, float, float]] = deque()
        """Requests, their seconds, and when their weights arrive."""
        self._free = list(range(len(self.speeds)))
        self._busy: list[tuple[float, int, Task, float]] = []
        """Clock at the end of a request, generator, the request, and when it began."""
        self._clock = 0.0
        """Seconds in which generators could work."""

    def run(self) -> None:
        """All batches."""
        work = self.work
        self.publish(0)
        for batch in range(1, self.batches + 1):
            self.wait(batch)
            self.do("learn", batch, work.learn[batch - 1])
            if batch + 1 + self.staleness <= self.batches:  # else no batch is left for this version to sample
                self.publish(batch)
            self.do("other", batch, work.other[batch - 1])
            self.evaluate(batch)

    def do(self, name: str, batch: int, seconds: float) -> None:
        """Work of the learner, beside what generators do."""
        started, left = self.now, seconds
        while (until := self._until_next()) < left:
            self._finish_next(self.slowdown)
            left -= until
        self.now += left * (self.slowdown if until < math.inf else 1.0)
        self._clock += left
        self.spans.append(Span(LEARNER, name, batch, started, self.now))

    def publish(self, version: int) -> None:
        """Publish a version, once the version before has arrived; its batches can begin when it has arrived."""
        self.idle_until(self.arrived)
        self.do("publish", version, self.work.publish[version])
        self.arrived = self.now
        if self.work.transfer and self.work.transfer[version]:
            self.arrived += self.work.transfer[version]
            self.spans.append(Span(PUBLISHER, "hand out", version, self.now, self.arrived))
        first = 1 if version == 0 else version + 1 + self.staleness
        for batch in range(first, min(version + 1 + self.staleness, self.batches) + 1):
            self.submit(("generate", batch), self.work.generate[batch - 1])

    def wait(self, batch: int) -> None:
        """Until a batch is sampled and judged."""
        self.until_all_of(("generate", batch))
        rewards = self.work.rewards[batch - 1] if self.work.rewards else 0.0
        self.judged = max(self.judged, self.ended["generate", batch]) + rewards
        self.idle_until(self.judged)

    def evaluate(self, batch: int) -> None:
        """Wait for the evaluation that is due after a batch, and ask for the next one."""
        steps = self.work.eval_steps
        if not steps:
            return
        wanted = batch % steps == 0 and batch + 1 + self.staleness <= self.batches
        if self.asked is not None and (wanted or batch >= self.asked + min(self.staleness + 1, steps)):
            self.until_all_of(("evaluate", self.asked))
            self.asked = None
        if wanted:
            self.submit(("evaluate", batch), self.work.evaluate)
            self.asked = batch

    def submit(self, task: Task, requests: Sequence[float]) -> None:
        """Put requests into the queue; they begin when the last version has arrived."""
        self.missing[task] = len(requests)
        self._queue.extend((task, seconds, self.arrived) for seconds in requests)
        self._begin()

    def until_all_of(self, task: Task) -> None:
        """Let time pass until every request is there."""
        while self.missing[task]:
            self._finish_next()

    def idle_until(self, moment: float) -> None:
        """Let time pass for the generators alone."""
        while self._until_next() < moment - self.now:
            self._finish_next()
        if moment > self.now:
            self._clock += moment - self.now
            self.now = moment

    def _begin(self) -> None:
        """Give free generators the first requests."""
        while self._queue and self._free:
            generator = heapq.heappop(self._free)
            task, seconds, arrival = self._queue.popleft()
            waits = max(0.0, arrival - self.now)
            seconds += self.work.unstaged if arrival >= self.now and task[0] == "generate" else 0.0
            end = self._clock + waits + seconds / self.speeds[generator]
            heapq.heappush(self._busy, (end, generator, task, self.now + waits))

    def _until_next(self) -> float:
        """Seconds of work until the next request is done; infinite if no generator is busy."""
        return max(0.0, self._busy[0][0] - self._clock) if self._busy else math.inf

    def _finish_next(self, slowdown: float = 1.0) -> None:
        """Complete the next request; its generator takes another."""
        self.now += self._until_next() * slowdown
        self._clock, generator, task, started = heapq.heappop(self._busy)
        self.missing[task] -= 1
        if not self.missing[task]:
            self.ended[task] = self.now
        self.spans.append(Span(generator, *task, started, self.now))
        heapq.heappush(self._free, generator)
        self._begin()


def simulate(work: Work, staleness: int, slowdown: float = 1.0) -> Outcome:
    """Simulate a run.

    Args:
        work: how long everything takes, for more than 4 (S + 1) batches.
        staleness: S.
        slowdown: how many times longer everything takes while learner and generators are both busy.
    """
    simulation = _Simulation(work, staleness, slowdown)
    simulation.run()
    return _outcome(simulation.spans, len(simulation.speeds), len(work.learn), staleness)


def _outcome(spans: list[Span], generators: int, batches: int, staleness: int) -> Outcome:
    """Sum up the part of a run in which the pipeline is full: the first batches fill it, the last ones drain it."""
    ends = [span.ended for span in spans if span.name == "other"]
    first, last = 2 * (staleness + 1), batches - 1 - staleness  # batches trained on, before and after
    if last <= first:
        raise ValueError(f"{batches} batches are too few for staleness {staleness}; more than {3 * (staleness + 1)}")
    begin, end = ends[first - 1], ends[last - 1]
    busy = [0.0, 0.0]
    for span in spans:
        if span.track != PUBLISHER:
            busy[span.track == LEARNER] += max(0.0, min(span.ended, end) - max(span.started, begin))
    seconds = end - begin
    shares = (busy[0] / generators / seconds, busy[1] / seconds) if seconds else (1.0, 1.0)
    generator_idle, learner_idle = (max(0.0, 1 - share) for share in shares)
    return Outcome(seconds / (last - first), generator_idle, learner_idle, spans)
