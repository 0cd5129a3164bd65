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
    shown = [f"\ntrained on {batches} batches; {timedelta(seconds=round(seconds))} in all"]
    shown += _scores("reward", [line for line in lines if SCORES in line], SCORES, max(1, len(lines) // 10))
    shown += _scores("held-out reward", [line for line in lines if HELD_OUT in line], HELD_OUT, 1)
    shown += [f"policy: {folder / policy}", f"every metric: {folder / metrics}"]
    return "\n".join(shown)


def _scores(name: str, lines: Sequence[Mapping[str, Any]], key: str, count: int) -> list[str]:
    if not lines:
        return []
    count = min(count, max(1, len(lines) // 2))
    ends = [sum(line[key] for line in part) / count for part in (lines[:count], lines[-count:])]
    if len(lines) == 1:
        return [f"{name}: {ends[1]:.3f}"]
    where = "the first and the last logged" if count == 1 else f"the first and the last {count} logged"
    if key == HELD_OUT:
        first, last = (int(line["batch"]) for line in (lines[0], lines[-1]))
        where = f"after batch {first} and {last}" if first else f"before training and after batch {last}"
    return [f"{name}: {ends[0]:.3f} -> {ends[1]:.3f} ({where})"]


WARM_UP = 2
"""First batches to leave out: caches fill, processes start."""
FASTER = 1.05
"""From which ratio of times it is called a gain: what the load of a machine changes between two runs is less."""
Row = Mapping[str, float]


def read_rows(metrics: Path) -> list[Row]:
    """The lines of a metrics.jsonl that are about training."""
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "time/batch" in line]


def asynchrony(synchronous: Sequence[Row], asynchronous: Sequence[Row], cores: int, gpus: int) -> str:
    """Compare the seconds of a batch of two runs that differ in staleness alone.

    Args:
        synchronous: metrics of the synchronous run, by batch.
        asynchronous: of the asynchronous one.
        cores: of the CPU.
        gpus: in this machine.
    """
    batch, sampling = _mean(synchronous, "time/batch"), _mean(synchronous, "time/generate")
    other, learning = _mean(asynchronous, "time/batch"), batch - sampling
    gain = batch / other
    seconds = f"a batch took {other:.2f} s one step off-policy and {batch:.2f} s in turn"
    text = [f"Asynchrony: {seconds}" + (f", {gain:.2f} times as fast." if gain >= FASTER else ": no gain.")]
    if gpus < 2:
        hardware = "one GPU" if gpus else f"{cores} CPU core{'s' * (cores > 1)}"
        text.append(
            f"Here both sides share {hardware}: in turn each has all of it, {sampling:.2f} s to sample and "
            f"{learning:.2f} s to score and learn; at the same time each has a part."
        )
        best = max(sampling, learning)
        text.append(
            f"On devices of their own, as fast as this one, a batch would take {best:.2f} s: "
            f"{batch / best:.2f} times as fast (async-rlhf plan predicts it for others)."
        )
    return " ".join(text)


def better_threads(rows: Sequence[Row], generator: int, workers: int, learner: int) -> str:
    """Which numbers of threads would keep neither side waiting, if those of an asynchronous run did; else, and if no
    batch was logged, "".

    Times are taken to shrink with the number of threads. A run with other numbers is another run, as its sums round
    otherwise; so this is said, and not done.

    Args:
        rows: metrics, by batch.
        generator: threads of each generator process.
        workers: how many of these there are.
        learner: threads of the learner.
    """
    if not rows:  # none was logged
        return ""
    sampling = _mean(rows, "time/generate") * generator
    learning = (_mean(rows, "time/batch") - _mean(rows, "time/wait")) * learner
    cores = workers * generator + learner

    def seconds(each: int) -> float:
        return max(sampling / each, learning / (cores - workers * each))

    best = min(range(1, (cores - 1) // workers + 1), key=seconds)
    gain = seconds(generator) / seconds(best)
    if gain < FASTER:
        return ""
    waits = "generators wait" if best < generator else "the learner waits"
    return (
        f"{waits.capitalize()} for the other side: with generation.num_threads {best} and num_threads "
        f"{cores - workers * best} instead of {generator} and {learner}, a batch might take {seconds(best):.2f} s "
        f"instead of {seconds(generator):.2f} s."
    )


def _mean(rows: Sequence[Row], key: str) -> float:
    kept = rows[WARM_UP:] or rows
    return sum(row[key] for row in kept) / len(kept)
