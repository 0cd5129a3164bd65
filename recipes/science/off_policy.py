"""Objectives made for samples of another policy, and one made worse: AsymRE, TOPR, best-of-K on ties too.

async-rlhf train --algorithm recipes/science/off_policy.py:TOPR ...

The first two have no ratio that is clipped or corrected: they read neither cliprange nor surrogate nor off_policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from async_rlhf.algorithms.best_of_k import OnlineBoKConfig, best_of_k, best_of_k_loss
from async_rlhf.algorithms.estimators import leave_one_out, row_means
from async_rlhf.algorithms.policy import credited, penalty_needs, rewards_of_groups
from async_rlhf.algorithms.record import Algorithm
from async_rlhf.config.base import key, require
from async_rlhf.config.policy import GroupConfig
from async_rlhf.types import Experience, LossOutput, PolicyOutput


@dataclass(frozen=True)
class SampleConfig(GroupConfig):
    """Each completion is one action, of a weight that does not depend on its length."""

    @property
    def normalization(self) -> Literal["sequence"]:
        return "sequence"

    def check(self) -> None:
        super().check()
        right = 'must be "reward": this objective has no penalty in its loss'
        require(self.kl.coef == 0 or self.kl.where == "reward", "kl.where", self.kl.where, right)


@dataclass(frozen=True)
class AsymREConfig(SampleConfig):
    """REINFORCE without importance weights, with a baseline below the mean (Arnal et al., arXiv 2506.20520)."""

    shift: float = key(0.1, ge=0)
    """How far below the mean reward of a prompt's samples the baseline is: positive samples count for more."""


def shifted_advantages(experience: Experience, config: AsymREConfig) -> Experience:
    """Each sample's reward, less the mean of its prompt's samples, plus the shift."""
    rewards_PK = rewards_of_groups(experience, config)
    return credited(experience, rewards_PK - rewards_PK.mean(dim=1, keepdim=True) + config.shift, config)


def asymre_loss(output: PolicyOutput, rows: Experience, config: AsymREConfig) -> LossOutput:
    """-A log pi of each sample, whoever drew it."""
    assert rows.advantages_BT is not None
    losses_B = -(output.logprobs_BT * rows.advantages_BT).sum(dim=1) * rows.loss_weights_U
    return LossOutput(losses_B.sum(), {"loss/policy_avg": losses_B.detach().sum()})


@dataclass(frozen=True)
class TOPRConfig(SampleConfig):
    """Tapered off-policy REINFORCE (Le Roux et al., arXiv 2503.14286)."""


def less_the_others(experience: Experience, config: TOPRConfig) -> Experience:
    """Each sample's reward, less the mean of its prompt's other samples, as RLOO has it."""
    return credited(experience, leave_one_out(rewards_of_groups(experience, config)), config)


def topr_loss(output: PolicyOutput, rows: Experience, config: TOPRConfig) -> LossOutput:
    """-w A log pi of each sample: w is 1 where A > 0, else min(pi / mu, 1), without gradient."""
    assert rows.advantages_BT is not None
    sampled_BT = rows.sampled_BT
    logps_B = (output.logprobs_BT * sampled_BT).sum(dim=1)
    behind_B = (logps_B.detach() - (rows.behaviour_logprobs_BT * sampled_BT).sum(dim=1)).clamp(max=0.0)
    advantages_B = row_means(rows.advantages_BT, sampled_BT)
    weights_B = behind_B.exp().where(advantages_B < 0, 1.0)
    losses_B = -weights_B * advantages_B * logps_B * rows.loss_weights_U
    metrics = {"loss/policy_avg": losses_B, "policy/importance_weight": weights_B * rows.loss_weights_U}
    return LossOutput(losses_B.sum(), {name: values_B.detach().sum() for name, values_B in metrics.items()})


@dataclass(frozen=True)
class BestWithTiesConfig(OnlineBoKConfig):
    """Best-of-K that trains on the first sample where all are equally good or bad, as the paper's code does."""


def best_or_first(experience: Experience, config: BestWithTiesConfig) -> Experience:
    """The sample of each prompt with the best reward; of equal ones the first, which counts as much."""
    import torch

    rows = best_of_k(experience, config)
    return replace(rows, loss_weights_U=torch.ones_like(rows.loss_weights_U))


ASYMRE = Algorithm("asymre", AsymREConfig, shifted_advantages, asymre_loss, needs=penalty_needs)
TOPR = Algorithm("topr", TOPRConfig, less_the_others, topr_loss, needs=penalty_needs)
BEST_WITH_TIES = Algorithm(
    "best_with_ties",
    BestWithTiesConfig,
    best_or_first,
    best_of_k_loss,
    needs=penalty_needs,
    rows_per_prompt=lambda config: 1,
)
