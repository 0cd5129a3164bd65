"""A reward model on a device of its own: batches are judged as they come, beside training."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from async_rlhf.models.budget import passes_alone
from async_rlhf.models.forward import Row, autocast_dtype, padded, score_padded
from async_rlhf.models.passes import Passes
from async_rlhf.rewards.scorer import Scorer


class ApartScorer(Scorer):
    """A :class:`Scorer` on rank 0 whose reward model computes on ``reward_model_device``, in the
    thread that judges batches before their turn, with the passes of a learner on one rank.
    """

    model_elsewhere = True
    scoring_ranks = 1

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.reward_model is not None
        self._device = self.reward_model.device

    def score_batches(self, batches: list[list[Row]]) -> list[Tensor]:
        """Scores of each batch of rows by the reward model."""
        model, device, dtype = self.reward_model, self._device, autocast_dtype(self.config)
        assert model is not None
        assert device is not None
        # Kernels of libraries run on the current device, and each thread has its own.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return [score_padded(model, **padded(rows), autocast=dtype, device=device) for rows in batches]

    @cached_property
    def _passes(self) -> Passes:
        assert self.reward_model is not None
        return passes_alone("reward model", self.reward_model, self.config)
