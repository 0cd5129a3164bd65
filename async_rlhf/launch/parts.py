"""The parts of a run that may be elsewhere: made on this host, or as actors in a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import OnlineConfig
from async_rlhf.generation import placement
from async_rlhf.generation.protocol import Generator, SamplingParams
from async_rlhf.generation.shared import SharedEngine
from async_rlhf.parallel import Parallel
from async_rlhf.ranks import Ranks
from async_rlhf.reports.trace import Trace
from async_rlhf.scoring import Scorer
from async_rlhf.scoring.functions import RewardFunction


def check_launch(config: OnlineConfig, ranks: Ranks) -> None:
    """Require what the configuration needs to be installed and, with Ray, a cluster that has what its actors need.

    Of several ranks of the learner the first alone has to do with the cluster.

    Raises:
        ConfigError: it is not there.
    """
    if config.launch == "local":
        placement.check_engine(config.generation)
    elif ranks.leads:
        from async_rlhf.launch.ray import connect

        connect(config)


def make_generator(
    config: OnlineConfig,
    policy: PreTrainedModel,
    params: SamplingParams,
    trace: Trace,
    threads: int | None,
    engine: SharedEngine,
) -> Generator:
    """The generator that the configuration asks for; of several ranks rank 0 alone has actors."""
    if config.launch == "ray" and engine.parallel.ranks.leads:
        from async_rlhf.launch.ray_generation import RayGenerator

        return RayGenerator(config, policy, params, trace, engine.parallel)
    return placement.make_generator(config, policy, params, trace, threads, engine)


def make_scorer(
    config: OnlineConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_model: PreTrainedModel | None,
    reward_funcs: Sequence[RewardFunction],
    prompt_field: str,
    parallel: Parallel,
) -> Scorer:
    """The scorer that the configuration asks for; of several ranks rank 0 alone has actors."""
    if config.ray.reward_workers:
        if not parallel.ranks.leads:
            return Scorer(tokenizer, config, None, reward_funcs, prompt_field, parallel)
        from async_rlhf.launch.ray_rewards import RayScorer

        return RayScorer(tokenizer, config, reward_model, reward_funcs, prompt_field, parallel)
    reward_model = None if reward_model is None else parallel.frozen(reward_model)
    return Scorer(tokenizer, config, reward_model, reward_funcs, prompt_field, parallel)


def reward_device(config: OnlineConfig, learner: torch.device) -> torch.device:
    """Where this process holds the reward model: not on its GPU if others compute it."""
    return torch.device("cpu") if config.ray.reward_workers else learner
