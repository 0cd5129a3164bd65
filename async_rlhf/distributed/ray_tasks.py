"""Ray: independent pieces of work as tasks, wherever the cluster has room."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from async_rlhf.config.base import require
from async_rlhf.distributed.ray import connect_to, describe_nodes

import ray  # isort: skip  # after distributed.ray, whose error says how to install it

from ray.exceptions import RayError  # isort: skip

logger = logging.getLogger(__name__)

T = TypeVar("T")
_RETRIES = 3
"""Of a task whose process was lost. One that is lost each time, for example for lack of memory, is an error."""


def run_tasks(
    work: Callable[[Any], T], items: Sequence[Any], num_cpus: float, num_gpus: float
) -> Iterator[tuple[Any, T | None, str]]:
    """Call ``work`` with each item in a task of its own, in this process's current folder, which the nodes must share.
    A task whose node or process is lost is done again, up to three times.

    The cluster is that of $RAY_ADDRESS, else the one that this host is a node of, else a new one on this host.

    Args:
        work: a function that every node can import.
        items: its arguments; they and what it returns are pickled.
        num_cpus: CPUs that each task reserves.
        num_gpus: GPUs that each reserves, possibly a fraction of one.

    Yields:
        As each ends: the item, what came of it, and else the error in words.

    Raises:
        ConfigError: there is no cluster, or none of its nodes has what a task needs.
    """
    if not ray.is_initialized():
        connect_to(None)
    logger.info("Ray: %s", describe_nodes())
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    rule = f"must fit on a node, as the CPUs of each run; the cluster has {describe_nodes()}"
    require(any(node.get("CPU", 0) >= num_cpus for node in nodes), "threads", num_cpus, rule)
    rule = f"must fit on a node, with {num_cpus:g} CPUs for each run; the cluster has {describe_nodes()}"
    fits = any(node.get("CPU", 0) >= num_cpus and node.get("GPU", 0) >= num_gpus for node in nodes)
    require(fits, "gpus", num_gpus, rule)
    here = os.getcwd()

    def call(item: Any) -> T:
        os.chdir(here)  # names of files are relative to it
        return work(item)

    task = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=_RETRIES)(call)
    waiting = {task.remote(item): item for item in items}
    try:
        while waiting:
            (done,), _ = ray.wait(list(waiting))
            item = waiting.pop(done)
            try:
                yield item, ray.get(done), ""
            except RayError as error:
                yield item, None, f"{type(error).__name__}: {error}"
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)
