"""The trainers: what a user constructs. Each wires the parts for one algorithm; the loop is trainer.py's."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from async_rlhf.algorithms import ALGORITHMS
from async_rlhf.callbacks import Callbacks, OnlineTrainerState, check_integrations
from async_rlhf.checkpoint import Checkpoints, ResumeState, check_output_dir, checkpoint_to_resume, delete_earlier_run
from async_rlhf.config import (
    ConfigError,
    GRPOConfig,
    OnlineBoKConfig,
    OnlineConfig,
    OnlineDPOConfig,
    PPOConfig,
    RLOOConfig,
)
from async_rlhf.data.loading import Rows
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.placement import check_engine, make_generator, shared_cores
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.learner import Learner
from async_rlhf.lora import add_adapters, has_adapters, only_adapter, unwrap
from async_rlhf.models import (
    check_positions,
    check_reward_model,
    check_tokenizer,
    check_vocabulary,
    default_device,
    load_policy,
    load_reward_model,
    load_tokenizer,
    load_value_head,
    new_value_model,
    stop_token_ids,
)
from async_rlhf.reports.trace import Trace
from async_rlhf.rollouts import Rollouts, read_schedule
from async_rlhf.scoring import Scorer
from async_rlhf.scoring.functions import RewardFunction
from async_rlhf.signals import ending_on_sigterm
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
        if reward_model is None and not reward_funcs:
            raise ConfigError("reward_model: got None; give a reward_model, reward_funcs, or both")
        if ref_model is not None and ref_model is model and not isinstance(model, str):
            raise ConfigError("ref_model: got the policy itself; give a copy, or None for the starting weights")
        if args.eval_steps and eval_dataset is None:
            raise ConfigError(f"eval_steps: got {args.eval_steps}; must be 0 without eval_dataset")
        check_integrations(args.report_to)
        check_engine(args.generation)
        self._find_checkpoint()
        self._recorded = None
        if args.replay_from is not None:
            self._recorded = read_schedule(Path(args.replay_from), args.generation.shares, args.num_batches)
        self.processing_class = _tokenizer(model, processing_class)
        # Data before models: its mistakes are found within seconds.
        self._stream = self._prompts(train_dataset, prompt_field, "train_dataset")
        self._eval_stream = None if eval_dataset is None else self._prompts(eval_dataset, prompt_field, "eval_dataset")

        device = torch.device(args.device) if args.device else default_device()
        self.model = load_policy(model, device) if isinstance(model, str) else _in_float32(unwrap(model).to(device))
        check_positions(self.model, args.max_prompt_length, args.generation.response_length)
        self._params = self._sampling()
        # The saved policy then stops where this one did.
        self.model.generation_config.eos_token_id = list(self._params.stop_token_ids)
        scoring_model = self._reward_model(reward_model, device)
        self._scorer = Scorer(self.processing_class, args, scoring_model, reward_funcs, prompt_field)
        _check_json(self._scorer.state())
        reference = load_policy(ref_model, device, "ref_model") if isinstance(ref_model, str) else ref_model
        if reference is not None:
            self._check_embeddings(reference.to(device), "ref_model")
        value = self._value(value_model, scoring_model, device)
        if args.lora.rank > 0 and not has_adapters(self.model):
            add_adapters(self.model, args.lora, args.seed)
        if args.lora.publish == "adapter":
            only_adapter(self.model)
        self.learner = Learner(self.model, reference, ALGORITHMS[self.algorithm], args, value)
        self.callbacks = Callbacks(args, self.learner, self.processing_class, callbacks)
        self._inputs = self._fingerprints()
        if self._resumed is not None:
            self._resumed.check_inputs(self._inputs, args.resume_anyway)
        self._started = False

    def _find_checkpoint(self) -> None:
        """What the run goes on from, if anything, and whether its folder may be written to."""
        args, output_dir = self.args, Path(self.args.output_dir)
        self._checkpoint = checkpoint_to_resume(args)
        self._resumed = None if self._checkpoint is None else ResumeState.read(self._checkpoint)
        if self._resumed is not None:
            self._resumed.check(args)
        self._here = self._checkpoint is not None and self._checkpoint.parent.resolve() == output_dir.resolve()
        afresh = args.overwrite_output_dir or (args.resume and self._checkpoint is None)
        check_output_dir(output_dir, afresh or self._here)

    def train(self) -> OnlineTrainerState:
        """Run the whole training, or what is left of it, once. The policy then lies in ``<output_dir>/final``.

        On SIGTERM it writes a checkpoint after the batch at hand and exits with code 0, to be resumed.

        Returns:
            The final state.
        """
        if self._started:
            raise RuntimeError("this trainer has trained already; make a new one to train again")
        self._started = True
        folder = Path(self.args.output_dir)
        resumed = self._resumed
        if resumed is not None:
            self._restore(resumed)
        with ExitStack() as stack:
            stop_asked = stack.enter_context(ending_on_sigterm())
            threads = stack.enter_context(shared_cores(self.args, self.model.device))
            trace = stack.enter_context(closing(Trace()))
            generator = make_generator(self.args, self.model, self._params, trace, threads)
            stack.enter_context(closing(generator))
            if resumed is not None and self._here:
                Checkpoints(folder).delete_newer(resumed.batch)
                # A kill may have come between the last checkpoint and the deletion of old ones.
                best = self.callbacks.state.best_model_checkpoint
                Checkpoints(folder).delete_old(self.args.save_total_limit, best)
            else:
                delete_earlier_run(folder)
            if self.args.trace:
                trace.write_to(folder / (f"trace-from-{resumed.batch}.json" if resumed else "trace.json"))
            rollouts = Rollouts(
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
            loop = TrainingLoop(
                self.args,
                rollouts,
                self._scorer,
                self.learner,
                self.processing_class,
                self.callbacks,
                trace,
                None if self._eval_stream is None else (self._eval_stream, self._eval_engine()),
                self._inputs,
                stop_asked,
            )
            return loop.run(resumed, resumed.logs if resumed and self._here else None)

    def _restore(self, resumed: ResumeState) -> None:
        """Put learner, callbacks and rewards where the checkpoint was written."""
        assert self._checkpoint is not None
        resumed.read_ahead(self._checkpoint, self._stream)
        self.learner.restore(self._checkpoint, resumed.tensors, resumed.values["learner"])
        self.callbacks.restore_state(self._checkpoint)
        self._scorer.restore(resumed.values["rewards"])
        logger.info("resuming after batch %d, from %s", resumed.batch, self._checkpoint)

    def _fingerprints(self) -> dict[str, str]:
        """Of everything that came from outside and decides the run, under the names of the arguments."""
        found = {
            "train_dataset": self._stream.fingerprint(),
            "ref_model": self.learner.fingerprint(),
            "reward_funcs": ", ".join(self._scorer.reward_funcs),
        }
        if self._scorer.reward_model is not None:
            found["reward_model"] = checksum(named_weights(self._scorer.reward_model))
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

    def _eval_engine(self) -> TransformersEngine:
        autocast = torch.bfloat16 if self.args.bf16 else None
        return TransformersEngine(self.model, replace(self._params, samples_per_prompt=1), autocast=autocast)

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

    def _reward_model(self, reward_model: Model | None, device: torch.device) -> PreTrainedModel | None:
        if isinstance(reward_model, str):
            check_vocabulary(self.processing_class, load_tokenizer(reward_model, "reward_model"), "reward_model")
            reward_model = load_reward_model(reward_model, device)
        if reward_model is None:
            return None
        self._check_embeddings(reward_model, "reward_model")
        return check_reward_model(reward_model).to(device).eval()

    def _value(
        self, value_model: Model | None, reward_model: PreTrainedModel | None, device: torch.device
    ) -> PreTrainedModel | nn.Linear | None:
        """Nothing to estimate values with, but for PPO."""
        if value_model is not None:
            raise ConfigError(f"value_model: got {value_model!r}; must be None: {self.algorithm} has no value model")
        return None

    def _check_embeddings(self, model: PreTrainedModel, key: str) -> None:
        rows, tokens = model.get_input_embeddings().weight.shape[0], len(self.processing_class)
        if rows < tokens:
            raise ConfigError(
                f"{key}: it has embeddings for {rows} tokens, the policy's tokenizer has {tokens}; must be a model "
                "with the policy's tokenizer"
            )


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
            return self._value_head(value_model, device)
        if isinstance(value_model, str):
            value = load_reward_model(value_model, device, "value_model")
        elif value_model is not None and value_model is reward_model:
            raise ConfigError("value_model: got the reward model itself; give a copy, or None for one")
        elif value_model is not None:
            value = check_reward_model(value_model, "value_model").to(device)
        else:
            value = new_value_model(self.model) if reward_model is None else copy.deepcopy(reward_model)
        self._check_embeddings(value, "value_model")
        value = _in_float32(value).requires_grad_(True)
        if self.args.lora.rank > 0:
            add_adapters(value, self.args.lora, self.args.seed, "SEQ_CLS").score.requires_grad_(True)
        return value

    def _value_head(self, folder: Model | None, device: torch.device) -> nn.Linear:
        if not (folder is None or isinstance(folder, str)):
            raise ConfigError("value_model: got a model; with shared_trunk it must be None or the folder of a head")
        head = nn.Linear(self.model.get_output_embeddings().in_features, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        if folder is not None:
            load_value_head(Path(folder), head)
        return head.to(device)


TRAINERS: dict[str, type[OnlineTrainer]] = {
    trainer.algorithm: trainer for trainer in (OnlineDPOTrainer, OnlineBoKTrainer, RLOOTrainer, PPOTrainer, GRPOTrainer)
}


def _tokenizer(model: Model, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is not None:
        return check_tokenizer(tokenizer)
    name = model if isinstance(model, str) else model.config.name_or_path
    if not name:
        raise ConfigError("processing_class: got None, and the model does not say where it was loaded from; give one")
    return load_tokenizer(name, "processing_class" if not isinstance(model, str) else "model")


def _check_json(state: dict[str, Any]) -> None:
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward_funcs: state_dict() must return what JSON can hold: {error}") from error


def _in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """AdamW in bfloat16 moves few weights at the rates of RLHF: the masters are float32, whatever was loaded."""
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        return model
    logger.warning("model: its weights are converted to float32; set bf16 to compute in bfloat16")
    return model.float()
