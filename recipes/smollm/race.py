"""SmolLM2 at several S: runs of a recipe one after another, and what came of them over seconds.

    python recipes/smollm/race.py run sums --staleness 0 1 2 --seeds 0 1 2 3 4
    python recipes/smollm/race.py draw --output runs/smollm/race.png

`run` trains with nothing beside it, as seconds are measured: leave the machine idle. S = 0 is in the placement that is
faster here, with all cores for each phase. Runs that are done are skipped. Of each it adds a line to --results: seconds
and score of every batch, and of each held-out question the share of right answers at the end. `draw` makes the picture.
trl_grpo.py adds the lines of TRL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean
from typing import Any

from async_rlhf.studies.report.charts import Axis, Key, Row, Series, Spec, curves, figure, render_png

HERE = Path(__file__).parent
RESULTS = Path("runs/smollm/race/results.jsonl")
TASKS = {"sums": "sums, GRPO", "sums_dpo": "sums, online DPO", "sums_hints": "sums in two turns, GRPO"}
IN_TURN = "process"
"""Of S = 0: where sampling is faster, in the learner's process or in one of its own."""
TOGETHER = 5
"""Batches of a mean."""


def main() -> None:
    """Run, or draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("run", "draw"))
    parser.add_argument("tasks", nargs="*", help=f"recipes in this folder: {', '.join(TASKS)}; all")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm/race"), help="of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=Path("smollm.png"), help="the picture")
    parser.add_argument("--options", default=[], nargs=argparse.REMAINDER, help="of train, last")
    wanted = parser.parse_args()
    if unknown := set(wanted.tasks) - set(TASKS):
        parser.error(f"tasks: got {', '.join(sorted(unknown))}; must be of {', '.join(TASKS)}")
    if wanted.what == "draw":
        render_png(picture(read(wanted.results)), wanted.output)
        return
    for task, seed, lag in product(wanted.tasks or TASKS, wanted.seeds, wanted.staleness):
        run = {"task": task, "way": f"S = {lag}", "seed": seed}
        if any(run.items() <= done.items() for done in read(wanted.results)):
            continue
        folder = wanted.folder / f"{task},{lag},{seed}"
        subprocess.run([*command(task, lag, seed, folder), *wanted.options], check=True)
        add(run | outcome(folder), wanted.results)


def command(task: str, lag: int, seed: int, folder: Path) -> list[str]:
    """What trains."""
    keys = {"staleness": lag, "seed": seed, "output_dir": folder, "overwrite_output_dir": "true"}
    words = [word for key, value in keys.items() for word in (f"--train.{key}", str(value))]
    words += [] if lag else ["--train.generation.placement", IN_TURN]
    return [sys.executable, "-m", "async_rlhf.cli", "train", "--config", str(HERE / f"{task}.yml"), *words]


def outcome(folder: Path) -> dict[str, Any]:
    """Seconds and scores of a run, and of each held-out question the share of its last answers that were right, if
    only after a hint.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    batches = [line for line in lines if "time/batch" in line]
    answers = [json.loads(line) for line in (folder / "eval_samples.jsonl").read_text().splitlines()]
    last, right = max(answer["batch"] for answer in answers), defaultdict(list)
    for answer in answers:
        if answer["batch"] == last:
            right[answer["row"]].append(answer["score"] > 0.5)
    return {
        "seconds": [round(second, 2) for second in accumulate(line["time/batch"] for line in batches)],
        "scores": [round(line["objective/scores"], 4) for line in batches],
        "ess": [line.get("val/ess_sequence") and round(line["val/ess_sequence"], 3) for line in batches],
        "right": [round(fmean(right[row]), 4) for row in sorted(right)],
    }


def read(results: Path) -> list[dict[str, Any]]:
    """All lines."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def add(run: dict[str, Any], results: Path) -> None:
    """One line more."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(f"{json.dumps(run)}\n")


def together(values: list[float]) -> list[float]:
    """Means of some batches each."""
    return [fmean(values[first : first + TOGETHER]) for first in range(0, len(values), TOGETHER)]


def picture(runs: list[dict[str, Any]]) -> Spec:
    """A panel for each task: the mean over seeds of what was scored by then."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[run["task"], run["way"]].append(run)
    ways = sorted({way for _, way in groups})
    key = Key([Series(way, way, int(way[-1]) if way.startswith("S") else None, says=way) for way in ways])
    panels = []
    for task in dict.fromkeys(task for task, _ in groups):
        rows: list[Row] = []
        for way in (way for known, way in groups if known == task):
            each = groups[task, way]
            times = [fmean(at) for at in zip(*(together(run["seconds"]) for run in each), strict=True)]
            scores = [fmean(at) for at in zip(*(together(run["scores"]) for run in each), strict=True)]
            rows += [{"series": way, "second": t, "score": s} for t, s in zip(times, scores, strict=True)]
        seconds = Axis("second", f"{TASKS[task]}: seconds of training", zero=True)
        panels.append(curves(rows, key, seconds, Axis("score", "score (new prompts)", format="%", domain=(0.0, 1.0))))
    return figure(panels, key, columns=2)


if __name__ == "__main__":
    main()
