"""Builds everything that the training loop needs from a configuration and the user's inputs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from async_rlhf.algorithms.record import Algorithm
from async_rlhf.algorithms.table import of_config
from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.config.episodes import World
from async_rlhf.config.rewards import check_rewards
from async_rlhf.data.loading import Rows
from async_rlhf.data.stream import PromptStream, SharedPrompts
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.failure_detector import FailureDetector
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.generation.episodes.spec import Sent, episodes_of, tools_of
from async_rlhf.generation.inline import PolicyEngine
from async_rlhf.generation.placement import memory_taken
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.learner.launch import rank_device, start_ranks
from async_rlhf.learner.learner import Learner
from async_rlhf.learner.optimizers import Optimizers, require_optimizer
from async_rlhf.learner.strategies.choice import make_parallel
from async_rlhf.models.adapters import add_adapters, has_adapters, only_adapter, unwrap
from async_rlhf.models.budget import with_recorded, with_sizes
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import check_positions, config_of, length_key, with_prompt_cap
from async_rlhf.models.forward import advise_sixteen_bits, autocast_dtype
from async_rlhf.models.gpu_defaults import bare_model, with_gpu_defaults
from async_rlhf.models.kernels import use_attention
from async_rlhf.models.loading import (
    check_embeddings,
    disable_dropout,
    frozen_checksum,
    in_float32,
    load_in_four_bits,
    load_policy,
    require_alike,
    require_repeatable,
    reward_model_for,
    stop_token_ids,
    that_stops,
    tokenizer_for,
)
from async_rlhf.models.packing import require_heads
from async_rlhf.models.quantised import require_bitsandbytes
from async_rlhf.models.routing import require_routers, route_shape
from async_rlhf.models.sharded_loading import is_on_meta
from async_rlhf.models.values import new_value_head, value_model_for
from async_rlhf.rewards.functions import RewardFunction
from async_rlhf.rewards.scorer import Scorer, metric_names
from async_rlhf.run.callbacks import Callbacks, tracked_runs
from async_rlhf.run.checkpoint import ResumeState, load_weights, restore_learner
from async_rlhf.run.factory import check_launch, frozen_device, make_scorer
from async_rlhf.run.folder import RunFolder, checkpoint_to_resume, hold_folder, refuse_second
from async_rlhf.run.record import Record, code_digests, derived, of_python
from async_rlhf.run.shards import SHARDS, load_shards
from async_rlhf.system.determinism import prepare_deterministic
from async_rlhf.system.lock import Hold
from async_rlhf.system.names import check_integrations, check_source
from async_rlhf.system.random_state import seed_all
from async_rlhf.system.versions import code

logger = logging.getLogger(__name__)

Model: TypeAlias = PreTrainedModel | str


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
    """What :func:`begin` returned, where inputs were read after it."""

    def __post_init__(self) -> None:
        optimizer, scheduler = self.optimizers
        alone = scheduler is None or optimizer is not None
        require(alone, "optimizers", type(scheduler).__name__, "must have an optimiser with the schedule")
        if self.ref_model is not None and self.ref_model is self.model and not isinstance(self.model, str):
            raise ConfigError("ref_model: got the policy itself; give a copy, or None for the starting weights")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loop needs of anything that is trained, on one rank."""

    config: OnlineConfig
    ranks: Ranks
    hold: Hold | None = None
    """On rank 0, the hold on the folder; released when the run has ended."""
    folder: RunFolder
    tokenizer: PreTrainedTokenizerBase
    learner: Learner
    callbacks: Callbacks
    fingerprints: Mapping[str, str]
    """Fingerprints of the inputs that decide the result; on rank 0."""


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    """All parts of a run on one rank, before it begins. A resumed run's state is already restored."""

    algorithm: Algorithm
    failure_detector: FailureDetector
    resumed: ResumeState | None
    prompts: SharedPrompts
    device: torch.device
    chat: ChatTemplate
    """Writes the chats of all prompts, with the time of the run's start."""
    scorer: Scorer
    engine: PolicyEngine
    """Samples from the learner's policy, for inline generation."""
    eval_prompts: SharedPrompts | None
    eval_params: SamplingParams
    """How completions of held-out prompts are sampled."""
    record: Record
    """How the run was asked for."""


@dataclass(frozen=True)
class Start:
    """A run before its inputs are read: with several ranks, they have met."""

    config: OnlineConfig
    """With ``max_prompt_length``, and what the GPU decides, resolved."""
    ranks: Ranks
    failure_detector: FailureDetector


