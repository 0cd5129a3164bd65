"""What a user hands over for a run, and the models that this names, loaded and sized."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from async_rlhf.algorithms.record import Algorithm
from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.config.episodes import World
from async_rlhf.data.loading import Rows
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.failure_detector import FailureDetector
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.generation.episodes.spec import episodes_of
from async_rlhf.generation.placement import memory_taken
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.learner.optimizers import Optimizers
from async_rlhf.models.adapters import add_adapters, are_trained, has_adapters, only_adapter, trained_further, unwrap
from async_rlhf.models.budget import with_sizes
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import check_positions, length_key
from async_rlhf.models.forward import advise_sixteen_bits, autocast_dtype
from async_rlhf.models.kernels import use_attention
from async_rlhf.models.loading import (
    check_embeddings,
    in_float32,
    load_in_four_bits,
    load_policy,
    reward_model_for,
    stop_token_ids,
    that_stops,
)
from async_rlhf.models.routing import route_shape
from async_rlhf.models.sharded_loading import loaded_once, require_alike
from async_rlhf.models.values import new_value_head, value_model_for
from async_rlhf.rewards.functions import RewardFunction
from async_rlhf.run.factory import frozen_device
from async_rlhf.run.record import Record

logger = logging.getLogger(__name__)

Model: TypeAlias = PreTrainedModel | str


@dataclass(frozen=True)
class Start:
    """A run before its inputs are read: with several ranks, they have met."""

    config: OnlineConfig
    """With ``max_prompt_length``, and what the GPU decides, resolved."""
    ranks: Ranks
    failure_detector: FailureDetector


@dataclass(frozen=True)
class Inputs:
    """What a user hands over beside the configuration; see :class:`~async_rlhf.run.trainer.OnlineTrainer`."""

    model: Model
    train_dataset: Rows
    algorithm: Algorithm | None = None
    reward_model: Model | None = None
    reward_funcs: Sequence[RewardFunction] = ()
    world: World = field(default_factory=World)
    """What answers the policy, if something does."""
    ref_model: Model | None = None
    value_model: Model | None = None
    processing_class: PreTrainedTokenizerBase | None = None
    eval_dataset: Rows | None = None
    callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = ()
    optimizers: Optimizers = (None, None)
    prompt_field: str = "query"
    record: Record | None = None
    """How the run was asked for, where a command knows it; None for what can be said of the arguments."""
    start: Start | None = None
    """What :func:`~async_rlhf.run.build.begin` returned, where inputs were read after it."""

    def __post_init__(self) -> None:
        optimizer, scheduler = self.optimizers
        alone = scheduler is None or optimizer is not None
        require(alone, "optimizers", type(scheduler).__name__, "must have an optimiser with the schedule")
        if self.ref_model is not None and self.ref_model is self.model and not isinstance(self.model, str):
            raise ConfigError("ref_model: got the policy itself; give a copy, or None for the starting weights")


@dataclass(frozen=True)
class Models:
    """The models of a run, all on the learner's device; reference, reward and value model only if the run has them."""

    policy: PreTrainedModel
    params: SamplingParams
    """How completions are sampled from the policy."""
    reference: PreTrainedModel | None
    reward: PreTrainedModel | None
    value: PreTrainedModel | nn.Linear | None
    reference_apart: bool
    reward_apart: bool
    """Whether these compute beside training."""


