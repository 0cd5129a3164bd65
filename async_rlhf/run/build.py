"""Builds everything that the training loop needs from a configuration and the user's inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from async_rlhf.algorithms.record import Algorithm
from async_rlhf.algorithms.table import of_config
from async_rlhf.config import OnlineConfig, engines
from async_rlhf.config.base import require
from async_rlhf.config.rewards import check_rewards
from async_rlhf.data.stream import PromptStream, SharedPrompts
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.failure_detector import FailureDetector
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.generation.episodes.spec import Sent, tools_of
from async_rlhf.generation.inline import PolicyEngine
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.learner.launch import rank_device, start_ranks
from async_rlhf.learner.learner import Learner
from async_rlhf.learner.optimizers import require_optimizer
from async_rlhf.learner.strategies.choice import make_parallel
from async_rlhf.models.adapters import add_adapters
from async_rlhf.models.budget import with_recorded
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import config_of, with_prompt_cap
from async_rlhf.models.gpu_defaults import bare_model, with_gpu_defaults
from async_rlhf.models.loading import disable_dropout, frozen_checksum, require_repeatable, tokenizer_for
from async_rlhf.models.packing import require_heads
from async_rlhf.models.quantised import require_bitsandbytes
from async_rlhf.models.routing import require_routers
from async_rlhf.models.sharded_loading import only_on_rank_0
from async_rlhf.rewards.scorer import Scorer, metric_names
from async_rlhf.run.callbacks import Callbacks, tracked_runs
from async_rlhf.run.checkpoint import ResumeState, load_weights, restore_learner
from async_rlhf.run.factory import check_launch, make_scorer
from async_rlhf.run.folder import RunFolder, checkpoint_to_resume, hold_folder, refuse_second
from async_rlhf.run.inputs import Inputs, Model, Models, Start, load_models, sized
from async_rlhf.run.record import Record, code_digests, derived, of_python
from async_rlhf.run.shards import SHARDS, load_shards
from async_rlhf.system.determinism import prepare_deterministic
from async_rlhf.system.lock import Hold
from async_rlhf.system.names import check_integrations, check_source
from async_rlhf.system.random_state import seed_all
from async_rlhf.system.versions import code

logger = logging.getLogger(__name__)


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
    rule = "must be null with a model that is loaded already; give its name"
    by_name = isinstance(inputs.model, str) or config.lora.base_bits is None
    require(by_name, "lora.base_bits", config.lora.base_bits, rule)
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
    """The algorithm that the configuration is for; a trainer of GRPO takes those that derive from its own, too."""
    if algorithm is None or (algorithm.config is not type(config) and isinstance(config, algorithm.config)):
        return of_config(config)
    rule = f"must be of type {algorithm.config.__name__}"
    require(type(config) is algorithm.config, "args", type(config).__name__, rule)
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
    rule = f'must be "ddp" or "fsdp" to go on from {folder.checkpoint}, which is sharded'
    legible = parallel.takes_shards or resumed is None or not resumed.sharded
    require(legible, "parallel.strategy", config.parallel.strategy, rule)
    models = load_models(config, algorithm, inputs, chat, parallel, device)
    if not only_on_rank_0(models.policy):
        require_repeatable(disable_dropout(models.policy), "model")
    record = inputs.record or of_python(asked, algorithm.name, inputs)
    config = sized(config, algorithm, models, parallel, device)
    judge = models.reward if ranks.is_main else None
    reward = {} if judge is None else {"reward_model": frozen_checksum(judge)}
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
    models: Models,
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
    fingerprints = {"ref_model": learner.fingerprint, "reward_funcs": ", ".join(scorer.reward_funcs)}
    if params.episodes is not None:
        fingerprints["environment"] = params.episodes.environment.name
    engine = learner.config.generation.engine
    components = [learner.algorithm, *inputs.callbacks, *inputs.reward_funcs, *filter(None, inputs.optimizers)]
    components += [] if engine in engines.ENGINES else [engines.load(engines.find(engine).make)]
    fingerprints |= code_digests([*components, *(Sent.of(part).value for part in inputs.world.all)])
    if inputs.optimizers[0] is not None:
        fingerprints["optimizers"] = ", ".join(type(each).__name__ for each in inputs.optimizers)
    if prompts.stream is not None:
        fingerprints["train_dataset"] = prompts.stream.fingerprint()
    return fingerprints


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
    identities = tracked_runs(folder.path) if folder.goes_on and learner.ranks.is_main else {}
    known |= derived(config, None if prompts.stream is None else len(prompts.stream))
    return Callbacks(config, learner, tokenizer, inputs.callbacks, known, identities)


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
