"""The page as text: one HTML file that needs nothing else.

Everything that a run, a model or a user wrote is escaped: texts in HTML by :func:`html.escape`, data for scripts as
JSON in which no "<" is left. Besides, a content security policy names the hashes of our own scripts, so a browser runs
no others and asks no network for anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from async_rlhf.run.folder import REPORT_MARK
from async_rlhf.studies.report import panels
from async_rlhf.studies.report.charts import VEGA_LITE, Key, Look, theme
from async_rlhf.studies.report.panels import Panel
from async_rlhf.studies.report.reading import Evaluation, ReadRun
from async_rlhf.studies.report.samples import samples
from async_rlhf.studies.report.tables import configuration, environment, evaluation_table, faults, overview
from async_rlhf.studies.report.warnings import warnings

LIMIT = 5_000_000
"""Most bytes of a page."""
_TEXT, _POINTS = 1_200_000, 2_000
"""Characters of completions, and points of a chart, before anything has to be left out."""


@dataclass
class _Page:
    """What is written so far."""

    sections: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, title and HTML."""
    specs: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, title: str, *html: str) -> None:
        if content := "\n".join(filter(None, html)):
            self.sections.append((name, title, content))

    def figures(self, shown: Iterable[Panel]) -> str:
        written = []
        for panel in shown:
            self.specs[panel.name] = panel.spec
            name = escape(panel.name)
            written.append(
                f'<figure><h3 id="h-{name}">{escape(panel.title)}</h3>'
                f'<div class="chart" id="{name}" role="img" aria-labelledby="h-{name}" '
                f'aria-describedby="c-{name}"></div>'
                f'<figcaption id="c-{name}">{escape(panel.says)}'
                f"{f' <span class=ends>{escape(panel.ends)}</span>' if panel.ends else ''}</figcaption></figure>"
            )
        return f'<div class="figures">{"".join(written)}</div>' if written else ""


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
    page, key = _Page(), Key(run.series for run in runs)
    points = max(20, int(share * _POINTS / len(runs)))
    legend = _legend(key)
    page.add("runs", "Runs", overview(runs))
    page.add("warnings", "What to look at", _warnings(runs, evaluations))
    curves = [*panels.over_training(panels.CURVES, runs, key, points), *panels.rewards(runs, key, points)]
    page.add("curves", "Curves", legend, page.figures(curves))
    path = panels.score_against_kl(runs, key)
    page.add("score-against-kl", "Score against KL", legend, page.figures(filter(None, [path])))
    page.add("evaluation", "Evaluation", *_evaluations(page, evaluations, runs))
    stale = list(panels.over_training(panels.STALENESS, runs, key, points))
    page.add("staleness", "Staleness", legend, page.figures(stale))
    work = [panel for number, run in enumerate(runs) if (panel := panels.work(run, number, share)) is not None]
    page.add("work", "Who worked when", page.figures(work).replace("figures", "figures wide", 1), faults(runs))
    chosen = samples(runs, evaluations, int(share * _TEXT))
    page.add("samples", "Samples", _samples(bool(chosen.groups), chosen.notes))
    page.add("environment", "Environment and configuration", environment(runs), configuration(runs))
    data = {
        "specs": page.specs,
        "samples": chosen.groups,
        "light": theme(False),
        "dark": theme(True),
        "runs": [run.name for run in runs],
        "refresh": refresh,
    }
    return _filled(page.sections, ", ".join(run.name for run in runs), data, refresh)


def _filled(sections: Sequence[tuple[str, str, str]], title: str, data: Any, refresh: float | None) -> str:
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    told = f"Brought up to date at {now}."
    if refresh is not None:
        told += f" It follows the run, and loads itself again every {refresh:g} seconds."
    scripts = [_library(), _file("page.js")]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _ in sections)
    body = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(heading)}</h2>\n{html}\n'
        "</section>"
        for name, heading, html in sections
    )
    values = {
        "generator": REPORT_MARK,
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:",
        "title": escape(title),
        "style": _file("page.css"),
        "told": escape(told),
        "links": links,
        "sections": body,
        "data": embedded(data),
        "library": scripts[0],
        "script": scripts[1],
    }
    parts = _file("page.html").split("@@")
    # Every other part is the name of a value. Values are not looked at again, whatever is in them.
    return "".join(values[part] if i % 2 else part for i, part in enumerate(parts))


def embedded(data: Any) -> str:
    """JSON for a script element: no "<" is left that could end it or begin another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


@cache
def _library() -> str:
    import vl_convert

    snippet = "window.vegaEmbed = vegaEmbed;"
    return str(vl_convert.javascript_bundle(snippet, vl_version=VEGA_LITE)).replace("</script", "<\\/script")


@cache
def _file(name: str) -> str:
    return files("async_rlhf.studies.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _legend(key: Key) -> str:
    """The looks of the runs, as the charts draw them."""
    items = "".join(f"<li>{_swatch(key.looks[name])}{escape(one.text)}</li>" for name, one in key.series.items())
    trained = [one for one in key.series.values() if not one.reference]
    algorithms, lags = len({one.algorithm for one in trained}), len({one.staleness for one in trained})
    says = ["A colour is a run"]
    says += ["the shape of a point is its algorithm"] * (algorithms > 1)
    says += ["dashes and the filling of a point are S, the staleness: solid and hollow is the least"] * (lags > 1)
    return f'<ul class="legend">{items}</ul><p class="small">{"; ".join(says)}.</p>'


def _swatch(look: Look) -> str:
    dash = " ".join(f"{part:g}" for part in look.dash)
    return (
        '<svg width="34" height="14" viewBox="-17 -7 34 14" aria-hidden="true">'
        f'<line x1="-17" x2="17" y1="0" y2="0" stroke="{look.colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
        f'<path d="{look.shape}" transform="scale(4.2)" stroke="{look.colour}" stroke-width=".4" fill="{look.colour}" '
        f'fill-opacity="{look.fill:g}"/></svg>'
    )


def _warnings(runs: Sequence[ReadRun], evaluations: Sequence[Evaluation]) -> str:
    found = warnings(runs, evaluations)
    if not found:
        return "<p>Nothing stands out.</p>"
    items = "".join(
        f'<li class="level{one.level}"><strong>{escape(one.title)}</strong> <span class="run">{escape(one.run)}</span>'
        f"<br>{escape(one.text)}</li>"
        for one in found
    )
    return f'<ul class="warnings">{items}</ul>'


def _evaluations(page: _Page, evaluations: Sequence[Evaluation], runs: Sequence[ReadRun]) -> list[str]:
    written = []
    for number, evaluation in enumerate(evaluations):
        shown = list(panels.gold(evaluation, runs, number))
        written += [f"<h3>{escape(evaluation.folder.name)}</h3>" if len(evaluations) > 1 else ""]
        written += [evaluation_table(evaluation), _legend(shown[0][1]), page.figures(panel for panel, _ in shown)]
    return written


def _samples(some: bool, notes: Sequence[str]) -> str:
    if not some:
        return ""
    told = f'<p class="small">{escape("; ".join(notes))}.</p>' if notes else ""
    return (
        '<form class="search" role="search"><label>Search in prompts and completions '
        '<input type="search" id="search" autocomplete="off"></label> '
        '<label>Of <select id="kind"></select></label> <label>Run <select id="run"></select></label></form>'
        f'{told}<p id="found" role="status"></p><div id="groups"></div>'
        '<button type="button" id="more" hidden>Show more</button>'
    )
