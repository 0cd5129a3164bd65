"""transformers' Trainer for the supervised stages: batches of similar length, one global normaliser, a quiet bar."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from async_rlhf.commands.stage import Stage
from async_rlhf.config import ConfigError
from async_rlhf.config.base import dotted
from async_rlhf.config.secrets import HIDDEN, without_secrets
from async_rlhf.config.stages import StageConfig
from async_rlhf.models.loading import write_model
from async_rlhf.reports.progress import Lines, on_terminal

logger = logging.getLogger(__name__)

_POOL = 50  # batches sorted together: enough to waste little on padding, few enough to stay random


class LengthBatches(Sampler[list[int]]):
    """Batches of rows of similar length, in a random order that depends only on the seed and the epoch.

    Args:
        lengths: tokens of each row.
        size: rows of a batch; the last batch of an epoch may be smaller.
        seed: of the order. Each pass over the sampler is the next epoch.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, size: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.size = size
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.lengths), generator=self._generator).numpy()
        # Full batches and one remainder, as pools are multiples of the batch.
        for start in range(0, len(order), _POOL * self.size):
            pool = order[start : start + _POOL * self.size]
            pool[:] = pool[np.argsort(self.lengths[pool], kind="stable")]
        for number in torch.randperm(len(self), generator=self._generator).numpy():
            yield order[number * self.size : (number + 1) * self.size].tolist()


class QuietProgress(ProgressCallback):
    """The Trainer's progress bar, with the newest numbers on it instead of printed to standard output."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Show loss and learning rate beside the bar."""
        if self.training_bar is not None and logs is not None:
            shown = {key: f"{logs[key]:.4g}" for key in ("loss", "learning_rate") if key in logs}
            self.training_bar.set_postfix(shown, refresh=False)


class _ProgressLines(TrainerCallback):
    """Lines in a log, where no bar can be drawn."""

    def __init__(self) -> None:
        self._loss = ""
        self._lines = Lines("step", 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count."""
        self._lines = Lines("step", state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how far it is."""
        self._lines.say(state.global_step, self._loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Keep the newest loss."""
        if logs is not None and "loss" in logs:
            self._loss = f"loss {logs['loss']:.4g}"


class _EvaluateEvery(TrainerCallback):
    """Puts metrics of held-out data into the Trainer's log after every given number of optimiser steps."""

    def __init__(self, trainer: Trainer, steps: float, evaluate: Callable[[], dict[str, float]]) -> None:
        self.trainer, self.steps, self.evaluate = trainer, steps, evaluate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate, if it is time."""
        every = self.steps if self.steps >= 1 else math.ceil(self.steps * state.max_steps)
        if every > 0 and state.global_step % every == 0 and state.global_step < state.max_steps:
            metrics = {name: value for name, value in self.evaluate().items() if isinstance(value, (int, float))}
            self.trainer.log(metrics)
            logger.info("step %d of %d: held-out loss %.4f", state.global_step, state.max_steps, metrics["eval_loss"])


class StageTrainer(Trainer):
    """A Trainer whose loss is a sum over an optimiser step's items divided by their number.

    A subclass defines :meth:`loss_sum` and :meth:`collate`; a batch has ``labels``, which are -100 except at items.

    Args:
        model: the model to train.
        examples: any number.
        lengths: tokens of each example.
        config: of the stage.
        evaluate: returns `eval_loss` and other metrics of held-out data.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        examples: Sequence[Any],
        lengths: Sequence[int] | np.ndarray,
        config: StageConfig,
        evaluate: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.config = config
        self.batches = LengthBatches(lengths, config.per_device_train_batch_size, config.seed)
        super().__init__(
            model=model,
            args=_training_arguments(config),
            train_dataset=examples,
            data_collator=self.collate,
        )
        # The loss below is divided by the items of the whole step, so the Trainer must not divide again.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.remove_callback(ProgressCallback)
        self.add_callback(QuietProgress if on_terminal() else _ProgressLines)
        self.add_callback(_EvaluateEvery(self, config.eval_steps, evaluate))

    def collate(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """A batch on the CPU."""
        raise NotImplementedError

    def loss_sum(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        """Sum of the losses of the batch's items, differentiable."""
        raise NotImplementedError

    def get_train_dataloader(self) -> DataLoader:
        """Batches of similar length."""
        pin = torch.cuda.is_available()
        return DataLoader(self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator, pin_memory=pin)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """This batch's share of the step's mean loss."""
        device = inputs["input_ids"].device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.config.bf16):
            return self.loss_sum(model, inputs) / num_items_in_batch


class StageArguments(TrainingArguments):
    """The Trainer's arguments; trackers show the stage's configuration, and not the Trainer's unused defaults."""

    stage_config: StageConfig

    def to_dict(self) -> dict[str, Any]:
        """The stage's configuration, with dotted keys, and what the Trainer calls its epochs."""
        values = dotted(without_secrets(asdict(self.stage_config), HIDDEN))
        return {**values, "num_train_epochs": self.num_train_epochs}


def _training_arguments(config: StageConfig) -> TrainingArguments:
    output = Path(config.output_dir).resolve()
    args = StageArguments(
        output_dir=str(output.with_name(f".{output.name}.logs")),  # moved into the output folder at the end
        num_train_epochs=config.num_epochs,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_steps or config.warmup_ratio,  # below 1 it is a share of the steps
        weight_decay=config.weight_decay,
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},  # the re-entrant kind finds no gradient below adapters
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,  # the filter would hide NaN by showing an older loss
        report_to=config.report_to or "none",
        save_strategy="no",
        seed=config.seed,
        remove_unused_columns=False,
        disable_tqdm=False,
    )
    args.stage_config = config
    args._n_gpu = min(args.n_gpu, 1)  # DataParallel would wrap the model, and split pairs
    return args


def train(trainer: StageTrainer) -> float:
    """Run the training and return its mean loss.

    Raises:
        FloatingPointError: the loss was not a finite number.
    """
    output = trainer.train()
    speed, loss = output.metrics["train_samples_per_second"], float(output.training_loss)
    logger.info("%d steps, loss %.4f, %.1f rows/s", output.global_step, loss, speed)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the training loss is {loss}; lower learning_rate ({trainer.config.learning_rate})")
    return loss


def require_single_process(name: str) -> None:
    """Require one process: the supervised stages run on one device."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ConfigError(f"{name}: started in {world} processes; run it without torchrun or accelerate, in one")


def publish_model(
    stage: Stage, trainer: StageTrainer, tokenizer: PreTrainedTokenizerBase, results: Mapping[str, Any]
) -> None:
    """Save model, tokenizer, the marker and, in logs/, what the loggers wrote: whole or not at all."""
    logs = Path(trainer.args.output_dir)
    with stage.publish_folder(results) as folder:
        write_model(trainer.model, tokenizer, folder)
        if logs.is_dir() and any(logs.iterdir()):
            shutil.move(logs, folder / "logs")
    shutil.rmtree(logs, ignore_errors=True)
