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
    """A batch, or some of its prompts."""

    index: int
    groups: Sequence[Group]
    done: Future[Judged] = field(default_factory=Future)


def _are(jobs: Sequence[_Job[Judged]], batch: Batch) -> bool:
    """Whether exactly these completions are what the batch has come to."""
    mine = [group.samples for job in jobs for group in job.groups]
    theirs = [group.samples for group in batch.groups]
    return len(mine) == len(theirs) and all(ours is other for ours, other in zip(mine, theirs, strict=True))


class EarlyRewards(Generic[Judged]):
    """Judges batches one after the other in a daemon thread, so that a function that hangs keeps nothing from ending.

    Args:
        judge: computes the rewards of groups. It is never called twice at the same time.
        join: makes the rewards of a batch from those of its parts, in order, where these may be judged apart, while
            others are still being sampled; None if a batch has to be judged as a whole.
    """

    def __init__(
        self,
        judge: Callable[[Sequence[Group]], Judged],
        join: Callable[[Sequence[Judged]], Judged] | None = None,
    ) -> None:
        self._judge, self._join = judge, join
        self._here: dict[int, dict[int, Sequence[Group]]] = {}
        """Parts of batches that are not whole yet, by the number of the first prompt."""
        self._alone = threading.Lock()
        self._waiting: queue.SimpleQueue[_Job[Judged] | None] = queue.SimpleQueue()
        self._jobs: dict[int, dict[int, _Job[Judged]]] = {}
        """By batch and number of the first prompt."""
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
            for jobs in list(self._jobs.values()):
                for job in list(jobs.values()):
                    job.done.cancel()
            self._waiting.put(None)

    def begin(self, index: int, first: int, groups: Sequence[Group], prompts: int) -> None:
        """Hand in prompts that have just been sampled; from any thread.

        Args:
            index: their batch.
            first: number of the first one in it.
            groups: they and those after it.
            prompts: how many the batch has.
        """
        if self._join is None:
            with self._beginning:
                here = self._here.setdefault(index, {})
                here[first] = groups
                if sum(map(len, here.values())) < prompts:
                    return
                del self._here[index]
            first, groups = 0, tuple(group for number in sorted(here) for group in here[number])
        job = _Job[Judged](index, groups)
        self._jobs.setdefault(index, {})[first] = job
        self._waiting.put(job)

    def random_state(self) -> RandomState:
        """The state of the global random generators, from which the batches that have not had their turn yet draw."""
        with self._beginning:
            return self._random[min(self._random)] if self._random else capture()

    def of(self, batch: Batch) -> Judged:
        """The rewards of a batch: those that were computed before, else computed now; raises what judging raised."""
        jobs = [job for _, job in sorted(self._jobs.pop(batch.index, {}).items())]
        try:
            if jobs and _are(jobs, batch):
                judged = [job.done.result() for job in jobs]
                return judged[0] if self._join is None else self._join(judged)
            for job in jobs:
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
            self._random.setdefault(job.index, capture())
        started = time.monotonic()
        try:
            judged = self._judge(job.groups)
        except BaseException as error:  # whatever it is, it is raised where the batch has its turn
            job.done.set_exception(error)
        else:
            job.done.set_result(judged)
        if trace is not None:
            what = {"batch": job.index} if job.index > 0 else {"evaluation": -job.index}
            trace.add("rewards", started, time.monotonic(), "rewards", **what)
