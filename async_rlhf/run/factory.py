"""Makes what the configuration chooses: the generator and its engine, the scorer, and their devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.distributed.collectives import WHOLE, ContextGroup, Ranks
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.generation.inline import PolicyEngine, make_inline
from async_rlhf.generation.placement import check_engine, check_gpus, check_memory, threads_side_by_side
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import Generator
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.generation.server_generator import ServerGenerator
from async_rlhf.learner.launch import device_of_host
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.forward import autocast_dtype, in_sixteen_bits
from async_rlhf.models.frozen_models import frozen
from async_rlhf.models.packing import choose, require_shared
from async_rlhf.models.sharded_loading import only_on_rank_0
from async_rlhf.rewards.functions import RewardFunction
from async_rlhf.rewards.scorer import ApartScorer, Scorer
from async_rlhf.system.trace import Trace

logger = logging.getLogger(__name__)


def check_launch(config: OnlineConfig, ranks: Ranks, learner: torch.device) -> None:
    """Require that what the configuration needs is installed and, with Ray, that the cluster has what its actors need.

    With several learner ranks, only rank 0 connects to the cluster.

    Raises:
        ConfigError: something is missing.
    """
    if config.launch == "local":
        check_engine(config.generation)
        check_gpus(config, learner)
        check_memory(config, learner)
    elif ranks.is_main:
        from async_rlhf.distributed.ray import connect

        connect(config)


def make_generator(config: OnlineConfig, engine: PolicyEngine, trace: Trace, threads: int | None) -> Generator:
    """Make the generator.

    Rank 0 has the actors, processes and servers; the other ranks' generators only take part where all are needed.

    Args:
        config: of the run.
        engine: samples from the learner's own policy; used for inline generation, unless another engine is.
        trace: records generation.
        threads: CPU threads of each generator process.
    """
    policy, params, parallel = engine.model, engine.params, engine.parallel
    config = replace(config, generation=replace(config.generation, num_threads=threads))
    if config.placement == "inline":
        return make_inline(config, engine, trace)
    if not parallel.ranks.is_main:
        return RemoteGenerator(config, policy, params, trace, parallel)
    if config.launch == "ray":
        from async_rlhf.generation.ray import RayGenerator

        return RayGenerator(config, policy, params, trace, parallel)
    kind = ServerGenerator if config.placement == "server" else ProcessGenerator
    return kind(config, policy, params, trace, parallel)


def make_scorer(
    config: OnlineConfig,
    chat: ChatTemplate,
    reward_model: PreTrainedModel | None,
    reward_funcs: Sequence[RewardFunction],
    prompt_field: str,
    parallel: Parallel,
    apart: bool = False,
) -> Scorer:
    """Make the scorer; with several ranks, only rank 0 has actors, or a reward model that computes ``apart``."""
    tokenizer = chat.tokenizer
    judged: dict[str, Any] = {
        "reward_funcs": reward_funcs,
        "prompt_field": prompt_field,
        "parallel": parallel,
        "chat": chat,
    }
    if config.ray.reward_workers and parallel.ranks.is_main:
        from async_rlhf.rewards.ray import RayScorer

        return RayScorer(tokenizer, config, reward_model, **judged)
    if reward_model is None or config.ray.reward_workers or (apart and not parallel.ranks.is_main):
        return Scorer(tokenizer, config, None, **judged)
    model = _at_work(reward_model, config, ALONE if apart else parallel)
    if apart:
        return ApartScorer(tokenizer, config, model, **judged)
    return Scorer(tokenizer, config, model, context=_sharing(model, config, parallel), **judged)


def _sharing(reward_model: PreTrainedModel, config: OnlineConfig, parallel: Parallel) -> ContextGroup:
    """The ranks that share the rows of a reward model at work; where they cannot, each reads whole rows."""
    device, dtype, size = parallel.device_of(reward_model), autocast_dtype(config), parallel.context.size
    if size == 1:
        return WHOLE
    try:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            require_shared({"reward model": reward_model}, size, device)
    except ConfigError as error:
        logger.info("%s; its rows are not shared", error)
        return WHOLE
    finally:
        parallel.reshard(reward_model)
    return parallel.context


def _at_work(reward_model: PreTrainedModel, config: OnlineConfig, parallel: Parallel) -> PreTrainedModel:
    """The reward model, ready to compute with."""
    pack = partial(
        choose, config.packing, config.by_tokens, {"reward model": reward_model}, in_sixteen_bits(config, reward_model)
    )
    if not only_on_rank_0(reward_model):
        pack()
        return frozen(reward_model, config, parallel)
    # Whether rows can be packed shows when it computes, and for that it needs weights.
    device, dtype = parallel.device_of(reward_model), autocast_dtype(config)
    frozen(reward_model, config, parallel)
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        pack(device=device)
    parallel.reshard(reward_model)
    return reward_model


def frozen_device(key: str, config: OnlineConfig, learner: torch.device) -> torch.device | None:
    """Where a frozen model computes beside training; None where the learner does, when a batch has its turn.

    Raises:
        ConfigError: the device that is named is not there.
    """
    name = getattr(config, key)
    # Two threads that compile at the same time were not tried.
    if name is None and learner.type == "cpu" and not config.offload_frozen and not config.torch_compile:
        return learner if threads_side_by_side(config, learner, config.parallel.ranks) else None
    return None if name in (None, "learner") else device_of_host(key, name)
