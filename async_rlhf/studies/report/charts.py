"""Charts as Vega-Lite specifications: one definition for the page and for PNGs, and what colours and shapes mean.

One meaning for each, in every chart:

- **colour** is the run (or the group of runs): :class:`Key` gives each its own, and it keeps it everywhere. The colours
  are those of Okabe and Ito (2008), which colour-blind people can tell apart, and four more. Grey is what was not
  trained here.
- **the shape of a point** is the algorithm.
- **the dashes of a line and the filling of a point** are the staleness S: solid and hollow is the least of a chart; the
  staler, the more broken the line and the fuller the point.

Every function returns a plain dict. A row of data names its series in ``series``; :meth:`Key.rows` adds what the
encodings need. :func:`legend` is a chart of its own, so that no legend lies on data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from async_rlhf.system.files import whole_file

Spec = dict[str, Any]
Row = Mapping[str, Any]

INSTALL = "pip install 'async-rlhf[report]'"
"""Brings vl-convert-python, which draws."""
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
VEGA_LITE = "6.4"
"""The version that draws, of those in vl-convert."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7E57C2", "#8D6E3A", "#7CB342", "#C2185B")
GREY = "#808080"
# In a box from -1 to 1. Filled or hollow, they can be told apart at the size of a letter.
SHAPES = (
    "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z",  # circle
    "M-.88,-.88L.88,-.88L.88,.88L-.88,.88Z",  # square
    "M0,-1.1L1.05,.8L-1.05,.8Z",  # triangle
    "M0,-1.25L1,0L0,1.25L-1,0Z",  # diamond
    "M0,1.1L1.05,-.8L-1.05,-.8Z",  # down
    "M-.4,-1.1L.4,-1.1L.4,-.4L1.1,-.4L1.1,.4L.4,.4L.4,1.1L-.4,1.1L-.4,.4L-1.1,.4L-1.1,-.4L-.4,-.4Z",  # cross
    "M-1.1,0L.8,-1.05L.8,1.05Z",  # left
    "M1.1,0L-.8,-1.05L-.8,1.05Z",  # right
)
UNTRAINED = "M-1,-.7L-.7,-1L0,-.3L.7,-1L1,-.7L.3,0L1,.7L.7,1L0,.3L-.7,1L-1,.7L-.3,0Z"
"""The shape of what was not trained here: an x."""
DASHES: tuple[tuple[float, ...], ...] = ((1, 0), (6, 2), (3, 2), (1.5, 2), (6, 2, 1.5, 2), (8, 4, 1.5, 4))
WORK = {
    "sampling": "#56B4E9",
    "evaluation": "#E69F00",
    "rewards": "#009E73",
    "publishing": "#D55E00",
    "training": "#CC79A7",
    "saving": "#808080",
}
"""Colours of kinds of work on a timeline, which has no runs. Where there is no bar, nothing is done."""


def can_draw() -> bool:
    """Whether vl-convert is installed."""
    return find_spec("vl_convert") is not None


class Series(NamedTuple):
    """A run, or a group of runs, as charts show it.

    Args:
        name: unique in a chart, and the value of ``series`` in its rows.
        algorithm: its name; "" for what is not a run.
        staleness: S; None for what is not a run.
        reference: it was not trained here, such as the model that a run started from: grey.
        says: for the legend; None for name, algorithm and S.
    """

    name: str
    algorithm: str = ""
    staleness: int | None = None
    reference: bool = False
    says: str | None = None

    @property
    def text(self) -> str:
        """Its words in a legend."""
        if self.says is not None:
            return self.says
        details = ", ".join(filter(None, [self.algorithm, "" if self.staleness is None else f"S = {self.staleness}"]))
        return f"{self.name} ({details})" if details else self.name


class Look(NamedTuple):
    """How one series is drawn."""

    colour: str
    shape: str
    dash: tuple[float, ...]
    fill: float


