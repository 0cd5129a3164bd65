"""Times of an earlier run, from the files that it left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.run.folder import METRICS
from async_rlhf.studies.plan.times import BatchTimes, Split
from async_rlhf.studies.report.reading import Span, json_lines, traces_of
from async_rlhf.system.trace import LEARNER

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
    rule = f"must be the output folder of a run, with its {METRICS}"
    require((folder / METRICS).is_file(), "run", str(folder), rule)
    logs = [log for log in json_lines(folder / METRICS, []) if "time/batch" in log]
    try:
        lag = max((int(log["schedule/lag"]) for log in logs), default=0)
        kept = logs[warm_up : max(0, len(logs) - 1 - lag)]
        requests, transfer, sampled = _traced(traces_of(folder).values())
        if any(int(log["batch"]) not in requests for log in kept):
            # The trace covers only part of the run: use what all batches have.
            requests, sampled = {}, sampled & {LEARNER}
        rows = [_row(log, requests, transfer) for log in kept]
        prompts = [round(log["eps"] * log["time/batch"]) for log in kept]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"run: got {str(folder)!r}; {rule}: {type(error).__name__}: {error}") from error
    if len(kept) < FEWEST:
        raise ConfigError(
            f"run: {str(folder)!r} has logged {len(logs)} batches; must be at least {warm_up + 1 + lag + FEWEST}: the "
            f"first {warm_up} (warm_up) and the last {1 + lag} do not count"
        )
    split = Split(max(1, len(sampled)), learners, LEARNER in sampled)
    return MeasuredRun(rows, split, lag, max(prompts), sum(log["time/batch"] for log in kept) / len(kept))


def _row(log: dict[str, float], requests: dict[int, tuple[float, ...]], transfer: dict[int, float]) -> BatchTimes:
    """Seconds of a batch.

    Comparing engine and learner is work, but done within "wait". What "score" takes beyond the functions is the reward
    model's; of functions that ran beside training it has only what was waited for.
    """
    batch = int(log["batch"])
    generate = requests.get(batch, (log["time/generate"],))
    other = log["time/batch"] - sum(log.get(name, 0.0) for name in _SPANS)
    rewards = log.get("time/reward_funcs", 0.0)
    work = max(0.0, log["time/score"] - rewards) + sum(log.get(name, 0.0) for name in _WORK)
    return BatchTimes(generate, work, log["time/publish"], max(0.0, other), rewards, transfer.get(batch, 0.0))


def _traced(traces: Iterable[Sequence[Span]]) -> tuple[dict[int, tuple[float, ...]], dict[int, float], set[str]]:
    """What the traces of a run say, as far as they go.

    Returns:
        By batch, seconds of each request, loading included, in the order in which they began; by version, seconds from
        publishing until the generators had it; and who has sampled.
    """
    requests: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    transfer: dict[int, float] = {}
    sampled: set[str] = set()
    loading: dict[str, float] = {}
    ends: dict[str, float] = {}
    for spans in traces:
        ends.clear()  # each start has its own clock
        for span in spans:
            seconds = span.end - span.start
            if span.name == "load":  # comes right before the samples of these weights
                loading[span.track] = seconds
            elif span.name == "generate":
                generator = span.track.partition(", ")[0]
                if generator != span.track:  # one of several batches under way: what it takes after the one before
                    seconds, ends[generator] = min(seconds, span.end - ends.get(generator, 0.0)), span.end
                sampled.add(generator)
                requests[span.batch].append((span.start, seconds + loading.pop(span.track, 0.0)))
            elif span.name == "hand out":
                transfer[span.version] = seconds
    return {batch: tuple(seconds for _, seconds in sorted(each)) for batch, each in requests.items()}, transfer, sampled