def load_models(
    config: OnlineConfig,
    algorithm: Algorithm,
    inputs: Inputs,
    chat: ChatTemplate,
    parallel: Parallel,
    device: torch.device,
) -> Models:
    tokenizer = chat.tokenizer
    trust = config.trust_remote_code
    apart = {key: frozen_device(key, config, device) for key in ("reference_device", "reward_model_device")}

    def place(key: str) -> torch.device:
        """For this process's copy of a frozen model: that which computes apart is rank 0's."""
        alone = apart[key] if parallel.ranks.is_main else torch.device("cpu")
        return device if apart[key] is None or alone is None else alone

    if parallel.ranks.is_main:
        advise_sixteen_bits(config, device)
    if parallel.is_sharded:
        device = torch.device("cpu")  # a sharded model reaches the device piece by piece
    spreads = is_spread(inputs, parallel)

    def once(key: str, load: Callable[[], PreTrainedModel], everywhere: bool = False) -> PreTrainedModel:
        """The model of that key: by rank 0 alone if it is to be sharded, unless all ranks were given it, or need it."""
        everywhere = everywhere or isinstance(getattr(inputs, key), PreTrainedModel) or not spreads
        return load() if everywhere else loaded_once(parallel.ranks, key, load)

    policy = once("model", partial(_policy, config, inputs.model, device))
    check_positions(policy, config.prompt_cap, config.generation.longest_episode, length_key(config.generation))
    params = _sampling(config, policy, chat, inputs)
    # The saved policy then stops at the same tokens as in training.
    policy.generation_config = that_stops(policy, tokenizer, params.stop_token_ids)
    reward, named = None, config.reward_model_device
    known = inputs.reward_model is not None or named in (None, "learner")
    require(known, "reward_model_device", named, "must be null: there is no reward model")
    if inputs.reward_model is not None:
        elsewhere = apart["reward_model_device"] is not None or config.ray.reward_workers > 0
        where = torch.device("cpu") if config.ray.reward_workers else place("reward_model_device")
        # Who scores elsewhere gets whole weights.
        load = partial(reward_model_for, inputs.reward_model, tokenizer, where, trust)
        reward = once("reward_model", load, everywhere=elsewhere)
    is_apart, where = apart["reference_device"] is not None, place("reference_device")
    find = partial(once, "ref_model", everywhere=is_apart)
    reference = _reference(config, inputs, policy, algorithm.needs(config).reference, is_apart, find, where)
    if reference is not None:
        check_embeddings(reference, tokenizer, "ref_model")
    find = partial(once, "value_model")
    value = _value(config, algorithm, inputs.value_model, policy, reward, tokenizer, device, find)
    for key, each in (("model", policy), ("ref_model", reference), ("reward_model", reward), ("value_model", value)):
        if isinstance(each, PreTrainedModel):
            use_attention(each, config, key)
    require_alike(parallel.ranks, model=policy, ref_model=reference, reward_model=reward, value_model=value)
    rule = "must be 0: the model has adapters, which are trained further; merge them to train new ones"
    require(config.lora.rank == 0 or not has_adapters(policy), "lora.rank", config.lora.rank, rule)
    if config.lora.rank > 0:
        add_adapters(policy, config.lora, config.seed)
    if config.lora.publish == "adapter":
        only_adapter(policy)
    return Models(policy, params, reference, reward, value, is_apart, apart["reward_model_device"] is not None)


def _reference(
    config: OnlineConfig,
    inputs: Inputs,
    policy: PreTrainedModel,
    needed: bool,
    apart: bool,
    once: Callable[[Callable[[], PreTrainedModel]], PreTrainedModel],
    where: torch.device,
) -> PreTrainedModel | None:
    """A reference policy that is a model of its own; None if there is none, or the learner copies the policy."""
    model = inputs.ref_model
    model = model if model is None or isinstance(model, str) else unwrap(model)
    if model is None and needed and are_trained(policy):
        # Below its adapters it is another policy than the one that the run starts from.
        logger.info("model: its adapters have been trained, so a copy of it as it starts is the reference policy")
        model = copy.deepcopy(policy)
    alone, named = needed and not (model is None and _adapts(config, policy)), config.reference_device
    rule = "must be null: this run has no reference policy that is a model of its own"
    require(alone or named in (None, "learner"), "reference_device", named, rule)
    if apart and named is not None and model is None:
        model = inputs.model if isinstance(inputs.model, str) else copy.deepcopy(policy)
    if isinstance(model, str):
        return once(partial(load_policy, model, where, "ref_model", trust=config.trust_remote_code))
    return None if model is None else model.to(where)


def _adapts(config: OnlineConfig, policy: PreTrainedModel) -> bool:
    """Whether adapters are trained, without which the policy is its own reference."""
    return config.lora.rank > 0 or has_adapters(policy)


