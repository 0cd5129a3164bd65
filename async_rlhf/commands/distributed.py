"""A command on one rank or several: how it starts, and what rank 0 does before the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from async_rlhf.commands.stage import Stage
from async_rlhf.config.common import OnRanksConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.failure_detector import FailureDetector
from async_rlhf.learner.launch import start_ranks
from async_rlhf.system.random_state import seed_all

T = TypeVar("T")


@contextmanager
def on_ranks(config: OnRanksConfig, command: str) -> Iterator[Ranks]:
    """The ranks that were launched together. Within, the failure of one ends all, and rank 0 alone gives warnings.

    The global random generators begin with the configuration's seed, so that a reward function that draws is repeated.

    Raises:
        ConfigError: there are not as many as ``parallel.ranks`` says.
    """
    seed_all(getattr(config, "seed", 0))
    ranks = start_ranks(config, command)
    watch, package = FailureDetector(ranks), logging.getLogger("async_rlhf")
    before = package.level
    try:
        if not ranks.is_main:
            package.setLevel(logging.ERROR)
        with watch.watching():
            yield ranks
    finally:
        package.setLevel(before)
    watch.close()


def done_by(stage: Stage, ranks: Ranks) -> dict[str, Any] | None:
    """:meth:`Stage.done` by rank 0, which alone has the lock and writes, for all ranks."""
    return ranks.broadcast("finished stage", stage.done)


def lead_first(ranks: Ranks, label: str, compute: Callable[[], T]) -> T:
    """What ``compute`` returns, by rank 0 first: the others find in caches what it has made there."""
    if ranks.is_main:
        output = compute()
    ranks.barrier(label)
    return output if ranks.is_main else compute()
