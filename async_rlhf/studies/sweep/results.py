"""What runs show together: means over seeds and prompts with intervals, comparisons with a baseline, a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from async_rlhf.commands.evaluation.statistics import Interval, crossed_mean_interval, outcomes

Results = Mapping[str, Any]
"""Of one run; see :func:`~async_rlhf.studies.sweep.one_trial.run_trial`."""

METRICS = {
    "objective/scores": "score in training",
    "val/ess_token": "ESS, tokens",
    "val/ess_sequence": "ESS, completions",
    "val/ended_share": "ended",
}
"""Metrics of the last tenth of training that the table shows."""


@dataclass(frozen=True)
class Summary:
    """One setting over all its seeds."""

    setting: Mapping[str, str]
    seeds: tuple[int, ...]
    gold: Interval
    """Mean gold reward; the interval is over seeds and prompts."""
    kl: Interval
    """To the model that the policy was measured against, in nats a completion; over seeds, or prompts with one seed."""
    wins: Interval | None
    """Gold win-rate: the share of prompts on which the policy's answer has a higher gold reward than the starting
    model's, a tie counted as half."""
    against: Interval | None
    """Gold reward minus the baseline's, on the same prompts and the seeds that both have."""
    common: int
    """How many seeds these are."""
    metrics: Mapping[str, float]
    """Means over seeds of the run's last metrics."""


def summaries(results: Iterable[Results], starts: Mapping[str, Results], baseline: Mapping[str, str]) -> list[Summary]:
    """All settings, in the order of their first runs.

    Args:
        results: of all runs.
        starts: run's name -> results of the model that it started from.
        baseline: axis -> label; each setting is compared with the one that has these labels and its own others.
    """
    groups: dict[tuple[tuple[str, str], ...], dict[int, Results]] = {}
    for run in results:
        groups.setdefault(tuple(run["setting"].items()), {})[run["seed"]] = run
    summarised = []
    for key, runs in groups.items():
        base = groups.get(tuple({**dict(key), **baseline}.items())) if baseline else None
        summarised.append(_summary(dict(key), runs, starts, None if base is runs else base))
    return summarised


def _summary(
    setting: Mapping[str, str],
    runs: Mapping[int, Results],
    starts: Mapping[str, Results],
    base: Mapping[int, Results] | None,
) -> Summary:
    scores_SP = [run["scores"] for run in runs.values()]
    wins = against = None
    if all(run["name"] in starts for run in runs.values()):
        won_SP = [outcomes(run["scores"], starts[run["name"]]["scores"]) for run in runs.values()]
        wins = Interval(*(min(max(end, 0.0), 1.0) for end in crossed_mean_interval(won_SP)))
    both = sorted(runs.keys() & base.keys()) if base is not None else []
    if base is not None and both:
        against = crossed_mean_interval([np.subtract(runs[s]["scores"], base[s]["scores"]).tolist() for s in both])
    kls = [run["kl"]["estimate"] for run in runs.values()]
    kl = crossed_mean_interval([[x] for x in kls]) if len(kls) > 1 else Interval(**next(iter(runs.values()))["kl"])
    kl = kl._replace(low=max(kl.low, min(kl.estimate, 0.0)))  # a KL is not negative, though an estimate may be
    names = set.intersection(*(set(run["metrics"]) for run in runs.values()))
    metrics = {name: fmean(run["metrics"][name] for run in runs.values()) for name in sorted(names)}
    return Summary(setting, tuple(runs), crossed_mean_interval(scores_SP), kl, wins, against, len(both), metrics)


def table(summarised: Sequence[Summary], baseline: Mapping[str, str]) -> str:
    """A Markdown table, a row for each setting."""
    axes = list(dict.fromkeys(axis for summary in summarised for axis in summary.setting))
    metrics = {name: label for name, label in METRICS.items() if any(name in summary.metrics for summary in summarised)}
    labels = ", ".join(f"{axis.rpartition('.')[2]} {label}" for axis, label in baseline.items())
    against = [f"minus {labels}"] if baseline else []
    wins = ["wins vs. start"] if any(summary.wins for summary in summarised) else []
    short = [axis.rpartition(".")[2] for axis in axes]
    titles = [*short, "seeds", "gold reward", *against, *wins, "KL to start", *metrics.values()]
    lines = [markdown_row(titles), markdown_row(["---"] * len(titles))]
    for summary in summarised:
        cells = [summary.setting.get(axis, "") for axis in axes]
        cells += [str(len(summary.seeds)), _cell(summary.gold, ".3f")]
        of_some = f" ({summary.common} of its seeds)" if summary.against and summary.common < len(summary.seeds) else ""
        cells += [_cell(summary.against, "+.3f") + of_some] if baseline else []
        cells += [_cell(summary.wins, ".1%")] if wins else []
        cells.append(_cell(summary.kl, ".2f"))
        cells += [f"{summary.metrics[name]:.3f}" if name in summary.metrics else "" for name in metrics]
        lines.append(markdown_row(cells))
    return "\n".join(lines) + "\n"


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _cell(interval: Interval | None, form: str) -> str:
    if interval is None:
        return ""
    estimate, low, high = (f"{value:{form}}" for value in interval)
    return f"{estimate} [{low}, {high}]"
