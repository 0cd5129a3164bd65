"""The trainers: what a user constructs. Each wires the parts for one algorithm; the loop is trainer.py's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from async_rlhf.algorithms import ALGORITHMS
from async_rlhf.callbacks import Callbacks, OnlineTrainerState
from async_rlhf.checkpoint import check_output_dir, delete_earlier_run
from async_rlhf.config import ConfigError, OnlineConfig, OnlineDPOConfig
from async_rlhf.data.loading import Rows
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.placement import make_generator, shared_cores
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.learner import Learner
from async_rlhf.models import (
    check_tokenizer,
    check_vocabulary,
    default_device,
    load_policy,
    load_reward_model,
    load_tokenizer,
    stop_token_ids,
)
from async_rlhf.reports.trace import Trace
from async_rlhf.rollouts import Rollouts
from async_rlhf.scoring import Scorer
from async_rlhf.scoring.functions import RewardFunction
from async_rlhf.trainer import TrainingLoop

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
        processing_class: PreTrainedTokenizerBase | None = None,
        eval_dataset: Rows | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
        prompt_field: str = "query",
    ) -> None:
        self.args = args
        reward_funcs = (reward_funcs,) if callable(reward_funcs) else tuple(reward_funcs)
        if reward_model is None and not reward_funcs:
            raise ConfigError("reward_model: got None; give a reward_model, reward_funcs, or both")
        check_output_dir(Path(args.output_dir), args.overwrite_output_dir)
        self.processing_class = _tokenizer(model, processing_class)
        # Data before models: its mistakes are found within seconds.
        stream = self._stream(train_dataset, prompt_field, shuffle=True)
        eval_stream = None if eval_dataset is None else self._stream(eval_dataset, prompt_field, shuffle=False)

        device = torch.device(args.device) if args.device else default_device()
        self.model = load_policy(model, device) if isinstance(model, str) else model.to(device)
        self._check_lengths()
        scorer = Scorer(
            self.processing_class, args, self._reward_model(reward_model, device), reward_funcs, prompt_field
        )
        reference = load_policy(ref_model, device, "ref_model") if isinstance(ref_model, str) else ref_model
        if reference is not None:
            reference.to(device)
        self.learner = Learner(self.model, reference, ALGORITHMS[self.algorithm], args)
        self.callbacks = Callbacks(args, self.learner, self.processing_class, callbacks)
        self._parts = (stream, scorer, eval_stream)

    def train(self) -> OnlineTrainerState:
        """Run the whole training. Returns the final state; the policy lies in ``<output_dir>/final``."""
        stream, scorer, eval_stream = self._parts
        delete_earlier_run(Path(self.args.output_dir))
        trace = Trace(Path(self.args.output_dir) / "trace.json" if self.args.trace else None)
        with shared_cores(self.args, self.model.device) as generator_threads:
            generator = make_generator(self.args, self.model, self._sampling(), trace, generator_threads)
            rollouts = Rollouts(
                generator,
                stream,
                batch_size=self.args.batch_size,
                num_batches=self.args.num_batches,
                staleness=self.args.staleness,
                trace=trace,
            )
            loop = TrainingLoop(
                self.args,
                rollouts,
                scorer,
                self.learner,
                self.processing_class,
                self.callbacks,
                trace,
                None if eval_stream is None else (eval_stream, self._eval_engine()),
            )
            return loop.run()

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
        return TransformersEngine(self.model, replace(self._sampling(), samples_per_prompt=1), autocast=autocast)

    def _stream(self, rows: Rows, prompt_field: str, shuffle: bool) -> PromptStream:
        return PromptStream(
            rows,
            self.processing_class,
            prompt_field=prompt_field,
            max_length=self.args.max_prompt_length,
            seed=self.args.seed,
            shuffle=shuffle,
        )

    def _reward_model(self, reward_model: Model | None, device: torch.device) -> PreTrainedModel | None:
        if isinstance(reward_model, str):
            check_vocabulary(self.processing_class, load_tokenizer(reward_model, "reward_model"), "reward_model")
            return load_reward_model(reward_model, device)
        if reward_model is not None and reward_model.config.vocab_size != self.model.config.vocab_size:
            raise ConfigError(
                f"reward_model: its vocabulary has {reward_model.config.vocab_size} tokens, the policy's "
                f"{self.model.config.vocab_size}; must be a model with the policy's tokenizer"
            )
        return None if reward_model is None else reward_model.to(device).eval()

    def _check_lengths(self) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        total = self.args.max_prompt_length + self.args.generation.response_length
        if limit is not None and total > limit:
            raise ConfigError(
                f"max_prompt_length: got {self.args.max_prompt_length}; with generation.response_length "
                f"{self.args.generation.response_length} it must be at most the model's {limit} positions, so at most "
                f"{limit - self.args.generation.response_length}"
            )


class OnlineDPOTrainer(OnlineTrainer):
    """Online DPO or IPO on the best and the worst of K samples; see :class:`OnlineTrainer` and OnlineDPOConfig."""

    algorithm = "online_dpo"

    def __init__(self, model: Model, args: OnlineDPOConfig, train_dataset: Rows, **options: Any) -> None:
        super().__init__(model, args, train_dataset, **options)


TRAINERS: dict[str, type[OnlineTrainer]] = {"online_dpo": OnlineDPOTrainer}


def _tokenizer(model: Model, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is not None:
        return check_tokenizer(tokenizer)
    name = model if isinstance(model, str) else model.config.name_or_path
    if not name:
        raise ConfigError("processing_class: got None, and the model does not say where it was loaded from; give one")
    return load_tokenizer(name, "processing_class" if not isinstance(model, str) else "model")
