"""Charts as Vega-Lite specifications: one definition for the page and for PNGs, and what colours and shapes mean.

One meaning for each, in every chart:

- **colour** is the run (or the group of runs): :class:`Key` gives each its own, and it keeps it everywhere. The colours
  are those of Okabe and Ito (2008), which colour-blind people can tell apart. Grey is what was not trained here.
- **the shape of a point** is the algorithm.
- **the dashes of a line and the filling of a point** are the staleness S: solid and hollow is the least of a chart; the
  staler, the more broken the line and the fuller the point.

Every function returns a plain dict. A row of data names its series in ``series``; :meth:`Key.rows` adds what the
encodings need. :func:`legend` is a chart of its own, so that no legend lies on data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from async_rlhf.system.files import whole_file

Spec = dict[str, Any]
Row = Mapping[str, Any]

INSTALL = "pip install 'async-rlhf[report]'"
"""Brings vl-convert-python, which draws."""
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
VEGA_LITE = "6.4"
"""The version that draws, of those in vl-convert."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#808080"
# In a box from -1 to 1. Filled or hollow, they can be told apart at the size of a letter.
SHAPES = {
    "circle": "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z",
    "square": "M-.88,-.88L.88,-.88L.88,.88L-.88,.88Z",
    "triangle": "M0,-1.1L1.05,.8L-1.05,.8Z",
    "diamond": "M0,-1.25L1,0L0,1.25L-1,0Z",
    "down": "M0,1.1L1.05,-.8L-1.05,-.8Z",
    "cross": "M-.4,-1.1L.4,-1.1L.4,-.4L1.1,-.4L1.1,.4L.4,.4L.4,1.1L-.4,1.1L-.4,.4L-1.1,.4L-1.1,-.4L-.4,-.4Z",
    "left": "M-1.1,0L.8,-1.05L.8,1.05Z",
    "right": "M1.1,0L-.8,-1.05L-.8,1.05Z",
}
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
MARKED = 8
"""About how many points of a curve carry its shape."""


def can_draw() -> bool:
    """Whether vl-convert is installed."""
    return find_spec("vl_convert") is not None


@dataclass(frozen=True)
class Series:
    """A run, or a group of runs, as charts show it.

    Args:
        name: unique in a chart, and the value of ``series`` in its rows.
        algorithm: its name; "" for what is not a run.
        staleness: S; None for what is not a run.
        reference: it was not trained here, such as the model that a run started from: grey.
        says: for the legend; None for name, algorithm and S.
        group: series of equal groups share a colour; None for a colour of its own.
    """

    name: str
    algorithm: str = ""
    staleness: int | None = None
    reference: bool = False
    says: str | None = None
    group: str | None = None

    @property
    def text(self) -> str:
        """Its words in a legend."""
        if self.says is not None:
            return self.says
        more = [self.algorithm, "" if self.staleness is None else f"S = {self.staleness}"]
        told = ", ".join(filter(None, more))
        return f"{self.name} ({told})" if told else self.name


@dataclass(frozen=True)
class Look:
    """How one series is drawn."""

    colour: str
    shape: str
    dash: tuple[float, ...]
    fill: float


class Key:
    """The looks of all series of a page or a figure. Charts with the same key agree on them.

    Args:
        series: in the order in which they get their colours. More than six share colours; shapes and dashes differ
            only if algorithm or S does.
    """

    def __init__(self, series: Iterable[Series]) -> None:
        self.series = {one.name: one for one in series}
        trained = [one for one in self.series.values() if not one.reference]
        coloured = list(dict.fromkeys(one.group or one.name for one in trained))
        algorithms = list(dict.fromkeys(one.algorithm for one in trained))
        lags = sorted({one.staleness or 0 for one in trained})
        shapes = list(SHAPES.values())
        self.looks: dict[str, Look] = {}
        for name, one in self.series.items():
            if one.reference:
                self.looks[name] = Look(GREY, UNTRAINED, DASHES[0], 1.0)
                continue
            lag = lags.index(one.staleness or 0)
            self.looks[name] = Look(
                COLOURS[coloured.index(one.group or name) % len(COLOURS)],
                shapes[algorithms.index(one.algorithm) % len(shapes)],
                DASHES[lag % len(DASHES)],
                lag / (len(lags) - 1) if len(lags) > 1 else 1.0,
            )

    def scale(self, channel: str, title: str | None = None) -> Spec:
        """The encoding of a channel: "color", "fill", "stroke", "shape", "strokeDash" or "fillOpacity"."""
        looks = self.looks.values()
        values: dict[str, list[Any]] = {
            "shape": [look.shape for look in looks],
            "strokeDash": [list(look.dash) for look in looks],
            "fillOpacity": [look.fill for look in looks],
        }
        return {
            "field": "series",
            "type": "ordinal" if channel == "fillOpacity" else "nominal",
            "scale": {"domain": list(self.looks), "range": values.get(channel, [look.colour for look in looks])},
            "legend": None,
            **({} if title is None else {"title": title}),
        }

    def points(self) -> Spec:
        """The encodings of points."""
        return {name: self.scale(name) for name in ("stroke", "fill", "shape", "fillOpacity")}


