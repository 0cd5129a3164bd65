"""Where completions are sampled: on which GPUs, and on how many cores of a CPU that trains as well."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from async_rlhf.config import GenerationConfig, OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.config.engines import find
from async_rlhf.config.parallel import launched_on_host

_SHARE_WITH_LEARNER = 0.8
"""Of a GPU's memory, the most that generators may take where a learner or a reward model computes as well."""


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def shared_cores(config: OnlineConfig, device: torch.device, ranks: int = 1) -> Iterator[int | None]:
    """Within, the learner uses its share of the CPU's cores. Yields the threads for each generator process.

    The configuration decides; by default the cores are split evenly between the learner's ranks on this host and the
    workers, or with staleness 0, where one side waits while the other computes, each side has all of them. A learner on
    a GPU, or without workers beside it, keeps torch's own choice.
    """
    before = torch.get_num_threads()
    per_worker, learner = _threads(config, device, ranks)
    if learner is not None:
        torch.set_num_threads(learner)
    try:
        yield per_worker
    finally:
        torch.set_num_threads(before)


def _workers(config: OnlineConfig) -> int:
    """Generator processes on this host."""
    return config.generation.workers if config.placement == "process" and config.launch == "local" else 0


def _threads(config: OnlineConfig, device: torch.device, ranks: int) -> tuple[int | None, int | None]:
    """Of each generator process, and of each rank of the learner; None for torch's choice."""
    cores, workers = available_cores(), _workers(config)
    alone = workers + ranks == 1 or device.type != "cpu"
    together = config.staleness > 0
    sides = max(1, workers + together * ranks)
    per_worker = config.generation.num_threads or (None if alone else max(1, cores // sides))
    learner = config.num_threads or (
        None if alone else max(1, (cores - together * workers * (per_worker or 0)) // ranks)
    )
    return per_worker, learner


def threads_side_by_side(config: OnlineConfig, device: torch.device, ranks: int) -> tuple[int, int, int] | None:
    """Threads of each generator, generators, and threads of the learner, if one CPU computes both at the same time."""
    per_worker, learner = _threads(config, device, ranks)
    workers = _workers(config)
    if config.staleness == 0 or workers == 0 or ranks > 1 or per_worker is None or learner is None:
        return None
    return per_worker, workers, learner


def check_engine(config: GenerationConfig) -> None:
    """Require that what the engine needs is installed.

    Raises:
        ConfigError: it is not.
    """
    rule = "" if config.placement == "server" else find(config.engine).check()
    require(not rule, "generation.engine", config.engine, rule)


def worker_devices(
    device: str | None, number: int, learner: torch.device, each: int = 1, apart: Collection[str] = ()
) -> tuple[str, ...]:
    """The devices of a worker. By default workers use the GPUs that the learner does not use, the last first; a CPU
    learner's workers run on the CPU, and a single GPU is shared.

    Args:
        device: as configured.
        number: the worker's. Workers beyond the last free GPUs begin with the first ones again.
        learner: its device.
        each: how many GPUs a worker needs.
        apart: the devices that frozen models have for themselves.
    """
    if device is not None and device != "cuda":
        return (device,)
    if device is None and learner.type != "cuda":
        return (learner.type,)
    others = free_gpus(learner, apart) or free_gpus(learner) or [0]
    groups = max(1, len(others) // each)
    first = number % groups * each
    return tuple(f"cuda:{gpu}" for gpu in others[first : first + each])


def free_gpus(learner: torch.device, apart: Collection[str] = ()) -> list[int]:
    """The GPUs that neither the learner nor a frozen model of its own device uses, the last first."""
    ranks, used = launched_on_host(), set[int]()
    if learner.type == "cuda":
        used |= set(range(ranks)) if ranks > 1 else {learner.index or 0}
    used |= {torch.device(name).index or 0 for name in apart if name.startswith("cuda")}
    return [gpu for gpu in reversed(range(torch.cuda.device_count())) if gpu not in used]


def memory_taken(config: OnlineConfig, learner: torch.device) -> dict[str, float]:
    """The share of each GPU's memory that vLLM may take in generator processes on this host."""
    generation, taken = config.generation, dict[str, float]()
    if "vllm_options" in find(generation.engine).supports and generation.vllm.kv_cache_gb is None:
        for number in range(_workers(config)):
            size = generation.vllm.tensor_parallel_size
            for device in worker_devices(generation.device, number, learner, size, config.own_devices):
                taken[device] = taken.get(device, 0.0) + generation.vllm.gpu_memory_utilization
    return {device: share for device, share in taken.items() if device.startswith("cuda")}


def check_memory(config: OnlineConfig, learner: torch.device) -> None:
    """Require that those who share a GPU do not ask for more than all of its memory.

    Raises:
        ConfigError: they do.
    """
    each, ranks = config.generation.vllm.gpu_memory_utilization, launched_on_host()
    used = {f"cuda:{rank}" for rank in range(ranks)} if ranks > 1 else {f"cuda:{learner.index or 0}"}
    used = (used if learner.type == "cuda" else set()) | config.own_devices
    for device, share in memory_taken(config, learner).items():
        number, room = round(share / each), _SHARE_WITH_LEARNER if device in used else 1.0
        others = f"{number} generators" if number > 1 else "a generator"
        others += " and what is trained, or judges," if device in used else ""
        rule = f"must be at most {math.floor(100 * room / number) / 100:g}, and leave what the learner needs"
        rule = f"{others} share {device}; {rule if device in used else rule.partition(',')[0]}"
        require(share <= room + 1e-9, "generation.vllm.gpu_memory_utilization", each, rule)
        # vLLM counts all that leaves a GPU while it starts as its own: the later one would find no room for its cache.
        rule = f"must be set: {number} generators share {device}, and each would measure the other's memory as its own"
        require(number == 1, "generation.vllm.kv_cache_gb", None, rule)


def check_gpus(config: OnlineConfig, learner: torch.device) -> None:
    """Require that there are GPUs enough: for models that several of them share, and beside the ranks of a learner.

    Raises:
        ConfigError: there are not.
    """
    generation = config.generation
    each, key = generation.vllm.tensor_parallel_size, "generation.vllm.tensor_parallel_size"
    if each > 1 and config.placement == "inline":
        count = torch.cuda.device_count()
        rule = f"must be at most {count}, the GPUs that this process sees"
        require(learner.type != "cuda" or each <= count, key, each, rule)
        return
    on_gpus = learner.type == "cuda" if generation.device is None else generation.device == "cuda"
    free = free_gpus(learner, config.own_devices) if on_gpus else []
    if each == 1:
        rule = f"the {config.parallel.ranks} ranks leave no GPU to generators; must name a GPU that they are to share "
        rule += '("cuda:0"), or be "cpu"; or start fewer ranks, let rank 0 see another GPU, or sample on servers'
        needs_own = on_gpus and config.placement == "process" and config.parallel.ranks > 1
        require(not needs_own or bool(free), "generation.device", generation.device, rule)
        return
    needed = each * generation.workers
    left = f"the learner leaves {len(free)} of {torch.cuda.device_count()} GPUs"
    rule = f"{left}, and generation.workers {generation.workers} need {needed}; must be "
    most = len(free) // generation.workers
    rule += f"at most {most}" if most else "1, with fewer generation.workers"
    require(not on_gpus or needed <= len(free), key, each, rule)
