"""What every call of the user's code needs: values of its own, and the event loop of its coroutines.

There is one such loop for the life of a process, in a thread of its own. So what belongs to a loop, such as an HTTP
client, may be kept between two calls, and goes on between two batches.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import ctypes
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.0
"""Within which a loop that nobody blocks does something else."""


class ExitError(Exception):
    """The user's code has called sys.exit(). The process is not its own to end, least of all with status 0."""


def failure_of(error: BaseException) -> BaseException:
    """What a call of the user's code has raised, with :class:`ExitError` in place of SystemExit."""
    if not isinstance(error, SystemExit):
        return error
    return ExitError(f"sys.exit({error.code!r}) was called").with_traceback(error.__traceback__)


def own_copy(value: Any) -> Any:
    """A deep copy. What cannot be copied, such as a lock, stays as it is."""
    try:
        return copy.deepcopy(value)
    except Exception:  # of any kind: objects have their own ways to refuse it
        if isinstance(value, Mapping):
            return {name: own_copy(each) for name, each in value.items()}
        return [own_copy(each) for each in value] if isinstance(value, list) else value


class _Loop:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="coroutines of the user's", daemon=True)
        self._thread.start()

    def answers(self) -> bool:
        """Whether nobody blocks it."""
        answered = threading.Event()
        self.loop.call_soon_threadsafe(answered.set)
        return answered.wait(_ANSWER_SECONDS)

    def end(self) -> None:
        """Cancel what runs there; what blocks it is interrupted, if it can be."""
        self._ended = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_ANSWER_SECONDS / 2)
        if self._thread.is_alive():
            ident = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
            self._thread.join(_ANSWER_SECONDS / 2)

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ended:
            with suppress(KeyboardInterrupt, SystemExit):  # a task raised it; whoever waits for that one has it, too
                self.loop.run_forever()
        with suppress(BaseException):  # of any kind: the process ends
            for task in (tasks := asyncio.all_tasks(self.loop)):
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=_ANSWER_SECONDS / 4))


_loops: list[_Loop] = []
"""The last one is in use; those before it are blocked."""
_making = threading.Lock()


def submit(awaitable: Awaitable[Any]) -> tuple[Future[Any | BaseException], Callable[[], object]]:
    """Have an awaitable done in the loop; from any thread.

    Returns:
        A future of its result, or of whatever it raised, as a result, too: a KeyboardInterrupt there ends no loop. And
        a function that cancels it; the future then is done when it has ended.
    """
    task: list[asyncio.Task[Any]] = []

    async def outcome() -> Any:
        task.extend(filter(None, [asyncio.current_task()]))
        try:
            return await awaitable
        except BaseException as error:  # of any kind: it is raised by who waits for it
            return failure_of(error)

    with _making:
        if not _loops:
            _loops.append(_Loop())
        loop = _loops[-1].loop
        done = asyncio.run_coroutine_threadsafe(outcome(), loop)
    return done, lambda: loop.call_soon_threadsafe(lambda: [each.cancel() for each in task])


def leave_blocked_loop() -> None:
    """To be called when something was not done in time: if a coroutine blocks the loop, the next ones get another."""
    with _making:
        if _loops and not _loops[-1].answers():
            logger.warning(
                "WARNING: a coroutine of yours blocks its event loop: it must await what takes long, or call it by "
                "asyncio.to_thread. It is left behind, and others go on in a new loop"
            )
            _loops.append(_Loop())


def _forget() -> None:
    """In a forked process, which has none of the threads."""
    global _making
    _loops.clear()
    _making = threading.Lock()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _end() -> None:
    for loop in _loops:
        loop.end()
