"""Results of a run's checkpoints, in the trackers' runs that the training itself was logged in."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.run.callbacks import TRAINER_STATE, tracked_runs
from async_rlhf.run.folder import FINAL, batch_of
from async_rlhf.run.trackers import report

logger = logging.getLogger(__name__)


def log_to_trackers(run: Path, results: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
    """Log what was found of a run's checkpoints, each at its batch. A failure is a warning.

    Args:
        run: the run's folder, whose trackers.json says where it was logged; without one, nothing is done.
        results: of ``evaluate``.
        samples: rows of its samples.jsonl, for a table.
    """
    runs = tracked_runs(run)
    steps = {name: step for name in results["models"] if (step := _batch(run, name)) is not None}
    if not runs or not steps:
        return
    scalars: dict[int, dict[str, float]] = {}
    for name, step in steps.items():
        numbers = _numbers(results["models"][name])
        scalars[step] = {f"evaluation/{key}": value for key, value in numbers.items()}
    rows = [
        {"batch": step, "model": name, "prompt": row["query"], **row["models"][name]}
        for row in samples
        for name, step in steps.items()
    ]
    if trackers := report(runs, run, scalars, {"evaluation_completions": rows}):
        logger.info("evaluate: the results are also in the run's %s", ", ".join(trackers))


def _batch(run: Path, name: str) -> int | None:
    """After how many batches a model of the run was saved; None for a model that is not the run's."""
    if name != FINAL:
        return batch_of(name)
    try:
        return int(json.loads((run / name / TRAINER_STATE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """A model's results, an interval as three: its estimate under the key itself, and its ends."""
    flat: dict[str, Any] = {}
    for key, value in results.items():
        if isinstance(value, Mapping):
            flat |= {key: value["estimate"], f"{key}_low": value["low"], f"{key}_high": value["high"]}
        else:
            flat[key] = value
    return {key: float(x) for key, x in flat.items() if isinstance(x, (int, float)) and math.isfinite(x)}
