"""Scripts in forks of a process that has loaded what they need, in place of interpreters that take seconds to do so."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import forkserver, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from async_rlhf.system.subprocesses import NO_RANK, start_process

PRELOADED = ["torch.distributed.run", "async_rlhf.cli", "async_rlhf.run.trainer", "async_rlhf.generation.worker"]
PRELOADED += ["async_rlhf.generation.transformers_engine"]


class Forked:
    """A process of the fork server's, as subprocess would show it."""

    def __init__(self, process: BaseProcess) -> None:
        self.process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def start_forked(target: Callable[..., None], *words: object, log: Path, **environment: str) -> Forked:
    """Call it with these words in a fork, in a session of its own; the log gets what is printed."""
    # Where there may be a GPU, what is forked should know nothing of it.
    method = "forkserver" if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    log.write_bytes(b"")
    call = partial(_call, target, words, log, {**os.environ, **environment}, os.getcwd())
    process = multiprocessing.get_context(method).Process(target=call, daemon=False)
    start_process(process, "a fork", method)
    return Forked(process)


def _call(target: Callable[..., None], words: Any, log: Path, environment: dict[str, str], folder: str) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()  # a crash of a library says where it was
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    target(*words)


def be_script(script: Path, *words: str) -> None:
    """In the fork: as an interpreter that runs the script, to its end."""
    ctypes.CDLL(None).prctl(1, 0)  # a rank that torchrun has started lives on without it
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # not as torchrun's agent takes them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fork_the_fork_server()
    forkserver.ensure_running()
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    if code:
        sys.stdout.flush()
        os._exit(code)


def fork_the_fork_server() -> None:
    """Have the first server of generators be a fork of this process: an interpreter would import everything again.

    Safe while there is no other thread; one that is started again later is an interpreter of its own, as ever.
    """
    spawn = util.spawnv_passfds

    def fork_once(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        if "forkserver" not in str(arguments[-1]):
            return spawn(path, arguments, descriptors)
        util.spawnv_passfds = spawn
        if pid := os.fork():
            return pid
        code = 1
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, nothing, *descriptors}:
                os.dup2(nothing, number)  # not closed: objects of this process may still close the number
            for name in NO_RANK:
                os.environ.pop(name, None)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
            exec(arguments[-1], {})
            code = 0
        finally:
            os._exit(code)

    util.spawnv_passfds = fork_once
