"""Reward functions in separate processes, which can be killed: the learner's side, and the process's.

A thread cannot be stopped while it holds Python's lock (the GIL), as a regular expression does that backtracks
forever; meanwhile neither learner nor signal handlers run. A process can be stopped. It is forked from the same fork
server as generator processes and loads its function by name: nothing of the learner, its threads or its GPU is copied.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch

from async_rlhf.rewards.base import Reward
from async_rlhf.rewards.calls import NoSequenceError, ProcessDiedError, RemoteError, TooLateError, outcome_of
from async_rlhf.rewards.functions import RewardFunction, has_failed, load_object, name_loaded_by, number_of
from async_rlhf.system.random_state import capture, equal, restore
from async_rlhf.system.subprocesses import context_of, hang_up, start_process

logger = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""How long an async function that was cancelled at the limit may take to end before its process is killed."""
_LONGEST_POLL = 1e6  # seconds; the system call accepts at most about 24 days


Loader = Callable[[], RewardFunction]
"""Loads a function in another process."""


def loader_of(function: RewardFunction) -> Loader | str:
    """How another process loads a function, or why it cannot."""
    if hasattr(function, "load_state_dict"):
        return "keeps a state (state_dict), which this process saves"
    if (name := name_loaded_by(function)) is not None:
        return _by_name(name)
    if isinstance(function, Reward) and type(function).__module__ != "__main__":
        return partial(_unpickled, pickle.dumps(function))  # its options are plain values
    if not isinstance(function, types.FunctionType):
        return "is an object or a method, which may hold anything"
    module, attribute = sys.modules.get(function.__module__), function.__qualname__
    if function.__module__ == "__main__":
        return "is defined in the script itself"
    if module is None or getattr(module, attribute, None) is not function:
        return "is made within another function"
    with suppress(ImportError, ValueError):
        if find_spec(function.__module__) is not None:
            return _by_name(f"{function.__module__}:{attribute}")
    file = getattr(module, "__file__", None)
    return _by_name(f"{file}:{attribute}") if file and file.endswith(".py") else "is in a module that has no file"


def _by_name(name: str) -> Loader:
    return partial(load_object, name, "reward_funcs")


def _unpickled(function: bytes) -> RewardFunction:
    return pickle.loads(function)


class StoppableFunction:
    """A reward function that is called in a separate process.

    Calls must not overlap. The states of Python's, numpy's and torch's random generators are sent there and back.

    Args:
        name: its name in messages.
        function: the function itself, for arguments that cannot be sent.
        load: in the process.
        limit: seconds after which an async function is cancelled there.
    """

    def __init__(self, name: str, function: RewardFunction, load: Loader, limit: float) -> None:
        self.name, self.limit = name, limit
        self._function, self._load = function, load
        self._process: Any = None
        self._ready = self._is_lost = self._late = False
        self._idle = threading.Event()
        self._idle.set()

    def start(self) -> None:
        """Start the process unless it is running; :meth:`wait` waits for it."""
        if self._is_lost:
            return
        idle = self._idle.wait(GRACE_SECONDS)  # after an error elsewhere, nothing waited for the last call
        if self._process is not None and idle and self._process.is_alive() and not self._late:
            return
        self._kill()
        context = context_of()
        self._pipe, theirs = context.Pipe()
        self._leash, held = context.Pipe()
        surroundings = (os.getcwd(), list(sys.path), dict(os.environ), logging.getLogger().getEffectiveLevel())
        # Not a daemon: daemons may not start processes, as some rewards do.
        arguments = (theirs, held, self._load, surroundings)
        process = context.Process(target=_serve, args=arguments, name=f"reward-{self.name}")
        process.daemon = False
        start_process(process, f"reward function {self.name}")
        held.close()
        theirs.close()  # only the process holds it now, so its death ends our read
        self._process, self._ready, self._late = process, False, False
        atexit.register(self.close)  # runs before multiprocessing's own handler, which would wait for the process

    def wait(self) -> None:
        """Wait until the process has loaded the function, as the limit is for calls. If it cannot, call it here."""
        if self._is_lost or self._ready:
            return
        try:
            wrong = self._pipe.recv()
        except (EOFError, OSError):
            wrong = self._epitaph()
        self._ready = wrong is None
        if wrong is not None:
            self._is_lost = True
            self._kill()
            logger.warning("reward function %s cannot be loaded in a process of its own (%s)", self.name, wrong)
            warn_unstoppable(self.name, "is called in this process")

    def __call__(self, /, **arguments: Any) -> Any:
        """The rewards.

        Raises:
            RemoteError: the function raised something.
            ProcessDiedError: its process has ended.
            TooLateError: an async function was cancelled.
        """
        if self._is_lost:
            return self._function(**arguments)
        before = capture(gpus=False)
        try:
            message = pickle.dumps((arguments, self.limit, torch.get_num_threads(), before))
        except Exception as error:  # of any kind: objects have their own ways to refuse pickling
            self._is_lost = True
            logger.warning("reward function %s: its columns cannot be sent to a process (%r)", self.name, error)
            warn_unstoppable(self.name, "is called in this process")
            return self._function(**arguments)
        self._idle.clear()
        try:
            self._pipe.send_bytes(message)
            # The caller stopped waiting at the limit; end the process here if the function does not end.
            if not self._pipe.poll(None if self.limit > _LONGEST_POLL else self.limit + GRACE_SECONDS):
                self._late = True
                self._send_kill()
                raise TooLateError
            outcome, states = self._pipe.recv()
        except (EOFError, OSError):
            raise ProcessDiedError(self._epitaph()) from None
        finally:
            self._idle.set()
        if states is not None:
            restore(*states)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """End the process."""
        atexit.unregister(self.close)
        self._kill()

    def _kill(self) -> None:
        if self._process is None:
            return
        self._send_kill()
        hang_up(self._pipe)
        self._process.join()
        self._idle.wait(5)
        self._pipe.close()
        self._leash.close()
        self._process, self._ready = None, False

    def _send_kill(self) -> None:
        for kill in (os.killpg, os.kill):  # including processes that the function started
            with suppress(OSError):
                kill(self._process.pid, signal.SIGKILL)

    def _epitaph(self) -> str:
        process = self._process
        if process is not None:
            process.join(5)
        return f"its process died (exit code {None if process is None else process.exitcode})"


