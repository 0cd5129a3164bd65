"""What a supervised stage shows while it trains: a bar or lines, transformers' integrations, metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, ProgressCallback, TrainerCallback, TrainerControl, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerState

from async_rlhf.config.base import dotted
from async_rlhf.config.secrets import HIDDEN, without_secrets
from async_rlhf.config.stages import StageConfig
from async_rlhf.reports.progress import Lines, on_terminal


class QuietProgress(ProgressCallback):
    """transformers' progress bar, with the newest numbers on it instead of printed to standard output."""

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
        self._lines = Lines("step", state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how far it is."""
        self._lines.say(state.global_step, self._loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Keep the newest loss."""
        if logs is not None and "loss" in logs:
            self._loss = f"loss {logs['loss']:.4g}"


class StageArguments(TrainingArguments):
    """The arguments that integrations read. They show the stage's configuration, and not transformers' defaults."""

    stage_config: StageConfig

    def to_dict(self) -> dict[str, Any]:
        """The stage's configuration, with dotted keys, and what transformers calls its epochs."""
        values = dotted(without_secrets(asdict(self.stage_config), HIDDEN))
        return {**values, "num_train_epochs": self.num_train_epochs}


class StageReports:
    """The callbacks of a stage, on rank 0.

    Args:
        config: of the stage.
        model: is shown to integrations.
        steps: optimiser steps in all.
        done: those that are done already.
        logs: the folder for what integrations write.
    """

    def __init__(self, config: StageConfig, model: PreTrainedModel, steps: int, done: int, logs: Path) -> None:
        self.arguments = _arguments(config, steps, logs)
        self.state = TrainerState(max_steps=steps, global_step=done)
        self.state.compute_steps(self.arguments, steps)
        self._control = TrainerControl()
        shown = QuietProgress if on_terminal() else _ProgressLines
        called = [DefaultFlowCallback, *get_reporting_integration_callbacks(self.arguments.report_to), shown]
        self._handler = CallbackHandler(called, model, None, None, None)
        self._control = self._handler.on_init_end(self.arguments, self.state, self._control)

    def begin(self) -> None:
        """Before the first step."""
        self._control = self._handler.on_train_begin(self.arguments, self.state, self._control)

    def step_end(self, step: int, epoch: float) -> None:
        """After each step."""
        self.state.global_step, self.state.epoch = step, epoch
        self._control = self._handler.on_step_end(self.arguments, self.state, self._control)

    def log(self, values: Mapping[str, float]) -> None:
        """Numbers of this step, or of those since the last call."""
        logs = {**values, "epoch": self.state.epoch or 0.0}
        self._control = self._handler.on_log(self.arguments, self.state, self._control, logs)

    def end(self) -> None:
        """After the last step."""
        self._control = self._handler.on_train_end(self.arguments, self.state, self._control)


def _arguments(config: StageConfig, steps: int, logs: Path) -> StageArguments:
    arguments = StageArguments(
        output_dir=str(logs),
        num_train_epochs=config.num_epochs,
        max_steps=steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        weight_decay=config.weight_decay,
        logging_steps=config.logging_steps,
        report_to=config.report_to or "none",
        save_strategy="no",
        seed=config.seed,
        use_cpu=not torch.cuda.is_available(),
    )
    arguments.stage_config = config
    return arguments
