"""Plots of runs and evaluations. matplotlib is imported when a plot is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rlhf.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vP*X"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. A last line that is still being written is left out.

    Raises:
        ConfigError: there is no such file, or a line before the last is not JSON.
    """
    if not path.is_file():
        raise ConfigError(f"metrics_files: got {str(path)!r}; there is no such file")
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(f"metrics_files: line {number} of {str(path)!r} is not JSON: {error}") from error
    return rows


def plot_training(metrics_files: Mapping[str, Path], out: Path, evaluation: Path | None = None) -> None:
    """Write a PNG: reward-model score and KL over episodes, one line per run, and gold reward against KL.

    Args:
        metrics_files: name of the run -> its metrics.jsonl, with `episode`, `objective/scores` and `objective/kl`.
        out: the image.
        evaluation: an evaluation.json; with it there is a third panel, a point with error bars for each model.

    Raises:
        ConfigError: a file is missing or malformed.
    """
    runs = {name: read_metrics(path) for name, path in metrics_files.items()}
    results = None if evaluation is None else json.loads(evaluation.read_text(encoding="utf-8"))["results"]
    figure, axes = _new_figure(2 if results is None else 3)
    for axis, key, label in (
        (axes[0], "objective/scores", "reward-model score (mean of the batch)"),
        (axes[1], "objective/kl", "KL to the reference policy (nats per completion)"),
    ):
        for i, (name, rows) in enumerate(runs.items()):
            points = [(row["episode"], row[key]) for row in rows if "episode" in row and key in row]
            episodes, values = [point[0] for point in points], [point[1] for point in points]
            axis.plot(episodes, values, label=name, color=f"C{i % 10}", linewidth=1.8)
        axis.set(xlabel="episodes (prompts)", ylabel=label)
        axis.legend(frameon=False)
    if results is not None:
        draw_summary(axes[2], results)
    _save(figure, out)


def plot_evaluation(results: Mapping[str, Any], out: Path) -> None:
    """Write a PNG: gold reward (or, with a pairwise judge, win-rate) against KL, and over the checkpoints of a run.

    Args:
        results: of :func:`~async_rlhf.commands.evaluate.run_evaluate`.
        out: the image.
    """
    models = results["models"]
    reference = "win_rate_vs_" + ("reference_response" if results["reference_response"] else results["reference"])
    key = "gold_mean" if all("gold_mean" in one for one in models.values()) else reference
    label = "gold reward (mean, 95% interval)" if key == "gold_mean" else key.replace("_", " ")
    batches = {name: int(name.removeprefix("checkpoint-")) for name in models if name.startswith("checkpoint-")}
    figure, axes = _new_figure(1 + (len(batches) > 1))
    draw_summary(axes[0], {**results, "models": {n: m for n, m in models.items() if key in m}}, key, label)
    if len(batches) > 1:
        points = [(batch, models[name][key]) for name, batch in batches.items() if key in models[name]]
        axes[1].fill_between(
            [batch for batch, _ in points],
            [one["low"] for _, one in points],
            [one["high"] for _, one in points],
            alpha=0.2,
        )
        axes[1].plot([batch for batch, _ in points], [one["estimate"] for _, one in points], marker="o")
        axes[1].set(xlabel="batches trained", ylabel=label)
    _save(figure, out)


def draw_summary(
    axis: Axes,
    results: Mapping[str, Any],
    key: str = "gold_mean",
    label: str = "gold reward (mean, 95% interval)",
) -> None:
    """Plot gold reward, or another ``key``, against KL on the given axes, and the human responses as a band."""
    nothing = {"estimate": 0.0, "low": 0.0, "high": 0.0}
    for i, (name, one) in enumerate(results["models"].items()):
        kl, gold = one.get("kl_to_reference", nothing), one[key]
        axis.errorbar(
            kl["estimate"],
            gold["estimate"],
            xerr=[[kl["estimate"] - kl["low"]], [kl["high"] - kl["estimate"]]],
            yerr=[[gold["estimate"] - gold["low"]], [gold["high"] - gold["estimate"]]],
            fmt=_MARKERS[i % len(_MARKERS)],
            color=f"C{i % 10}",
            capsize=3,
            label=name,
        )
    human = results.get("reference_response")
    if human and key in human:
        gold = human[key]
        axis.axhspan(gold["low"], gold["high"], color="0.85", label="human")
    axis.set(xlabel=f"KL to {results['reference']} (nats per completion)", ylabel=label)
    axis.legend(frameon=False)


def _new_figure(panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: it keeps global state, and may look for a display.
    figure = Figure(figsize=(5.2 * panels, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, out: Path) -> None:
    """Write under a temporary name first, so that the image appears whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    figure.savefig(temporary, format="png", dpi=150)
    temporary.replace(out)
