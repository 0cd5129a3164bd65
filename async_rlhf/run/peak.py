"""Ends a run when what its evaluations measure is past its peak."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from async_rlhf.config import OnlineConfig

logger = logging.getLogger(__name__)


class StopAtPeak(TrainerCallback, ExportableState):
    """Stops after ``stop_patience`` evaluations in a row without a new best value of ``stop_at``.

    transformers' EarlyStoppingCallback compares with the best checkpoint, so a peak without one would not count.

    Args:
        config: of the run.
    """

    def __init__(self, config: OnlineConfig) -> None:
        assert config.stop_at is not None
        self.name, self.patience = config.stop_at, config.stop_patience
        self.sign = 1 if config.greater_is_better else -1
        self.best: float | None = None
        self.best_batch = 0
        self.waited = 0

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"args": {}, "attributes": {name: getattr(self, name) for name in ("best", "best_batch", "waited")}}

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Compare; a result that is missing, because no completion has a score, is no new best."""
        found = (metrics or {}).get(self.name)
        if found is not None and (self.best is None or self.sign * found > self.sign * self.best):
            self.best, self.best_batch, self.waited = found, state.global_step, 0
            return
        self.waited += 1
        if self.waited < self.patience:
            return
        control.should_training_stop = True
        if self.waited == self.patience:  # the policy at the end is evaluated once more
            peak = "has no value" if self.best is None else f"peaked at batch {self.best_batch} with {self.best:.6g}"
            logger.info("stopped: %s %s; %d evaluations since were no better", self.name, peak, self.waited)
