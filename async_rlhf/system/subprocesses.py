"""Starts child processes for generators and reward functions."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import async_rlhf
from async_rlhf.config.base import ConfigError
from async_rlhf.config.parallel import OF_A_RANK

logger = logging.getLogger(__name__)

NO_RANK: Mapping[str, str | None] = dict.fromkeys(OF_A_RANK)
"""Changes of the environment so that a process does not count as a rank."""

_STARTING = threading.Lock()
"""Held while a process is started, by one thread at a time: what is changed meanwhile belongs to the whole process."""

_NO_CUDA_YET = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""With flash-attn installed, importing transformers asks whether there is a GPU. torch would initialise CUDA to find
out, and no process forked after that could use it; with this, it asks the driver's library instead."""


def context_of(method: str = "forkserver") -> Any:
    """multiprocessing's context for "forkserver" or "spawn".

    A fork server that has already loaded torch and transformers starts processes in milliseconds; a fresh interpreter
    needs seconds. It has no threads and has not touched a GPU, so forking it is safe; forking the learner is not. Where
    it would load other code than ours, there are fresh interpreters instead: they take over our module path at first.
    """
    if method == "forkserver" and other_package() is not None:
        method = "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["async_rlhf.generation.worker", "async_rlhf.generation.transformers_engine"])
    return context


def other_package() -> str | None:
    """The file of a package of our name that a program started here imports: the current folder comes first for it."""
    spec = PathFinder.find_spec(async_rlhf.__name__, [""])
    origin = None if spec is None else spec.origin  # None, too, for a folder without __init__.py: ours comes first
    return None if origin is None or os.path.samefile(origin, str(async_rlhf.__file__)) else origin


def require_own_package(command: str, who: str) -> None:
    """Require that programs that a library starts here import this very package.

    Args:
        command: what errors call what was asked for.
        who: what errors call those programs.

    Raises:
        ConfigError: the current folder, which comes first for them, has another one.
    """
    if (other := other_package()) is not None:
        why = f"in this folder {who} would import {other} instead of {async_rlhf.__file__}"
        raise ConfigError(f"{command}: {why}; must be started in another folder")


def start_process(
    process: BaseProcess, label: str, method: str = "forkserver", environment: Mapping[str, str | None] = NO_RANK
) -> None:
    """Start a process of :func:`context_of`: it ignores SIGTERM and SIGHUP, and does not run the user's script again.

    Args:
        process: not started yet.
        label: its name in messages.
        method: of its context.
        environment: variables to change; None deletes one. (A fork server keeps those of its own start.)
    """
    if method == "forkserver":
        environment = {**environment, **_NO_CUDA_YET}
    with _STARTING, _main_left_alone(), _endings_blocked(), environment_changed(environment):
        try:
            process.start()
        except (OSError, EOFError, AttributeError) as error:  # the fork server is dead, or its socket is gone
            if method != "forkserver":
                raise
            logger.warning("%s: the fork server does not answer (%r); starting another", label, error)
            _leave_fork_server()
            process.start()


@contextmanager
def started_within(environment: Mapping[str, str | None]) -> Iterator[None]:
    """Processes that a library starts within belong to this one, which ends them: they ignore SIGINT as well, get these
    variables, and do not run the user's script again.
    """
    with _STARTING, _main_left_alone(), _endings_blocked(signal.SIGINT), environment_changed(environment):
        yield


def hang_up(pipe: Connection) -> None:
    """Close the connection: the process at the other end exits when it is idle or was not told to end."""
    with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _leave_fork_server() -> None:
    """Make multiprocessing start another fork server, in its folder, which a cleaner of /tmp may have deleted.

    If the old one lives, it is not ended: the processes that it forked keep running, and waiting for them needs it. It
    ends with this process.
    """
    Path(util.get_temp_dir()).mkdir(mode=0o700, parents=True, exist_ok=True)
    # There is no public way: otherwise it keeps using a server that lives but whose socket is gone.
    vars(forkserver)["_forkserver"]._forkserver_pid = None


@contextmanager
def _endings_blocked(*more: signal.Signals) -> Iterator[None]:
    """Processes started within ignore SIGTERM and SIGHUP: a scheduler sends SIGTERM to a whole job and a closed
    terminal sends SIGHUP, but the learner still needs its processes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, *more})
    try:
        resource_tracker.ensure_running()  # starting it would let SIGTERM through again
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def environment_changed(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Within, and for processes started within, the environment has these variables, without those that are None."""
    before = {name: os.environ.get(name) for name in variables}
    _set_environment(variables)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _main_left_alone() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in the worker, which needs nothing from it.

    Without this, a script that trains at its top level, without ``if __name__ == "__main__"``, could not start workers.
    """
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)
