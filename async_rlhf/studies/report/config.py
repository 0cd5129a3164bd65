"""Configuration of ``async-rlhf report``."""

from __future__ import annotations

from async_rlhf.config.base import EACH_ONCE, FILE, REQUIRED, Checked, Rule, configuration, key

_SOME = Rule(lambda runs: len(runs) > 0, "must name at least one folder")
_HTML = Rule(lambda path: path.endswith(".html"), "must end with .html")


@configuration
class ReportConfig(Checked):
    """One HTML page of runs: ``async-rlhf report RUN [RUN ...]``. It holds all that it shows, and needs no network.

    Curves of all runs together, score against KL, the timeline of generators and learner, warnings in words, samples
    with search, evaluations that lie beside the runs, versions and configurations.
    """

    runs: list[str] = key(REQUIRED, _SOME, EACH_ONCE, names="folder")
    """Output folders of ``train`` or of a trainer in Python, finished or not; also of ``evaluate``."""
    out: str | None = key(None, _HTML, *FILE, role="place")
    """The file; null for report.html in the folder of the run, or in the current folder for several runs."""
    open: bool = key(False, role="place")
    """Show it in a browser."""
    live: bool = key(False, role="place")
    """Follow runs that are training: write the page again whenever they have, until they end or Ctrl-C is pressed. The
    open page loads itself again, and keeps its place."""
    every: float = key(10.0, gt=0, role="speed")
    """With live, seconds from one look to the next."""