class Key:
    """The looks of all series of a page or a figure. Charts with the same key agree on them.

    Args:
        series: in the order in which they get their colours. More than ten share colours; shapes and dashes differ
            only if algorithm or S does.
    """

    def __init__(self, series: Iterable[Series]) -> None:
        self.series = {entry.name: entry for entry in series}
        trained = [entry for entry in self.series.values() if not entry.reference]
        algorithms = list(dict.fromkeys(entry.algorithm for entry in trained))
        lags = sorted({entry.staleness or 0 for entry in trained})
        self.looks = {name: Look(GREY, UNTRAINED, DASHES[0], 1.0) for name in self.series}
        for number, entry in enumerate(trained):
            lag = lags.index(entry.staleness or 0)
            self.looks[entry.name] = Look(
                COLOURS[number % len(COLOURS)],
                SHAPES[algorithms.index(entry.algorithm) % len(SHAPES)],
                DASHES[lag % len(DASHES)],
                lag / (len(lags) - 1) if len(lags) > 1 else 1.0,
            )

    def scale(self, channel: str) -> Spec:
        """The encoding of a channel: "color", "fill", "stroke", "shape", "strokeDash" or "fillOpacity"."""
        part = {"shape": "shape", "strokeDash": "dash", "fillOpacity": "fill"}.get(channel, "colour")
        return {
            "field": "series",
            "type": "ordinal" if channel == "fillOpacity" else "nominal",
            "scale": {"domain": list(self.looks), "range": [getattr(look, part) for look in self.looks.values()]},
            "legend": None,
        }

    def points(self) -> Spec:
        """The encodings of points."""
        return {name: self.scale(name) for name in ("stroke", "fill", "shape", "fillOpacity")}

    def lines(self) -> Spec:
        """The encodings of lines."""
        return {name: self.scale(name) for name in ("color", "strokeDash")}


_SMALL = "datum.value !== 0 && abs(datum.value) < 1e-4 ? format(datum.value, '.2~e') : datum.label"
"""Labels of axes: 5e-7, not 0.0000005."""


class Axis(NamedTuple):
    """An axis.

    Args:
        field: of the rows.
        title: with the unit.
        zero: whether 0 is on it.
        values: all that there are, in order, at equal distances, with the series beside each other at each; empty for
            a scale of numbers.
        format: d3's, such as "%" for shares.
        domain: its ends; None for what the data need.
    """

    field: str
    title: str
    zero: bool = False
    format: str | None = None
    domain: tuple[float, float] | None = None
    values: tuple[str, ...] = ()

    def encoding(self) -> Spec:
        """As Vega-Lite writes it."""
        axis: Spec = {"labelExpr": _SMALL} if self.format is None else {"format": self.format}
        scale: Spec = {"zero": self.zero, "nice": self.domain is None}
        scale |= {} if self.domain is None else {"domain": list(self.domain)}
        if self.values:
            known = {"scale": {"domain": list(self.values), "padding": 0.3}, "axis": {"labelAngle": 0}}
            return {"field": self.field, "type": "ordinal", "title": self.title, **known}
        return {"field": self.field, "type": "quantitative", "title": self.title, "scale": scale, "axis": axis}


def curves(rows: Sequence[Row], key: Key, x: Axis, y: Axis, path: bool = False) -> Spec:
    """A line for each series, with its shape at the end.

    Args:
        rows: with "series", ``x.field`` and ``y.field``; with "low" and "high" there is a band around the line.
        key: looks.
        x: axis.
        y: axis.
        path: connect the points in the order of the rows, not of x.
    """
    position, tooltip = _position(x, y), _tooltip("run", x, y)
    order: Spec = {"order": {"field": "_order", "type": "quantitative"}} if path else {}
    layers: list[Spec] = []
    if any("low" in row for row in rows):
        band = {"y": {**y.encoding(), "field": "low"}, "y2": {"field": "high"}, "color": key.scale("color")}
        layers.append(_layer("area", {**position, **band}, opacity=0.18))
    points = {**position, **key.points(), "tooltip": tooltip}
    layers += [
        _layer("line", {**position, **order, **key.lines()}, strokeWidth=1.8),
        _layer("point", points, {"filter": "datum._last"}, size=45, strokeWidth=1.6),
        # What a pointer meets anywhere on the line.
        _layer("point", {**position, "tooltip": tooltip}, size=120, opacity=0),
    ]
    return _chart(_in_order(rows), layers)


def points(rows: Sequence[Row], key: Key, x: Axis, y: Axis) -> Spec:
    """A point for each row, with intervals; those of a series are connected in the order of the rows.

    Args:
        rows: with "series", ``x.field`` and ``y.field``; "x_low", "x_high", "y_low", "y_high" draw error bars.
        key: looks.
        x: axis.
        y: axis.
    """
    position, layers = _position(x, y), []
    if x.values:
        position["xOffset"] = {"field": "series", "scale": {"domain": list(key.series)}}
    if len(rows) > len({row["series"] for row in rows}):
        layers.append(_layer("line", {**position, "order": {"field": "_order"}, **key.lines()}, strokeWidth=1.4))
    for name in ("x", "y"):
        if any(f"{name}_low" in row for row in rows):
            ends = {name: {**position[name], "field": f"{name}_low"}, f"{name}2": {"field": f"{name}_high"}}
            layers.append(_layer("rule", {**position, **ends, "color": key.scale("color")}, strokeWidth=1.4))
    shapes = {**position, **key.points(), "tooltip": _tooltip("series", x, y)}
    layers.append(_layer("point", shapes, size=80, strokeWidth=1.8))
    return _chart(_in_order(rows), layers)


