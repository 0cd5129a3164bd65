"""The ranks that torchrun, accelerate launch or srun have started, and the device of each.

torchrun --nproc-per-node 2 -m async_rlhf.cli train --config run.yml
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from async_rlhf.config.base import require
from async_rlhf.config.common import OnRanksConfig
from async_rlhf.config.parallel import launched_on_host, launched_ranks
from async_rlhf.distributed.collectives import FOR_EVER, Ranks
from async_rlhf.models.loading import default_device

logger = logging.getLogger(__name__)


def start_ranks(config: OnRanksConfig, command: str = "train") -> Ranks:
    """Meet the other ranks, if the process was launched as one of several; ``command`` is what errors call it.

    Raises:
        ConfigError: there are not as many as ``parallel.ranks`` says, or the device is not there.
    """
    launched = launched_ranks()
    if launched == 1 and config.device is not None:
        device = device_of_host("device", config.device)
        if device.type == "cuda" and device.index:
            torch.cuda.set_device(device)  # as ranks do: what asks for no GPU by name then leaves the first one alone
    rule = f"must be {launched}, the processes that were launched, or left out"
    if launched == 1:
        rule = "start the command with torchrun or accelerate launch, such as: torchrun --nproc-per-node"
        rule += f" {config.parallel.ranks} -m async_rlhf.cli {command} ..."
    require(config.parallel.ranks == launched, "parallel.ranks", config.parallel.ranks, rule)
    if launched == 1:
        if config.parallel.strategy not in ("auto", "ddp"):
            logger.warning(
                "parallel.strategy: %r has no effect on one rank; start with torchrun", config.parallel.strategy
            )
        return Ranks()
    # transformers would leave the weights of all but one rank zero, for somebody to broadcast them.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    local, on_host = int(os.environ.get("LOCAL_RANK", 0)), launched_on_host()
    if uses_gpu(config):
        rule = "the variable LOCAL_RANK must say which GPU of its host a rank takes"
        require("LOCAL_RANK" in os.environ, "device", config.device, rule)
        gpus = torch.cuda.device_count()
        rule = f"host {os.uname().nodename} has {gpus} GPUs for {on_host} ranks"
        require(gpus == 1 or gpus >= on_host, "device", config.device, rule)
        torch.cuda.set_device(_gpu_of(local))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if uses_gpu(config) else "cpu:gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=config.parallel.timeout))
        # A thread of gloo's that still holds a tensor of Python's would abort the interpreter as it ends.
        atexit.register(dist.destroy_process_group)
    group = dist.new_group(timeout=FOR_EVER, backend="gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), local, on_host, group)
    if uses_gpu(config):
        mine = (os.uname().nodename, str(torch.cuda.get_device_properties(_gpu_of(local)).uuid))
        check_own_gpus(ranks.gather("GPUs", mine))
    return ranks


def device_of_host(key: str, name: str) -> torch.device:
    """The device of this name, as the configuration's ``key`` has it.

    Raises:
        ConfigError: torch does not see it.
    """
    device = torch.device(name)
    count = 1 if device.type == "cpu" else getattr(torch, device.type).device_count()
    rule = f"must be a device of this host, where torch sees {count} of type {device.type!r}"
    require((device.index or 0) < count, key, name, rule)
    return device


def _gpu_of(local_rank: int) -> int:
    """The GPU of a rank, as this process counts them: some launchers, such as SLURM with --gpus-per-task, show every
    rank only its own.
    """
    return 0 if torch.cuda.device_count() == 1 else local_rank


def check_own_gpus(gpus: Sequence[tuple[str, str]]) -> None:
    """Require that no two ranks have the same GPU.

    Args:
        gpus: host and GPU of every rank.

    Raises:
        ConfigError: two have.
    """
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        rule = "must be a GPU for each rank: show every rank all GPUs of its host, or only its own"
        require(first == rank, "device", f"the same GPU of host {gpu[0]} for ranks {first} and {rank}", rule)


def uses_gpu(config: OnRanksConfig) -> bool:
    """Whether the learner's ranks compute on GPUs."""
    return torch.cuda.is_available() if config.device is None else config.device != "cpu"


def rank_device(config: OnRanksConfig, ranks: Ranks) -> torch.device:
    """The device of this rank: of several on GPUs, that of its number on the host."""
    if ranks.count > 1:
        return torch.device("cuda", _gpu_of(ranks.local_rank)) if uses_gpu(config) else torch.device("cpu")
    return torch.device(config.device) if config.device else default_device()
