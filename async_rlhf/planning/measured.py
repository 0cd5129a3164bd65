"""Times of an earlier run, from the files that it left."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.config import ConfigError
from async_rlhf.planning.times import BatchTimes, Split
from async_rlhf.reports.trace import LEARNER

METRICS, TRACE = "metrics.jsonl", "trace.json"
FEWEST = 4
"""Least number of batches that must remain to measure anything."""
_WORK = ("time/mismatch", "time/annotate", "time/train")
_SPANS = ("time/wait", "time/score", "time/annotate", "time/train", "time/publish")


@dataclass(frozen=True)
class MeasuredRun:
    """The measured times of a run.

    Args:
        rows: its batches, in order.
        split: generators that shared each batch, and one learner; ``in_turn`` if it sampled inline.
        staleness: the staleness it reached.
        prompts: prompts of a batch.
        step_seconds: mean time from batch to batch.
    """

    rows: list[BatchTimes]
    split: Split
    staleness: int
    prompts: int
    step_seconds: float


def read_run(folder: Path, warm_up: int, learners: int = 1) -> MeasuredRun:
    """The batches of a run after the first ``warm_up``, without the last ones, which publish nothing.

    Raises:
        ConfigError: it is not a run's folder, or has too few batches.
    """
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
        logs = [log for log in map(json.loads, lines) if "time/batch" in log]
        lag = max((int(log["schedule/lag"]) for log in logs), default=0)
        kept = logs[warm_up : max(0, len(logs) - 1 - lag)]
        generate, in_turn = _by_generator(folder / TRACE)
        rows = [_row(log, generate.get(int(log["batch"])) or (log["time/generate"],)) for log in kept]
        prompts = [round(log["eps"] * log["time/batch"]) for log in kept]
    except (OSError, ValueError, KeyError, TypeError) as error:
        right = f"must be the output folder of a run, with its {METRICS}: {type(error).__name__}: {error}"
        raise ConfigError(f"run: got {str(folder)!r}; {right}") from error
    if len(kept) < FEWEST:
        raise ConfigError(
            f"run: {str(folder)!r} has logged {len(logs)} batches; must be at least {warm_up + 1 + lag + FEWEST}: the "
            f"first {warm_up} (warm_up) and the last {1 + lag} do not count"
        )
    counts = {len(row.generate) for row in rows}
    if len(counts) > 1:  # the trace covers only part of the run: use what all batches have
        rows = [BatchTimes((log["time/generate"],), *_learner(log)) for log in kept]
    split = Split(len(rows[0].generate), learners, in_turn)
    return MeasuredRun(rows, split, lag, max(prompts), sum(log["time/batch"] for log in kept) / len(kept))


def _row(log: dict[str, float], generate: tuple[float, ...]) -> BatchTimes:
    return BatchTimes(generate, *_learner(log))


def _learner(log: dict[str, float]) -> tuple[float, float, float, float]:
    """Seconds of work, of publishing, of the rest, and of reward functions, which run beside all of that.

    Comparing engine and learner is work, but done within "wait". What "score" takes beyond the functions is the reward
    model's; of functions that ran beside training it has only what was waited for.
    """
    other = log["time/batch"] - sum(log.get(name, 0.0) for name in _SPANS)
    rewards = log.get("time/reward_funcs", 0.0)
    work = max(0.0, log["time/score"] - rewards) + sum(log.get(name, 0.0) for name in _WORK)
    return work, log["time/publish"], max(0.0, other), rewards


def _by_generator(path: Path) -> tuple[dict[int, tuple[float, ...]], bool]:
    """Seconds of each generator by batch, loading included, and whether they sampled in the learner's process.

    The trace of a killed run has no end, and tracing may be off: then the result is partial or empty.
    """
    tracks: dict[int, str] = {}
    loading: dict[str, float] = {}
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for event in _events(path):
        if event["ph"] == "M":
            tracks[event["tid"]] = event["args"]["name"]
        track = tracks.get(event["tid"], "")
        if event["name"] == "load":  # comes right before the samples of these weights
            loading[track] = event["dur"] / 1e6
        elif event["name"] == "generate":
            seconds = found[event["args"]["batch"]]  # of all requests of the batch
            seconds[track] = seconds.get(track, 0.0) + event["dur"] / 1e6 + loading.pop(track, 0.0)
    in_turn = any(LEARNER in seconds for seconds in found.values())
    return {batch: tuple(seconds[name] for name in sorted(seconds)) for batch, seconds in found.items()}, in_turn


def _events(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    whole = [line.rstrip(",") for line in lines if line.startswith("{") and line.rstrip(",").endswith("}")]
    return [json.loads(line) for line in whole]
