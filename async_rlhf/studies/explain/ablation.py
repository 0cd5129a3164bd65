"""An update without a part of its batch: how the step changes, and the policy that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rlhf.config import OnlineConfig
from async_rlhf.models.forward import over_response_logits
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.studies.explain.update import RepeatableUpdate, compared, load
from async_rlhf.types import Experience, Sample, ScoredBatch


class Distance(NamedTuple):
    """How far two policies differ on the rows of an experience."""

    kl: float
    """Mean over sampled tokens of KL(first || second), in nats, exact over the vocabulary."""
    logprobs_B: Tensor
    """(B,) float64: how much more likely the first makes each completion, in nats."""


@dataclass(frozen=True)
class Effect:
    """What an update would have been without something."""

    change: float | None
    """Norm of the difference of both steps, divided by the norm of the step that was taken; None if that is zero."""
    cosine: float | None
    """Between both steps; None if one of them is zero."""
    distance: Distance
    """From the policy with it to the one without it."""

    @property
    def row(self) -> dict[str, float | None]:
        """As JSON can hold it."""
        return {"change": self.change, "cosine": self.cosine, "kl_per_token": self.distance.kl}


@dataclass(frozen=True)
class Removal:
    """Takes an update without parts of its batch, one after another.

    Args:
        update: of the learner.
        experience: the rows on which policies are compared.
        after: the policy's weights after the update as it was taken.
        step: how far it moved them.
    """

    update: RepeatableUpdate
    experience: Experience
    after: Sequence[Tensor]
    step: Sequence[Tensor]

    def without_units(self, units: Sequence[int]) -> Effect:
        """These units have weight 0. The others keep their credit; the mean is over what is left. Where nothing is left
        of a mini-batch, its step has a gradient of zero.
        """
        loss_weights_U = self.experience.loss_weights_U.clone()
        loss_weights_U[list(units)] = 0.0
        left = replace(self.experience, loss_weights_U=loss_weights_U)
        return self.effect(self.update.take(left, as_with=self.experience))

    def with_scores(self, scored: ScoredBatch) -> Effect:
        """Other scores, from which credit is assigned anew."""
        return self.effect(self.update.take(self.update.annotate(scored)))

    def effect(self, weights: Sequence[Tensor]) -> Effect:
        """Of the policy having these weights instead."""
        change, cosine = compared(self.update.step_to(weights), self.step)
        return Effect(change, cosine, distance(self.update, self.experience, self.after, weights))


@torch.no_grad()
def distance(
    update: RepeatableUpdate, experience: Experience, first: Sequence[Tensor], second: Sequence[Tensor]
) -> Distance:
    """From the policy with the first weights to that with the second. The learner's policy is left with the second."""
    learner = update.learner
    device, temperature = learner.parallel.device_of(learner.policy), learner.config.generation.temperature
    kl_sum, tokens, logprobs_B = 0.0, 0, torch.zeros(len(experience), dtype=torch.float64)
    for unit in range(experience.units):
        rows = experience.select([unit])
        drawn_N = rows.tokens_BT[rows.sampled_BT > 0].to(device)
        kept: list[Tensor] = []

        def keep(logits_CV: Tensor, part: slice, kept: list[Tensor] = kept, count: int = len(drawn_N)) -> Tensor:
            if not kept:
                kept.append(logits_CV.new_empty(count, logits_CV.shape[1]))
            kept[0][part] = logits_CV
            return logits_CV.new_zeros(1, len(logits_CV))

        def compare(logits_CV: Tensor, part: slice, kept: list[Tensor] = kept, drawn_N: Tensor = drawn_N) -> Tensor:
            # float64: the difference of two policies after one step is close to float32's rounding.
            ours_CV, theirs_CV = (
                torch.log_softmax(x.double() / temperature, dim=-1) for x in (kept[0][part], logits_CV)
            )
            difference_CV = ours_CV - theirs_CV
            kl_C = (ours_CV.exp() * difference_CV).sum(dim=1)
            return torch.stack([kl_C, difference_CV.gather(1, drawn_N[part, None]).squeeze(1)]).float()

        for weights, reduce in ((first, keep), (second, compare)):
            load(update.policy, weights)
            with learner.autocast():
                tokens_BT = rows.tokens_BT.to(device)
                how = rows.positions_BT, rows.routes_BTLE
                numbers_KN = over_response_logits(learner.policy, tokens_BT, rows.sampled_BT, reduce, *how)
        kl_N, more_N = numbers_KN.double().cpu()
        kl_sum, tokens = kl_sum + kl_N.sum().item(), tokens + len(drawn_N)
        row_N = rows.sampled_BT.nonzero()[:, 0] + unit * experience.rows_per_unit
        logprobs_B.index_add_(0, row_N, more_N)
    return Distance(kl_sum / max(tokens, 1), logprobs_B)


# Parts of the reward


def reward_parts(scorer: Scorer, scored: ScoredBatch) -> list[str]:
    """What the scores of a batch are made of, by name."""
    config, samples = scorer.config, scored.batch.samples
    penalties = {"length_penalty": config.length_penalty != 0, "non_eos_penalty": bool(config.non_eos_penalty)}
    environment = ["environment"] if any(sample.rewards is not None for sample in samples) else []
    return [*scored.rewards, *environment, *(name for name, there in penalties.items() if there)]


def without_part(scorer: Scorer, scored: ScoredBatch, part: str) -> ScoredBatch:
    """The batch scored without one of :func:`reward_parts`. What has no score gets none."""
    config: OnlineConfig = scorer.config
    rewards, batch = dict(scored.rewards), scored.batch
    if part in rewards:
        rewards[part] = rewards[part] * 0  # None stays None, NaN
    elif part == "environment":
        groups = tuple(replace(g, samples=tuple(map(_without_rewards, g.samples))) for g in batch.groups)
        batch = replace(batch, groups=groups)
    else:
        nothing: dict[str, Any] = {"length_penalty": 0.0} if part == "length_penalty" else {"non_eos_penalty": False}
        config = replace(config, **nothing)
    failed_R = scored.scores_PK.isnan().flatten()
    scores_R = scorer.total(rewards, failed_R, batch.samples, config)
    return replace(scored, batch=batch, scores_PK=scores_R.view_as(scored.scores_PK), rewards=rewards)


def _without_rewards(sample: Sample) -> Sample:
    return replace(sample, rewards=None if sample.rewards is None else np.zeros_like(sample.rewards))
