"""What the configuration, or accelerate's, chooses: how work and weights are spread over the ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace

import torch

from async_rlhf.config import OnlineConfig, ParallelConfig
from async_rlhf.config.base import require
from async_rlhf.config.parallel import Strategy
from async_rlhf.distributed.collectives import ContextGroup, Ranks
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.learner.launch import rank_device
from async_rlhf.learner.strategies.ddp import DataParallel
from async_rlhf.learner.strategies.fsdp import FullyShardedDataParallel

logger = logging.getLogger(__name__)

_ZERO: dict[str, Strategy] = {"1": "zero1", "2": "zero2", "3": "zero3"}


def from_accelerate(
    config: ParallelConfig, bf16: bool, environment: Mapping[str, str] = os.environ, fp16: bool = False
) -> ParallelConfig:
    """The configuration with strategy "auto" resolved, by what ``accelerate launch`` has put into the environment.

    Raises:
        ConfigError: an accelerate config file asks for what the configuration contradicts.
    """
    if config.strategy != "auto":
        return config

    def said(name: str) -> str:
        return environment.get(name, "").lower()

    asked = said("ACCELERATE_MIXED_PRECISION")
    key = "fp16" if asked == "fp16" else "bf16"
    rule = f"the accelerate config file says mixed_precision: {asked}; set {key} to match, or leave it out there"
    same = asked in ("", "no") or (asked == "bf16" and bf16) or (asked == "fp16" and fp16)
    require(same, key, fp16 if asked == "fp16" else bf16, rule)
    if said("ACCELERATE_USE_DEEPSPEED") == "true":
        file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
        rule = f"the accelerate config file names {file}; set parallel.strategy, and its options as parallel.deepspeed"
        require(file in ("", "none"), "parallel.strategy", "auto", rule)
        stage = said("ACCELERATE_DEEPSPEED_ZERO_STAGE") or "2"
        rule = f"the accelerate config file says zero_stage: {stage}; must be 1, 2 or 3"
        require(stage in _ZERO, "parallel.strategy", "auto", rule)
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


def shards_weights(config: ParallelConfig, bf16: bool, ranks: Ranks) -> bool:
    """Whether each rank is to have a share of a model's weights."""
    return ranks.count > 1 and from_accelerate(config, bf16).strategy in ("fsdp", "zero3")


def make_parallel(config: OnlineConfig, ranks: Ranks) -> Parallel:
    """What ``parallel.strategy`` asks for."""
    if ranks.count == 1:
        return Parallel(ranks)
    parallel = from_accelerate(config.parallel, config.in_bfloat16, fp16=config.fp16)
    device = rank_device(config, ranks)
    _check(config, parallel)
    if ranks.is_main:
        logger.info("learner: %d ranks, %s", ranks.count, parallel.strategy)
    made = _strategy(config, parallel, ranks, device)
    made.context = ContextGroup.of(ranks, parallel.context_parallel, parallel.timeout)
    return made


def _strategy(config: OnlineConfig, parallel: ParallelConfig, ranks: Ranks, device: torch.device) -> Parallel:
    if parallel.strategy == "ddp":
        return DataParallel(ranks)
    if parallel.strategy == "fsdp":
        return FullyShardedDataParallel(ranks, parallel, device, config)
    from async_rlhf.learner.strategies.deepspeed import ZeRO

    return ZeRO(ranks, parallel, device, config)


def _check(config: OnlineConfig, parallel: ParallelConfig) -> None:
    """Refuse what does not go with a strategy that an accelerate config file may have chosen."""
    spread = parallel.strategy in ("fsdp", "zero3")
    rule = 'must be "merged" with weights spread over ranks (parallel.strategy)'
    require(not spread or config.lora.publish == "merged", "lora.publish", config.lora.publish, rule)
    parallel.require_format(config.checkpoint_format)
    bits = config.lora.base_bits
    require(not spread or bits is None, "lora.base_bits", bits, "must be null with weights spread over ranks")
    rule = 'must be false with parallel.strategy "zero3", whose parallel.cpu_offload does the same'
    require(parallel.strategy != "zero3" or not config.offload_frozen, "offload_frozen", True, rule)
