"""Rewards of batches that have been sampled, computed beside training and before their turn."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from async_rlhf.reports.trace import Trace
from async_rlhf.system.random_state import RandomState, capture
from async_rlhf.types import Batch, Group

Judged = TypeVar("Judged")


@dataclass
class _Job(Generic[Judged]):
    index: int
    groups: Sequence[Group]
    done: Future[Judged] = field(default_factory=Future)

    def is_of(self, batch: Batch) -> bool:
        """Whether exactly these completions are what the batch has come to."""
        theirs = [group.samples for group in batch.groups]
        return len(theirs) == len(self.groups) and all(
            mine.samples is samples for mine, samples in zip(self.groups, theirs, strict=True)
        )


class EarlyRewards(Generic[Judged]):
    """Judges batches one after the other in a daemon thread, so that a function that hangs keeps nothing from ending.

    Args:
        judge: computes the rewards of groups. It is never called twice at the same time.
    """

    def __init__(self, judge: Callable[[Sequence[Group]], Judged]) -> None:
        self._judge = judge
        self._alone = threading.Lock()
        self._waiting: queue.SimpleQueue[_Job[Judged] | None] = queue.SimpleQueue()
        self._jobs: dict[int, _Job[Judged]] = {}
        self._beginning = threading.Lock()
        self._random: dict[int, RandomState] = {}
        """By batch that is judged before its turn: the state of the global random generators before that."""

    @contextmanager
    def running(self, trace: Trace | None) -> Iterator[None]:
        """Within, batches are judged when :meth:`begin` hands them in; ``trace`` gets a span of each."""
        threading.Thread(target=self._work, args=(trace,), name="early rewards", daemon=True).start()
        try:
            yield
        finally:
            for job in list(self._jobs.values()):
                job.done.cancel()
            self._waiting.put(None)

    def begin(self, index: int, groups: Sequence[Group]) -> None:
        """Hand in a batch that has just been sampled; from any thread."""
        job = _Job[Judged](index, groups)
        self._jobs[index] = job
        self._waiting.put(job)

    def random_state(self) -> RandomState:
        """The state of the global random generators, from which the batches that have not had their turn yet draw."""
        with self._beginning:
            return self._random[min(self._random)] if self._random else capture()

    def of(self, batch: Batch) -> Judged:
        """The rewards of a batch: those that were computed before, else computed now; raises what judging raised."""
        job = self._jobs.pop(batch.index, None)
        try:
            if job is not None and job.is_of(batch):
                return job.done.result()
            if job is not None:
                job.done.cancel()
            with self._alone:
                return self._judge(batch.groups)
        finally:
            with self._beginning:
                self._random.pop(batch.index, None)

    def _work(self, trace: Trace | None) -> None:
        while (job := self._waiting.get()) is not None:
            with self._alone:
                self._do(job, trace)

    def _do(self, job: _Job[Judged], trace: Trace | None) -> None:
        with self._beginning:
            if not job.done.set_running_or_notify_cancel():
                return
            self._random[job.index] = capture()
        started = time.monotonic()
        try:
            judged = self._judge(job.groups)
        except BaseException as error:  # whatever it is, it is raised where the batch has its turn
            job.done.set_exception(error)
        else:
            job.done.set_result(judged)
        if trace is not None:
            trace.add("rewards", started, time.monotonic(), "rewards", batch=job.index)