def begin(config: OnlineConfig, model: Model, algorithm: Algorithm, prefix: str = "") -> Start:
    """Check what needs neither data nor models, and meet the other ranks. All of them must call it.

    Args:
        config: of the run.
        model: the policy, whose context limits prompts.
        algorithm: trains it.
        prefix: of keys in errors.

    Raises:
        ConfigError: something is missing, or another process writes to the run's folder.
    """
    check_integrations(config.report_to)
    require_bitsandbytes(config.lora.base_bits, f"{prefix}lora.base_bits")
    if config.lora.target_modules and isinstance(model, str):
        check_source(model, "model")
        if (bare := bare_model(model, config.trust_remote_code)) is not None:
            add_adapters(bare, config.lora, config.seed)  # an error before the weights are loaded
    ranks = start_ranks(config)
    failure_detector = FailureDetector(ranks)
    with failure_detector.watching():
        if ranks.is_main:
            refuse_second(Path(config.output_dir))  # early: fingerprints of large models take a while
        if (size := config.parallel.context_parallel) > 1:
            require_heads("policy", config_of("model", model, config.trust_remote_code), size)
        if config.router_replay:
            require_routers(model, config.trust_remote_code, f"{prefix}router_replay")
        config, device = with_prompt_cap(config, model), rank_device(config, ranks)
        here = partial(with_gpu_defaults, config, model, device, algorithm.rows_per_unit)
        return Start(ranks.broadcast("what the GPU decides", here), ranks, failure_detector)


def build(config: OnlineConfig, inputs: Inputs) -> Run:
    """Make everything that a run needs except its generators. With several ranks, all must call it.

    The global random generators, from which reward functions and callbacks may draw, begin with the run's seed: now
    that the user's modules have been imported, and rows read.

    Raises:
        ConfigError: the inputs do not fit together; raised before anything is trained or written.
    """
    seed_all(config.seed)
    algorithm = _algorithm(config, inputs.algorithm)
    _check_stop(config, inputs)
    judged = inputs.reward_model is not None or len(inputs.reward_funcs) > 0 or inputs.world.gives_rewards
    check_rewards(judged, inputs.reward_model)
    inputs.world.check(config.generation.max_turns)
    right = "must be null with a model that is loaded already; give its name"
    by_name = isinstance(inputs.model, str) or config.lora.base_bits is None
    require(by_name, "lora.base_bits", config.lora.base_bits, right)
    start = inputs.start or begin(config, inputs.model, algorithm)
    ranks, failure_detector = start.ranks, start.failure_detector
    if config.deterministic and rank_device(config, ranks).type == "cuda":
        prepare_deterministic()
    with failure_detector.watching(), ExitStack() as stack:
        check_launch(config, ranks, rank_device(config, ranks))
        config = start.config.with_rows(ranks.broadcast("rows", lambda: len(inputs.train_dataset)))
        hold = stack.enter_context(hold_folder(Path(config.output_dir))) if ranks.is_main else None
        run = _build(config, algorithm, inputs, ranks, failure_detector, hold)
        if run.resumed is not None:
            _restore(run, run.resumed)
        stack.pop_all()  # from here on the run releases the folder
    return run


def _check_stop(config: OnlineConfig, inputs: Inputs) -> None:
    """Require that evaluations will have the result at whose peak the run is to end."""
    names = [f"eval_{name}" for name in metric_names(inputs.reward_funcs, inputs.reward_model is not None)]
    known = config.early_stopping_patience is None or config.metric_for_best_model in names
    config.require(known, "metric_for_best_model", f"must be one of {', '.join(names)}")


def _algorithm(config: OnlineConfig, algorithm: Algorithm | None) -> Algorithm:
    """The algorithm that the configuration is for."""
    if algorithm is None:
        return of_config(config)
    right = f"must be of type {algorithm.config.__name__}"
    require(type(config) is algorithm.config, "args", type(config).__name__, right)
    return algorithm


