"""The trainers: what a user constructs. Each wires the parts for one algorithm; the loop is trainer.py's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from async_rlhf.algorithms import ALGORITHMS
from async_rlhf.callbacks import Callbacks, OnlineTrainerState, check_integrations
from async_rlhf.checkpoint import ResumeState
from async_rlhf.config import (
    ConfigError,
    GRPOConfig,
    OnlineBoKConfig,
    OnlineConfig,
    OnlineDPOConfig,
    PPOConfig,
    RLOOConfig,
)
from async_rlhf.config.base import require
from async_rlhf.data.loading import Rows
from async_rlhf.data.stream import PromptStream, SharedPrompts
from async_rlhf.generation.placement import shared_cores, shared_engine
from async_rlhf.generation.protocol import Generator, SamplingParams
from async_rlhf.generation.shared import SharedEngine
from async_rlhf.launch.parts import check_launch, make_generator, make_scorer, reward_device
from async_rlhf.launch.torchrun import make_parallel, rank_device, start_ranks
from async_rlhf.launch.watch import Watch
from async_rlhf.learner import Learner
from async_rlhf.lora import add_adapters, has_adapters, only_adapter, unwrap
from async_rlhf.models import (
    check_embeddings,
    check_positions,
    in_float32,
    load_policy,
    new_value_head,
    require_alike,
    reward_model_for,
    stop_token_ids,
    tokenizer_for,
    value_model_for,
)
from async_rlhf.reports.trace import Trace
from async_rlhf.rollouts import Rollouts, read_schedule
from async_rlhf.run_folder import RunFolder, checkpoint_to_resume, hold_folder
from async_rlhf.scoring.functions import RewardFunction
from async_rlhf.signals import ending_on_signals
from async_rlhf.trainer import TrainingLoop
from async_rlhf.weights import checksum, named_weights

logger = logging.getLogger(__name__)

Model: TypeAlias = PreTrainedModel | str


class OnlineTrainer:
    """Online training of a causal language model; subclasses name the algorithm.

    Args:
        model: the policy, trained in place; a model, a folder or a hub name.
        args: the configuration.
        train_dataset: rows with the prompt's text, such as a datasets.Dataset or a list of dicts.
        reward_model: scores completions: a sequence-classification model with one output, a folder or a hub name.
        reward_funcs: called as f(prompts=..., completions=..., **columns); their sum, and the reward model's score,
            is the reward.
        ref_model: the reference policy; None takes the policy's starting weights.
        value_model: for PPO, the value model to start from: a model, or the value_model folder of an earlier run's
            checkpoint; None takes the reward model, or without one the policy's body.
        processing_class: the tokenizer; None loads the policy's.
        eval_dataset: held-out rows.
        callbacks: transformers' callbacks.
        prompt_field: the column with the prompt's text.

    Raises:
        ConfigError: something does not fit; raised before anything is trained or written.
    """

    algorithm: ClassVar[str]

    def __init__(
        self,
        model: Model,
        args: OnlineConfig,
        train_dataset: Rows,
        *,
        reward_model: Model | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] = (),
        ref_model: Model | None = None,
        value_model: Model | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        eval_dataset: Rows | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
        prompt_field: str = "query",
    ) -> None:
        self.args = args
        reward_funcs = (reward_funcs,) if callable(reward_funcs) else tuple(reward_funcs)
        given = reward_model is not None or len(reward_funcs) > 0
        require(given, "reward_model", None, "give a reward_model, reward_funcs, or both")
        if ref_model is not None and ref_model is model and not isinstance(model, str):
            raise ConfigError("ref_model: got the policy itself; give a copy, or None for the starting weights")
        check_integrations(args.report_to)
        self._started = False
        self.ranks = start_ranks(args)
        self._watch = Watch(self.ranks)
        with self._watch.watching(), ExitStack() as stack:
            check_launch(args, self.ranks)
            self._find_checkpoint(stack)
            self.processing_class = tokenizer_for(model, processing_class, args.trust_remote_code)
            # Data before models: its mistakes are found within seconds.
            self._read_data(train_dataset, eval_dataset, prompt_field)
            self._load_models(model, ref_model, reward_model, value_model, reward_funcs, prompt_field)
            self.callbacks = Callbacks(args, self.learner, self.processing_class, callbacks)
            self._inputs = self._fingerprints()
            if self.ranks.leads and self._resumed is not None:
                self._resumed.check_inputs(self._inputs, args.resume_anyway)
            self._until_trained = stack.pop_all()

    def _read_data(self, train_dataset: Rows, eval_dataset: Rows | None, prompt_field: str) -> None:
        """Prompts, and a record to repeat. Rank 0 reads them, and tells the others."""
        args, ranks = self.args, self.ranks
        train, evaluated = None, None
        if ranks.leads:
            evaluable = args.eval_steps == 0 or eval_dataset is not None
            require(evaluable, "eval_steps", args.eval_steps, "must be 0 without eval_dataset")
        self._recorded = ranks.from_lead("recorded schedule", self._read_record)
        if ranks.leads:
            train = self._prompts(train_dataset, prompt_field, "train_dataset")
            if eval_dataset is not None:
                evaluated = self._prompts(eval_dataset, prompt_field, "eval_dataset")
        self._stream, eval_stream = SharedPrompts(train, ranks), SharedPrompts(evaluated, ranks)
        self._eval_stream = eval_stream if ranks.from_lead("held-out prompts", lambda: evaluated is not None) else None

    def _read_record(self) -> dict[int, tuple[int, ...]] | None:
        args = self.args
        if args.replay_from is None:
            return None
        return read_schedule(Path(args.replay_from), args.generation.shares, args.num_batches)

    def _load_models(
        self,
        model: Model,
        ref_model: Model | None,
        reward_model: Model | None,
        value_model: Model | None,
        reward_funcs: tuple[RewardFunction, ...],
        prompt_field: str,
    ) -> None:
        args, trust = self.args, self.args.trust_remote_code
        self.parallel = parallel = make_parallel(args, self.ranks)
        self.device = rank_device(args, self.ranks)
        # What is spread comes to the device piece by piece.
        device = torch.device("cpu") if parallel.spreads_weights else self.device
        named = isinstance(model, str)
        self.model = load_policy(model, device, trust=trust) if named else in_float32(unwrap(model).to(device))
        check_positions(self.model, args.max_prompt_length, args.generation.response_length)
        self._params = self._sampling()
        # The saved policy then stops where this one did.
        self.model.generation_config.eos_token_id = list(self._params.stop_token_ids)
        scoring_model = None
        if reward_model is not None:
            scoring_model = reward_model_for(reward_model, self.processing_class, trust)
            scoring_model.to(reward_device(args, device))
        self._reward_checksum = None if scoring_model is None else checksum(named_weights(scoring_model))
        reference = (
            load_policy(ref_model, device, "ref_model", trust=trust) if isinstance(ref_model, str) else ref_model
        )
        if reference is not None:
            check_embeddings(reference.to(device), self.processing_class, "ref_model")
        value = self._value(value_model, scoring_model, device)
        require_alike(self.ranks, model=self.model, ref_model=reference, reward_model=scoring_model, value_model=value)
        if args.lora.rank > 0 and not has_adapters(self.model):
            add_adapters(self.model, args.lora, args.seed)
        if args.lora.publish == "adapter":
            only_adapter(self.model)
        resumed = self._resumed
        checkpoint = None if resumed is None or self._checkpoint is None else (self._checkpoint, resumed.tensors)
        self.learner = Learner(self.model, reference, ALGORITHMS[self.algorithm], args, value, parallel, checkpoint)
        self._scorer = make_scorer(args, self.processing_class, scoring_model, reward_funcs, prompt_field, parallel)

    def _find_checkpoint(self, stack: ExitStack) -> None:
        """Hold the folder, find what the run goes on from, if anything, and require that nothing else is in the way."""
        args = self.args
        if self.ranks.leads:
            self._hold = stack.enter_context(hold_folder(Path(args.output_dir)))
        self._checkpoint = self.ranks.from_lead("checkpoint", lambda: checkpoint_to_resume(args))
        self._resumed = None if self._checkpoint is None else ResumeState.read(self._checkpoint)
        if self._resumed is not None:
            self._resumed.check(args)
        self._folder = RunFolder(args, self._checkpoint, self._resumed.batch if self._resumed else 0)
        if self.ranks.leads:
            self._folder.check()

    def train(self) -> OnlineTrainerState:
        """Run the whole training, or what is left of it, once. The policy then lies in ``<output_dir>/final``.

        On SIGTERM or SIGHUP it writes a checkpoint after the batch at hand and exits with code 0, to be resumed. Of
        several ranks all must call it.

        Returns:
            The final state.
        """
        if self._started:
            raise RuntimeError("this trainer has trained already; make a new one to train again")
        self._started = True
        with self._until_trained, self._watch.watching(), ending_on_signals() as stop_asked:
            with shared_cores(self.args, self.device, self.ranks.local_count) as threads:
                if self._resumed is not None:
                    self.learner.restore(self._resumed.tensors, self._resumed.values["learner"])
                    self._resumed.forget_weights()
                state = self._run(threads, stop_asked)
            self._watch.close()
        return state

    def _run(self, threads: int | None, stop_asked: Callable[[], bool]) -> OnlineTrainerState:
        """Run the loop. Every rank does, with all that it has of each part."""
        folder, resumed, leads = self._folder, self._resumed, self.ranks.leads
        with ExitStack() as stack:
            if leads:
                stack.enter_context(self._hold.alone())
            trace = stack.enter_context(closing(Trace()))
            engine = shared_engine(self.args, self.model, self._params, self.parallel)
            generator = make_generator(self.args, self.model, self._params, trace, threads, engine)
            stack.enter_context(closing(generator))
            if resumed is not None:
                self._restore(resumed, generator)
            stack.enter_context(self._scorer.started())
            if leads:
                self._hold.require()
                folder.clear(self.callbacks.state.best_model_checkpoint)
                if self.args.trace:
                    trace.write_to(folder.path / folder.trace)
            loop = TrainingLoop(
                self.args,
                self._rollouts(generator, trace),
                self._scorer,
                self.learner,
                self.processing_class,
                self.callbacks,
                trace,
                None if self._eval_stream is None else (self._eval_stream, self._eval_engine()),
                self._inputs,
                stop_asked,
                self._hold.require if leads else lambda: None,
            )
            return loop.run(resumed, resumed.logs if resumed and folder.goes_on else None)

    def _rollouts(self, generator: Generator, trace: Trace) -> Rollouts:
        resumed = self._resumed
        return Rollouts(
            generator,
            self._stream,
            batch_size=self.args.batch_size,
            num_batches=self.args.num_batches,
            staleness=self.args.staleness,
            trace=trace,
            bounded=self.args.staleness_mode == "bounded",
            recorded=self._recorded,
            start=resumed.batch if resumed else 0,
            ahead=resumed.ahead if resumed else (),
        )

    def _restore(self, resumed: ResumeState, generator: Generator) -> None:
        """Put callbacks, rewards and what was found of the generator where the checkpoint was written."""
        assert self._checkpoint is not None
        resumed.read_ahead(self._checkpoint, self._stream)
        self.callbacks.restore_state(self._checkpoint)
        self._scorer.restore(resumed.values["rewards"])
        generator.agreement.restore(resumed.values["agreement"])
        logger.info("resuming after batch %d, from %s", resumed.batch, self._checkpoint)

    def _fingerprints(self) -> dict[str, str]:
        """Of everything that came from outside and decides the run, under the names of the arguments. Rank 0 knows."""
        stream = self._stream.stream
        if stream is None:
            return {}
        found = {
            "train_dataset": stream.fingerprint(),
            "ref_model": self.learner.fingerprint,
            "reward_funcs": ", ".join(self._scorer.reward_funcs),
        }
        if self._reward_checksum is not None:
            found["reward_model"] = self._reward_checksum
        return found

    def _sampling(self) -> SamplingParams:
        generation = self.args.generation
        return SamplingParams(
            samples_per_prompt=self.args.samples_per_prompt,
            temperature=generation.temperature,
            response_length=generation.response_length,
            stop_token_ids=stop_token_ids(self.model, self.processing_class, generation.stop_tokens),
            seed=self.args.seed,
            batch_size=generation.batch_size,
        )

    def _eval_engine(self) -> SharedEngine:
        return shared_engine(self.args, self.model, replace(self._params, samples_per_prompt=1), self.parallel)

    def _prompts(self, rows: Rows, prompt_field: str, key: str) -> PromptStream:
        return PromptStream(
            rows,
            self.processing_class,
            prompt_field=prompt_field,
            max_length=self.args.max_prompt_length,
            seed=self.args.seed,
            shuffle=key == "train_dataset",
            key=key,
        )

    def _value(
        self, value_model: Model | None, reward_model: PreTrainedModel | None, device: torch.device
    ) -> PreTrainedModel | nn.Linear | None:
        """Nothing to estimate values with, but for PPO."""
        if value_model is not None:
            raise ConfigError(f"value_model: got {value_model!r}; must be None: {self.algorithm} has no value model")
        return None


class OnlineDPOTrainer(OnlineTrainer):
    """Online DPO or IPO on the best and the worst of K samples; see :class:`OnlineTrainer` and OnlineDPOConfig."""

    algorithm = "online_dpo"
    args: OnlineDPOConfig


class OnlineBoKTrainer(OnlineTrainer):
    """Supervised learning on the best of K samples; see :class:`OnlineTrainer` and OnlineBoKConfig."""

    algorithm = "best_of_k"
    args: OnlineBoKConfig


class RLOOTrainer(OnlineTrainer):
    """REINFORCE leave-one-out; see :class:`OnlineTrainer` and RLOOConfig."""

    algorithm = "rloo"
    args: RLOOConfig


class GRPOTrainer(OnlineTrainer):
    """Group relative policy optimisation; see :class:`OnlineTrainer` and GRPOConfig."""

    algorithm = "grpo"
    args: GRPOConfig


class PPOTrainer(OnlineTrainer):
    """PPO with a learned value function; see :class:`OnlineTrainer` and PPOConfig."""

    algorithm = "ppo"
    args: PPOConfig

    def _value(
        self, value_model: Model | None, reward_model: PreTrainedModel | None, device: torch.device
    ) -> PreTrainedModel | nn.Linear:
        """The value model: as given, else a copy of the reward model, else on the policy's body. Or a value head."""
        if self.args.shared_trunk:
            if not (value_model is None or isinstance(value_model, str)):
                right = "with shared_trunk it must be None or the folder of a head"
                raise ConfigError(f"value_model: got a model; {right}")
            return new_value_head(self.model, value_model).to(device)
        value = value_model_for(value_model, reward_model, self.model, device, self.args.trust_remote_code)
        check_embeddings(value, self.processing_class, "value_model")
        value = in_float32(value).to(device).requires_grad_(True)
        if self.args.lora.rank > 0:
            add_adapters(value, self.args.lora, self.args.seed, "SEQ_CLS").score.requires_grad_(True)
        return value


TRAINERS: dict[str, type[OnlineTrainer]] = {
    trainer.algorithm: trainer for trainer in (OnlineDPOTrainer, OnlineBoKTrainer, RLOOTrainer, PPOTrainer, GRPOTrainer)
}
