"""Ranks started by torchrun, accelerate launch or srun, and PyTorch's own strategies: DDP and FSDP.

torchrun --nproc-per-node 2 -m async_rlhf.cli train --config run.yml
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig, ParallelConfig
from async_rlhf.config.base import require
from async_rlhf.config.parallel import Strategy, launched_on_host, launched_ranks
from async_rlhf.models import default_device
from async_rlhf.parallel import Model, Parallel
from async_rlhf.ranks import Ranks

logger = logging.getLogger(__name__)

_FOR_EVER = timedelta(days=365)
"""The other ranks wait for rank 0 without a limit; launch/watch.py checks that it is alive."""

_ZERO: dict[str, Strategy] = {"1": "zero1", "2": "zero2", "3": "zero3"}


def start_ranks(config: OnlineConfig) -> Ranks:
    """Join the other ranks, if the process was launched as one of several.

    Raises:
        ConfigError: their number is not ``parallel.ranks``.
    """
    launched = launched_ranks()
    right = f"must be {launched}, the processes that were launched, or left out"
    if launched == 1:
        right = "start the command with torchrun or accelerate launch, such as: torchrun --nproc-per-node"
        right += f" {config.parallel.ranks} -m async_rlhf.cli train ..."
    require(config.parallel.ranks == launched, "parallel.ranks", config.parallel.ranks, right)
    if launched == 1:
        if config.parallel.strategy not in ("auto", "ddp"):
            logger.warning(
                "parallel.strategy: %r has no effect on one rank; start with torchrun", config.parallel.strategy
            )
        return Ranks()
    # transformers would load weights on one rank only and leave zeros on the others, expecting a broadcast.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    local, on_host = int(os.environ.get("LOCAL_RANK", 0)), launched_on_host()
    if uses_gpu(config):
        right = "the variable LOCAL_RANK must say which GPU of its host a rank takes"
        require("LOCAL_RANK" in os.environ, "device", config.device, right)
        right = f"host {os.uname().nodename} has {torch.cuda.device_count()} GPUs for {on_host} ranks"
        require(torch.cuda.device_count() >= on_host, "device", config.device, right)
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if uses_gpu(config) else "cpu:gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=config.parallel.timeout))
        # A gloo thread that still holds a Python tensor would abort the interpreter at exit.
        atexit.register(dist.destroy_process_group)
    return Ranks(
        dist.get_rank(), dist.get_world_size(), local, on_host, dist.new_group(timeout=_FOR_EVER, backend="gloo")
    )


def uses_gpu(config: OnlineConfig) -> bool:
    """Whether the learner's ranks compute on GPUs."""
    return torch.cuda.is_available() if config.device is None else config.device != "cpu"


def rank_device(config: OnlineConfig, ranks: Ranks) -> torch.device:
    """The device of this rank: with several ranks on GPUs, the GPU with the rank's number on the host."""
    if ranks.count > 1:
        return torch.device("cuda", ranks.local_rank) if uses_gpu(config) else torch.device("cpu")
    return torch.device(config.device) if config.device else default_device()