def _build(
    config: OnlineConfig,
    algorithm: Algorithm,
    inputs: Inputs,
    ranks: Ranks,
    failure_detector: FailureDetector,
    hold: Hold | None,
) -> Run:
    asked = config
    folder, resumed = _find_checkpoint(config, algorithm, ranks)
    config = folder.config
    tokenizer = tokenizer_for(inputs.model, inputs.processing_class, config.trust_remote_code)
    # Data before models: mistakes in it show within seconds.
    started = None if resumed is None else resumed.values.get("started")
    chat = ChatTemplate(tokenizer, config.chat, ranks.broadcast("the time", lambda: config.chat.time_of(started)))
    prompts, eval_prompts = _read_prompts(config, inputs, chat, ranks)
    parallel, device = make_parallel(config, ranks), rank_device(config, ranks)
    require_optimizer(config, parallel, inputs.optimizers[0])
    right = f'must be "ddp" or "fsdp" to go on from {folder.checkpoint}, which is sharded'
    legible = parallel.takes_shards or resumed is None or not resumed.sharded
    require(legible, "parallel.strategy", config.parallel.strategy, right)
    models = _load_models(config, algorithm, inputs, chat, parallel, device)
    if not is_on_meta(models.policy):
        require_repeatable(disable_dropout(models.policy), "model")
    record = inputs.record or of_python(asked, algorithm.name, inputs)
    config = _with_sizes(config, algorithm, models, parallel, device)
    reward = {} if models.reward is None else {"reward_model": frozen_checksum(models.reward)}
    learner = _learner(config, algorithm, inputs, models, parallel, folder, resumed)
    scorer = make_scorer(
        config,
        chat,
        models.reward,
        reward_funcs=inputs.reward_funcs,
        prompt_field=inputs.prompt_field,
        parallel=parallel,
        apart=models.reward_apart,
    )
    return Run(
        config=config,
        algorithm=algorithm,
        ranks=ranks,
        failure_detector=failure_detector,
        hold=hold,
        folder=folder,
        resumed=resumed,
        tokenizer=tokenizer,
        prompts=prompts,
        device=device,
        learner=learner,
        chat=chat,
        scorer=scorer,
        engine=PolicyEngine(config, models.policy, models.params, parallel),
        eval_prompts=eval_prompts,
        eval_params=_eval_params(config, models.params),
        callbacks=_callbacks(config, inputs, record, learner, tokenizer, prompts, folder),
        record=record,
        fingerprints=_fingerprints(inputs, learner, scorer, models.params, prompts) | reward,
    )


def _learner(
    config: OnlineConfig,
    algorithm: Algorithm,
    inputs: Inputs,
    models: _Models,
    parallel: Parallel,
    folder: RunFolder,
    resumed: ResumeState | None,
) -> Learner:
    """The learner, with the checkpoint's weights if the run goes on from a whole one."""
    load = None
    if folder.checkpoint is not None and resumed is not None and not resumed.sharded:
        load = partial(load_weights, folder=folder.checkpoint, tensors=resumed.tensors, trust=config.trust_remote_code)
    return Learner(
        models.policy,
        models.reference,
        algorithm,
        config,
        value=models.value,
        parallel=parallel,
        load=load,
        optimizers=inputs.optimizers,
        reference_apart=models.reference_apart,
    )


def _eval_params(config: OnlineConfig, params: SamplingParams) -> SamplingParams:
    """How completions of held-out prompts are sampled."""
    return replace(
        params,
        samples_per_prompt=config.eval_samples_per_prompt,
        temperature=config.eval_temperature or config.generation.temperature,
        routes=None,  # nothing is trained on these answers
    )


def _fingerprints(
    inputs: Inputs, learner: Learner, scorer: Scorer, params: SamplingParams, prompts: SharedPrompts
) -> dict[str, str]:
    """Of the inputs that decide the result, but for a reward model."""
    found = {"ref_model": learner.fingerprint, "reward_funcs": ", ".join(scorer.reward_funcs)}
    if params.episodes is not None:
        found["environment"] = params.episodes.environment.name
    found |= code_digests([*inputs.reward_funcs, *(Sent.of(one).value for one in inputs.world.all)])
    if inputs.optimizers[0] is not None:
        found["optimizers"] = ", ".join(type(each).__name__ for each in inputs.optimizers)
    if prompts.stream is not None:
        found["train_dataset"] = prompts.stream.fingerprint()
    return found


def _callbacks(
    config: OnlineConfig,
    inputs: Inputs,
    record: Record,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    prompts: SharedPrompts,
    folder: RunFolder,
) -> Callbacks:
    """The callbacks, and the trackers' runs that they go on with, if the run goes on in its folder."""
    known = {**record.flat(), **{f"async_rlhf.{name}": value for name, value in code().items()}}
    found = tracked_runs(folder.path) if folder.goes_on and learner.ranks.is_main else {}
    known |= derived(config, None if prompts.stream is None else len(prompts.stream))
    return Callbacks(config, learner, tokenizer, inputs.callbacks, known, found)


