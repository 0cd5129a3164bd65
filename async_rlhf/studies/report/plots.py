"""Pictures of runs and evaluations, as PNGs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from async_rlhf.commands.evaluation.tables import of_today
from async_rlhf.run.summary import read_rows
from async_rlhf.studies.report.charts import (
    INSTALL,
    Axis,
    Key,
    Series,
    Spec,
    can_draw,
    curves,
    figure,
    points,
    render_png,
    with_band,
    with_interval,
)

logger = logging.getLogger(__name__)

EPISODES = Axis("episode", "episodes (prompts)", zero=True)
SCORE = Axis("objective/scores", "score (mean of the batch)")
KL = Axis("objective/kl", "KL to the reference (nats per completion)", zero=True)
CHECKPOINTS = "checkpoints"
"""The series of all checkpoints of a run that was evaluated."""
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def plot_training(metrics_files: Mapping[Series, Path], out: Path, evaluation: Path) -> None:
    """Write a PNG: score and KL over episodes, one line per run, and the reward of an evaluation against KL.

    The reference is the model that training began with: before the first batch KL is 0.

    Args:
        metrics_files: run -> its metrics.jsonl, with `episode`, `objective/scores` and `objective/kl`.
        out: the image.
        evaluation: an evaluation.json.

    Raises:
        ImportError: vl-convert is not installed.
    """
    begin = {EPISODES.field: 0, KL.field: 0.0}
    rows = [(series.name, row) for series, path in metrics_files.items() for row in (begin, *read_rows(path))]
    results = of_today(json.loads(evaluation.read_text(encoding="utf-8"))["results"])
    key = Key([*metrics_files, *evaluated(results, metrics_files)])
    panels = [against_kl(results, key)]
    for y in (SCORE, KL):
        fields = (EPISODES.field, y.field)
        shown = [{"series": name, **{f: row[f] for f in fields}} for name, row in rows if {*fields} <= row.keys()]
        panels.insert(-1, curves(shown, key, EPISODES, y))
    render_png(figure(panels, key), out, scale=1.6)


def evaluated(results: Mapping[str, Any], runs: Iterable[Series]) -> list[Series]:
    """The series that an evaluation has beside those of the runs: the reference model is grey."""
    known = {series.name for series in runs}
    names = list(dict.fromkeys(_series_of(name) for name in results["models"]))
    return [Series(name, reference=name == results["reference"]) for name in names if name not in known]


def plot_evaluation(results: Mapping[str, Any], out: Path) -> None:
    """Write a PNG: reward (or, with a pairwise judge, win-rate) against KL, and over the checkpoints of a run.

    Without vl-convert nothing is drawn, and the log says so.

    Args:
        results: of :func:`~async_rlhf.commands.evaluate.run_evaluate`.
        out: the image.
    """
    if not can_draw():
        logger.info("evaluate: no plot without vl-convert: %s", INSTALL)
        return
    key = Key(evaluated(results, ()))
    panels = [against_kl(results, key), over_checkpoints(results, key)]
    render_png(figure([panel for panel in panels if panel is not None], key), out, scale=1.6)


def judged(results: Mapping[str, Any]) -> Axis:
    """What the judge says of every model: reward or, without one, the win-rate."""
    if all("reward_mean" in figures for figures in results["models"].values()):
        return Axis("reward_mean", f"{results.get('reward', 'reward')} (mean, 95% interval)")
    opponent = "reference_response" if results["reference_response"] else results["reference"]
    key = f"win_rate_vs_{opponent}"
    return Axis(key, f"{key.replace('_', ' ')} (95% interval)", format="%")


def against_kl(results: Mapping[str, Any], key: Key) -> Spec:
    """A point with its intervals for each model that was judged, the human responses as a band."""
    nothing = {"estimate": 0.0, "low": 0.0, "high": 0.0}
    y = judged(results)
    rows = [
        {
            "series": _series_of(name),
            "model": name,
            **with_interval("kl", "x", figures.get("kl_to_reference", nothing)),
            **with_interval(y.field, "y", figures[y.field]),
        }
        for name, figures in _in_order(results)
        if y.field in figures
    ]
    spec = points(rows, key, Axis("kl", f"KL to {results['reference']} (nats per completion)", zero=True), y)
    human = (results.get("reference_response") or {}).get(y.field)
    return spec if human is None else with_band(spec, human["low"], human["high"], "human")


def over_checkpoints(results: Mapping[str, Any], key: Key) -> Spec | None:
    """What the judge says over the checkpoints of a run; None if fewer than two were evaluated."""
    y = judged(results)
    rows = [
        {"series": CHECKPOINTS, "batch": _batch_of(name), y.field: figures[y.field]["estimate"]}
        | {end: figures[y.field][end] for end in ("low", "high")}
        for name, figures in _in_order(results)
        if CHECKPOINT.fullmatch(name) and y.field in figures
    ]
    return curves(rows, key, Axis("batch", "batches trained", zero=True), y) if len(rows) > 1 else None


def _series_of(model: str) -> str:
    return CHECKPOINTS if CHECKPOINT.fullmatch(model) else model


def _in_order(results: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The models, checkpoints by their batch."""
    return sorted(results["models"].items(), key=lambda item: _batch_of(item[0]))


def _batch_of(model: str) -> int:
    match = CHECKPOINT.fullmatch(model)
    return int(match[1]) if match else 0
