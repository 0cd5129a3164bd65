"""The policy on held-out prompts: one completion each, scored as in training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.run.wiring import Run
from async_rlhf.types import Batch, Group, ScoredBatch


def evaluate(run: Run) -> tuple[dict[str, float], ScoredBatch]:
    """Sample and score with the policy's current weights; every rank must call it.

    Returns:
        Metrics, with names that begin with "eval_", and the completions with their scores.
    """
    assert run.eval_prompts is not None
    prompts = run.eval_prompts.all()
    completions = run.eval_engine.generate(prompts)
    groups = tuple(Group(p, c) for p, c in zip(prompts, completions, strict=True))
    scored = run.scorer(Batch(0, run.callbacks.state.global_step, groups, 0.0))
    return {f"eval_{name}": value for name, value in scored.metrics.items()}, scored


def answer_rows(run: Run, scored: ScoredBatch) -> Iterator[dict[str, Any]]:
    """The answers of an evaluation, as eval_samples.jsonl has them."""
    answers = [group.samples[0] for group in scored.batch.groups]
    texts = decode_samples(run.tokenizer, answers)
    for group, text, score in zip(scored.batch.groups, texts, scored.scores_PK[:, 0].tolist(), strict=True):
        yield {
            "batch": scored.batch.version,
            "row": group.prompt.row,
            "temperature": run.eval_engine.params.temperature,
            "score": None if math.isnan(score) else score,  # it has no reward, and JSON knows no NaN
            "prompt": run.tokenizer.decode(group.prompt.tokens),
            "completion": text,
            "finish_reason": group.samples[0].finish_reason,
        }