def _find_checkpoint(config: OnlineConfig, algorithm: Algorithm, ranks: Ranks) -> tuple[RunFolder, ResumeState | None]:
    """The run's folder, whose configuration has what "auto" stood for if the run goes on, and the state to resume from,
    if any. Requires that nothing else is in the way.
    """
    checkpoint = ranks.broadcast("checkpoint", lambda: checkpoint_to_resume(config))
    resumed = None if checkpoint is None else ResumeState.read(checkpoint)
    if resumed is not None:
        config = with_recorded(config, resumed.config)
        resumed.check(config, algorithm.name)
    folder = RunFolder(config, checkpoint, resumed.batch if resumed else 0)
    if ranks.is_main:
        folder.check()
    return folder, resumed


def _read_prompts(
    config: OnlineConfig, inputs: Inputs, chat: ChatTemplate, ranks: Ranks
) -> tuple[SharedPrompts, SharedPrompts | None]:
    """The training prompts and the held-out ones, if any. Rank 0 reads them."""
    what: dict[str, Any] = {"prompt_field": inputs.prompt_field, "max_length": config.prompt_cap}
    what |= {"tools": tools_of(inputs.world), "chat": chat}

    train: PromptStream | None = None
    evaluated: PromptStream | None = None
    if ranks.is_main:
        rows = inputs.eval_dataset
        evaluable = config.eval_steps == 0 or rows is not None
        require(evaluable, "eval_steps", config.eval_steps, "must be 0 without eval_dataset")
        train = PromptStream(inputs.train_dataset, chat.tokenizer, seed=config.seed, **what)
        if rows is not None:
            evaluated = PromptStream(rows, chat.tokenizer, shuffle=False, key="eval_dataset", **what)
    evaluates = ranks.broadcast("held-out prompts", lambda: evaluated is not None)
    return SharedPrompts(train, ranks), SharedPrompts(evaluated, ranks) if evaluates else None


@dataclass(frozen=True)
class _Models:
    """The models, all on the learner's device; reference, reward and value model only if the run has them."""

    policy: PreTrainedModel
    params: SamplingParams
    """How completions are sampled from the policy."""
    reference: PreTrainedModel | None
    reward: PreTrainedModel | None
    value: PreTrainedModel | nn.Linear | None
    reference_apart: bool
    reward_apart: bool
    """Whether these compute beside training."""


def _load_models(
    config: OnlineConfig,
    algorithm: Algorithm,
    inputs: Inputs,
    chat: ChatTemplate,
    parallel: Parallel,
    device: torch.device,
) -> _Models:
    tokenizer = chat.tokenizer
    trust, ref_model = config.trust_remote_code, inputs.ref_model
    apart = {key: frozen_device(key, config, device) for key in ("reference_device", "reward_model_device")}

    def place(key: str) -> torch.device:
        """For this process's copy of a frozen model: that which computes apart is rank 0's."""
        alone = apart[key] if parallel.ranks.is_main else torch.device("cpu")
        return device if apart[key] is None or alone is None else alone

    if parallel.ranks.is_main:
        advise_sixteen_bits(config, device)
    if parallel.is_sharded:
        device = torch.device("cpu")  # a sharded model reaches the device piece by piece
    on_meta = _reads_shares(inputs, parallel)
    policy = _policy(config, inputs.model, device, on_meta)
    check_positions(policy, config.prompt_cap, config.generation.longest_episode, length_key(config.generation))
    params = _sampling(config, policy, chat, inputs)
    # The saved policy then stops at the same tokens as in training.
    policy.generation_config = that_stops(policy, tokenizer, params.stop_token_ids)
    reward, named = None, config.reward_model_device
    known = inputs.reward_model is not None or named in (None, "learner")
    require(known, "reward_model_device", named, "must be null: there is no reward model")
    if inputs.reward_model is not None:
        here = apart["reward_model_device"] is None and not config.ray.reward_workers
        where = torch.device("cpu") if config.ray.reward_workers else place("reward_model_device")
        # Who scores elsewhere gets whole weights.
        reward = reward_model_for(inputs.reward_model, tokenizer, where, trust, on_meta=on_meta and here)
    own, where = apart["reference_device"] is not None, place("reference_device")
    alone = algorithm.needs(config).reference and not (ref_model is None and _adapts(config, policy))
    named = config.reference_device
    right = "must be null: this run has no reference policy that is a model of its own"
    require(alone or named in (None, "learner"), "reference_device", named, right)
    if own and named is not None and ref_model is None:
        ref_model = inputs.model if isinstance(inputs.model, str) else copy.deepcopy(policy)
    if isinstance(ref_model, str):
        meta = on_meta and not own
        reference: PreTrainedModel | None = load_policy(ref_model, where, "ref_model", trust=trust, on_meta=meta)
    else:
        reference = None if ref_model is None else ref_model.to(where)
    if reference is not None:
        check_embeddings(reference, tokenizer, "ref_model")
    value = _value(config, algorithm, inputs.value_model, policy, reward, tokenizer, device, on_meta)
    for key, each in (("model", policy), ("ref_model", reference), ("reward_model", reward), ("value_model", value)):
        if isinstance(each, PreTrainedModel):
            use_attention(each, config, key)
    require_alike(parallel.ranks, model=policy, ref_model=reference, reward_model=reward, value_model=value)
    if config.lora.rank > 0 and not has_adapters(policy):
        add_adapters(policy, config.lora, config.seed)
    if config.lora.publish == "adapter":
        only_adapter(policy)
    return _Models(policy, params, reference, reward, value, own, apart["reward_model_device"] is not None)