def is_spread(inputs: Inputs, parallel: Parallel) -> bool:
    """Whether rank 0 alone loads models that are named, for they are sharded; the log names those that are not."""
    keys = ("model", "ref_model", "reward_model", "value_model")
    loaded = [key for key in keys if isinstance(getattr(inputs, key), PreTrainedModel)]
    if parallel.is_sharded and loaded and parallel.ranks.is_main:
        why = "given as models, not by name, so every rank holds all of their weights before it keeps its share"
        logger.info("%s: %s", ", ".join(loaded), why)
    return parallel.is_sharded


def _policy(config: OnlineConfig, model: Model, device: torch.device) -> PreTrainedModel:
    if not isinstance(model, str):
        return in_float32(unwrap(model).to(device))
    if config.lora.base_bits is None:
        policy = load_policy(model, device, trust=config.trust_remote_code)
        if not has_adapters(policy):
            return policy
        base = only_adapter(policy).base_model_name_or_path
        return trained_further(load_policy(base, device, trust=config.trust_remote_code), model)
    computed = autocast_dtype(config) or torch.float32
    return load_in_four_bits(model, device, computed, trust=config.trust_remote_code)


def sized(
    config: OnlineConfig, algorithm: Algorithm, models: Models, parallel: Parallel, device: torch.device
) -> OnlineConfig:
    """The configuration with the sizes that the devices' memory decides."""
    trained = [model for model in (models.policy, models.value) if isinstance(model, PreTrainedModel)]
    candidates: list[PreTrainedModel] = []
    if algorithm.needs(config).reference and not (models.reference is None and has_adapters(models.policy)):
        candidates.append(models.reference or models.policy)  # a copy of the policy
    if models.reward is not None and config.ray.reward_workers == 0:
        candidates.append(models.reward)
    devices = [torch.device(name) for name in config.own_devices]
    frozen = [model for model in candidates if model.device not in devices]
    judge = models.reward if models.reward in frozen else None
    apart = [model for model in candidates if model.device in devices and model.device.type == "cuda"]
    taken = memory_taken(config, device).get(f"cuda:{device.index or 0}", 0.0)
    return with_sizes(config, trained, frozen, parallel, device, algorithm.rows_per_unit, taken, judge, apart)


def _value(
    config: OnlineConfig,
    algorithm: Algorithm,
    value_model: Model | None,
    policy: PreTrainedModel,
    reward_model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    once: Callable[[Callable[[], PreTrainedModel]], PreTrainedModel],
) -> PreTrainedModel | nn.Linear | None:
    """The value model: as given, else a copy of the reward model, else built on the policy's body; or a value head."""
    needs = algorithm.needs(config)
    if not needs.values:
        require(value_model is None, "value_model", value_model, f"must be None: {algorithm.name} has no value model")
        return None
    if needs.shared_trunk:
        if not (value_model is None or isinstance(value_model, str)):
            raise ConfigError("value_model: got a model; with shared_trunk it must be None or the folder of a head")
        return new_value_head(policy, value_model).to(device)
    value = once(partial(value_model_for, value_model, reward_model, policy, device, config.trust_remote_code))
    check_embeddings(value, tokenizer, "value_model")
    value = in_float32(value).requires_grad_(True)
    if config.lora.rank > 0:
        add_adapters(value, config.lora, config.seed, "SEQ_CLS").score.requires_grad_(True)
    return value


def _sampling(config: OnlineConfig, policy: PreTrainedModel, chat: ChatTemplate, inputs: Inputs) -> SamplingParams:
    generation = config.generation
    judged = inputs.reward_model is not None or len(inputs.reward_funcs) > 0
    return SamplingParams(
        samples_per_prompt=config.samples_per_prompt,
        temperature=generation.temperature,
        response_length=generation.response_length,
        stop_token_ids=stop_token_ids(
            policy, chat.tokenizer, generation.stop_tokens, [*generation.stop_token_ids, *chat.ends]
        ),
        seed=config.seed,
        batch_size=generation.batch_size,
        top_p=generation.top_p,
        top_k=generation.top_k,
        seed_per_request=generation.seed_per_request,
        episodes=episodes_of(config, inputs.world, chat, inputs.prompt_field, judged),
        routes=route_shape(policy.config) if config.router_replay else None,
    )
