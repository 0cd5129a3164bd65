"""How much of the workers' time passed without work while a batch was sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class _Span:
    """From ``start`` to ``end``, which is infinite while it lasts."""

    start: float
    end: float = math.inf

    def within(self, start: float, end: float) -> float:
        """How many seconds of it lie between two times."""
        return max(0.0, min(self.end, end) - max(self.start, start))


@dataclass
class _Worker:
    there: list[_Span] = field(default_factory=list)
    busy: list[_Span] = field(default_factory=list)


class Timesheet:
    """When each worker was there, and when it had a unit to sample. All times are seconds of one clock, and grow."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._began: dict[int, float] = {}

    def came(self, worker: int, now: float) -> None:
        """A worker is there."""
        self._workers.setdefault(worker, _Worker()).there.append(_Span(now))

    def left(self, worker: int, now: float) -> None:
        """It is not there any more, or gets nothing any more."""
        self._workers[worker].there[-1].end = now
        self.ended(worker, now)

    def began(self, worker: int, batch: int, now: float) -> None:
        """It got a unit of a batch."""
        self._began.setdefault(batch, now)
        busy = self._workers[worker].busy
        if not busy or busy[-1].end < math.inf:
            busy.append(_Span(now))

    def ended(self, worker: int, now: float) -> None:
        """It has answered all that it had, if it had something."""
        for span in self._workers[worker].busy[-1:]:
            span.end = min(span.end, now)

    def idle_share(self, batch: int, now: float) -> float:
        """The share of the time that workers were there in which they had nothing, since the first unit of the batch
        was begun. Work on other batches counts as work. The batch must have ended.
        """
        began = self._began.pop(batch)
        there = sum(span.within(began, now) for worker in self._workers.values() for span in worker.there)
        busy = sum(span.within(began, now) for worker in self._workers.values() for span in worker.busy)
        self._forget(min(self._began.values(), default=now))
        return 1 - busy / there if there else 0.0

    def _forget(self, before: float) -> None:
        for worker in self._workers.values():
            worker.there = [span for span in worker.there if span.end >= before]
            worker.busy = [span for span in worker.busy if span.end >= before]