def _adapts(config: OnlineConfig, policy: PreTrainedModel) -> bool:
    """Whether adapters are trained, without which the policy is its own reference."""
    return config.lora.rank > 0 or has_adapters(policy)


def _reads_shares(inputs: Inputs, parallel: Parallel) -> bool:
    """Whether models that are named stay without weights until they are sharded; the log names those that are not."""
    keys = ("model", "ref_model", "reward_model", "value_model")
    loaded = [key for key in keys if isinstance(getattr(inputs, key), PreTrainedModel)]
    if parallel.reads_shares and loaded and parallel.ranks.is_main:
        why = "given as models, not by name, so every rank holds all of their weights before it keeps its share"
        logger.info("%s: %s", ", ".join(loaded), why)
    return parallel.reads_shares


def _policy(config: OnlineConfig, model: Model, device: torch.device, on_meta: bool) -> PreTrainedModel:
    if not isinstance(model, str):
        return in_float32(unwrap(model).to(device))
    if config.lora.base_bits is None:
        return load_policy(model, device, trust=config.trust_remote_code, on_meta=on_meta)
    computed = autocast_dtype(config) or torch.float32
    return load_in_four_bits(model, device, computed, trust=config.trust_remote_code)


def _with_sizes(
    config: OnlineConfig, algorithm: Algorithm, models: _Models, parallel: Parallel, device: torch.device
) -> OnlineConfig:
    """The configuration with the sizes that the devices' memory decides."""
    trained = [model for model in (models.policy, models.value) if isinstance(model, PreTrainedModel)]
    found: list[PreTrainedModel] = []
    if algorithm.needs(config).reference and not (models.reference is None and has_adapters(models.policy)):
        found.append(models.reference or models.policy)  # a copy of the policy
    if models.reward is not None and config.ray.reward_workers == 0:
        found.append(models.reward)
    own = [torch.device(name) for name in config.own_devices]
    frozen = [model for model in found if model.device not in own]
    judge = models.reward if models.reward in frozen else None
    apart = [model for model in found if model.device in own and model.device.type == "cuda"]
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
    on_meta: bool,
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
    value = value_model_for(value_model, reward_model, policy, device, config.trust_remote_code, on_meta)
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


def restore_trained(run: Training, resumed: ResumeState) -> None:
    """Restore learner and callbacks from the checkpoint, which must be of the same inputs. Every rank must call it.

    Raises:
        ConfigError: it is of others.
    """
    checkpoint = run.folder.checkpoint
    assert checkpoint is not None
    if run.ranks.is_main:
        resumed.check_inputs(run.fingerprints, run.config.resume_anyway)
    run.callbacks.restore_state(checkpoint)
    tensors = load_shards(run.learner, checkpoint / "resume" / SHARDS) if resumed.sharded else resumed.tensors
    restore_learner(run.learner, tensors, resumed.values["learner"])
    resumed.forget_weights()


def _restore(run: Run, resumed: ResumeState) -> None:
    """Restore everything from the checkpoint except random generators and the engine's agreement statistics."""
    checkpoint = run.folder.checkpoint
    assert checkpoint is not None
    if run.ranks.is_main:
        run.scorer.restore(resumed.values["rewards"])
        exact = run.device.type == "cpu" or run.config.deterministic
        how = "" if exact else "; what follows is equal up to rounding, as deterministic is false"
        logger.info("resuming after batch %d, from %s%s", resumed.batch, checkpoint, how)
    restore_trained(run, resumed)
    resumed.read_ahead(checkpoint, run.prompts)
    resumed.read_evaluation(checkpoint, run.eval_prompts, run.ranks)
    # Its name in older checkpoints, too.
    run.callbacks.pending_eval = None if resumed.evaluation is None else resumed.values.get("unjudged")
