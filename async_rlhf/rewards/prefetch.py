"""Results of frozen models and reward functions, computed beside training as soon as a batch has been sampled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from async_rlhf.system.random_state import capture, equal, restore, seed_by
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Group

logger = logging.getLogger(__name__)

Judged = TypeVar("Judged")
_LONGEST = 5.0
"""Seconds that the end of a run waits for what is being computed."""


@dataclass
class _Job(Generic[Judged]):
    """A batch to judge, or some of its prompts."""

    index: int
    groups: Sequence[Group]
    done: Future[Judged] = field(default_factory=Future)
    drew: bool = False
    """Whether random numbers were drawn meanwhile: then it is judged again, in its turn."""

    @property
    def is_waiting(self) -> bool:
        """Whether it is still to be judged, and was not begun."""
        return not self.done.running() and not self.done.done()


class EarlyResults(Generic[Judged]):
    """Judges batches one after the other in a daemon thread; a function that hangs there keeps no process from ending.

    What functions draw from the global random generators depends on the run's seed and the batch alone: in a batch's
    turn they are seeded for it, and restored after it. They cannot be seeded beside training, which shares them. So
    functions that judge whole batches judge the first one in its turn, which shows whether they draw. If they do, or if
    later a function or a callback at the same time draws, every batch from there on is judged in its turn.

    Args:
        judge: computes the rewards of groups. It is never called twice at the same time.
        join: makes the rewards of a batch from those of its parts, which are then judged while others are still being
            sampled; None if a batch is judged as a whole.
        name: what is computed, for traces.
        functions: whether users' functions judge, which may hang and may draw random numbers. If not, the end waits for
            the thread: one that runs a kernel when the interpreter ends can abort the process.
        seed: of the run.
    """

    def __init__(
        self,
        judge: Callable[[Sequence[Group]], Judged],
        join: Callable[[Sequence[Judged]], Judged] | None = None,
        name: str = "rewards",
        functions: bool = True,
        seed: int = 0,
    ) -> None:
        self._judge, self._join, self._name, self._functions, self._seed = judge, join, name, functions, seed
        self._here: dict[int, dict[int, Sequence[Group]]] = {}
        """Parts of batches that are not whole yet, by the number of the first prompt."""
        self._alone = threading.Lock()
        self._changed = threading.Condition()
        self._jobs: dict[int, dict[int, _Job[Judged]]] = {}
        """By batch and number of the first prompt, in the order in which they came."""
        self._draws = None if functions and join is None else False
        """Whether judging draws random numbers; None as long as that is unknown."""

    @contextmanager
    def running(self, trace: Trace | None) -> Iterator[None]:
        """Within, batches that :meth:`begin` hands in are judged; the trace gets a span of each."""
        ended = threading.Event()
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
            thread.join(0.0 if self._functions else _LONGEST)

    def begin(self, index: int, first: int, groups: Sequence[Group], prompts: int) -> None:
        """Hand in prompts that have just been sampled; from any thread.

        Args:
            index: their batch.
            first: number of the first one in it.
            groups: they and those after it.
            prompts: how many the batch has.
        """
        with self._changed:
            if self._draws:
                return
            if self._join is None:
                here = self._here.setdefault(index, {})
                here[first] = groups
                if sum(map(len, here.values())) < prompts:
                    return
                del self._here[index]
                first, groups = 0, tuple(group for number in sorted(here) for group in here[number])
            self._jobs.setdefault(index, {})[first] = _Job[Judged](index, groups)
            self._changed.notify_all()

    def of(self, batch: Batch) -> Judged:
        """The rewards of a batch whose turn it is, computed now if they were not before; raises what judging raised."""
        with self._changed:
            jobs = [job for _, job in sorted(self._jobs.get(batch.index, {}).items())]
            begun = [id(group.samples) for job in jobs for group in job.groups]
            # What was judged is what the batch has come to, the very same completions.
            same = bool(jobs) and begun == [id(group.samples) for group in batch.groups]
            usable = same and self._draws is not None
            if not usable:
                for job in jobs:
                    job.done.cancel()
        try:
            if usable:
                for job in jobs:
                    with suppress(CancelledError):
                        job.done.exception()
                if not any(job.done.cancelled() or job.drew for job in jobs):
                    judged = [job.done.result() for job in jobs]
                    return judged[0] if self._join is None else self._join(judged)
            return self._in_turn(batch)
        finally:
            with self._changed:
                self._jobs.pop(batch.index, None)

    def _in_turn(self, batch: Batch) -> Judged:
        """The rewards of a batch, computed now."""
        with self._alone:
            if not self._functions:
                return self._judge(batch.groups)
            outside = capture()
            seed_by(self._seed, batch.index)
            before = capture()
            try:
                return self._judge(batch.groups)
            finally:
                self._learn(not equal(before, capture()))
                restore(*outside)

    def _learn(self, drew: bool) -> None:
        """Note whether random numbers were drawn while a batch was judged."""
        with self._changed:
            if drew and not self._draws:
                logger.info("%s: random numbers are drawn; from here on each batch is judged in its turn", self._name)
                for job in self._all():
                    job.done.cancel()
            self._draws = self._draws or drew
            self._changed.notify_all()

    def _all(self) -> list[_Job[Judged]]:
        return [job for jobs in self._jobs.values() for job in jobs.values()]

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
                self._do(job, trace)

    def _possible(self) -> _Job[Judged] | None:
        """The job that can be done next, before its turn."""
        return None if self._draws is None else next((job for job in self._all() if job.is_waiting), None)

    def _do(self, job: _Job[Judged], trace: Trace | None) -> None:
        started, before = time.monotonic(), capture() if self._functions else None
        outcome: Callable[[], None]
        try:
            outcome = partial(job.done.set_result, self._judge(job.groups))
        except BaseException as error:  # whatever it is, it is raised where the batch has its turn
            outcome = partial(job.done.set_exception, error)
        with self._changed:
            if before is not None and not equal(before, capture()):
                job.drew = True
                self._learn(True)
            outcome()
        if trace is not None:
            what = {"batch": job.index} if job.index > 0 else {"evaluation": -job.index}
            trace.add(self._name, started, time.monotonic(), self._name, **what)
