"""Times of an earlier run, from the files that it left."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_rlhf.config import ConfigError
from async_rlhf.studies.plan.times import BatchTimes, Split
from async_rlhf.system.trace import LEARNER

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
        traced = _read_trace(folder / TRACE)
        rows = [_row(log, traced) for log in kept]
        prompts = [round(log["eps"] * log["time/batch"]) for log in kept]
    except (OSError, ValueError, KeyError, TypeError) as error:
        right = f"must be the output folder of a run, with its {METRICS}: {type(error).__name__}: {error}"
        raise ConfigError(f"run: got {str(folder)!r}; {right}") from error
    if len(kept) < FEWEST:
        raise ConfigError(
            f"run: {str(folder)!r} has logged {len(logs)} batches; must be at least {warm_up + 1 + lag + FEWEST}: the "
            f"first {warm_up} (warm_up) and the last {1 + lag} do not count"
        )
    generators = traced.generators
    if any(int(log["batch"]) not in traced.requests for log in kept):
        # The trace covers only part of the run: use what all batches have.
        rows = [replace(row, generate=(log["time/generate"],)) for row, log in zip(rows, kept, strict=True)]
        generators = 1
    split = Split(generators, learners, traced.in_turn)
    return MeasuredRun(rows, split, lag, max(prompts), sum(log["time/batch"] for log in kept) / len(kept))


@dataclass
class _Traced:
    """What the trace of a run says; it has no end if the run was killed, and is empty if tracing was off.

    Args:
        requests: by batch, seconds of each request, loading included, in the order in which they began.
        transfer: by version, seconds from publishing until the generators had it.
        generators: how many have sampled.
        in_turn: whether they sampled in the learner's process.
    """

    requests: dict[int, tuple[float, ...]]
    transfer: dict[int, float]
    generators: int
    in_turn: bool


def _row(log: dict[str, float], traced: _Traced) -> BatchTimes:
    """Seconds of a batch.

    Comparing engine and learner is work, but done within "wait". What "score" takes beyond the functions is the reward
    model's; of functions that ran beside training it has only what was waited for.
    """
    batch = int(log["batch"])
    generate = traced.requests.get(batch, (log["time/generate"],))
    other = log["time/batch"] - sum(log.get(name, 0.0) for name in _SPANS)
    rewards = log.get("time/reward_funcs", 0.0)
    work = max(0.0, log["time/score"] - rewards) + sum(log.get(name, 0.0) for name in _WORK)
    transfer = traced.transfer.get(batch, 0.0)
    return BatchTimes(generate, work, log["time/publish"], max(0.0, other), rewards, transfer)


def _read_trace(path: Path) -> _Traced:
    tracks: dict[int, str] = {}
    loading: dict[str, float] = {}
    found: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    transfer: dict[int, float] = {}
    ends: dict[str, float] = {}
    sampled: set[str] = set()
    for event in _events(path):
        if event["ph"] == "M":
            tracks[event["tid"]] = event["args"]["name"]
        track = tracks.get(event["tid"], "")
        if event["name"] == "load":  # comes right before the samples of these weights
            loading[track] = event["dur"] / 1e6
        elif event["name"] == "generate":
            generator, seconds = track.partition(", ")[0], event["dur"] / 1e6
            if generator != track:  # one of several batches under way: what it takes after the one before
                end = event["ts"] / 1e6 + seconds
                seconds, ends[generator] = min(seconds, end - ends.get(generator, 0.0)), end
            sampled.add(generator)
            found[event["args"]["batch"]].append((event["ts"], seconds + loading.pop(track, 0.0)))
        elif event["name"] == "hand out":
            transfer[event["args"]["version"]] = event["dur"] / 1e6
    requests = {batch: tuple(seconds for _, seconds in sorted(each)) for batch, each in found.items()}
    return _Traced(requests, transfer, max(1, len(sampled)), LEARNER in sampled)


def _events(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    whole = [line.rstrip(",") for line in lines if line.startswith("{") and line.rstrip(",").endswith("}")]
    return [json.loads(line) for line in whole]
