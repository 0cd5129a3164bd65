"""What a training run has come to, in a few lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

SCORES, HELD_OUT = "objective/scores", "eval_objective/scores"


def training_summary(folder: Path, policy: str, metrics: str, seconds: float) -> str:
    """Where the policy is, how long it took, the reward at start and end, and the held-out result.

    Args:
        folder: of the run.
        policy: name of the policy's folder in it.
        metrics: name of its log in it.
        seconds: that the command took; a resumed run's earlier time is not in it.
    """
    text = (folder / metrics).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    batches = int(max((line["batch"] for line in lines), default=0))
    told = [f"\ntrained on {batches} batches; {timedelta(seconds=round(seconds))} in all"]
    told += _scores("reward", [line for line in lines if SCORES in line], SCORES, max(1, len(lines) // 10))
    told += _scores("held-out reward", [line for line in lines if HELD_OUT in line], HELD_OUT, 1)
    told += [f"policy: {folder / policy}", f"every metric: {folder / metrics}"]
    return "\n".join(told)


def _scores(name: str, lines: Sequence[Mapping[str, Any]], key: str, count: int) -> list[str]:
    if not lines:
        return []
    count = min(count, max(1, len(lines) // 2))
    ends = [sum(line[key] for line in part) / count for part in (lines[:count], lines[-count:])]
    if len(lines) == 1:
        return [f"{name}: {ends[1]:.3f}"]
    where = "the first and the last" if count == 1 else f"the first and the last {count}"
    return [f"{name}: {ends[0]:.3f} -> {ends[1]:.3f} ({where} logged)"]
