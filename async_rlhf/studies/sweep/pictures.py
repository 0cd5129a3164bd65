"""Pictures of a sweep: gold reward against what was swept, and gold win-rate against KL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from async_rlhf.studies.report.charts import Axis, Key, Series, Spec, figure, points, render_png, with_interval
from async_rlhf.studies.sweep.results import Summary
from async_rlhf.studies.sweep.trials import number_of

START = "starting model"
_MOST = 24
"""Series of one picture; more could not be told apart."""


def draw(summaries: Sequence[Summary], wanted: str | None, out: Path) -> bool:
    """Write the picture as a PNG. Returns whether there was something to draw.

    Raises:
        ImportError: vl-convert is not installed.
    """
    if (spec := picture(summaries, wanted)) is not None:
        render_png(spec, out)
    return spec is not None


def picture(summaries: Sequence[Summary], wanted: str | None) -> Spec | None:
    """The charts of a sweep; None if there is no axis of numbers, or too many series.

    Args:
        summaries: of all settings.
        wanted: the axis to put on the horizontal; None for the one of numbers with the most values.
    """
    labels = {
        axis: {summary.setting.get(axis, "") for summary in summaries}
        for summary in summaries
        for axis in summary.setting
    }
    varied = {axis: known for axis, known in labels.items() if len(known) > 1 or axis == wanted}
    numbers = [axis for axis, known in varied.items() if all(number_of(label) is not None for label in known)]
    axis = wanted or max(numbers, key=lambda axis: len(varied[axis]), default=None)
    if axis is None:
        return None
    names = [
        _name({key: label for key, label in summary.setting.items() if key in varied}, axis) for summary in summaries
    ]
    if len(set(names)) > _MOST:
        return None
    shown = sorted(zip(summaries, names, strict=True), key=lambda pair: number_of(pair[0].setting.get(axis, "")) or 0.0)
    wins = all(summary.wins is not None for summary in summaries)
    series = [Series(name, name, says=name) for name in dict.fromkeys(names)]
    key = Key([*series, *([Series(START, reference=True)] if wins else [])])

    def panel(x: Axis, y: Axis, measured: str) -> Spec:
        rows = []
        for summary, name in shown:
            if (interval := getattr(summary, measured)) is not None:
                horizontal = (
                    {"x": summary.setting.get(axis, "")} if x.values else with_interval("x", "x", summary.kl._asdict())
                )
                rows.append({"series": name, **horizontal, **with_interval("y", "y", interval._asdict())})
        if measured == "wins":  # the model that they started from has no KL, and wins half of the time
            rows.append({"series": START, "x": 0.0, "y": 0.5})
        return points(rows, key, x, y)

    swept = axis.rpartition(".")[2]
    x = Axis("x", swept, values=tuple(dict.fromkeys(summary.setting.get(axis, "") for summary, _ in shown)))
    panels = [panel(x, Axis("y", "gold reward (mean, 95% interval)"), "gold")]
    if any(summary.against is not None for summary in summaries):
        panels.append(panel(x, Axis("y", "minus the baseline (paired, 95% interval)"), "against"))
    kl = Axis("x", f"KL to the starting model (nats), in the order of {swept}", zero=True)
    gold = Axis("y", "gold reward (95% interval)")
    won = Axis("y", "gold win-rate against the start (95% interval)", format="%")
    panels.append(panel(kl, won, "wins") if wins else panel(kl, gold, "gold"))
    return figure(panels, key)


def _name(setting: dict[str, str], axis: str) -> str:
    """The series that a setting is in: its labels on the other axes."""
    labels = {name.rpartition(".")[2]: label for name, label in setting.items() if name != axis}
    words = [label if number_of(label) is None else f"{name} {label}" for name, label in labels.items()]
    return ", ".join(words) or "all"
