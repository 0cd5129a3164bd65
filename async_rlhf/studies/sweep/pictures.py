"""Pictures of a sweep: gold reward against what was swept, and gold win-rate against KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from async_rlhf.studies.report.charts import Axis, Key, Series, Spec, figure, points, render_png, with_interval
from async_rlhf.studies.sweep.results import Summary
from async_rlhf.studies.sweep.trials import number_of

START = "starting model"
_MOST = 24
"""Series of one picture; more could not be told apart."""
_ROOM = 0.09
"""Of a chart's width and height: what a label takes, to the right of its point and above it."""


def axis_of(found: Sequence[Summary], wanted: str | None) -> str | None:
    """What goes on the horizontal axis: what is asked for, else the axis of numbers with the most values."""
    if wanted is not None:
        return wanted
    axes = [axis for axis in found[0].setting if all(axis in one.setting for one in found)]
    labels = {axis: {one.setting[axis] for one in found} for axis in axes}
    numbers = [axis for axis in axes if all(number_of(label) is not None for label in labels[axis])]
    return max(numbers, key=lambda axis: len(labels[axis]), default=None)


def without_constants(found: Sequence[Summary], wanted: str | None) -> list[Summary]:
    """Settings without the axes on which all are alike, which need no words; but with the one that is wanted."""
    labels = {axis: {one.setting.get(axis) for one in found} for one in found for axis in one.setting}
    kept = {axis for axis, known in labels.items() if len(known) > 1 or axis == wanted}
    return [replace(one, setting={a: label for a, label in one.setting.items() if a in kept}) for one in found]


def draw(found: Sequence[Summary], wanted: str | None, out: Path) -> bool:
    """Write the picture as a PNG. Returns whether there was something to draw.

    Raises:
        ImportError: vl-convert is not installed.
    """
    if (spec := picture(found, wanted)) is not None:
        render_png(spec, out)
    return spec is not None


def picture(found: Sequence[Summary], wanted: str | None) -> Spec | None:
    """The charts of a sweep; None if there is no axis of numbers, or too many series.

    Args:
        found: all settings.
        wanted: the axis to put on the horizontal; None for the one of numbers with the most values.
    """
    found = without_constants(found, wanted)
    axis = axis_of(found, wanted)
    if axis is None or len(series := series_of(found, axis)) > _MOST:
        return None
    wins = all(one.wins is not None for one in found)
    key = Key([*series, *([Series(START, reference=True)] if wins else [])])
    ticks = tuple(sorted({number_of(one.setting[axis]) or 0.0 for one in found}))
    panels = [_against_axis(found, axis, ticks, key, "gold", "gold reward (mean, 95% interval)")]
    if any(one.against is not None for one in found):
        panels.append(_against_axis(found, axis, ticks, key, "against", "minus the baseline (paired, 95% interval)"))
    panels.append(_against_kl(found, axis, key, "wins" if wins else "gold"))
    return figure(panels, key)


def series_of(found: Sequence[Summary], axis: str) -> list[Series]:
    """Labels that are words, such as the algorithm, give colour and shape; numbers give dashes and filling."""
    words: dict[str, str] = {}
    numbers: dict[str, list[float]] = {}
    for one in found:
        labels = {name: label for name, label in one.setting.items() if name != axis}
        name = name_of(one, axis)
        words[name] = ", ".join(label for label in labels.values() if number_of(label) is None)
        numbers[name] = [value for label in labels.values() if (value := number_of(label)) is not None]
    order = sorted(numbers.values())
    return [
        Series(name, algorithm=word, staleness=order.index(numbers[name]), says=name, group=word or None)
        for name, word in words.items()
    ]


def name_of(one: Summary, axis: str) -> str:
    """The series that a setting is in: its labels on the other axes."""
    labels = ", ".join(
        label if number_of(label) is None else f"{name.rpartition('.')[2]} {label}"
        for name, label in one.setting.items()
        if name != axis
    )
    return labels or "all"


def _against_axis(
    found: Sequence[Summary], axis: str, ticks: tuple[float, ...], key: Key, what: str, title: str
) -> Spec:
    rows = [
        {"series": name_of(one, axis), "x": number_of(one.setting[axis]), **with_interval("y", "y", interval._asdict())}
        for one in sorted(found, key=lambda one: number_of(one.setting[axis]) or 0.0)
        if (interval := getattr(one, what)) is not None
    ]
    x = Axis("x", axis.rpartition(".")[2], ticks=ticks)
    return points(_apart(rows, key, ticks), key, x, Axis("y", title))


def _against_kl(found: Sequence[Summary], axis: str, key: Key, what: str) -> Spec:
    """A point for each setting; those of a series are connected in the order of the axis, and named by it. The model
    that they started from has no KL, and a win-rate of one half.
    """
    rows = [
        {
            "series": name_of(one, axis),
            "label": one.setting[axis],
            **with_interval("x", "x", one.kl._asdict()),
            **with_interval("y", "y", getattr(one, what)._asdict()),
        }
        for one in sorted(found, key=lambda one: number_of(one.setting[axis]) or 0.0)
    ]
    titles = {"wins": "gold win-rate against the start", "gold": "gold reward"}
    y = Axis("y", f"{titles[what]} (95% interval)", format="%" if what == "wins" else None)
    if what == "wins":
        rows.append({"series": START, "label": "", "x": 0.0, "y": 0.5})
    x = Axis("x", "KL to the starting model (nats per completion)", zero=True)
    named = f"Numbers, where there is room: {axis.rpartition('.')[2]}"
    return points(_labelled_where_alone(rows), key, x, y, named, label="label")


def _labelled_where_alone(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the labels that would lie on other points, or on their labels."""
    places_R2 = np.array([(row["x"], row["y"]) for row in rows])
    ends = [[row.get(f"{axis}_{end}", row[axis]) for axis in "xy"] for row in rows for end in ("low", "high")]
    from_to_RR2 = (places_R2 - places_R2[:, None]) / np.maximum(np.ptp(ends, axis=0), 1e-9)
    on_a_label_RR = ((from_to_RR2 > -0.02) & (from_to_RR2 < _ROOM)).all(axis=-1)
    near_R = (on_a_label_RR | (np.abs(from_to_RR2) < 0.06).all(axis=-1)).sum(axis=1)
    return [row if near == 1 else {**row, "label": ""} for row, near in zip(rows, near_R, strict=True)]


def _apart(rows: list[dict[str, Any]], key: Key, ticks: Sequence[float]) -> list[dict[str, Any]]:
    """Rows with x moved a little to either side, by series, so that error bars do not cover each other."""
    names = list(key.series)
    unit = min((tick for tick in ticks if tick > 0), default=1.0) if ticks[0] <= 0 else 0.0
    step = min(0.03, 0.2 / len(names))  # all of them within the ends of the axis
    for row in rows:
        place = names.index(row["series"]) - (len(names) - 1) / 2
        row["x"] += step * place * (unit + abs(row["x"]))
    return rows
