"""REINFORCE without a value model: RLOO and REINFORCE++."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from async_rlhf.algorithms import policy
from async_rlhf.algorithms.record import Algorithm
from async_rlhf.config.base import configuration, key
from async_rlhf.config.online import KLConfig
from async_rlhf.config.policy import DiscountConfig, GroupConfig, OffPolicyConfig
from async_rlhf.types import Experience


@configuration
class RLOOConfig(GroupConfig):
    """REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740): one ratio and one advantage for each completion."""

    off_policy = key(lambda: OffPolicyConfig(level="sequence"))
    """Corrections for stale samples; the level is "sequence", as the ratio's."""

    ratio = normalization = "sequence"

    def check(self) -> None:
        super().check()
        rule = 'must be "sequence": the ratio of RLOO is one number for each completion'
        self.require(self.off_policy.level == "sequence", "off_policy.level", rule)


@configuration
class ReinforcePPConfig(DiscountConfig):
    """REINFORCE++ (Hu et al., arXiv 2501.03262): advantages normalised over the whole batch, without a value model."""

    samples_per_prompt = key(1)
    """K, completions per prompt; one is enough without a baseline."""
    kl = key(lambda: KLConfig(coef=0.01))
    """The penalty, in the reward of each token."""
    baseline: Literal["none", "group"] = "none"
    """ "group" subtracts the mean reward of the prompt's completions first ("REINFORCE++ with baseline")."""

    def check(self) -> None:
        super().check()
        if self.baseline == "group":
            self.require(self.samples_per_prompt >= 2, "samples_per_prompt", "must be at least 2")


def rloo_credit(experience: Experience, config: RLOOConfig) -> Experience:
    """One advantage for each sample: its reward less the mean reward of the prompt's other samples."""
    from async_rlhf.algorithms.estimators import leave_one_out

    return policy.credited(experience, leave_one_out(policy.rewards_of_groups(experience, config)), config)


RLOO = Algorithm("rloo", RLOOConfig, rloo_credit, policy.policy_loss, needs=policy.ratio_needs)


def reinforce_pp_credit(experience: Experience, config: ReinforcePPConfig) -> Experience:
    """The discounted rewards of a sample from each token on, whitened over the tokens of the batch.

    REINFORCE++, arXiv 2501.03262, section 3: A_t = sum of gamma^(i - t) r_i for i >= t, with the KL penalty in the
    reward of its token and the score at the last one. With ``baseline`` "group" the mean score of the prompt's samples
    is subtracted first.
    """
    from async_rlhf.algorithms.estimators import gae, group_normalized, whiten

    sampled_BT, scores_B = experience.sampled_BT, experience.scores_B
    if config.baseline == "group":
        scores_B = group_normalized(scores_B.view(-1, config.samples_per_prompt), "none").flatten()
    rewards_BT = policy.rewards_of_tokens(experience, policy.rest_of_score(experience, scores_B), config.kl)
    none_BT = rewards_BT.new_zeros(rewards_BT.shape)
    left_BT, _ = gae(rewards_BT, none_BT, sampled_BT, config.gamma, lam=1.0, over=config.gamma_over)
    advantages_BT = whiten(left_BT, sampled_BT)
    has_gradient_U = policy.teaching(advantages_BT, sampled_BT, config.kl)
    return replace(
        experience, advantages_BT=advantages_BT, loss_weights_U=sampled_BT.sum(dim=1), has_gradient_U=has_gradient_U
    )


REINFORCE_PP = Algorithm(
    "reinforce_pp", ReinforcePPConfig, reinforce_pp_credit, policy.policy_loss, needs=policy.ratio_needs
)
