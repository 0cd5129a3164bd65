"""The charts of the page: which numbers, in which section, and what each says in words. Trackers draw the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from async_rlhf.studies.report.charts import Axis, Key, Spec, curves, thinned, timeline, with_threshold
from async_rlhf.studies.report.idleness import idleness
from async_rlhf.studies.report.plots import CHECKPOINTS, against_kl, evaluated, over_checkpoints
from async_rlhf.studies.report.reading import Evaluation, ReadRun, Span, of_runs
from async_rlhf.studies.report.warnings import THRESHOLDS

PATH_POINTS = 20
"""Points of a path of score against KL: each is the mean of neighbouring batches, but the first."""
BATCHES_SHOWN = 8
"""Of a timeline, before it is moved."""
MAX_SPANS = 4000
"""Of one timeline. The newest are shown."""
LIVES = 12
"""Batches whose way from sampling to training is shown."""
_LIFE = ("generate", "rewards", "score", "reference", "annotate", "train")
_SPANS = {
    "sampling": ("generate", "load", "mismatch"),
    "evaluation": ("evaluate",),
    "rewards": ("rewards", "score"),
    "publishing": ("hand out", "publish"),
    "training": ("annotate", "reference", "train"),
    "saving": ("save",),
}
WORK_OF = {span: work for work, spans in _SPANS.items() for span in spans}
"""Span -> kind of work. Waiting is where there is no bar."""


class Panel(NamedTuple):
    """A chart with its words.

    Args:
        name: unique on the page.
        title: its heading.
        spec: what is drawn.
        says: what it shows and how to read it.
        ends: the last value of each run, for those who cannot see it.
    """

    name: str
    title: str
    spec: Spec
    says: str
    ends: str = ""


class Curve(NamedTuple):
    """A measure of staleness over training.

    Args:
        field: its name in metrics.jsonl.
        title: heading.
        says: what it is.
        zero: whether 0 is on its axis.
        format: of its axis.
        band: the metrics that bound a band around it.
        warns: where a warning begins.
    """

    field: str
    title: str
    says: str
    zero: bool = False
    format: str | None = None
    band: tuple[str, str] | None = None
    warns: float | None = None


STALENESS = [
    Curve("schedule/lag_mean", "Lag", "Batches between the weights that sampled a token and the newest.", zero=True),
    Curve(
        "val/ess_token",
        "Effective sample size by token",
        "Share of the tokens that the batch is worth, as the importance weights say. 1 is on-policy.",
        format="%",
        warns=THRESHOLDS.ess_token,
    ),
    Curve(
        "val/ess_sequence",
        "Effective sample size by completion",
        "The same with completions.",
        format="%",
        warns=THRESHOLDS.ess_sequence,
    ),
    Curve(
        "val/ratio_p50",
        "Ratio of trained and sampling policy",
        "Over tokens: the median, and a band from the 1st to the 99th percentile.",
        band=("val/ratio_p01", "val/ratio_p99"),
    ),
]


def x_axis(runs: Sequence[ReadRun]) -> Axis:
    """Batches, or episodes if a batch is not the same in all runs."""
    newest = [run.rows[-1] for run in runs if run.rows]
    sizes = {round(row["episode"] / row["batch"], 3) for row in newest if row.get("episode")}
    if len(sizes) > 1:
        return Axis("episode", "episodes (prompts)", zero=True)
    return Axis("batch", "batches", zero=True)


def staleness(runs: Sequence[ReadRun], key: Key, points: int) -> Iterator[Panel]:
    """The curves of staleness that any run has, each with at most ``points`` points a run."""
    x = x_axis(runs)
    for curve in STALENESS:
        found = {run.name: rows for run in runs if (rows := _points(curve, run, x, points))}
        if found:
            name = "".join(letter if letter.isalnum() else "-" for letter in curve.field)
            whole = (0.0, 1.0) if curve.format == "%" and not curve.zero else None
            y = Axis("value", "", zero=curve.zero, format=curve.format, domain=whole)
            spec = curves([row for rows in found.values() for row in rows], key, x, y)
            spec = spec if curve.warns is None else with_threshold(spec, curve.warns)
            form = ".1%" if curve.format == "%" else ".4g"
            ends = ", ".join(f"{run} {rows[-1]['value']:{form}}" for run, rows in found.items())
            many = any("low" in row for rows in found.values() for row in rows) and curve.band is None
            says = curve.says + " A point is the mean of neighbouring batches, within a band of all of them." * many
            yield Panel(name, curve.title, spec, says, f"At the end: {ends}.")


def _points(curve: Curve, run: ReadRun, x: Axis, points: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row in run.rows:
        if isinstance(row.get(curve.field), (int, float)) and x.field in row:
            rows.append({"series": run.name, x.field: row[x.field], "value": row[curve.field]})
            if curve.band is not None and {*curve.band} <= row.keys():
                rows[-1] |= {"low": row[curve.band[0]], "high": row[curve.band[1]]}
    return [_short(row) for row in thinned(rows, points, ("value",))]


def score_against_kl(runs: Sequence[ReadRun], key: Key) -> Iterator[Panel]:
    """The path of each run through score and KL, if any has one."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        found = [
            {"series": run.name, "kl": row["objective/kl"], "score": row["objective/scores"]}
            for row in run.rows
            if {"objective/kl", "objective/scores"} <= row.keys()
        ]
        # The first as it is: it was sampled by the weights that training began with.
        rows += map(_short, [*found[:1], *thinned(found[1:], PATH_POINTS, ("kl", "score"))])
    if rows:
        says = (
            "What a run gets for moving away from the reference: up is good, right is dear. A path begins at its first "
            f"batch, at a KL of 0 if it began as its own reference, and has at most {PATH_POINTS + 1} points, which "
            "are means of neighbouring batches."
        )
        x = Axis("kl", "KL to the reference (nats per completion)", zero=True)
        yield Panel("score-kl", "Score against KL", curves(rows, key, x, Axis("score", "score"), path=True), says)


