"""Group relative policy optimisation and its variants: Dr. GRPO, GSPO and CISPO are GRPO with other defaults."""

from __future__ import annotations

from typing import Literal

from async_rlhf.algorithms.policy import credited, policy_loss, ratio_needs, rewards_of_groups
from async_rlhf.algorithms.record import Algorithm
from async_rlhf.config.base import configuration, key
from async_rlhf.config.online import KLConfig
from async_rlhf.config.policy import GroupConfig
from async_rlhf.types import Experience


@configuration
class GRPOConfig(GroupConfig):
    """Group relative policy optimisation (Shao et al., arXiv 2402.03300) and its variants."""

    samples_per_prompt = key(8)
    """K, the size of a group."""
    kl = key(lambda: KLConfig(coef=0.04, where="loss", estimator="k3"))
    """The penalty; GRPO has it in the loss."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Advantages are (reward - mean of the group), divided by the standard deviation (with Bessel's correction) of the
    "group", of the whole "batch", or by "none" (Dr. GRPO: Liu et al., arXiv 2503.20783)."""
    normalization: Literal["sequence", "token", "constant"] = "sequence"
    """ "sequence" means over the tokens of each completion, then over completions (GRPO); "token" means over all tokens
    (DAPO); "constant" divides by response_length instead of a completion's own length (Dr. GRPO). Groups of equal
    rewards count in each of them."""
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    """The clipped ratio pi / old: one per "token"; or one per "sequence", the product over its tokens; or
    "sequence_mean", the geometric mean over them (GSPO: Zheng et al., arXiv 2507.18071)."""
    surrogate: Literal["clipped", "cispo"] = "clipped"
    """ "clipped" is the smaller of ratio and clipped ratio times the advantage; "cispo" weighs the log-likelihood of
    each token by the clipped ratio, so that clipping removes no token's gradient (MiniMax-M1, arXiv 2506.13585)."""

    def check(self) -> None:
        super().check()
        if self.ratio == "sequence":
            rule = 'must be "sequence" with ratio "sequence": a sample then is one action'
            self.require(self.normalization == "sequence", "normalization", rule)
            self.require(self.off_policy.level == "sequence", "off_policy.level", rule)
        rule = 'must be "token" with surrogate "cispo", which weighs tokens'
        self.require(self.surrogate == "clipped" or self.ratio == "token", "ratio", rule)


def _no_penalty() -> KLConfig:
    return KLConfig(coef=0.0, where="loss", estimator="k3")


@configuration
class DrGRPOConfig(GRPOConfig):
    """GRPO without its two biases (Liu et al., arXiv 2503.20783): no division by deviations or by lengths."""

    kl = key(_no_penalty)
    scale_rewards = key("none")
    normalization = key("constant")


@configuration
class GSPOConfig(GRPOConfig):
    """Group sequence policy optimisation (Zheng et al., arXiv 2507.18071): one clipped ratio for each sample."""

    kl = key(_no_penalty)
    ratio = key("sequence_mean")
    cliprange = key(3e-4)
    """The ratio is clipped at 1 - cliprange; means over tokens stay nearer to 1 than the ratios of single tokens."""
    cliprange_high = key(4e-4)


@configuration
class CISPOConfig(GRPOConfig):
    """GRPO with clipped weights in place of clipped updates (MiniMax-M1, arXiv 2506.13585)."""

    kl = key(_no_penalty)
    surrogate = key("cispo")
    normalization = key("token")
    cliprange = key(1.0, gt=0, le=1)
    """The weight is at least 1 - cliprange; with 1 there is no such bound."""
    cliprange_high = key(4.0)
    """And at most 1 + this (Khatri et al., arXiv 2510.13786, find 4 to 8 alike); null for cliprange."""


def grpo_credit(experience: Experience, config: GRPOConfig) -> Experience:
    """One advantage for each sample, normalised within its group."""
    from async_rlhf.algorithms.estimators import group_normalized

    rewards_PK = rewards_of_groups(experience, config)
    return credited(experience, group_normalized(rewards_PK, config.scale_rewards), config)


GRPO = Algorithm("grpo", GRPOConfig, grpo_credit, policy_loss, needs=ratio_needs)
DR_GRPO = Algorithm("dr_grpo", DrGRPOConfig, grpo_credit, policy_loss, needs=ratio_needs)
GSPO = Algorithm("gspo", GSPOConfig, grpo_credit, policy_loss, needs=ratio_needs)
CISPO = Algorithm("cispo", CISPOConfig, grpo_credit, policy_loss, needs=ratio_needs)