_SMALL = "datum.value !== 0 && abs(datum.value) < 1e-4 ? format(datum.value, '.2~e') : datum.label"
"""Labels of axes: 5e-7, not 0.0000005."""


@dataclass(frozen=True)
class Axis:
    """An axis of numbers.

    Args:
        field: of the rows.
        title: with the unit.
        zero: whether 0 is on it.
        ticks: where they stand, in order, on a logarithmic scale, which is linear around 0 where 0 or less is among
            them; empty for a linear scale.
        format: d3's, such as "%" for shares.
        domain: its ends; None for what the data need.
    """

    field: str
    title: str
    zero: bool = False
    format: str | None = None
    domain: tuple[float, float] | None = None
    ticks: tuple[float, ...] = ()

    def encoding(self) -> Spec:
        """As Vega-Lite writes it."""
        scale: Spec = {"zero": self.zero, "nice": self.domain is None}
        if self.domain is not None:
            scale["domain"] = list(self.domain)
        axis: Spec = {"labelExpr": _SMALL} if self.format is None else {"format": self.format}
        if self.ticks:
            scale, axis["values"] = self._by_ticks(), list(self.ticks)
        return {"field": self.field, "type": "quantitative", "title": self.title, "scale": scale, "axis": axis}

    def _by_ticks(self) -> Spec:
        first, last = self.ticks[0], self.ticks[-1]
        if first > 0:
            return {"type": "log", "domain": [first / 1.15, last * 1.15], "nice": False}
        unit = min((tick for tick in self.ticks if tick > 0), default=1.0)
        ends = [1.15 * first - 0.15 * unit, 1.15 * max(last, 0.0) + 0.15 * unit]
        return {"type": "symlog", "constant": unit, "domain": ends, "nice": False}


def curves(rows: Sequence[Row], key: Key, x: Axis, y: Axis, title: str = "", path: bool = False) -> Spec:
    """A line for each series, with its shape at some of its points.

    Args:
        rows: with "series", ``x.field`` and ``y.field``; with "low" and "high" there is a band around the line.
        key: looks.
        x: axis.
        y: axis.
        title: above the chart.
        path: connect the points in the order of the rows, not of x; the last is marked.
    """
    data = _marked(rows)
    position = {"x": x.encoding(), "y": y.encoding()}
    order: Spec = {"order": {"field": "_order", "type": "quantitative"}} if path else {}
    tooltip = [{"field": "series", "title": "run"}, *({"field": a.field, "title": a.title} for a in (x, y))]
    layers: list[Spec] = []
    if any("low" in row for row in rows):
        band = {"y": {**y.encoding(), "field": "low"}, "y2": {"field": "high"}}
        layers.append(
            {"mark": {"type": "area", "opacity": 0.18}, "encoding": {**position, **band, "color": key.scale("color")}}
        )
    line = {**position, **order, "color": key.scale("color"), "strokeDash": key.scale("strokeDash")}
    layers.append({"mark": {"type": "line", "strokeWidth": 1.8}, "encoding": line})
    shapes = {**position, **key.points(), "tooltip": tooltip}
    mark = {"type": "point", "size": 45, "strokeWidth": 1.6}
    layers.append({"transform": [{"filter": "datum._mark"}], "mark": mark, "encoding": shapes})
    hover = {"type": "point", "size": 120, "opacity": 0}  # what a pointer meets anywhere on the line
    layers.append({"mark": hover, "encoding": {**position, "tooltip": tooltip}})
    return _chart(title, data, layers)