def gold(evaluation: Evaluation, runs: Sequence[ReadRun], number: int) -> tuple[Key, list[Panel]]:
    """Gold reward against KL, and over checkpoints. The reference model is grey, a run keeps its colour."""
    mine, results = of_runs(evaluation, runs), evaluation.results
    if len(set(mine.values())) == len(mine):  # a model for each run: under the name of the run
        models = {mine.get(name, name): one for name, one in results["models"].items()}
        results = {**results, "models": models, "reference": mine.get(results["reference"], results["reference"])}
    series = {run.name: run.series for run in runs}
    for one in sorted(evaluated(results, list(series.values())), key=lambda one: one.name == CHECKPOINTS):
        whose = next((run for run in runs if run.name in mine.values()), None) if one.name == CHECKPOINTS else None
        series[one.name] = one if whose is None else whose.series._replace(name=CHECKPOINTS)
    key = Key(series.values())
    says, more = "Bars are 95% intervals over prompts.", over_checkpoints(results, key)
    shown = [Panel(f"gold-{number}", "Gold reward against KL", against_kl(results, key), says)]
    shown += [] if more is None else [Panel(f"gold-batches-{number}", "Over the checkpoints", more, says)]
    return key, shown


def work(run: ReadRun, number: int, share: float) -> Iterator[Panel]:
    """The timeline of the newest start of a run, that can be moved; with a ``share`` of the spans that it may have."""
    name, spans = list(run.traces.items())[-1] if run.traces else ("", [])
    drawn = _drawn(spans)
    if not drawn:
        return
    rows = [_bar(span, span.track, drawn[0].start) for span in drawn]
    shown, end = rows[-max(1, int(share * MAX_SPANS)) :], max(row["end"] for row in rows)
    begin = min(row["start"] for row in shown)
    tracks = sorted({row["track"] for row in shown}, key=_track_place)
    wide = min(end - begin, _seconds_of(spans, BATCHES_SHOWN))
    spec = timeline(shown, tracks, Axis("start", "seconds since the start"), wide)
    last = max(begin, end - wide)
    ends = {"min": round(begin, 2), "max": round(last, 2), "step": round(max(wide / 20, 1e-3), 3)}
    bind = {"input": "range", **ends, "name": "move along the run "}
    spec["params"] = [{"name": "from", "value": round(begin + (last - begin) / 2, 2), "bind": bind}]
    window = {"domainMin": {"expr": "from"}, "domainMax": {"expr": f"from + {wide:.4f}"}}
    for layer in spec["layer"]:
        layer["encoding"]["x"]["scale"] = {"zero": False, "nice": False, **window}
    found = idleness(run.traces.values())
    says = "" if found is None else found.text
    says += " Shares are of each side's time from its first piece of work to its last."
    if len(run.traces) > 1:
        says += f" They are of all {len(run.traces)} starts; the picture is of the newest, {name}."
    if len(rows) > len(shown):
        says += f" The picture has the newest {len(shown)} of {len(rows)} pieces of work; {name} has all."
    yield Panel(f"work-{number}", run.name, spec, says + " A bar's number is its batch.")


