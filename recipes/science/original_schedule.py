"""The learning rate as the code of "Asynchronous RLHF" (arXiv 2410.18252) had it, as a callback.

Its schedule was stepped once before each batch, not after each optimiser step: a linear one is at 1 - b / B of the
learning rate for all N mini-batches of batch b of B, and at 0 for the last batch.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class OriginalSchedule(TrainerCallback):
    """Linear, stepped before each batch."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the rate of all optimiser steps on the batch."""
        factor = 1 - (state.global_step + 1) / state.max_steps
        scheduler = kwargs["lr_scheduler"]
        scheduler.lr_lambdas = [lambda _: factor] * len(scheduler.lr_lambdas)
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = group["initial_lr"] * factor
