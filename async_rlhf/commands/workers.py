"""Says how many generators a run has, and has it start or stop some."""

from __future__ import annotations

import time
from pathlib import Path

from async_rlhf.config import ConfigError
from async_rlhf.config.base import Checked, configuration, key
from async_rlhf.generation.worker_count import WorkerCount
from async_rlhf.run.folder import refuse_second
from async_rlhf.system.lock import InUseError

_PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.1


@configuration
class WorkersConfig(Checked):
    """Say how many generators a run has, or have it start or stop some: ``async-rlhf workers RUN [N]``, on the host of
    its learner. Only runs with generator processes or Ray actors have such."""

    run: str
    """The output folder of a run that is training now."""
    workers: int | None = key(None, ge=1, le=1024, why="each is a process")
    """How many it shall have from now on, until it ends; null changes nothing."""


def run_workers(config: WorkersConfig) -> None:
    """Print the number of generators, after it has been changed if that is asked for.

    Raises:
        ConfigError: the run is not training, or has no generators of its own.
    """
    worker_count = WorkerCount(Path(config.run))
    if not _is_training(Path(config.run)) or worker_count.present() is None:
        rule = "must be the output folder of a run that is training, with generator processes or actors"
        raise ConfigError(f"run: got {config.run!r}; {rule}")
    if config.workers is not None:
        worker_count.ask(config.workers)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while worker_count.is_asked() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if worker_count.is_asked():
            print(f"the run has not answered for {_PATIENCE_SECONDS:g} s; it was asked for {config.workers} generators")
    numbers = worker_count.present() or []
    print(f"{len(numbers)} generators: {', '.join(map(str, numbers))}")


def _is_training(folder: Path) -> bool:
    try:
        refuse_second(folder)
    except InUseError:
        return True
    return False