def lives(run: ReadRun, number: int) -> Iterator[Panel]:
    """Of the newest batches of a run: when each was sampled, how long it waited, when it was trained on."""
    spans = list(run.traces.values())[-1] if run.traces else []
    lags = {round(row["batch"]): row["schedule/lag_mean"] for row in run.rows if "schedule/lag_mean" in row}
    own = [span for span in spans if span.name in _LIFE and span.batch in lags]
    sampled, used = ({s.batch: s for s in own if s.name == name} for name in ("generate", "train"))
    shown = sorted(sampled.keys() & used.keys())[-LIVES:]
    if not shown:
        return
    tracks = {batch: f"batch {batch}, lag {lags[batch]:.3g}" for batch in shown}
    rows, first = [], _drawn(spans)[0].start
    for batch in shown:
        parts = [span for span in own if span.batch == batch]
        begin = min(span.start for span in parts if span.name in ("annotate", "train"))
        waits = Span("", "wait", max(span.end for span in parts if span.name == "generate"), begin, batch)
        parts = [waits, *parts] if waits.end > waits.start else parts
        rows += [_bar(span, tracks[batch], first) | {"text": ""} for span in parts]
    ends = min(row["start"] for row in rows), max(row["end"] for row in rows)
    spec = timeline(
        rows, list(tracks.values()), Axis("start", "seconds since the start", domain=ends), ends[1] - ends[0]
    )
    says = (
        f"The newest batches, {LIVES} at most: sampled, waiting for their turn, trained on. The lag is by how many "
        "batches the weights that sampled a batch are older than those that it updates."
    )
    yield Panel(f"lives-{number}", f"{run.name}: from sampling to training", spec, says)


def _drawn(spans: Sequence[Span]) -> list[Span]:
    """What a timeline shows, by its beginning."""
    shown = (
        span for span in spans if span.name in WORK_OF and (span.name != "publish" or span.end - span.start > 1e-3)
    )
    return sorted(shown, key=lambda span: span.start)


def _bar(span: Span, track: str, first: float) -> dict[str, Any]:
    row = {"track": track, "work": WORK_OF.get(span.name, "waiting"), "what": span.name, "text": str(span.batch or "")}
    return row | {"start": round(span.start - first, 4), "end": round(span.end - first, 4)}


def _seconds_of(spans: Sequence[Span], batches: int) -> float:
    """How long so many batches take, about."""
    ends = sorted(span.end for span in spans if span.name == "train")
    if len(ends) < 2:
        return max((span.end for span in spans), default=1.0)
    return max(1e-3, batches * (ends[-1] - ends[0]) / (len(ends) - 1))


def _track_place(track: str) -> tuple[int, str]:
    """Generators, rewards, reference, publisher, learner: as the work flows."""
    order = ("generator", "rewards", "reference", "publisher", "learner")
    return next((i for i, name in enumerate(order) if track.startswith(name)), 0), track


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """Six digits are more than a screen shows."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}
