"""What frozen models and functions say of batches that have been sampled, beside training, before their turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from async_rlhf.system.random_state import RandomState, capture, equal, restore
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Group

Judged = TypeVar("Judged")
_LONGEST = 5.0
"""Seconds that the end of a run waits for what is being computed."""


@dataclass
class _Job(Generic[Judged]):
    """A batch, or some of its prompts."""

    index: int
    groups: Sequence[Group]
    done: Future[Judged] = field(default_factory=Future)
    before: RandomState | None = None
    """The state of the global random generators before it was judged; None if it has not been, or drew nothing."""

    @property
    def is_waiting(self) -> bool:
        """Whether nobody has begun to judge it, and somebody is to."""
        return not self.done.running() and not self.done.done()


class EarlyResults(Generic[Judged]):
    """Judges batches one after the other in a daemon thread, so that a function that hangs keeps nothing from ending.

    Args:
        judge: computes the rewards of groups. It is never called twice at the same time.
        join: makes the rewards of a batch from those of its parts, in order, where these may be judged apart, while
            others are still being sampled; None if a batch has to be judged as a whole.
        ordered: judge batches in the order of their turns, as what is judged may depend on what was judged before:
            functions may draw random numbers. Else in the order in which they come.
        waits: whether a batch must not be judged before its turn; asked where ``ordered``.
        name: what is computed, for traces.
        hangs: whether ``judge`` may do so. Else it is waited for at the end: a thread that is amid a kernel when the
            interpreter ends can abort the process.
    """

    def __init__(
        self,
        judge: Callable[[Sequence[Group]], Judged],
        join: Callable[[Sequence[Judged]], Judged] | None = None,
        ordered: bool = False,
        waits: Callable[[int], bool] = lambda index: False,
        name: str = "rewards",
        hangs: bool = True,
    ) -> None:
        self._judge, self._join, self._ordered, self._waits = judge, join, ordered, waits
        self._name, self._hangs = name, hangs
        self._here: dict[int, dict[int, Sequence[Group]]] = {}
        """Parts of batches that are not whole yet, by the number of the first prompt."""
        self._alone = threading.Lock()
        self._changed = threading.Condition()
        self._jobs: dict[int, dict[int, _Job[Judged]]] = {}
        """By batch and number of the first prompt, in the order in which they came."""
        self._next = 1
        """The batch whose turn it is, or comes next."""

    @contextmanager
    def running(self, trace: Trace | None, first: int = 1) -> Iterator[None]:
        """Within, batches are judged when :meth:`begin` hands them in.

        Args:
            trace: gets a span of each.
            first: the batch that has the first turn.
        """
        self._next, ended = first, threading.Event()
        thread = threading.Thread(target=self._work, args=(trace, ended), name=f"early {self._name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                ended.set()
                for job in self._all():
                    job.done.cancel()
                self._changed.notify_all()
            thread.join(0.0 if self._hangs else _LONGEST)

    def begin(self, index: int, first: int, groups: Sequence[Group], prompts: int) -> None:
        """Hand in prompts that have just been sampled; from any thread.

        Args:
            index: their batch.
            first: number of the first one in it.
            groups: they and those after it.
            prompts: how many the batch has.
        """
        with self._changed:
            if self._join is None:
                here = self._here.setdefault(index, {})
                here[first] = groups
                if sum(map(len, here.values())) < prompts:
                    return
                del self._here[index]
                first, groups = 0, tuple(group for number in sorted(here) for group in here[number])
            self._jobs.setdefault(index, {})[first] = _Job[Judged](index, groups)
            self._changed.notify_all()

    def look_again(self) -> None:
        """Say that a batch that had to wait for its turn may no longer have to."""
        with self._changed:
            self._changed.notify_all()

    def random_state(self) -> RandomState:
        """The state of the global random generators, from which the batches that have not had their turn yet draw."""
        with self._changed:
            return self._drawn_from() or capture()

    def of(self, batch: Batch) -> Judged:
        """The rewards of a batch: those that were computed before, else computed now; raises what judging raised."""
        with self._changed:
            jobs = [job for _, job in sorted(self._jobs.get(batch.index, {}).items())]
            given = [id(group.samples) for job in jobs for group in job.groups]
            # What was judged is what the batch has come to, the very same completions.
            usable = bool(jobs) and given == [id(group.samples) for group in batch.groups]
            if self._ordered and self._waits(batch.index):
                usable = usable and not jobs[0].is_waiting
            if not usable:
                for job in jobs:
                    job.done.cancel()
        try:
            if usable:
                judged = [job.done.result() for job in jobs]
                return judged[0] if self._join is None else self._join(judged)
            with self._alone:
                self._take_back(batch.index)
                return self._judge(batch.groups)
        finally:
            with self._changed:
                self._jobs.pop(batch.index, None)
                self._next = max(self._next, batch.index + 1)
                self._changed.notify_all()

    def _all(self) -> list[_Job[Judged]]:
        return [job for jobs in self._jobs.values() for job in jobs.values()]

    def _drawn_from(self) -> RandomState | None:
        """The state before the first job that has drawn random numbers, or may be doing so."""
        drew = [job for job in self._all() if job.before is not None]
        return min(drew, key=lambda job: job.index).before if drew else None

    def _take_back(self, index: int) -> None:
        """Give back the random numbers that were drawn before their turn: they belong to ``index``, whose turn it is.
        What drew them is judged again, but for earlier completions of ``index`` itself.
        """
        with self._changed:
            state = self._drawn_from()
            self._jobs.pop(index, None)
            if not self._ordered or state is None:
                return
            restore(*state)
            for job in self._all():
                if job.before is not None:
                    job.done, job.before = Future(), None

    def _work(self, trace: Trace | None, ended: threading.Event) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: ended.is_set() or self._possible() is not None)
            if ended.is_set():
                return
            with self._alone:
                with self._changed:  # once more: what has its turn may have come first
                    job = self._possible()
                    if job is None or not job.done.set_running_or_notify_cancel():
                        continue
                    job.before = capture()
                self._do(job, trace)

    def _possible(self) -> _Job[Judged] | None:
        """What can be judged next, before its turn."""
        if not self._ordered:
            return next((job for job in self._all() if job.is_waiting), None)
        index = self._next
        while index in self._jobs and not self._jobs[index][0].is_waiting:
            index += 1
        return self._jobs[index][0] if index in self._jobs and not self._waits(index) else None

    def _do(self, job: _Job[Judged], trace: Trace | None) -> None:
        started = time.monotonic()
        outcome: Callable[[], None]
        try:
            outcome = partial(job.done.set_result, self._judge(job.groups))
        except BaseException as error:  # whatever it is, it is raised where the batch has its turn
            outcome = partial(job.done.set_exception, error)
        with self._changed:
            if job.before is not None and equal(job.before, capture()):
                job.before = None
            outcome()
            self._changed.notify_all()
        if trace is not None:
            what = {"batch": job.index} if job.index > 0 else {"evaluation": -job.index}
            trace.add(self._name, started, time.monotonic(), self._name, **what)
