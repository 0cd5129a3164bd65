"""The charts of the page: which numbers, in which section, and what each says in words. Trackers draw the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from async_rlhf.studies.report.charts import Axis, Key, Spec, curves, thinned, timeline, with_threshold
from async_rlhf.studies.report.idleness import idleness
from async_rlhf.studies.report.plots import EPISODES, against_kl, evaluated, judged, over_checkpoints
from async_rlhf.studies.report.reading import Evaluation, ReadRun, Span, of_runs
from async_rlhf.studies.report.warnings import THRESHOLDS

PATH_POINTS = 20
"""Points of a path of score against KL: each is the mean of neighbouring batches, but the first."""
BATCHES_SHOWN = 8
"""Of a timeline, before it is moved."""
MAX_SPANS = 4000
"""Of one timeline. The newest are shown."""
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
_TRACKS = ("generator", "rewards", "reference", "publisher", "learner")
"""From top to bottom: as the work flows."""


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


_SHARE = Axis("value", "", format="%", domain=(0.0, 1.0))
_ESS = "Share of the tokens that the batch is worth, as the importance weights say. 1 is on-policy."
_RATIO = "Over tokens: the median, and a band from the 1st to the 99th percentile."
_LAG = "Batches between the weights that sampled a token and the newest."
STALENESS = {
    "schedule/lag_mean": ("Lag", _LAG, Axis("value", "", zero=True)),
    "val/ess_token": ("Effective sample size by token", _ESS, _SHARE),
    "val/ess_sequence": ("Effective sample size by completion", "The same with completions.", _SHARE),
    "val/ratio_p50": ("Ratio of trained and sampling policy", _RATIO, Axis("value", "")),
}
"""Measures of staleness: heading, what it is, and axis."""
_BANDS = {"val/ratio_p50": ("val/ratio_p01", "val/ratio_p99")}
_WARNS = {"val/ess_token": THRESHOLDS.ess_token, "val/ess_sequence": THRESHOLDS.ess_sequence}


def staleness(runs: Sequence[ReadRun], key: Key, points: int) -> Iterator[Panel]:
    """The curves of staleness that any run has, each with at most ``points`` points a run; over batches, or over
    episodes if a batch is not the same in all runs.
    """
    newest = [run.rows[-1] for run in runs if run.rows]
    sizes = {round(row["episode"] / row["batch"], 3) for row in newest if row.get("episode")}
    x = EPISODES if len(sizes) > 1 else Axis("batch", "batches", zero=True)
    for metric, (title, says, y) in STALENESS.items():
        fields = {x.field: x.field, "value": metric}
        fields |= dict(zip(("low", "high"), _BANDS.get(metric, ()), strict=False))
        rows_by_run = {run.name: rows for run in runs if (rows := thinned(_rows(run, fields), points, ("value",)))}
        if rows_by_run:
            spec = curves([_short(row) for rows in rows_by_run.values() for row in rows], key, x, y)
            spec = with_threshold(spec, _WARNS[metric]) if metric in _WARNS else spec
            form = ".1%" if y.format == "%" else ".4g"
            ends = ", ".join(f"{run} {rows[-1]['value']:{form}}" for run, rows in rows_by_run.items())
            if metric not in _BANDS and any("low" in row for rows in rows_by_run.values() for row in rows):
                says += " A point is the mean of neighbouring batches, within a band of all of them."
            name = "".join(letter if letter.isalnum() else "-" for letter in metric)
            yield Panel(name, title, spec, says, f"At the end: {ends}.")


def _rows(run: ReadRun, fields: dict[str, str]) -> list[dict[str, Any]]:
    """Of each batch that has all of these metrics: field of the chart -> metric."""
    having = (row for row in run.rows if all(isinstance(row.get(metric), (int, float)) for metric in fields.values()))
    return [{"series": run.name, **{field: row[metric] for field, metric in fields.items()}} for row in having]


def score_against_kl(runs: Sequence[ReadRun], key: Key) -> Iterator[Panel]:
    """The path of each run through score and KL, if any has one."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        path = _rows(run, {"kl": "objective/kl", "score": "objective/scores"})
        # The first as it is: it was sampled by the weights that training began with.
        rows += map(_short, [*path[:1], *thinned(path[1:], PATH_POINTS, ("kl", "score"))])
    if rows:
        says = (
            "What a run gets for moving away from the reference: up is good, right is dear. A path begins at its first "
            f"batch, at a KL of 0 if it began as its own reference, and has at most {PATH_POINTS + 1} points, which "
            "are means of neighbouring batches."
        )
        x = Axis("kl", "KL to the reference (nats per completion)", zero=True)
        yield Panel("score-kl", "Score against KL", curves(rows, key, x, Axis("score", "score"), path=True), says)


def gold(evaluation: Evaluation, runs: Sequence[ReadRun], number: int) -> tuple[Key, list[Panel]]:
    """What a judge says against KL, and over checkpoints. The reference model is grey, a run keeps its colour."""
    mine, results = of_runs(evaluation, runs), evaluation.results
    if len(set(mine.values())) == len(mine):  # a model for each run: under the name of the run
        models = {mine.get(name, name): figures for name, figures in results["models"].items()}
        results = {**results, "models": models, "reference": mine.get(results["reference"], results["reference"])}
    series = [run.series for run in runs]
    key = Key([*series, *evaluated(results, series)])
    says, more = "Bars are 95% intervals over prompts.", over_checkpoints(results, key)
    title = f"{judged(results).title.rpartition(' (')[0].capitalize()} against KL"
    shown = [Panel(f"gold-{number}", title, against_kl(results, key), says)]
    shown += [] if more is None else [Panel(f"gold-batches-{number}", "Over the checkpoints", more, says)]
    return key, shown


def work(run: ReadRun, number: int, share: float) -> Iterator[Panel]:
    """The timeline of the newest start of a run, that can be moved; with a ``share`` of the spans that it may have."""
    name, spans = list(run.traces.items())[-1] if run.traces else ("", [])
    known = (span for span in spans if span.name in WORK_OF)
    drawn = sorted((s for s in known if s.name != "publish" or s.end - s.start > 1e-3), key=lambda span: span.start)
    if not drawn:
        return
    rows: list[dict[str, Any]] = [
        {"track": span.track, "work": WORK_OF[span.name], "what": span.name, "text": str(span.batch or "")}
        | {"start": round(span.start - drawn[0].start, 4), "end": round(span.end - drawn[0].start, 4)}
        for span in drawn
    ]
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
    shares = idleness(run.traces.values())
    says = "" if shares is None else shares.text
    says += " Shares are of each side's time from its first piece of work to its last."
    if len(run.traces) > 1:
        says += f" They are of all {len(run.traces)} starts; the picture is of the newest, {name}."
    if len(rows) > len(shown):
        says += f" The picture has the newest {len(shown)} of {len(rows)} pieces of work; {name} has all."
    yield Panel(f"work-{number}", run.name, spec, says + " A bar's number is its batch.")


def _seconds_of(spans: Sequence[Span], batches: int) -> float:
    """How long so many batches take, about."""
    ends = sorted(span.end for span in spans if span.name == "train")
    if len(ends) < 2:
        return max((span.end for span in spans), default=1.0)
    return max(1e-3, batches * (ends[-1] - ends[0]) / (len(ends) - 1))


def _track_place(track: str) -> tuple[int, str]:
    return next((i for i, name in enumerate(_TRACKS) if track.startswith(name)), 0), track


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Six digits are more than a screen shows."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}
