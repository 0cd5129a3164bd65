"""The page as text: one HTML file that needs nothing else.

Everything that a run, a model or a user wrote is escaped: texts in HTML by the templates, data for scripts as JSON in
which no "<" is left. Besides, a content security policy names the hashes of our own scripts, so a browser runs no
others and asks no network for anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from async_rlhf.run.folder import REPORT_MARK
from async_rlhf.studies.report import panels, proof, tables
from async_rlhf.studies.report.charts import VEGA_LITE, Key, theme
from async_rlhf.studies.report.reading import FREE_FORM, Evaluation, ReadRun
from async_rlhf.studies.report.samples import samples
from async_rlhf.studies.report.verdict import verdict
from async_rlhf.studies.report.warnings import warnings

LIMIT = 5_000_000
"""Most bytes of a page."""
_TEXT, _POINTS = 1_200_000, 2_000
"""Characters of completions, and points of a chart, before anything has to be left out."""
_TEMPLATES = Environment(
    loader=PackageLoader("async_rlhf.studies.report", "."), autoescape=True, undefined=StrictUndefined
)


def page(runs: Sequence[ReadRun], evaluations: Sequence[Evaluation] = (), refresh: float | None = None) -> str:
    """The HTML.

    Args:
        runs: at least one, with unique names.
        evaluations: of them.
        refresh: seconds after which the page loads itself again; None if it is final.

    Raises:
        ImportError: vl-convert is not installed.
    """
    share = 1.0
    while True:
        # A lone surrogate, of a name or a sample that is no Unicode, becomes its escape.
        text = _page(runs, evaluations, refresh, share).encode(errors="backslashreplace").decode()
        if len(text.encode()) < LIMIT or share < 0.01:
            return text
        share /= 2


def _page(runs: Sequence[ReadRun], evaluations: Sequence[Evaluation], refresh: float | None, share: float) -> str:
    key, names = Key(run.series for run in runs), [run.name for run in runs]
    points = max(20, int(share * _POINTS / len(runs)))
    path = list(panels.score_against_kl(runs, key))
    stale = list(panels.staleness(runs, key, points))
    work = [panel for number, run in enumerate(runs) for panel in panels.work(run, number, share)]
    gold = [panels.gold(evaluation, runs, number) for number, evaluation in enumerate(evaluations)]
    groups, notes = samples(runs, evaluations, int(share * _TEXT))
    parts: Any = _TEMPLATES.get_template("page.parts.html").module
    judged = [
        parts.evaluation(len(evaluations) > 1, evaluation, tables.evaluation(evaluation), *of_one)
        for evaluation, of_one in zip(evaluations, gold, strict=True)
    ]
    about = parts.environment(list(tables.starts(runs)), *tables.configuration(runs), FREE_FORM)
    sections = [
        ("verdict", "In short", parts.verdict(verdict(runs, evaluations))),
        ("runs", "Runs", parts.table(*tables.overview(runs))),
        ("warnings", "What to look at", parts.warnings(warnings(runs, evaluations))),
        ("score-against-kl", "Score against KL", parts.curves(key, path) if path else ""),
        ("evaluation", "Evaluation", Markup("\n").join(judged)),
        ("staleness", "Staleness", parts.curves(key, stale) if stale else ""),
        ("work", "Who worked when", parts.work(work, tables.faults(runs))),
        ("proof", "What was checked", parts.table(*proof.rows(runs))),
        ("samples", "Samples", parts.samples(notes) if groups else ""),
        ("environment", "Environment and configuration", about),
    ]
    shown = [*path, *(panel for _, of_one in gold for panel in of_one), *stale, *work]
    data = {
        "specs": {panel.name: panel.spec for panel in shown},
        "samples": groups,
        "light": theme(False),
        "dark": theme(True),
        "runs": names,
        "refresh": refresh,
    }
    scripts = [_library(), _file("page.js")]
    return _TEMPLATES.get_template("page.html").render(
        generator=Markup(REPORT_MARK),
        hashes=map(_digest, scripts),
        title=", ".join(names),
        style=_file("page.css"),
        now=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        refresh=refresh,
        sections=[section for section in sections if section[2]],
        data=Markup(embedded(data)),
        scripts=scripts,
    )


def embedded(data: Any) -> str:
    """JSON for a script element: no "<" is left that could end it or begin another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


@cache
def _library() -> Markup:
    import vl_convert

    snippet = "window.vegaEmbed = vegaEmbed;"
    return Markup(str(vl_convert.javascript_bundle(snippet, vl_version=VEGA_LITE)).replace("</script", "<\\/script"))


@cache
def _file(name: str) -> Markup:
    return Markup(files("async_rlhf.studies.report").joinpath(name).read_text(encoding="utf-8"))


@cache
def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