def points(
    rows: Sequence[Row], key: Key, x: Axis, y: Axis, title: str = "", front: bool = False, label: str | None = None
) -> Spec:
    """A point for each row, with intervals.

    Args:
        rows: with "series", ``x.field`` and ``y.field``; "x_low", "x_high", "y_low", "y_high" draw error bars.
        key: looks.
        x: axis.
        y: axis.
        title: above the chart.
        front: connect the points of a series, in the order of the rows.
        label: a field whose text stands beside each point.
    """
    data = _marked(rows)
    px, py = x.encoding(), y.encoding()
    colour = key.scale("color")
    layers: list[Spec] = []
    if front:
        line = {"x": px, "y": py, "order": {"field": "_order"}, "color": colour, "strokeDash": key.scale("strokeDash")}
        layers.append({"mark": {"type": "line", "strokeWidth": 1.4}, "encoding": line})
    bars: dict[str, Spec] = {
        "x_low": {"y": py, "x": {**px, "field": "x_low"}, "x2": {"field": "x_high"}},
        "y_low": {"x": px, "y": {**py, "field": "y_low"}, "y2": {"field": "y_high"}},
    }
    for low, bar in bars.items():
        if any(low in row for row in rows):
            layers.append({"mark": {"type": "rule", "strokeWidth": 1.4}, "encoding": {**bar, "color": colour}})
    tooltip = [{"field": "series", "title": "series"}, *({"field": a.field, "title": a.title} for a in (x, y))]
    encoding: Spec = {"x": px, "y": py, **key.points(), "tooltip": tooltip}
    layers.append({"mark": {"type": "point", "size": 80, "strokeWidth": 1.8}, "encoding": encoding})
    if label is not None:
        text = {"x": px, "y": py, "text": {"field": label}}
        layers.append({"mark": {"type": "text", "align": "left", "dx": 8, "dy": -7}, "encoding": text})
    return _chart(title, data, layers)


def with_band(spec: Spec, low: float, high: float, text: str) -> Spec:
    """The chart with a grey band across it, such as the human responses, and its name in it."""
    band = {"values": [{"low": low, "high": high, "text": text}]}
    y = spec["layer"][-1]["encoding"]["y"]
    area: Spec = {
        "data": band,
        "mark": {"type": "rect", "color": GREY, "opacity": 0.25},
        "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
    }
    word: Spec = {
        "data": band,
        "mark": {"type": "text", "align": "left", "baseline": "top", "x": 6, "dy": 3},
        "encoding": {"y": {**y, "field": "high"}, "text": {"field": "text"}},
    }
    return {**spec, "layer": [area, word, *spec["layer"]]}


def timeline(rows: Sequence[Row], tracks: Sequence[str], x: Axis, seconds: float, title: str = "") -> Spec:
    """Bars of work, a line of bars for each track.

    Args:
        rows: with "track", "work" (of :data:`WORK`), "what" in detail, "start", "end", and "text" for wide bars.
        tracks: from top to bottom.
        x: axis of time; its field is "start".
        seconds: how much of the time is seen at once.
        title: above the chart.
    """
    middle, wide = "(datum.start + datum.end) / 2", f"datum.end - datum.start > {seconds / 30:.6g}"
    known = [name for name in WORK if any(row["work"] == name for row in rows)]
    colour = {
        "field": "work",
        "type": "nominal",
        "title": None,
        "scale": {"domain": known, "range": [WORK[name] for name in known]},
        "legend": {"orient": "bottom", "direction": "horizontal", "columns": 3, "symbolType": "square"},
    }
    y = {"field": "track", "type": "nominal", "title": None, "sort": list(tracks), "axis": {"grid": False}}
    position = {"x": x.encoding(), "x2": {"field": "end"}, "y": {**y, "scale": {"domain": list(tracks)}}}
    tooltip = [
        {"field": "track"},
        {"field": "what", "title": "work"},
        {"field": "text", "title": "batch"},
        {"field": "start", "title": "from (s)", "format": ".3f"},
        {"field": "end", "title": "to (s)", "format": ".3f"},
    ]
    bar = {"type": "bar", "height": {"band": 0.72}, "clip": True, "stroke": "white", "strokeWidth": 0.4}
    layers: list[Spec] = [{"mark": bar, "encoding": {**position, "color": colour, "tooltip": tooltip}}]
    text = {"x": {**x.encoding(), "field": "middle"}, "y": position["y"], "text": {"field": "text"}}
    mark = {"type": "text", "size": 9, "color": "black", "clip": True}
    only = [{"filter": wide}, {"calculate": middle, "as": "middle"}]
    layers.append({"transform": only, "mark": mark, "encoding": text})
    return {**_chart(title, list(map(dict, rows)), layers), "height": 34 * len(tracks)}


