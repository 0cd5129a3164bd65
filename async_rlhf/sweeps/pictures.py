"""Pictures of a sweep: reward against what was swept, and reward against KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rlhf.evaluation.statistics import Interval
from async_rlhf.reports.charts import Axis, Key, Series, Spec, figure, points, render_png
from async_rlhf.sweeps.results import Summary
from async_rlhf.sweeps.trials import number_of

START = "starting model"
_LONGEST = 40
"""Series of one picture; more could not be told apart."""


def axis_of(found: Sequence[Summary], wanted: str | None) -> str | None:
    """What goes on the horizontal axis: what is asked for, else the axis of numbers with the most values."""
    axes = [axis for axis in found[0].setting if all(axis in one.setting for one in found)]
    labels = {axis: {one.setting.get(axis, "") for one in found} for axis in axes}
    numbers = [axis for axis in axes if all(number_of(label) is not None for label in labels[axis])]
    if wanted is not None:
        return wanted
    return max(numbers, key=lambda axis: len(labels[axis]), default=None)


def without_constants(found: Sequence[Summary], wanted: str | None) -> list[Summary]:
    """Settings without the axes on which all are alike, which need no words; but with the one that is wanted."""
    labels = {axis: {one.setting.get(axis) for one in found} for one in found for axis in one.setting}
    kept = {axis for axis, known in labels.items() if len(known) > 1 or axis == wanted}
    return [replace(one, setting={a: label for a, label in one.setting.items() if a in kept}) for one in found]


def draw(found: Sequence[Summary], starts: Sequence[Interval], wanted: str | None, out: Path) -> bool:
    """Write the picture as a PNG. Returns whether there was something to draw.

    Args:
        found: all settings.
        starts: gold reward of the models that they started from.
        wanted: the axis to put on the horizontal; None for the one of numbers with the most values.
        out: the image.

    Raises:
        ImportError: vl-convert is not installed.
    """
    found = without_constants(found, wanted)
    axis = axis_of(found, wanted)
    groups = list(dict.fromkeys(_group(one, axis) for one in found))
    if axis is None or len(found) > _LONGEST * max(1, len(groups)):
        return False
    key = Key([*series_of(found, axis), *([Series(START, reference=True)] if starts else [])])
    ticks = tuple(sorted({number_of(one.setting[axis]) or 0.0 for one in found}))
    panels = [_against_axis(found, axis, ticks, key, "gold", "gold reward (mean, 95% interval)")]
    if any(one.against is not None for one in found):
        panels.append(_against_axis(found, axis, ticks, key, "against", "minus the baseline (paired, 95% interval)"))
    panels.append(_against_kl(found, starts, axis, key))
    render_png(figure(panels, key), out)
    return True


def series_of(found: Sequence[Summary], axis: str) -> list[Series]:
    """Labels that are words, such as the algorithm, give colour and shape; numbers give dashes and filling."""
    words: dict[str, str] = {}
    numbers: dict[str, list[float]] = {}
    for one in found:
        labels = {name: label for name, label in one.setting.items() if name != axis}
        name = _group(one, axis) or "all"
        words[name] = ", ".join(label for label in labels.values() if number_of(label) is None)
        numbers[name] = [value for label in labels.values() if (value := number_of(label)) is not None]
    order = sorted(numbers.values())
    return [
        Series(name, algorithm=word, staleness=order.index(numbers[name]), says=name, group=word or None)
        for name, word in words.items()
    ]


def _group(one: Summary, axis: str | None) -> str:
    """A setting's labels on the other axes."""
    return ", ".join(
        label if number_of(label) is None else f"{name.rpartition('.')[2]} {label}"
        for name, label in one.setting.items()
        if name != axis
    )


def _against_axis(
    found: Sequence[Summary], axis: str, ticks: tuple[float, ...], key: Key, what: str, title: str
) -> Spec:
    rows = [
        {"series": _group(one, axis) or "all", "x": number_of(one.setting[axis]), **_ends(interval, "y")}
        for one in sorted(found, key=lambda one: number_of(one.setting[axis]) or 0.0)
        if (interval := getattr(one, what)) is not None
    ]
    return points(_apart(rows, key), key, Axis("x", axis.rpartition(".")[2], ticks=ticks), Axis("y", title), front=True)


def _against_kl(found: Sequence[Summary], starts: Sequence[Interval], axis: str, key: Key) -> Spec:
    """A point for each setting; those of a series are connected in the order of the axis, and named by it. The models
    that they started from have no KL.
    """
    rows = [
        {"series": _group(one, axis) or "all", "label": one.setting[axis], **_ends(one.kl, "x"), **_ends(one.gold, "y")}
        for one in sorted(found, key=lambda one: number_of(one.setting[axis]) or 0.0)
    ]
    nothing = _ends(Interval(0, 0, 0), "x")
    rows += [{"series": START, "label": "", **nothing, **_ends(one, "y")} for one in dict.fromkeys(starts)]
    x = Axis("x", "KL to the starting model (nats per completion)", zero=True)
    title = f"Numbers at the points: {axis.rpartition('.')[2]}"
    return points(rows, key, x, Axis("y", "gold reward (mean, 95% interval)"), title, front=True, label="label")


def _ends(interval: Interval, name: str) -> dict[str, Any]:
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _apart(rows: list[dict[str, Any]], key: Key) -> list[dict[str, Any]]:
    """Rows with x moved a little to either side, by series, so that error bars do not cover each other."""
    names = list(key.series)
    for row in rows:
        place = names.index(row["series"]) - (len(names) - 1) / 2
        row["x"] = row["x"] + 0.03 * place * (1 + row["x"])
    return rows