def from_accelerate(config: ParallelConfig, bf16: bool, environment: Mapping[str, str] = os.environ) -> ParallelConfig:
    """The configuration with strategy "auto" resolved from the environment that ``accelerate launch`` sets.

    Raises:
        ConfigError: the configuration contradicts an accelerate config file.
    """
    if config.strategy != "auto":
        return config

    def said(name: str) -> str:
        return environment.get(name, "").lower()

    asked = said("ACCELERATE_MIXED_PRECISION")
    right = f"the accelerate config file says mixed_precision: {asked}; set bf16 to match, or leave it out there"
    require(asked in ("", "no", "bf16") and (asked == "bf16") <= bf16, "bf16", bf16, right)
    if said("ACCELERATE_USE_DEEPSPEED") == "true":
        file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
        right = f"the accelerate config file names {file}; set parallel.strategy, and its options as parallel.deepspeed"
        require(file in ("", "none"), "parallel.strategy", "auto", right)
        stage = said("ACCELERATE_DEEPSPEED_ZERO_STAGE") or "2"
        right = f"the accelerate config file says zero_stage: {stage}; must be 1, 2 or 3"
        require(stage in _ZERO, "parallel.strategy", "auto", right)
        kinds = ("OPTIMIZER", "PARAM")
        offload = any(said(f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind}_DEVICE") == "cpu" for kind in kinds)
        return replace(config, strategy=_ZERO[stage], cpu_offload=config.cpu_offload or offload)
    if said("ACCELERATE_USE_FSDP") == "true":
        keep = said("FSDP_RESHARD_AFTER_FORWARD") in ("false", "shard_grad_op")
        offload = said("FSDP_OFFLOAD_PARAMS") == "true"
        return replace(
            config,
            strategy="fsdp",
            cpu_offload=config.cpu_offload or offload,
            reshard_after_forward=config.reshard_after_forward and not keep,
        )
    return replace(config, strategy="ddp")


def make_parallel(config: OnlineConfig, ranks: Ranks) -> Parallel:
    """The strategy that ``parallel.strategy`` names."""
    if ranks.count == 1:
        return Parallel(ranks)
    parallel = from_accelerate(config.parallel, config.bf16)
    spread = parallel.strategy in ("fsdp", "zero3")
    right = 'must be "merged" with weights spread over ranks (parallel.strategy)'
    require(not spread or config.lora.publish == "merged", "lora.publish", config.lora.publish, right)
    if ranks.leads:
        logger.info("learner: %d ranks, %s", ranks.count, parallel.strategy)
    if parallel.strategy == "ddp":
        return DataParallel(ranks)
    device = rank_device(config, ranks)
    if parallel.strategy == "fsdp":
        return FullyShardedDataParallel(ranks, parallel, device)
    from async_rlhf.launch.deepspeed import ZeRO

    return ZeRO(ranks, parallel, device, config)


class DataParallel(Parallel):
    """DDP: all weights on every rank, and gradients reduced while they are computed."""

    def prepare(
        self, model: nn.Module, parts: Sequence[nn.Module], make: Callable[[], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        self._ddp = DistributedDataParallel(model)
        return super().prepare(self._ddp, parts, make)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._ddp.no_sync()


class FullyShardedDataParallel(Parallel):
    """FSDP2: weights, gradients and the optimiser's state sharded over all ranks.

    Args:
        ranks: the ranks that share them.
        config: offloading and resharding.
        device: of this rank.
    """

    spreads_weights = True

    def __init__(self, ranks: Ranks, config: ParallelConfig, device: torch.device) -> None:
        super().__init__(ranks)
        self.config = config
        self.device = device
        self._mesh: DeviceMesh = init_device_mesh(device.type, (ranks.count,))

    def prepare(
        self, model: nn.Module, parts: Sequence[nn.Module], make: Callable[[], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        for part in parts:
            self._shard(part)
        return super().prepare(model, parts, make)

    def frozen(self, model: Model) -> Model:
        self._shard(model)
        return model

    def _shard(self, model: nn.Module) -> None:
        """Shard block by block, so that only one block's weights are whole at a time."""
        offload = self.config.cpu_offload and self._mesh.device_type != "cpu"  # CPU weights are there already
        blocks = set(getattr(model, "_no_split_modules", None) or [])
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": self.config.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        for module in list(model.modules()):
            if type(module).__name__ in blocks:
                fully_shard(module, **options)
        if isinstance(model, PreTrainedModel) and not model.can_generate():
            # Scores and values are computed by calling body and head separately.
            for child in model.children():
                fully_shard(child, **options)
        else:
            fully_shard(model, **options)

    def architecture_of(self, model: nn.Module) -> type[Any]:
        return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))

    def _clip(self, parameters: list[nn.Parameter], limit: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return self.whole(norm).item()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def share(self, number: int, tensor: Tensor) -> Tensor:
        like = self.trained[number]
        if not isinstance(like, DTensor) or tensor.shape != like.shape:  # such as the step count
            return tensor
        tensor = tensor.to(like.device)
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

    def settle(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def exchange(self, parameter: nn.Parameter, tensor: Tensor | None) -> Callable[[], Any]:
        assert isinstance(parameter, DTensor)
        mine, mesh = parameter.to_local(), parameter.device_mesh
        before = mine.clone()
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
        if tensor is not None:
            whole.copy_(tensor)
        mine.copy_(distribute_tensor(whole, mesh, parameter.placements).to_local())
        return partial(mine.copy_, before)
