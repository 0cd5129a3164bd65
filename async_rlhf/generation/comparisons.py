"""In which batches an engine is compared with the learner, and what share of the learner's time that takes.

A comparison is a forward pass over a few completions and, where the weights that sampled them are older than the
policy, loading those. Both grow with the model as a batch does: the share depends on the batch, not on the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from async_rlhf.config import OnlineConfig

LIMIT = 0.005
"""Most of a batch's computing that comparing may take, on average."""
FIRST = 4
"""So many batches are always compared, besides those that are sampled before any weights were loaded anew: what is
wrong from the beginning is found at the beginning."""


class Hardware(NamedTuple):
    """Of one rank, as the planner counts it by default."""

    tflops: float
    weights_gbs: float
    forward_mfu: float
    train_mfu: float


GPU = Hardware(tflops=989.0, weights_gbs=10.0, forward_mfu=0.5, train_mfu=0.4)
CPU = GPU._replace(tflops=0.05, weights_gbs=2.0)
"""Of a CPU little is certain, but that loading weights takes no more than some tokens of a forward pass."""
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def share(
    trained_rows: float, compared_rows: float, tokens: float, ranks: int, loaded_bytes: float, hardware: Hardware
) -> float:
    """Seconds of a comparison / seconds of the updates on a batch.

    Arithmetic is counted as the planner counts it: 2 operations a weight and token forward, 6 with the backward pass.
    Every rank of the learner takes part in a comparison, or waits for it.

    Args:
        trained_rows: completions that a batch trains on, counted once for each epoch.
        compared_rows: completions that are compared.
        tokens: of a prompt and its completion.
        ranks: of the learner.
        loaded_bytes: a weight; 0 where nothing is loaded.
        hardware: of one rank.
    """
    operations = hardware.tflops * 1e12  # a second
    forward = 2 * min(compared_rows, trained_rows) * tokens / (operations * hardware.forward_mfu)
    loading = loaded_bytes / (hardware.weights_gbs * 1e9)
    update = 6 * trained_rows * tokens / (operations * hardware.train_mfu * ranks)
    return (forward + loading) / update


def steps_for(found: float) -> int:
    """Batches between two comparisons that each take this share of a batch."""
    return max(1, math.ceil(found / LIMIT))


def steps_of(config: OnlineConfig, trained_per_prompt: int, ranks: int, on_gpu: bool) -> int:
    """Batches between two comparisons in a run, from its sizes alone: the same on every machine and after a resume.

    Args:
        config: of the run.
        trained_per_prompt: completions of each prompt that the algorithm trains on.
        ranks: of the learner.
        on_gpu: whether the learner is on one.
    """
    generation = config.generation
    if generation.mismatch_steps != "auto":
        return generation.mismatch_steps
    own = config.staleness == 0 and generation.dtype == "float32" and config.lora.rank == 0
    inline = config.placement == "inline"
    rows = config.batch_size * trained_per_prompt * config.num_epochs
    compared = min(generation.mismatch_samples, config.batch_size * config.samples_per_prompt)
    loaded = 0.0 if own or inline else _BYTES[generation.dtype]
    return steps_for(share(rows, compared, config.max_length, ranks, loaded, GPU if on_gpu else CPU))


@dataclass(frozen=True)
class Comparisons:
    """The batches that are compared: the first ones, then every n-th.

    Args:
        steps: n.
        staleness: S.
    """

    steps: int
    staleness: int = 0

    @property
    def first(self) -> int:
        """So many batches are compared in any case."""
        return FIRST + self.staleness

    def has(self, batch: int) -> bool:
        """Whether a batch is compared."""
        return batch <= self.first or batch % self.steps == 0

    def number(self, batch: int) -> int:
        """Which comparison that of a batch is, from 1: consecutive ones look at different completions."""
        later = batch // self.steps - self.first // self.steps
        return batch if batch <= self.first else self.first + later
