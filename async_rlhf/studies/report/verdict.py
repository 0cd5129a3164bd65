"""What several runs say together, in words: reward, speed, who waited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from async_rlhf.commands.evaluation.statistics import paired_difference
from async_rlhf.studies.report.idleness import idleness
from async_rlhf.studies.report.reading import Evaluation, ReadRun, of_runs

_WARM_UP = 2
"""Batches, whose times are not a run's."""


def verdict(runs: Sequence[ReadRun], evaluations: Sequence[Evaluation] = ()) -> list[str]:
    """A sentence for each run but the first of least staleness, against it; nothing of one run alone."""
    first = min(runs, key=lambda run: run.staleness or 0)
    return [f"{run.name} against {first.name}: {_text(run, first, evaluations)}" for run in runs if run is not first]


def _text(run: ReadRun, first: ReadRun, evaluations: Sequence[Evaluation]) -> str:
    sentences = [next(filter(None, _rewards(run, first, evaluations)), "their rewards cannot be compared")]
    seconds = [[row["time/batch"] for row in side.rows[_WARM_UP:] if "time/batch" in row] for side in (run, first)]
    if all(seconds):
        mine, other = map(fmean, seconds)
        sentences.append(f"a batch took {mine:.3g} s, {other:.3g} there: {other / mine:.2f} times as fast")
    waited = idleness(run.traces.values())
    return "; ".join(sentences) + "." + ("" if waited is None else f" {waited.text}")


def _rewards(run: ReadRun, first: ReadRun, evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """The difference, by what is most to be believed first."""
    for evaluation in evaluations:
        models = {name: model for model, name in of_runs(evaluation, [run, first]).items()}
        if {run.name, first.name} <= models.keys():
            said = [row for row in evaluation.samples if isinstance(row.get("models"), dict)]
            pairs = [[row["models"].get(models[each.name], {}).get("score") for each in (run, first)] for row in said]
            yield _difference(evaluation.results.get("reward", "reward"), pairs, [row.get("query") for row in said])
    mine, other = (_scores(each.eval_samples) for each in (run, first))
    both = [key for key in mine if key in other]
    yield _difference("held-out score", [[mine[p], other[p]] for p in both], [row for row, _ in both])
    ends = [[row["objective/scores"] for row in each.rows if "objective/scores" in row] for each in (run, first)]
    if all(ends):
        final = [fmean(scores[-max(1, len(scores) // 10) :]) for scores in ends]
        yield f"training score {final[0]:.3f}, {final[1]:.3f} there, at the end (no held-out prompts, so no interval)"


def _scores(samples: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, Any], Any]:
    """Of the last evaluation, by row and number of the sample."""
    last = max((row["batch"] for row in samples if "batch" in row), default=None)
    return {(row.get("row"), row.get("sample")): row.get("score") for row in samples if row.get("batch") == last}


def _difference(what: str, pairs: Sequence[Sequence[Any]], prompts: Sequence[Any]) -> str:
    """Over prompts, with its interval; "" without scores of two."""
    both = zip(pairs, prompts, strict=True)
    known = [(*pair, prompt) for pair, prompt in both if all(isinstance(score, (int, float)) for score in pair)]
    if len({prompt for *_, prompt in known}) < 2:
        return ""
    ours, theirs, clusters = zip(*known, strict=True)
    difference = paired_difference(ours, theirs, clusters)
    more = "more" if difference.low > 0 else "less" if difference.high < 0 else "no clear difference in"
    between = f"{difference.estimate:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
    return f"{more} {what}, {between} on the same {len(set(clusters))} prompts (95%, for these two runs)"
