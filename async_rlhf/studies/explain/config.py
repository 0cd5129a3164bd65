"""Configuration of ``async-rlhf explain``."""

from __future__ import annotations

from dataclasses import dataclass

from async_rlhf.config.base import FOLDER, REQUIRED, at_least, key
from async_rlhf.config.common import OfRunConfig, RepeatableConfig


@dataclass(frozen=True)
class ExplainConfig(OfRunConfig, RepeatableConfig):
    """Say what moved the policy in one update: ``async-rlhf explain RUN --batch b``. The update is repeated, bit for
    bit, from the checkpoint before it."""

    batch: int = key(REQUIRED, at_least(1))
    """The batch, from 1, whose update is explained."""
    top: int = key(5, at_least(0))
    """How many completions, or pairs, are left out in turn: those with the largest contributions. Each costs another
    update."""
    output_dir: str | None = key(None, FOLDER, role="place")
    """Where explain-BATCH.json and explain-BATCH.txt go; null for the folder "explain" in the run's folder."""
