"""Calls plain and async functions concurrently, within one time limit."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import inspect
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from async_rlhf.system import user_code

logger = logging.getLogger(__name__)

_THREADS = "reward function"


class TooLateError(Exception):
    """A function was not done within the time limit."""


class RemoteError(Exception):
    """An exception that a function raised in its process.

    Args:
        kind: the exception's type.
        text: its message.
        trace: its traceback.
    """

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(kind, text, trace)
        self.kind, self.text, self.trace = kind, text, trace

    def __str__(self) -> str:
        return f"\n{self.trace}"


class NoSequenceError(Exception):
    """A function returned something else than one value after the other. The message is what it returned."""


class ProcessDiedError(Exception):
    """A function ended its process, or somebody killed it."""


def call_together(
    calls: Sequence[Callable[[], Any]], timeout: float | None = None, retries: int = 0
) -> Iterator[tuple[int, list[Any] | BaseException]]:
    """Call every function in a separate thread, and yield each outcome as soon as it is known.

    If a function returns an awaitable, that runs in the process's event loop of the user's coroutines. At the time
    limit an async function is cancelled. A plain one cannot be; it is abandoned: its thread continues until it returns,
    and the result is dropped. The threads are daemons, so the process can end meanwhile. Threads that a function starts
    itself, as asyncio.to_thread does, are not managed here.

    Args:
        calls: called without arguments; each returns a sequence, or an awaitable of one.
        timeout: seconds for all of them together; None for no limit.
        retries: how often one that raises is called again, after 1, 2, 4 ... seconds.

    Yields:
        The number of the call and a list of what it returned, or the exception that it raised,
        or :class:`TooLateError`.

    Raises:
        BaseException: raised by a call but not a failure of it, such as KeyboardInterrupt.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    outcomes: queue.SimpleQueue[tuple[int, list[Any] | BaseException]] = queue.SimpleQueue()

    def deliver(number: int, call: Callable[[], Any]) -> None:
        outcomes.put((number, _retried(call, deadline, retries)))

    for number, call in enumerate(calls):
        # No ThreadPoolExecutor: the interpreter would wait for its threads before it ends.
        threading.Thread(target=deliver, args=(number, call), name=_THREADS, daemon=True).start()
    pending = set(range(len(calls)))
    while pending:
        try:
            number, outcome = outcomes.get(timeout=_seconds_until(deadline))  # Ctrl-C interrupts it
        except queue.Empty:
            user_code.leave_blocked_loop()
            for number in sorted(pending):
                yield number, TooLateError()
            return
        # A cancelled task is a failure of its function although CancelledError is not an Exception.
        if isinstance(outcome, BaseException) and not isinstance(outcome, (Exception, asyncio.CancelledError)):
            raise outcome
        pending.remove(number)
        yield number, outcome


def _retried(call: Callable[[], Any], deadline: float | None, retries: int) -> list[Any] | BaseException:
    for wait in (2.0**number for number in range(retries)):
        outcome = outcome_of(call, deadline)
        left = _seconds_until(deadline)
        raised = isinstance(outcome, (Exception, asyncio.CancelledError)) and not isinstance(outcome, _FINAL)
        if not raised or (left is not None and left <= wait):
            return outcome
        kind = outcome.kind if isinstance(outcome, RemoteError) else type(outcome).__name__
        logger.warning("a reward function raised %s; it is called again in %g s (reward_retries)", kind, wait)
        time.sleep(wait)
    return outcome_of(call, deadline)


_FINAL = (TooLateError, NoSequenceError, ProcessDiedError)
"""What another call would not mend."""


def outcome_of(call: Callable[[], Any], deadline: float | None) -> list[Any] | BaseException:
    """Make a call in this thread and return a list of what it returned, or the exception that it raised.

    Args:
        call: returns a sequence, or an awaitable of one.
        deadline: when an awaitable is cancelled, on the monotonic clock; None for never.
    """
    try:
        returned = call()
        if inspect.isawaitable(returned):
            returned = user_code.submit(_until(deadline, returned))[0].result()
        return returned if isinstance(returned, BaseException) else _listed(returned)
    except BaseException as error:  # of any kind: else the thread would just end and the caller would wait in vain
        return user_code.failure_of(error)


def _listed(returned: Any) -> list[Any]:
    """The values of a sequence, an array or a tensor. What else can be iterated over has no order, or other values."""
    arrayed = hasattr(returned, "__array__") and not hasattr(returned, "columns")  # a table's iterate over their names
    sequence = isinstance(returned, Sequence) and not isinstance(returned, (str, bytes, bytearray))
    if not (getattr(returned, "ndim", 0) > 0 if arrayed else sequence):
        raise NoSequenceError(f"{repr(returned)[:200]} ({type(returned).__name__})")
    return list(returned)


async def _until(deadline: float | None, awaitable: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(_seconds_until(deadline)) as limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise TooLateError from None
        raise  # the function's own timeout, such as a request's


@atexit.register
def _interrupt_abandoned() -> None:
    """Before Python 3.14, a daemon thread that runs C++ code, such as torch's, when the interpreter ends aborts the
    process, so a finished run would look like a crash. Raising an exception in the thread gets most threads out.
    """
    abandoned = [thread for thread in threading.enumerate() if thread.name == _THREADS and thread.daemon]
    for thread in abandoned:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    deadline = time.monotonic() + 1.0  # a sleeping thread does not notice, but does no harm
    for thread in abandoned:
        thread.join(_seconds_until(deadline))


def _seconds_until(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    # Locks refuse to wait longer than TIMEOUT_MAX, some 290 years.
    return min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
