"""Objectives made for samples of another policy, and one made worse: AsymRE, TOPR, best-of-K on ties too.

async-rlhf train --algorithm recipes/science/off_policy.py:TOPR ...
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from async_rlhf.algorithms.advantages import row_means
from async_rlhf.algorithms.best_of_k import OnlineBoKConfig, best_of_k, best_of_k_loss
from async_rlhf.algorithms.policy import credited, penalty_needs, rewards_of_groups
from async_rlhf.algorithms.record import Algorithm
from async_rlhf.config.base import at_least, key
from async_rlhf.config.policy import GroupConfig
from async_rlhf.types import Experience, LossOutput, PolicyOutput


@dataclass(frozen=True)
class AsymREConfig(GroupConfig):
    """REINFORCE without importance weights, with a baseline below the mean (Arnal et al., arXiv 2506.20520)."""

    shift: float = key(0.1, at_least(0))
    """How far below the mean reward of a prompt's samples the baseline is: positive samples count for more."""


def shifted_advantages(experience: Experience, config: AsymREConfig) -> Experience:
    """Each sample's reward, less the mean of its prompt's samples, plus the shift; (B,) is one advantage a sample."""
    rewards_PK = rewards_of_groups(experience, config)
    return credited(experience, rewards_PK - rewards_PK.mean(dim=1, keepdim=True) + config.shift, config)


def asymre_loss(output: PolicyOutput, rows: Experience, config: AsymREConfig) -> LossOutput:
    """-A log pi of each sample, whoever drew it: eq. 4 of the paper."""
    assert rows.advantages_BT is not None
    losses_B = -(output.logprobs_BT * rows.advantages_BT).sum(dim=1) * rows.loss_weights_U
    return LossOutput(losses_B.sum(), {"loss/policy_avg": losses_B.detach().sum()})


@dataclass(frozen=True)
class TOPRConfig(GroupConfig):
    """Tapered off-policy REINFORCE (Le Roux et al., arXiv 2503.14286)."""


def leave_one_out(experience: Experience, config: TOPRConfig) -> Experience:
    """Each sample's reward, less the mean of its prompt's other samples, as RLOO has it."""
    rewards_PK = rewards_of_groups(experience, config)
    others = config.samples_per_prompt / (config.samples_per_prompt - 1)
    return credited(experience, (rewards_PK - rewards_PK.mean(dim=1, keepdim=True)) * others, config)


def topr_loss(output: PolicyOutput, rows: Experience, config: TOPRConfig) -> LossOutput:
    """-w A log pi of each sample: w is 1 for good samples, min(pi / mu, 1) for bad ones, without gradient (eq. 6)."""
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
TOPR = Algorithm("topr", TOPRConfig, leave_one_out, topr_loss, needs=penalty_needs)
BEST_WITH_TIES = Algorithm(
    "best_with_ties",
    BestWithTiesConfig,
    best_or_first,
    best_of_k_loss,
    needs=penalty_needs,
    rows_per_prompt=lambda config: 1,
)