def with_interval(field: str, axis: str, interval: Mapping[str, float]) -> dict[str, float]:
    """What a row for :func:`points` has of an "estimate" with its "low" and "high"; ``axis`` is "x" or "y"."""
    return {field: interval["estimate"], f"{axis}_low": interval["low"], f"{axis}_high": interval["high"]}


def with_band(spec: Spec, low: float, high: float, text: str) -> Spec:
    """The chart with a grey band across it, such as the human responses, and its name in it."""
    data = {"data": {"values": [{"low": low, "high": high, "text": text}]}}
    y = spec["layer"][-1]["encoding"]["y"]
    bottom, top = {**y, "field": "low"}, {**y, "field": "high"}
    area = _layer("rect", {"y": bottom, "y2": {"field": "high"}}, color=GREY, opacity=0.25)
    word = _layer("text", {"y": top, "text": {"field": "text"}}, align="left", baseline="top", x=6, dy=3)
    return {**spec, "layer": [data | area, data | word, *spec["layer"]]}


def with_threshold(spec: Spec, value: float) -> Spec:
    """The chart with a dashed line where a warning begins."""
    y = {**spec["layer"][-1]["encoding"]["y"], "field": "value"}
    tooltip = [{"field": "value", "title": "a warning begins at"}]
    line = _layer("rule", {"y": y, "tooltip": tooltip}, strokeDash=[4, 4], color=GREY, strokeWidth=1.4)
    return {**spec, "layer": [*spec["layer"], {"data": {"values": [{"value": value}]}, **line}]}


def timeline(rows: Sequence[Row], tracks: Sequence[str], x: Axis, seconds: float) -> Spec:
    """Bars of work, a line of bars for each track.

    Args:
        rows: with "track", "work" (of :data:`WORK`), "what" in detail, "start", "end", and "text" for wide bars.
        tracks: from top to bottom.
        x: axis of time; its field is "start".
        seconds: how much of the time is seen at once.
    """
    known = [name for name in WORK if any(row["work"] == name for row in rows)]
    colour = {
        "field": "work",
        "type": "nominal",
        "title": None,
        "scale": {"domain": known, "range": [WORK[name] for name in known]},
        "legend": {"orient": "bottom", "direction": "horizontal", "columns": 3, "symbolType": "square"},
    }
    y: Spec = {"field": "track", "type": "nominal", "title": None, "sort": list(tracks), "axis": {"grid": False}}
    y["scale"] = {"domain": list(tracks)}
    tooltip = [{"field": "track"}, {"field": "what", "title": "work"}, {"field": "text", "title": "batch"}]
    times = {"start": "from (s)", "end": "to (s)"}
    tooltip += [{"field": field, "title": title, "format": ".3f"} for field, title in times.items()]
    bar = {"x": x.encoding(), "x2": {"field": "end"}, "y": y, "color": colour, "tooltip": tooltip}
    number = {"x": {**x.encoding(), "field": "middle"}, "y": y, "text": {"field": "text"}}
    wide = {"filter": f"datum.end - datum.start > {seconds / 30:.6g}"}
    middle = {"calculate": "(datum.start + datum.end) / 2", "as": "middle"}
    layers = [
        _layer("bar", bar, height={"band": 0.72}, clip=True, stroke="white", strokeWidth=0.4),
        _layer("text", number, wide, middle, size=9, color="black", clip=True),
    ]
    return {**_chart(rows, layers), "height": 34 * len(tracks)}


