"""What was checked in a run, how often, and what was not: in plain words, for the page and for proof.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from async_rlhf.studies.report.reading import ReadRun

_STOPS = 4.7
"""log10 of the evidence at which the sampling test ends a run."""


class Check(NamedTuple):
    """One promise, and what the run did for it."""

    promise: str
    checked: int
    """How often: batches, versions or starts; 0 if it was not checked."""
    words: str


def proof(run: ReadRun) -> list[Check]:
    """All checks of a run, as far as its folder says."""
    return [Check(promise, checked, words) for promise, checked, words in _checks(run)]


def _checks(run: ReadRun) -> Iterator[tuple[str, int, str]]:
    digests, get = run.digests, run.config.get
    lags, versions = Counter[int](), set[int]()
    for row in digests:
        for version, tokens in row.get("drawn", {}).items():
            lags[row["batch"] - 1 - int(version)] += tokens
            versions.add(int(version))
    each = ", ".join(f"{tokens:,} by weights of {lag} batches before" for lag, tokens in sorted(lags.items()))
    tokens = f"{sum(lags.values()):,} tokens: {each}" if lags else "an older version has not noted the tokens"
    yield "each token was drawn by the weights that the schedule names", run.batches, tokens
    tensors = next((len(row["tensors"]) for row in digests if "tensors" in row), 0)
    words = f"{tensors} tensors of each version: the engine's own checksums, read back, equal the published ones"
    if not tensors:
        words = "the engine samples from the policy itself: nothing is delivered"
    yield "the engine held these weights", len(versions) if tensors else 0, words
    measured = [row for row in run.rows if "engine/logprob_difference" in row]
    words = "generation.mismatch_samples is 0, or the engine cannot be compared"
    if measured:
        mean, most = (max(row.get(f"engine/logprob_difference{end}", 0.0) for row in measured) for end in ("", "_max"))
        words = f"log-probabilities differ by {mean:.2g} nats a token in the worst batch, {most:.2g} at one token"
    yield "engine and learner compute the same", len(measured), words
    evidence = [row["engine/sampling_evidence"] for row in run.rows if "engine/sampling_evidence" in row]
    words = "no completion was tested" if not evidence else ""
    if evidence:
        words = f"log10 of the evidence that it is wrong: at most {max(evidence):.2f}; {_STOPS} ends a run"
    yield "tokens are drawn from the distribution that is reported", len(evidence), words
    redrawn = [row["engine/redraw_ties"] for row in run.rows if "engine/redraw_ties" in row]
    words = f"{sum(redrawn):g} tokens differ within rounding" if redrawn else "the engine has no seeds of ours"
    yield "tokens follow from seed, draw, sample and position", len(redrawn), words
    again = max(len(run.starts) - 1, 0)
    words = "configuration, data, models and code were compared each time" if again else "the run was not interrupted"
    yield "a resumed run goes on as the same run", again, words
    if get("generation.in_flight"):
        yield "the run repeats", 0, "weights came in flight: timing decides which draw a token"
    elif not get("generation.seed_per_request", True):
        yield "the run repeats", 0, "generation.seed_per_request is false"
    else:
        yield "the run repeats", 0, f"not tried by the run itself: async-rlhf diff {run.folder} tries it"


def rows(runs: Sequence[ReadRun]) -> tuple[list[str], list[list[str]]]:
    """The table of the page: heads and rows."""
    lines = [
        [
            *([run.name] if len(runs) > 1 else []),
            check.promise,
            f"{check.checked:,} times" if check.checked else "not checked",
            check.words,
        ]
        for run in runs
        for check in proof(run)
    ]
    return [*(["run"] if len(runs) > 1 else []), "promise", "checked", "what was seen"], lines


def document(run: ReadRun) -> dict[str, Any]:
    """For proof.json."""
    return {"run": run.name, "batches": run.batches, "checks": [check._asdict() for check in proof(run)]}
