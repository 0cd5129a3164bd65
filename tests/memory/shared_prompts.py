"""A learner whose rows share prompts, with PyTorch's kernel for packed rows, emulated; and what the planner says of it.

The emulation holds what FlashAttention 2 holds of copied keys and their gradients, those of all query heads included.
Not what a GPU's kernel needs for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import varlen
from fake_rank import Peak
from memory import Case, measure

from async_rlhf.config.online import OnlineConfig
from async_rlhf.models import packing
from async_rlhf.models.memory import LearnerMemory, Pass
from async_rlhf.types import Batch, Group, Prompt, Sample, ScoredBatch


@dataclass(frozen=True)
class SharedCase(Case):
    """All rows of a pass are samples of one prompt."""

    @property
    def tokens(self) -> int:
        """Of a pass."""
        return self.prompt + self.rows * self.response

    @property
    def keys(self) -> int:
        """Of a pass: every branch has those of the prompt."""
        return self.rows * (self.prompt + self.response)

    def config(self) -> OnlineConfig:
        """With as many tokens a pass as the samples of a prompt have."""
        limits = {"max_tokens_per_pass": self.tokens, "annotate_max_tokens": self.tokens}
        rows = {"samples_per_prompt": self.rows, "per_device_train_batch_size": None, "annotate_batch_size": None}
        return replace(super().config(), packing=True, **limits, **rows)

    def batch(self) -> ScoredBatch:
        """A prompt for each pass of each rank, with other tokens in every answer."""
        groups = []
        for number in range(self.passes * self.ranks):
            prompt, samples = [1 + number] * self.prompt, []
            for answer in range(self.rows):
                tokens, versions = [100 + answer] * self.response, np.zeros(self.response, np.int64)
                logprobs = np.zeros(self.response, np.float32)
                samples.append(Sample.answer(prompt, tokens, logprobs, versions, "length"))
            groups.append(Group(Prompt(number, number, tuple(prompt)), tuple(samples)))
        scores = torch.arange(float(self.rows)).repeat(len(groups), 1)
        return ScoredBatch(Batch(1, 0, tuple(groups), 0.0), scores, {})


def measure_kernel(case: SharedCase) -> dict[str, Peak]:
    """What :func:`memory.measure` says with the kernel."""
    replaced: dict[str, Any] = {"_has_kernel": lambda *_: True, "varlen_attn": varlen.varlen_attn}
    with patch.multiple(packing, **replaced):
        return measure(case)


def planned_with_keys(case: SharedCase, memory: LearnerMemory, keys: int | None = None) -> dict[str, float]:
    """What the planner's formulas say of such passes, or of passes with another number of keys."""
    one = Pass(case.tokens, case.rows * case.response, case.keys if keys is None else keys)
    return replace(memory, update=one, annotate=one).phases()
