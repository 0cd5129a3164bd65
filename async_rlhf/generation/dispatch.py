"""Who samples what next: the units of all batches under way lie in one queue, and a free worker takes the first.

A unit is some consecutive prompts of one batch, sampled together by one worker. The units are fixed when a batch is
submitted, so what is computed does not depend on who takes which.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol, TypeVar

from async_rlhf.generation.idleness import Timesheet
from async_rlhf.generation.messages import Request

Item = TypeVar("Item")


class Worker(Protocol):
    """One process or server, and the unit that it samples."""

    number: int
    label: str
    open: list[Request]
    """What it was given and has not answered."""

    def submit(self, request: Request) -> None:
        """Send a request. Returns at once."""

    def answered(self, place: int) -> Request:
        """Remove and return the request at a place of :attr:`open`, which was just answered."""

    def close(self) -> None:
        """End it."""


class Dispatcher:
    """Gives each free worker the next unit, at the moment that it becomes free. Every method is for any thread.

    Units go out in the order of their batches, and within a batch in their own. A worker that samples one unit after
    the other has no more than that one: what it would hold in reserve, nobody else could take, and at the end of a
    batch the slowest worker would hold it longest.

    Args:
        workers: who is there from the start.
        clock: seconds.
        at_once: most units that a worker has at a time.
    """

    def __init__(
        self, workers: Iterable[Worker], clock: Callable[[], float] = time.monotonic, at_once: int = 1
    ) -> None:
        self._lock = threading.RLock()
        self._queue: list[Request] = []
        self._there: list[Worker] = []
        self._at_once = at_once
        self._given: dict[int, dict[tuple[int, int], Request]] = {}
        """By number of a worker, batch and unit: what it has, as it lay in the queue."""
        self._probed: dict[int, int] = {}
        """By number of a worker: the batch at which it was asked for a probe last."""
        self._unanswered: dict[int, int] = {}
        self._times, self._clock = Timesheet(), clock
        self._idle: dict[int, float] = {}
        for worker in workers:
            self.join(worker)

    def add(self, requests: Sequence[Request]) -> None:
        """Take all units of a batch."""
        with self._lock:
            for request in requests:
                self._insert(request)
                self._unanswered[request.batch] = self._unanswered.get(request.batch, 0) + 1
            self._hand_out()

    def join(self, worker: Worker) -> None:
        """Count on a worker from now on; again, if it was lost."""
        with self._lock:
            if worker not in self._there:
                self._there.append(worker)
                self._there.sort(key=lambda each: each.number)
                self._times.came(worker.number, self._clock())
                self._hand_out()

    def is_there(self, worker: Worker) -> bool:
        """Whether it gets units."""
        with self._lock:
            return worker in self._there

    def answered(self, worker: Worker, batch: int | None = None, unit: int | None = None) -> Request:
        """Take back the request that a worker has just answered, and give it the next one.

        Args:
            worker: who answered.
            batch: what its answer names; only looked at if the worker has several requests.
            unit: the same.
        """
        with self._lock:
            place = next((i for i, each in enumerate(worker.open) if (each.batch, each.unit) == (batch, unit)), 0)
            request, now = worker.answered(place), self._clock()
            del self._given[worker.number][request.batch, request.unit]
            if not worker.open:
                self._times.ended(worker.number, now)
            self._unanswered[request.batch] -= 1
            if not self._unanswered[request.batch]:
                del self._unanswered[request.batch]
                self._idle[request.batch] = self._times.idle_share(request.batch, now)
            self._hand_out()
            return request

    def lost(self, worker: Worker) -> list[Request]:
        """Give to others what a worker had; it gets nothing until it joins again. Returns what it had."""
        with self._lock:
            back = list(self._given.pop(worker.number, {}).values())
            worker.open = []
            self.leave(worker)
            for request in back:
                self._insert(request)
            self._hand_out()
            return back

    def leave(self, worker: Worker) -> None:
        """Give a worker nothing any more; it may still answer what it has."""
        with self._lock:
            if worker in self._there:
                self._there.remove(worker)
                self._times.left(worker.number, self._clock())
                self._probed.pop(worker.number, None)

    def idle_share(self, batch: int) -> float:
        """Share of the workers' time without a unit, from the first unit of a batch that went out to the last that came
        back. For a batch whose units have all been answered; it is forgotten then.
        """
        with self._lock:
            return self._idle.pop(batch)

    def _insert(self, request: Request) -> None:
        insort(self._queue, request, key=lambda each: (each.batch, each.unit))

    def _hand_out(self) -> None:
        while self._queue and self._there:
            worker = min(self._there, key=lambda each: len(each.open))  # the first of those that have least
            if len(worker.open) >= self._at_once:
                return
            request = self._queue.pop(0)
            # A worker has the same weights for all of its units of a batch, so one probe is enough.
            probe = request.probe and self._probed.get(worker.number) != request.batch
            self._probed[worker.number] = request.batch
            self._given.setdefault(worker.number, {})[request.batch, request.unit] = request
            self._times.began(worker.number, request.batch, self._clock())
            worker.submit(replace(request, probe=probe))


def cut(items: Sequence[Item], number: int, size: int | None) -> list[Sequence[Item]]:
    """Consecutive parts: of ``size`` items each, the last of fewer if need be; without a size, ``number`` parts that
    differ by one item at most.
    """
    if not items:
        return []
    if size is not None:
        return [items[start : start + size] for start in range(0, len(items), size)]
    bounds = [part * len(items) // number for part in range(number + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