def warn_unstoppable(name: str, why: str) -> None:
    """Warn that a time limit may not hold."""
    logger.warning(
        "reward_timeout: reward function %s %s: over the limit it is abandoned in its thread, and code that keeps "
        "Python's lock, such as a regular expression, holds up everything. Only what can be loaded by name, "
        '"module:function" or "file.py:function", and keeps no state can be stopped',
        name,
        why,
    )


@dataclass(frozen=True)
class _Unusable:
    """Stands for a value that is not a number; messages show it as the value's text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _serve(
    pipe: Connection, leash: Connection, load: Loader, surroundings: tuple[str, list[str], dict[str, str], int]
) -> None:
    """Answer calls until the learner is gone."""
    # When the learner dies, the kernel ends this process even if its function never returns to Python: at end of
    # file the kernel sends SIGIO, which has no handler. (On macOS the current call is finished first.)
    fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC)
    os.setpgid(0, 0)
    # Only the learner ends it. Use handlers: programs that it starts would inherit ignored or blocked signals.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
    folder, path, environment, level = surroundings
    os.chdir(folder)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    try:
        function = load()
    except BaseException as error:  # of any kind: the learner has loaded the function and will call it itself
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(None)
    with suppress(EOFError, OSError):
        while True:
            arguments, limit, threads, before = pickle.loads(pipe.recv_bytes())
            if torch.get_num_threads() != threads:  # sums depend on it
                torch.set_num_threads(threads)
            restore(*before)
            outcome = _sendable(outcome_of(partial(function, **arguments), time.monotonic() + limit))
            after = capture(gpus=False)
            pipe.send((outcome, None if equal(before, after) else after))


def _sendable(outcome: list[Any] | BaseException) -> list[Any] | BaseException:
    """Keep numbers, and send as text what may exist only in this process."""
    if isinstance(outcome, (TooLateError, NoSequenceError, KeyboardInterrupt)):
        return type(outcome)(*map(str, outcome.args))
    if isinstance(outcome, BaseException):
        kind = type(outcome).__name__
        return RemoteError(kind, str(outcome), "".join(traceback.format_exception(outcome)))
    return [_sendable_value(value) for value in outcome]


def _sendable_value(value: Any) -> Any:
    number = None if value is None else number_of(value)
    return _Unusable(_text_of(value)) if has_failed(number) else number


def _text_of(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception as error:  # of any kind: a value of the user's own class
        return f"a {type(value).__name__} ({type(error).__name__} in its repr)"
