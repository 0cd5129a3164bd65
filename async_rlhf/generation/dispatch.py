"""Who samples what next: the requests of all batches under way lie in one queue, and a free worker takes the first.

A request is some consecutive prompts of one batch, sampled together by one worker. The requests are fixed when a batch
is submitted, so what is computed does not depend on who takes which.
"""

from __future__ import annotations

import queue
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from async_rlhf.generation.protocol import Failure, Ready, Reply, Request

Item = TypeVar("Item")


class Worker:
    """One process, actor or server that samples, and the requests that it was given. It may be lost and started again.

    Args:
        number: among the workers.
        label: its name in messages and traces.
        arrived: takes what comes from it.
    """

    has_begun: Any
    """Whether it has given a sign of life since it was started; until then it may be importing, building, compiling."""
    has_place = True
    """Whether it has a host to run on. One that is lost before is started again, and that counts as no restart."""

    def __init__(self, number: int, label: str, arrived: queue.SimpleQueue[Arrived | None]) -> None:
        self.number, self.label, self._arrived = number, label, arrived
        self.open: list[Request] = []
        """What it was given and has not answered."""
        self.starts = 0
        """How often it was started; what comes from an earlier start is ignored."""
        self.since = 0.0
        """When its silence may have begun."""
        self.started: float | None = None
        """When it was started, on the monotonic clock, where that takes long."""

    def arrive(self, message: Message, start: int | None = None) -> None:
        """Hand over what came from it, or from an earlier start."""
        self._arrived.put(Arrived(self, self.starts if start is None else start, message))

    def submit(self, request: Request) -> None:
        """Send a request. Returns at once."""
        raise NotImplementedError

    def answered(self, index: int) -> Request:
        """Remove and return the request at an index of :attr:`open`, which was just answered."""
        return self.open.pop(index)

    def start(self) -> None:
        """Start it, the first time or again. It says Ready once it can sample."""
        raise NotImplementedError

    def silent_for(self) -> float:
        """Seconds since its last sign of life, or its start, while it had something to do; 0 if unknown.

        May raise ``unstartable`` of its generator.
        """
        return 0.0

    def end(self) -> str:
        """Make sure that it has ended, and describe how it ended."""
        return ""

    def kill(self) -> None:
        """End it, whatever it is doing."""

    def close(self) -> None:
        """End it."""
        raise NotImplementedError


class Stop(NamedTuple):
    """The worker shall end when it has answered what it has."""


Message = Ready | Reply | Failure | Stop | BaseException | None
"""What comes from a worker, or is to become of it. None: it was lost. An exception ends the run as it is."""


class Arrived(NamedTuple):
    """An answer, and who sent it."""

    worker: Any
    start: int
    """Number of the start of the worker that sent it."""
    message: Message


class Dispatcher:
    """Gives each free worker the next request, at the moment that it becomes free. Every method is for any thread.

    Requests go out in the order of their batches, and within a batch in their own; those of an evaluation behind the
    batch that was submitted before them. A worker that samples one request after the other has no more than that one:
    what it would hold in reserve, nobody else could take, and at the end of a batch the slowest worker would hold it
    longest.

    Args:
        workers: who is there from the start.
        clock: seconds.
        per_worker: most requests that a worker has at a time.
    """

    def __init__(
        self, workers: Iterable[Worker], clock: Callable[[], float] = time.monotonic, per_worker: int = 1
    ) -> None:
        self._lock = threading.RLock()
        self._queue: list[Request] = []
        self._there: list[Worker] = []
        self._per_worker = per_worker
        self._unanswered: dict[int, int] = {}
        self._times, self._clock = Utilisation(self._there), clock
        self._idle: dict[int, float] = {}
        for worker in workers:
            self.join(worker)

    def add(self, requests: Sequence[Request]) -> None:
        """Take all requests of a batch."""
        with self._lock:
            for request in requests:
                self._insert(request)
                self._unanswered[request.batch] = self._unanswered.get(request.batch, 0) + 1
            self._hand_out()

    def join(self, worker: Worker) -> None:
        """Count on a worker from now on; again, if it was lost."""
        with self._lock:
            if worker not in self._there:
                self._times.until(self._clock())
                insort(self._there, worker, key=lambda each: each.number)
                self._hand_out()

    def is_there(self, worker: Worker) -> bool:
        """Whether it gets requests."""
        with self._lock:
            return worker in self._there

    def answered(self, worker: Worker, batch: int | None = None, number: int | None = None) -> Request:
        """Take back the request that a worker has just answered, and give it the next one.

        Args:
            worker: who answered.
            batch: what its answer names; only looked at if the worker has several requests.
            number: the same.
        """
        with self._lock:
            index = next((i for i, each in enumerate(worker.open) if (each.batch, each.number) == (batch, number)), 0)
            now = self._clock()
            self._times.until(now)
            request = worker.answered(index)
            self._unanswered[request.batch] -= 1
            if not self._unanswered[request.batch]:
                del self._unanswered[request.batch]
                self._idle[request.batch] = self._times.idle_share(request.batch, now)
            self._hand_out()
            return request

    def lost(self, worker: Worker) -> list[Request]:
        """Give to others what a worker had; it gets nothing until it joins again. Returns what it had."""
        with self._lock:
            self.leave(worker)
            back, worker.open = worker.open, []
            for request in back:
                self._insert(request)
            self._hand_out()
            return back

    def leave(self, worker: Worker) -> None:
        """Give a worker nothing any more; it may still answer what it has."""
        with self._lock:
            if worker in self._there:
                self._times.until(self._clock())
                self._there.remove(worker)

    def idle_share(self, batch: int) -> float:
        """Share of the workers' time without a request, from the first request of a batch that went out to the last
        that came back. For a batch whose requests have all been answered; it is forgotten then.
        """
        with self._lock:
            return self._idle.pop(batch)

    def _insert(self, request: Request) -> None:
        insort(self._queue, request, key=lambda each: each.turn)

    def _hand_out(self) -> None:
        while self._queue and self._there:
            worker = min(self._there, key=lambda each: len(each.open))  # the first of those that have least
            if len(worker.open) >= self._per_worker:
                return
            request = self._queue.pop(0)
            self._times.began(request.batch, self._clock())
            worker.submit(request)


class Utilisation:
    """How much of the workers' time had work. All times are seconds of one clock, and grow.

    Args:
        there: the workers that are there, and get requests. What they have is in their ``open``.
    """

    def __init__(self, there: list[Worker]) -> None:
        self._there = there
        self._seconds = (0.0, 0.0)
        """Of all workers together until the last event: that they were there, and that they had work."""
        self._last = 0.0
        self._began: dict[int, tuple[float, float]] = {}
        """By batch: those seconds when its first request began."""

    def until(self, now: float) -> tuple[float, float]:
        """Count the time up to now. To be called before workers come, leave, begin or answer."""
        there, busy = self._seconds
        passed, self._last = now - self._last, now
        working = sum(bool(worker.open) for worker in self._there)
        self._seconds = there + passed * len(self._there), busy + passed * working
        return self._seconds

    def began(self, batch: int, now: float) -> None:
        """A worker is about to get a request of a batch."""
        self._began.setdefault(batch, self.until(now))

    def idle_share(self, batch: int, now: float) -> float:
        """The share of the time that workers were there in which they had nothing, since the first request of the batch
        was begun. Work on other batches counts as work. The batch must have ended.
        """
        there, busy = (end - start for end, start in zip(self.until(now), self._began.pop(batch), strict=True))
        return 1 - busy / there if there else 0.0


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
