"""Generators whose workers may come and go, die or hang: what one had, others take.

One thread, the keeper, takes everything that comes from workers, hands out units, restarts and gives up. So nothing of
this waits for the learner, which may be training.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.generation.dispatch import Worker
from async_rlhf.generation.messages import Failure, Ready, Reply, Request, work
from async_rlhf.generation.protocol import GeneratorError
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.generation.roster import Roster

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_CLOSE_SECONDS = 60.0


class MortalWorker(Worker, Protocol):
    """A worker that can be restarted when it was lost."""

    starts: int
    """How often it was started; what comes from an earlier start is ignored."""
    since: float
    """When its silence may have begun."""

    has_begun: bool
    """Whether it has given a sign of life since it was started; until then it may be importing, building, compiling."""

    has_place: bool
    """Whether it has a host to run on. One that is lost before is placed elsewhere, and that counts as no restart."""

    def silent_for(self) -> float:
        """Seconds since its last sign of life, or its start, while it had something to do; 0 if unknown.

        May raise ``unstartable`` of its generator.
        """

    def end(self) -> str:
        """Make sure that it has ended, and describe how it ended."""

    def kill(self) -> None:
        """End it, whatever it is doing."""

    def start(self) -> None:
        """Start it, the first time or again. It says Ready once it can sample."""


class Stop(NamedTuple):
    """The worker shall end when it has answered what it has."""


class Arrived(NamedTuple):
    """What came from a worker, or is to become of it."""

    worker: Any
    start: int
    """Number of the start of the worker that sent it."""
    answer: Ready | Reply | Failure | Stop | None
    """None: it has died."""


class RestartingGenerator(RemoteGenerator):
    """Workers that may die or hang: others take what they had, and they are started again; the weights are still there.
    Workers can be added and stopped at any time.

    Args:
        arrived: where the workers put what comes from them.
        arguments: of :class:`~async_rlhf.generation.remote.RemoteGenerator`.
    """

    kind: str
    """What messages call a worker."""
    unstartable: type[Exception] = GeneratorError
    """What a worker raises when it cannot be started at all."""
    workers: Sequence[Any]
    """Each a :class:`MortalWorker`. The list is replaced, never changed."""

    def __init__(self, arrived: queue.SimpleQueue[Arrived | None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._arrived = arrived
        self._answers: queue.SimpleQueue[tuple[MortalWorker, Request, Reply] | BaseException] = queue.SimpleQueue()
        self._restarts = 0
        self._members = threading.RLock()
        """Held by who changes the workers."""
        self._stopping: list[MortalWorker] = []
        self._ending: list[threading.Thread] = []
        self._roster: Roster | None = None
        self._look_seconds = min(self.config.heartbeat_timeout / 4, self.config.start_timeout / 4, _LOOK_SECONDS)
        self._closing = False
        self._keeper = threading.Thread(target=self._keep, name=f"keeper of each {self.kind}", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End the workers."""
        self._closing = True
        self._arrived.put(None)
        self._keeper.join(timeout=_CLOSE_SECONDS)
        for thread in self._ending:
            thread.join(timeout=_CLOSE_SECONDS)
        super().close()
        if self._roster is not None:
            self._roster.clear()

    def add_worker(self) -> int:
        """Start another worker, from any thread, which samples as soon as it is ready. Returns its number."""
        with self._members:
            taken = {worker.number for worker in self.workers}
            number = next(number for number in count() if number not in taken)
            self.workers = sorted([*self.workers, self._make(number)], key=lambda worker: worker.number)
            return number

    def stop_worker(self, number: int) -> None:
        """Have a worker end when it has answered what it has; from any thread.

        Raises:
            ConfigError: there is no such worker, or it is the last.
        """
        with self._members:
            numbers = [worker.number for worker in self._staying()]
            right = f"must be one of {', '.join(map(str, numbers))}"
            require(number in numbers, "worker", number, right)
            require(len(numbers) > 1, "worker", number, "must leave another one")
            (worker,) = (worker for worker in self._staying() if worker.number == number)
            self._stopping.append(worker)
            self._arrived.put(Arrived(worker, worker.starts, Stop()))

    def follow(self, folder: Path) -> None:
        """Say in a run's folder which workers there are, and have as many as are asked for there."""
        roster = Roster(folder)
        roster.clear()
        roster.write([worker.number for worker in self.workers])
        self._roster = roster

    def _make(self, number: int) -> Any:
        """A new worker, already starting."""
        raise NotImplementedError

    def _staying(self) -> list[MortalWorker]:
        return [worker for worker in self.workers if worker not in self._stopping]

    def _follow(self) -> None:
        """Start or stop workers as is asked for in the run's folder, and say there who they are."""
        if self._roster is None:
            return
        try:
            wanted = self._roster.take()
            if wanted is not None:
                for _ in range(wanted - len(self._staying())):
                    self.add_worker()
                for worker in self._staying()[wanted:]:
                    self.stop_worker(worker.number)
            numbers = [worker.number for worker in self._staying()]
            if self._roster.present() != numbers or self._roster.is_asked():
                self._roster.write(numbers)
                logger.info("generators: %s", ", ".join(map(str, numbers)))
        except OSError as error:  # the run itself will say what is wrong with its folder
            logger.warning("WARNING: %s", error)

    def _wait(self, seconds: float) -> bool:
        """Wait for an answer, but wake up in between to see whether this process itself was stopped."""
        asked, pause = time.monotonic(), min(max(seconds, 0.0), self._look_seconds)
        try:
            answer = self._answers.get(timeout=pause)
        except queue.Empty:
            if _overslept(asked, pause):
                return True
            if seconds <= pause:
                raise self._no_answer() from None
            return False
        if isinstance(answer, BaseException):
            raise answer
        self._accept(*answer)
        return True

    def _no_answer(self) -> GeneratorError:
        numbers = ", ".join(str(worker.number) for worker in self._busy())
        return GeneratorError(
            f"no answer from {self.kind} {numbers} for {self.config.timeout:g} s (generation.timeout)"
        )

    def _busy(self) -> list[MortalWorker]:
        """Workers that have something to do, if only to get ready."""
        return [worker for worker in self.workers if worker.open or not self.dispatcher.is_there(worker)]

    def _keep(self) -> None:
        """Take what comes, and look after the workers in between, until it is closed or something goes wrong."""
        looked = time.monotonic()
        try:
            while not self._closing:
                asked = time.monotonic()
                pause = max(0.0, looked + self._look_seconds - asked)
                try:
                    arrived = self._arrived.get(timeout=pause)
                    if arrived is not None and not self._closing:
                        with self._members:
                            self._take(*arrived)
                except queue.Empty:
                    # What came after a stop of this process was taken first.
                    if _overslept(asked, pause) or _overslept(looked, self._look_seconds):
                        for worker in self.workers:
                            worker.since = time.monotonic()
                    with self._members:
                        self._look_for_the_silent()
                        self._follow()
                    looked = time.monotonic()
        except BaseException as error:
            self._answers.put(error)

    def _take(self, worker: MortalWorker, start: int, answer: Ready | Reply | Failure | Stop | None) -> None:
        if worker not in self.workers:
            return
        if isinstance(answer, Stop):
            self.dispatcher.leave(worker)
            self._dismiss_if_idle(worker)
        elif start != worker.starts:
            return
        elif isinstance(answer, Reply):
            self._answers.put((worker, self.taken(worker, answer), answer))
            self._dismiss_if_idle(worker)
        elif isinstance(answer, Ready):
            if worker not in self._stopping:
                self.dispatcher.join(worker)
        elif answer is None:  # it died, perhaps in the middle of a message
            self._replace(worker)
        elif answer.out_of_memory:
            self._replace(worker, f"ran out of memory: {answer.message}")
        elif answer.is_lost:
            self._replace(worker, answer.message)
        elif answer.is_config:
            raise ConfigError(answer.message)
        else:
            raise GeneratorError(f"{self.kind} {worker.number}: {answer.message}\n\n{answer.traceback}")

    def _look_for_the_silent(self) -> None:
        for worker in self._busy():
            key = "heartbeat_timeout" if worker.has_begun else "start_timeout"
            limit = self.config.heartbeat_timeout if worker.has_begun else self.config.start_timeout
            try:
                silent = worker.silent_for()
            except self.unstartable as error:
                self._give_up(worker, error)
                continue
            if silent > limit:
                worker.kill()
                self._replace(worker, f"gave no sign of life for {limit:g} s (generation.{key})")

    def _replace(self, worker: MortalWorker, why: str = "") -> None:
        """Give others what the worker had, and start it again if it may be."""
        back = self.dispatcher.lost(worker)
        ended = worker.end()
        if worker in self._stopping:
            self._dismiss_if_idle(worker)
            return
        if not worker.has_place:  # it got onto a host that was about to go
            worker.start()
            return
        why = why or ended
        if self._restarts >= self.config.max_restarts:
            right = f"{why} after {self._restarts} restarts (generation.max_restarts)"
            self._give_up(worker, GeneratorError(f"{self.kind} {worker.number} {right}"))
            return
        self._restarts += 1
        again = f", to sample {', '.join(work(request.batch) for request in back)} again" if back else ""
        logger.warning("%s %d %s; starting it again%s", self.kind, worker.number, why, again)
        self.trace.mark("restarted", worker.label, f"it {why}")
        worker.start()

    def _give_up(self, worker: MortalWorker, error: Exception) -> None:
        """Go on without the worker; raise the error if it was the last."""
        self.dispatcher.lost(worker)
        others = [each for each in self._staying() if each is not worker]
        if not others:
            raise error
        self._dismiss(worker)
        self.trace.mark("given up", worker.label, str(error))
        logger.warning("WARNING: %s; the run goes on with %d: %s", error, len(others), ", ".join(map(_name, others)))

    def _dismiss_if_idle(self, worker: MortalWorker) -> None:
        if worker in self._stopping and not worker.open:
            self._stopping.remove(worker)
            self._dismiss(worker)

    def _dismiss(self, worker: MortalWorker) -> None:
        """End a worker; beside the others, for that may take a while."""
        self.workers = [each for each in self.workers if each is not worker]
        self._ending.append(threading.Thread(target=worker.close, daemon=True))
        self._ending[-1].start()


def _name(worker: Worker) -> str:
    return worker.label


def _overslept(asked: float, pause: float) -> bool:
    """Whether a wait took so much longer than it should that this process itself was stopped for a while."""
    return time.monotonic() - asked > 2 * pause + 0.5