def legend(key: Key, columns: int = 3, width: int = 300) -> Spec:
    """What each series looks like, and its words, in ``columns`` of that ``width``."""
    rows = [
        {
            "series": name,
            "left": (i % columns) * width,
            "middle": (i % columns) * width + 17,
            "right": (i % columns) * width + 34,
            "words": (i % columns) * width + 42,
            "y": i // columns * 18 + 9,
            "text": one.text,
        }
        for i, (name, one) in enumerate(key.series.items())
    ]
    high = 18 * math.ceil(len(rows) / columns)

    def at(field: str) -> Spec:
        # Pixels: the scale maps each number to itself.
        scale = {"domain": [0, columns * width], "range": [0, columns * width], "nice": False}
        return {"field": field, "type": "quantitative", "axis": None, "scale": scale}

    scale = {"domain": [0, high], "range": [0, high], "nice": False}
    y: Spec = {"field": "y", "type": "quantitative", "axis": None, "scale": scale}
    colour = key.scale("color")
    line: Spec = {"x": at("left"), "x2": {"field": "right"}, "y": y}
    line |= {"color": colour, "strokeDash": key.scale("strokeDash")}
    trained = {"filter": {"field": "series", "oneOf": [n for n, one in key.series.items() if not one.reference]}}
    layers: list[Spec] = [
        {"transform": [trained], "mark": {"type": "rule", "strokeWidth": 1.8}, "encoding": line},
        {"mark": {"type": "point", "size": 70}, "encoding": {"x": at("middle"), "y": y, **key.points()}},
        {
            "mark": {"type": "text", "align": "left", "baseline": "middle", "fontSize": 12},
            "encoding": {"x": at("words"), "y": y, "text": {"field": "text"}},
        },
    ]
    chart = _chart("", rows, layers)
    return {**chart, "width": columns * width, "height": high}


def figure(panels: Sequence[Spec], key: Key | None = None, columns: int = 3, title: str = "") -> Spec:
    """Several charts as one, with the legend of ``key`` below them."""
    rows: list[Spec] = [{"hconcat": list(panels[i : i + columns])} for i in range(0, len(panels), columns)]
    if key is not None and key.series:
        longest = max(len(one.text) for one in key.series.values())
        width = 56 + 7 * longest
        wide = min(columns, len(panels)) * 360
        rows.append(legend(key, max(1, min(len(key.series), wide // width)), width))
    return {"$schema": SCHEMA, **({"title": title} if title else {}), "vconcat": rows, "spacing": 24}


def theme(dark: bool = False) -> Spec:
    """Vega-Lite's ``config``."""
    ink, faint, paper = ("#e6edf3", "#30363d", "#0d1117") if dark else ("#1f2328", "#e3e6ea", "#ffffff")
    words = {"labelColor": ink, "titleColor": ink}
    return {
        "background": paper,
        "font": "Liberation Sans, Arial, Helvetica, sans-serif",
        "view": {"stroke": None},
        "axis": {
            **words,
            "gridColor": faint,
            "domainColor": ink,
            "tickColor": ink,
            "labelFontSize": 11,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "tickCount": 5,
        },
        "legend": {**words, "labelFontSize": 11},
        "title": {"color": ink, "anchor": "start", "fontSize": 13, "fontWeight": "bold"},
        "text": {"color": ink},
        "point": {"filled": False, "opacity": 1},
    }


def render_png(spec: Spec, path: Path, scale: float = 2.0, dark: bool = False) -> None:
    """Draw a chart, without a browser. The image appears whole or not at all.

    Raises:
        ImportError: vl-convert is not installed.
    """
    import vl_convert

    drawn = vl_convert.vegalite_to_png(
        spec, vl_version=VEGA_LITE, scale=scale, config=theme(dark), allowed_base_urls=[], show_warnings=False
    )
    with whole_file(path) as file:
        file.buffer.write(drawn)


def thinned(rows: Sequence[Row], limit: int, keys: Sequence[str]) -> list[dict[str, Any]]:
    """At most ``limit`` rows: means of neighbours over the numbers ``keys``, everything else as in the last of them."""
    size = math.ceil(len(rows) / limit) if limit else 1
    if size <= 1:
        return list(map(dict, rows))
    return [_mean(rows[i : i + size], keys) for i in range(0, len(rows), size)]


def _mean(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, Any]:
    found = {key: [row[key] for row in rows if key in row] for key in keys}
    return {**rows[-1], **{key: sum(values) / len(values) for key, values in found.items() if values}}


def _marked(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with their order, and whether the shape of their series stands there."""
    count: dict[Any, int] = {}
    for row in rows:
        count[row["series"]] = count.get(row["series"], 0) + 1
    seen = dict.fromkeys(count, 0)
    marked = []
    for order, row in enumerate(rows):
        name = row["series"]
        step = max(1, round(count[name] / MARKED))
        # Series are marked at different places, so that their shapes do not cover each other.
        offset = list(count).index(name) * step // max(1, len(count))
        last = seen[name] == count[name] - 1
        marked.append({**row, "_order": order, "_mark": last or (seen[name] - offset) % step == 0})
        seen[name] += 1
    return marked


def _chart(title: str, rows: Sequence[Row], layers: list[Spec]) -> Spec:
    heading = {"title": title} if title else {}
    return {"$schema": SCHEMA, **heading, "width": 300, "height": 220, "data": {"values": list(rows)}, "layer": layers}
