"""The learning curves of sums.yml as a picture: right answers over batches, on sums that the policy had not seen.

python recipes/smollm/curves.py runs/smollm/sums/sweep --output docs/smollm.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

from async_rlhf.studies.report.charts import Axis, Key, Series, curves, figure, render_png

TOGETHER = 5
"""Batches of a mean: 320 answers."""


def means(scores: list[float]) -> list[tuple[float, float]]:
    """The middle of some batches, which count from 1, and their mean."""
    parts = [scores[first : first + TOGETHER] for first in range(0, len(scores), TOGETHER)]
    return [(i * TOGETHER + (len(part) + 1) / 2, fmean(part)) for i, part in enumerate(parts)]


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sweep", type=Path, help="the sweep's folder")
    parser.add_argument("--output", type=Path, default=Path("smollm.png"))
    wanted = parser.parse_args()
    series, rows = [], []
    for path in sorted(wanted.sweep.glob("runs/*/train/metrics.jsonl")):
        trial = path.parents[1]
        setting = dict(part.split("=") for part in trial.name.split(","))
        lines = map(json.loads, path.read_text().splitlines())
        scores = [line["objective/scores"] for line in lines if "objective/scores" in line]
        series.append(Series(trial.name, setting["algorithm"], int(setting["staleness"])))
        rows += [{"series": trial.name, "batch": batch, "right": share} for batch, share in means(scores)]
    named = [one._replace(says=f"{one.algorithm}, S = {one.staleness}") for one in series]
    key = Key(named)
    share = Axis("right", f"right answers (mean of {TOGETHER} batches)", format="%", domain=(0.0, 1.0))
    render_png(figure([curves(rows, key, Axis("batch", "batch", zero=True), share)], key), wanted.output)


if __name__ == "__main__":
    main()
