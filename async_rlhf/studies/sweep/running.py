"""Works off many jobs, each in a process of its own, a few at a time."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from async_rlhf.config import ConfigError
from async_rlhf.system.files import write_file
from async_rlhf.system.subprocesses import context_of, start_process

LOG = "log.txt"
_RESULT = ".result.json"


@dataclass(frozen=True)
class Job:
    """A function, its argument, and a folder for its log. Function and argument are pickled."""

    name: str
    function: Callable[[Any], dict[str, Any]]
    argument: Any
    folder: Path


class Outcome(NamedTuple):
    """What came of a job: results, or the error in words."""

    job: Job
    results: dict[str, Any] | None
    error: str = ""


def run_jobs(jobs: Sequence[Job], parallel: int, threads: int, devices: Sequence[str] = ()) -> Iterator[Outcome]:
    """Run all jobs and yield each outcome as it comes. A job that fails, or is killed, does not end the others.

    Args:
        jobs: in the order in which they are started.
        parallel: processes at a time.
        threads: CPU threads of each.
        devices: values of CUDA_VISIBLE_DEVICES to divide among the processes at a time; empty for no change.
    """
    waiting, running = list(reversed(jobs)), dict[Any, tuple[BaseProcess, Job, str | None]]()
    places: list[str | None] = list(reversed(devices[:parallel])) or [None] * parallel
    try:
        while waiting or running:
            while waiting and places:
                job, device = waiting.pop(), places.pop()
                process = _started(job, threads, device)
                running[process.sentinel] = (process, job, device)
            for sentinel in connection.wait(list(running)):
                process, job, device = running.pop(sentinel)
                places.append(device)
                process.join()
                yield _outcome(job, process.exitcode)
    finally:  # nobody waits for them any more
        for process, _, _ in running.values():
            process.kill()


def run_alone(job: Job, threads: int) -> Outcome:
    """Run one job and wait for it; in a task of a cluster, for example."""
    (outcome,) = run_jobs([job], 1, threads)
    return outcome


def _started(job: Job, threads: int, device: str | None) -> BaseProcess:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / _RESULT).unlink(missing_ok=True)
    process: BaseProcess = context_of().Process(target=_work, args=(job, threads, device), name=job.name)
    start_process(process, job.name)
    return process


def _outcome(job: Job, exit_code: int | None) -> Outcome:
    try:
        outcome = json.loads((job.folder / _RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Outcome(job, None, f"its process ended with exit code {exit_code}; see {job.folder / LOG}")
    (job.folder / _RESULT).unlink()
    return Outcome(job, outcome["results"], outcome["error"])


def _work(job: Job, threads: int, device: str | None) -> None:
    """In the job's process: write to its log, do it, and leave the result in a file."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if device is not None:  # CUDA has not been initialised: the fork server does not
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    log = os.open(job.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    results, error = None, ""
    try:
        results = job.function(job.argument)
    except ConfigError as problem:
        error = str(problem)
    except Exception as problem:  # of any kind: it is told, and the other jobs go on
        error = f"{type(problem).__name__}: {problem}; see {job.folder / LOG}"
        traceback.print_exc()
    write_file(job.folder / _RESULT, json.dumps({"results": results, "error": error}))


def _end_with_parent() -> None:
    """A sweep that is killed takes its runs with it; they resume when it is started again."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
