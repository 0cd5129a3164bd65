"""What sampling and training at the same time has gained over doing both in turn, or why it has not: in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

WARM_UP = 2
"""First batches to leave out: caches fill, processes start."""
FASTER = 1.05
"""From which ratio of times it is called a gain: what the load of a machine changes between two runs is less."""
Row = Mapping[str, float]


def read_rows(metrics: Path) -> list[Row]:
    """The lines of a metrics.jsonl that are about training."""
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "time/batch" in line]


def asynchrony(in_turn: Sequence[Row], at_once: Sequence[Row], cores: int, gpus: int) -> str:
    """Compare the seconds of a batch of two runs that differ in staleness alone.

    Args:
        in_turn: metrics of the synchronous run, by batch.
        at_once: of the asynchronous one.
        cores: of the CPU.
        gpus: in this machine.
    """
    batch, sampling = _mean(in_turn, "time/batch"), _mean(in_turn, "time/generate")
    other, learning = _mean(at_once, "time/batch"), batch - sampling
    gain = batch / other
    seconds = f"a batch took {other:.2f} s one step off-policy and {batch:.2f} s in turn"
    told = [
        f"Asynchrony: {seconds}, {gain:.2f} times as fast." if gain >= FASTER else f"Asynchrony: {seconds}: no gain."
    ]
    if gpus < 2:
        place = "one GPU" if gpus else f"{cores} CPU core{'s' * (cores > 1)}"
        told.append(
            f"Here both sides share {place}: in turn each has all of it, {sampling:.2f} s to sample and "
            f"{learning:.2f} s to score and learn; at the same time each has a part."
        )
        best = max(sampling, learning)
        told.append(
            f"On devices of their own, as fast as this one, a batch would take {best:.2f} s: "
            f"{batch / best:.2f} times as fast (async-rlhf plan predicts it for others)."
        )
    return " ".join(told)


def _mean(rows: Sequence[Row], key: str) -> float:
    kept = rows[WARM_UP:] or rows
    return sum(row[key] for row in kept) / len(kept)
