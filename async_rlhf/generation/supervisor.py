"""Keeps workers at work: one thread takes what comes from them, restarts and gives up, adds and stops.

Workers may come and go, die or hang; what one had, others take. The thread, the keeper, waits for nobody: not for the
learner, which may be training.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from async_rlhf.config import ConfigError, GenerationConfig
from async_rlhf.config.base import require
from async_rlhf.generation.dispatch import Arrived, Dispatcher, Message, Stop, Worker
from async_rlhf.generation.protocol import GeneratorError, Ready, Reply, work
from async_rlhf.generation.worker_count import WorkerCount
from async_rlhf.system.errors import UserCodeError, last_place, own_frames
from async_rlhf.system.trace import Trace

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_CLOSE_SECONDS = 60.0


class Supervisor:
    """Looks after the workers of a generator from :meth:`start` to :meth:`close`.

    Args:
        kind: what messages call a worker.
        config: limits of time, and of restarts.
        make: a new worker with a number, already starting.
        number: how many there are to begin with.
        per_worker: most requests that a worker has at a time.
        arrived: where workers put what comes from them.
        trace: gets restarts.
        on_reply: called with a worker and its reply to a request, in the keeper.
        on_error: called with what ends the run.
        unstartable: what a worker raises that cannot be started at all.
    """

    def __init__(
        self,
        kind: str,
        config: GenerationConfig,
        make: Callable[[int], Worker],
        number: int,
        per_worker: int,
        arrived: queue.SimpleQueue[Arrived | None],
        trace: Trace,
        on_reply: Callable[[Any, Reply], None],
        on_error: Callable[[BaseException], None],
        unstartable: type[Exception],
    ) -> None:
        self.kind, self._config, self._make, self._trace = kind, config, make, trace
        self._arrived, self._on_reply, self._on_error, self._unstartable = arrived, on_reply, on_error, unstartable
        self.workers: Sequence[Any] = list(map(make, range(number)))
        """The list is replaced, never changed."""
        self.dispatcher = Dispatcher(self.workers, per_worker=per_worker)
        self.restarts = 0
        self._members = threading.RLock()
        """Held by who changes the workers."""
        self._stopping: list[Worker] = []
        self._ending: list[threading.Thread] = []
        self._worker_count: WorkerCount | None = None
        self.look_seconds = min(config.heartbeat_timeout / 4, config.start_timeout / 4, _LOOK_SECONDS)
        self._closing = False
        self._keeper = threading.Thread(target=self._run, name=f"keeper of each {kind}", daemon=True)

    def start(self) -> None:
        """Begin to look after the workers, if there are any."""
        if self.workers:
            self._keeper.start()

    def close(self) -> None:
        """End the workers."""
        self._closing = True
        self._arrived.put(None)
        if self._keeper.is_alive():
            self._keeper.join(timeout=_CLOSE_SECONDS)
        for thread in self._ending:
            thread.join(timeout=_CLOSE_SECONDS)
        for worker in self.workers:
            worker.close()
        if self._worker_count is not None:
            self._worker_count.clear()

    def busy(self) -> list[Worker]:
        """Workers that have something to do, if only to get ready."""
        return [worker for worker in self.workers if worker.open or not self.dispatcher.is_there(worker)]

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
            require(number in numbers, "worker", number, f"must be one of {', '.join(map(str, numbers))}")
            require(len(numbers) > 1, "worker", number, "must leave another one")
            (worker,) = (worker for worker in self._staying() if worker.number == number)
            self._stopping.append(worker)
            worker.arrive(Stop())

    def follow(self, folder: Path) -> None:
        """Say in a run's folder which workers there are, and have as many as are asked for there."""
        worker_count = WorkerCount(folder)
        worker_count.clear()
        worker_count.write([worker.number for worker in self.workers])
        self._worker_count = worker_count  # from here on the keeper obeys what is asked for there

    def _run(self) -> None:
        """Take what comes, and look after the workers in between, until it is closed or something goes wrong."""
        looked = time.monotonic()
        try:
            while not self._closing:
                asked = time.monotonic()
                pause = max(0.0, looked + self.look_seconds - asked)
                try:
                    arrived = self._arrived.get(timeout=pause)
                    if arrived is not None and not self._closing:
                        with self._members:
                            self._on_message(*arrived)
                except queue.Empty:
                    # What came after a stop of this process was taken first.
                    if overslept(asked, pause) or overslept(looked, self.look_seconds):
                        for worker in self.workers:
                            worker.since = time.monotonic()
                    with self._members:
                        self._replace_the_silent()
                        self._match_worker_count()
                    looked = time.monotonic()
        except BaseException as error:
            self._on_error(error)

    def _on_message(self, worker: Worker, start: int, message: Message) -> None:
        if worker not in self.workers:
            return
        if isinstance(message, Stop):
            self.dispatcher.leave(worker)
            self._dismiss_if_idle(worker)
        elif start != worker.starts:
            return
        elif isinstance(message, Reply):
            self._on_reply(worker, message)
            self._dismiss_if_idle(worker)
        elif isinstance(message, Ready):
            if worker.started is not None:
                logger.info("%s is ready after %.0f s", worker.label, time.monotonic() - worker.started)
            if worker not in self._stopping:
                self.dispatcher.join(worker)
        elif isinstance(message, BaseException):
            raise message
        elif message is None:  # it died, perhaps in the middle of a message
            self._replace(worker)
        elif message.is_lost:
            self._replace(worker, message.message)
        elif message.is_config:
            raise ConfigError(message.message)
        elif frames := own_frames(message.traceback):
            frame = last_place(frames)
            raise UserCodeError(f"{self.kind} {worker.number}: {message.message.removesuffix(frame)}{frame}", frames)
        else:
            raise GeneratorError(f"{self.kind} {worker.number}: {message.message}\n\n{message.traceback}")

    def _replace_the_silent(self) -> None:
        for worker in self.busy():
            key = "heartbeat_timeout" if worker.has_begun else "start_timeout"
            limit = self._config.heartbeat_timeout if worker.has_begun else self._config.start_timeout
            try:
                silent = worker.silent_for()
            except self._unstartable as error:
                self._give_up(worker, error)
                continue
            if silent > limit:
                worker.kill()
                self._replace(worker, f"gave no sign of life for {limit:g} s (generation.{key})")

    def _match_worker_count(self) -> None:
        """Start or stop workers as is asked for in the run's folder, and say there who they are."""
        if self._worker_count is None:
            return
        try:
            wanted = self._worker_count.take()
            if wanted is not None:
                for _ in range(wanted - len(self._staying())):
                    self.add_worker()
                for worker in self._staying()[wanted:]:
                    self.stop_worker(worker.number)
            numbers = [worker.number for worker in self._staying()]
            if self._worker_count.present() != numbers or self._worker_count.is_asked():
                self._worker_count.write(numbers)
                logger.info("generators: %s", ", ".join(map(str, numbers)))
        except OSError as error:  # the run itself will say what is wrong with its folder
            logger.warning("WARNING: %s", error)

    def _replace(self, worker: Worker, why: str = "") -> None:
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
        if self.restarts >= self._config.max_restarts:
            reason = f"{why} after {self.restarts} restarts (generation.max_restarts)"
            self._give_up(worker, GeneratorError(f"{self.kind} {worker.number} {reason}"))
            return
        self.restarts += 1
        again = f", to sample {', '.join(work(request.batch) for request in back)} again" if back else ""
        logger.warning("%s %d %s; starting it again%s", self.kind, worker.number, why, again)
        self._trace.mark("restarted", worker.label, f"it {why}")
        worker.start()

    def _give_up(self, worker: Worker, error: Exception) -> None:
        """Go on without the worker; raise the error if it was the last."""
        self.dispatcher.lost(worker)
        others = [each for each in self._staying() if each is not worker]
        if not others:
            raise error
        self._dismiss(worker)
        self._trace.mark("given up", worker.label, str(error))
        logger.warning(
            "WARNING: %s; the run goes on with %d: %s", error, len(others), ", ".join(each.label for each in others)
        )

    def _staying(self) -> list[Worker]:
        return [worker for worker in self.workers if worker not in self._stopping]

    def _dismiss_if_idle(self, worker: Worker) -> None:
        if worker in self._stopping and not worker.open:
            self._stopping.remove(worker)
            self._dismiss(worker)

    def _dismiss(self, worker: Worker) -> None:
        """End a worker; beside the others, for that may take a while."""
        self.workers = [each for each in self.workers if each is not worker]
        self._ending.append(threading.Thread(target=worker.close, daemon=True))
        self._ending[-1].start()


def overslept(asked: float, pause: float) -> bool:
    """Whether a wait took so much longer than it should that this process itself was stopped for a while."""
    return time.monotonic() - asked > 2 * pause + 0.5