def legend(key: Key, columns: int, width: int) -> Spec:
    """What each series looks like, and its words, in ``columns`` of that ``width``."""
    rows = [
        {"series": name, "x": i % columns * width, "y": i // columns * 18 + 9, "text": entry.text}
        for i, (name, entry) in enumerate(key.series.items())
    ]
    # Without a scale, numbers are pixels.
    at: Spec = {name: {"field": name, "type": "quantitative", "axis": None, "scale": None} for name in ("x", "y")}
    trained = {"filter": {"field": "series", "oneOf": [n for n, entry in key.series.items() if not entry.reference]}}
    words = {**at, "text": {"field": "text"}}
    layers = [
        _layer("rule", {**at, "x2": {"field": "x"}, **key.lines()}, trained, x2Offset=34, strokeWidth=1.8),
        _layer("point", {**at, **key.points()}, xOffset=17, size=70),
        _layer("text", words, align="left", baseline="middle", fontSize=12, xOffset=42),
    ]
    return {**_chart(rows, layers), "width": columns * width, "height": 18 * math.ceil(len(rows) / columns)}


def figure(panels: Sequence[Spec], key: Key | None = None, columns: int = 3) -> Spec:
    """Several charts as one, with the legend of ``key`` below them."""
    rows: list[Spec] = [{"hconcat": list(panels[i : i + columns])} for i in range(0, len(panels), columns)]
    if key is not None and key.series:
        width = 56 + 7 * max(len(entry.text) for entry in key.series.values())
        fitting = min(columns, len(panels)) * 360 // width
        rows.append(legend(key, max(1, min(len(key.series), fitting)), width))
    return {"$schema": SCHEMA, "vconcat": rows, "spacing": 24}


def theme(dark: bool = False) -> Spec:
    """Vega-Lite's ``config``."""
    ink, faint, paper = ("#e6edf3", "#30363d", "#0d1117") if dark else ("#1f2328", "#e3e6ea", "#ffffff")
    words = {"labelColor": ink, "titleColor": ink, "labelFontSize": 11}
    lines = {"gridColor": faint, "domainColor": ink, "tickColor": ink, "tickCount": 5}
    return {
        "background": paper,
        "font": "Liberation Sans, Arial, Helvetica, sans-serif",
        "view": {"stroke": None},
        "axis": {**words, **lines, "titleFontSize": 12, "titleFontWeight": "normal"},
        "legend": words,
        "title": {"color": ink, "anchor": "start", "fontSize": 13, "fontWeight": "bold"},
        "text": {"color": ink},
        "point": {"filled": False, "opacity": 1},
    }


def render_png(spec: Spec, path: Path, scale: float = 2.0) -> None:
    """Draw a chart, without a browser. The image appears whole or not at all.

    Raises:
        ImportError: vl-convert is not installed.
    """
    import vl_convert

    drawn = vl_convert.vegalite_to_png(
        spec, vl_version=VEGA_LITE, scale=scale, config=theme(), allowed_base_urls=[], show_warnings=False
    )
    with whole_file(path) as file:
        file.buffer.write(drawn)


def thinned(rows: Sequence[Row], limit: int, keys: Sequence[str]) -> list[dict[str, Any]]:
    """At most ``limit`` rows: means of neighbours over the numbers ``keys``, everything else as in the last of them.
    If "value" is among the keys, "low" and "high" are the ends of all that the means are of, so that no spike is lost.
    """
    size = max(1, math.ceil(len(rows) / limit))
    return [_mean(rows[i : i + size], keys) for i in range(0, len(rows), size)]


def _mean(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, Any]:
    columns = {key: [row[key] for row in rows if key in row] for key in keys}
    means = {key: sum(values) / len(values) for key, values in columns.items() if values}
    if len(rows) > 1 and "value" in means:
        means["low"] = min(row.get("low", row["value"]) for row in rows)
        means["high"] = max(row.get("high", row["value"]) for row in rows)
    return {**rows[-1], **means}


def _in_order(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with their places, and whether each is the last of its series."""
    ends = {row["series"]: index for index, row in enumerate(rows)}
    return [{**row, "_order": index, "_last": ends[row["series"]] == index} for index, row in enumerate(rows)]


def _position(x: Axis, y: Axis) -> Spec:
    return {"x": x.encoding(), "y": y.encoding()}


def _tooltip(series: str, *axes: Axis) -> list[Spec]:
    return [{"field": "series", "title": series}, *({"field": axis.field, "title": axis.title} for axis in axes)]


def _layer(mark: str, encoding: Spec, *transform: Spec, **style: Any) -> Spec:
    steps = {"transform": list(transform)} if transform else {}
    return {**steps, "mark": {"type": mark, **style}, "encoding": encoding}


def _chart(rows: Sequence[Row], layers: list[Spec]) -> Spec:
    return {"$schema": SCHEMA, "width": 300, "height": 220, "data": {"values": list(rows)}, "layer": layers}
