"""Configuration that algorithms share: KL penalties, ratios of probabilities and groups of samples."""

from __future__ import annotations

from copy import copy
from typing import Literal

from async_rlhf.config.base import Checked, configuration, key
from async_rlhf.config.online import KLConfig, OnlineConfig


@configuration
class OffPolicyConfig(Checked):
    """How a ratio-based objective corrects for samples from weights other than those being trained.

    There are three policies: mu sampled, pi is being trained, and the clipped ratio is pi / old.
    """

    old_logprobs: Literal["behaviour", "proximal"] = "proximal"
    """ "behaviour": old is mu, by the generator's own log-probabilities. "proximal": old is the policy before the
    update (decoupled PPO: Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298), and importance weights
    correct for the difference between mu and old."""
    importance: Literal["none", "truncated", "masked"] = "truncated"
    """With "proximal", the weight w = old / mu of each term of the loss: "none" leaves it out, "truncated" is min(w,
    cap), "masked" is w if w <= cap, else 0."""
    level: Literal["token", "sequence"] = "token"
    """One weight for each "token", or one for each "sequence", the product over its tokens."""
    cap: float = key(2.0, ge=1)
    """Upper bound of the weight, see importance."""


@configuration
class KLPenaltyConfig(OnlineConfig):
    """Objectives with an explicit KL penalty."""

    kl: KLConfig = key(KLConfig)
    """The penalty."""

    def check(self) -> None:
        super().check()
        completions = self.batch_size * self.samples_per_prompt
        rule = f"must be at least the {completions} completions of a batch with kl.target"
        self.require(self.kl.target is None or self.kl.horizon >= completions, "kl.horizon", rule)
        self.require_whole(not self.kl.corrected, "kl.corrected", "false")

    @property
    def kl_penalty(self) -> KLConfig:
        return self.kl

    def with_kl_coef(self, coef: float) -> KLPenaltyConfig:
        config, kl = copy(self), copy(self.kl)
        object.__setattr__(kl, "coef", coef)
        object.__setattr__(config, "kl", kl)
        return config


@configuration
class RatioConfig(KLPenaltyConfig):
    """Objectives on the clipped ratio pi / old (Schulman et al., arXiv 1707.06347, eq. 7)."""

    cliprange: float = key(0.2, gt=0, lt=1, why="the ratio is positive")
    """The ratio is clipped at 1 - cliprange and 1 + cliprange."""
    cliprange_high: float | None = key(None, gt=0)
    """The upper bound is 1 + this instead (Yu et al., "DAPO", arXiv 2503.14476); null for cliprange."""
    off_policy: OffPolicyConfig = key(OffPolicyConfig)
    """Corrections for stale samples."""

    def check(self) -> None:
        super().check()
        self.require_whole(self.off_policy.old_logprobs == "proximal", "off_policy.old_logprobs", '"proximal"')
        self.require_whole(self.off_policy.importance == "none", "off_policy.importance", '"none"')

    @property
    def upper_cliprange(self) -> float:
        """How far above 1 the ratio is clipped."""
        return self.cliprange if self.cliprange_high is None else self.cliprange_high

    # No keys, as they have no type here: an algorithm may give them one.
    ratio = "token"
    """The ratio of each token, of the sample ("sequence", the product over its tokens), or the geometric mean over
    these ("sequence_mean")."""
    surrogate = "clipped"
    """How the loss combines ratio and advantage: "clipped" or "cispo"."""
    normalization = "token"
    """What the loss is divided by: samples and the tokens of each ("sequence"), all tokens, or a "constant" for each
    sample."""


@configuration
class DiscountConfig(RatioConfig):
    """Objectives whose later rewards count less."""

    gamma: float = key(1.0, ge=0, le=1)
    """Discount from token to token."""
    gamma_over: Literal["tokens", "turns"] = "tokens"
    """ "turns" discounts from one answer of an episode to the next instead."""


@configuration
class GroupConfig(RatioConfig):
    """Objectives whose baseline is the rewards of the prompt's other completions."""

    non_eos_penalty = key(False)
    """As for every algorithm, but none by default: verifiable rewards of completions that did not end by themselves
    should not change unasked."""
    mask_truncated: bool = False
    """Completions that did not end by themselves are neither trained on nor counted in the normaliser, but their
    rewards still count in the others' baselines ("overlong filtering": Yu et al., "DAPO", arXiv 2503.14476, section
    3.4)."""

    def check(self) -> None:
        super().check()
        self.require(self.samples_per_prompt >= 2, "samples_per_prompt", "must be at least 2")
