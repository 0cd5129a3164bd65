"""The policy on held-out prompts: generators answer beside training, and the answers are scored as in training.

An evaluation after batch v is asked of the generator at once and has a fixed moment, ``evaluation_delay`` batches
later, at which its answers are waited for, scored, logged and shown to callbacks. So neither what is logged nor what
callbacks decide depends on timing. There is one evaluation at a time: its moment comes earlier if the next one is asked
for, or the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.protocol import drawing
from async_rlhf.run.build import Run
from async_rlhf.run.schedule import RolloutSchedule
from async_rlhf.types import Batch, Group, ScoredBatch


@dataclass
class Evaluations:
    """The evaluations of a run. Every rank makes the same calls.

    Args:
        run: with held-out prompts, or else nothing is ever asked for.
        rollouts: publish and ask.
    """

    run: Run
    rollouts: RolloutSchedule
    asked: int | None = None
    """The batch after which the one that is under way was asked for."""
    _answers: tuple[Group, ...] | None = None
    """Of that one, if they are here."""

    def begin(self) -> None:
        """In a run that is resumed, go on with the evaluation that was under way: have the version that the run goes on
        from answer again, as it is in the checkpoint; answers of an older one are in the checkpoint themselves.
        """
        resumed = self.run.resumed
        if resumed is None or resumed.evaluation is None:
            return
        if resumed.evaluation.version == resumed.batch:
            self.ask(resumed.batch)
        else:
            self.asked, self._answers = resumed.evaluation.version, resumed.evaluation.groups

    def is_due(self, batch: int) -> bool:
        """Whether the moment of the evaluation under way has come, after a batch."""
        return self.asked is not None and batch >= self.asked + self.run.config.evaluation_delay

    def ask(self, batch: int) -> None:
        """Ask for the evaluation of the policy as it is now, after a batch."""
        assert self.asked is None
        assert self.run.eval_prompts is not None
        self.asked = batch
        self.rollouts.ask(self.run.learner.policy, batch, self.run.eval_prompts.all(), self.run.eval_params)

    def wait(self) -> tuple[Group, ...]:
        """The answers of the evaluation under way, on rank 0."""
        assert self.asked is not None
        if self._answers is None:
            self._answers = self.rollouts.answers(self.asked)
        return self._answers

    def take(self) -> tuple[dict[str, float], ScoredBatch]:
        """Wait for the answers and score them; another evaluation can be asked for then. See :func:`evaluate`."""
        groups, version = self.wait(), self.asked
        assert version is not None
        self.asked = self._answers = None
        return _scored(self.run, version, groups)

    def under_way(self, batch: int) -> Batch | None:
        """For a checkpoint after a batch, what :meth:`begin` goes on with. Waits for answers of older weights."""
        if self.asked is None:
            return None
        return Batch(0, self.asked, () if self.asked == batch else self.wait(), 0.0)


def evaluate(run: Run) -> tuple[dict[str, float], ScoredBatch]:
    """Have the learner itself sample with the policy's current weights, and score; every rank must call it.

    Returns:
        Metrics, with names that begin with "eval_", and the completions with their scores.
    """
    assert run.eval_prompts is not None
    prompts = run.eval_prompts.all()
    with drawing(run.engine, run.eval_params):
        completions = EpisodeSampler(run.engine, run.ranks).generate(prompts)
    groups = tuple(Group(p, c) for p, c in zip(prompts, completions, strict=True))
    return _scored(run, run.callbacks.state.global_step, groups)


def _scored(run: Run, version: int, groups: tuple[Group, ...]) -> tuple[dict[str, float], ScoredBatch]:
    scored = run.scorer(Batch(-version, version, groups, 0.0))  # the number that its requests have
    return {f"eval_{name}": value for name, value in scored.metrics.items()}, scored


def answer_rows(run: Run, scored: ScoredBatch) -> Iterator[dict[str, Any]]:
    """The answers of an evaluation, as eval_samples.jsonl has them."""
    groups = scored.batch.groups
    texts = iter(decode_samples(run.tokenizer, scored.batch.samples))
    for group, scores in zip(groups, scored.scores_PK.tolist(), strict=True):
        prompt = run.tokenizer.decode(group.prompt.tokens)
        for number, (sample, score) in enumerate(zip(group.samples, scores, strict=True)):
            yield {
                "batch": scored.batch.version,
                "row": group.prompt.row,
                "sample": number,
                "temperature": run.eval_params.temperature,
                "score": None if math.isnan(score) else score,  # it has no reward, and JSON knows no NaN
                "prompt": prompt,
                "completion": next(texts),
                "finish_reason": sample.finish_reason,
                **sample.episode,
            }
