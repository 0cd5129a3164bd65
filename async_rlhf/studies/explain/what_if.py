"""A run in which a few completions had other scores, beside the run as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from async_rlhf.studies.explain.ablation import distance
from async_rlhf.studies.explain.explanation import number
from async_rlhf.studies.explain.repetition import Course, Repetition
from async_rlhf.studies.explain.update import compared, difference
from async_rlhf.types import Experience, ScoredBatch

_METRICS = {"score": "objective/scores", "kl": "objective/kl"}


def what_changes(was: Repetition, now: Course, experience: Experience, scores: Mapping[int, float]) -> dict[str, Any]:
    """How a run with other scores differs, as JSON can hold it.

    Args:
        was: the run as it was, with its weights.
        now: what became of it with the other scores.
        experience: the rows on which policies are compared, of the batch as it was.
        scores: by the completions' numbers, from 1.

    Returns:
        ``changes``, by completion; ``completions_differ_from``, the first batch in which a completion is another; and
        for each of ``batches`` means of scores and of the KL from the reference, how many completions are others, how
        the update differs, and the KL in nats a token from the policy as it was to the other one.
    """
    update, batches = was.update, sorted(was.course.scored.keys() & now.scored.keys())
    first = was.course.scored[batches[0]]
    found = []
    for batch in batches:
        theirs, ours = was.course.weights, now.weights
        change, cosine = compared(*(difference(of[batch], of[batch - 1]) for of in (ours, theirs)))
        old, new = was.course.metrics[batch], now.metrics[batch]
        found.append(
            {
                "batch": batch,
                **{name: {"was": old.get(key), "is": new.get(key)} for name, key in _METRICS.items()},
                "completions": len(first.batch.samples),
                "others": _others(was.course.scored[batch], now.scored[batch]),
                "update": {"change": change, "cosine": cosine},
                "kl_per_token": distance(update, experience, theirs[batch], ours[batch]).kl,
            }
        )
    scores_R = first.scores_PK.flatten()
    return {
        "changes": [{"completion": n, "was": number(scores_R[n - 1].item()), "is": x} for n, x in scores.items()],
        "completions_differ_from": next((each["batch"] for each in found if each["others"]), None),
        "batches": found,
    }


def _others(was: ScoredBatch, now: ScoredBatch) -> int:
    """How many completions are others, or of other prompts."""
    pairs = zip(was.batch.samples, now.batch.samples, strict=True)
    return sum(not np.array_equal(ours.tokens, theirs.tokens) for ours, theirs in pairs)
