"""Configuration that algorithms share: KL penalties, ratios of probabilities and groups of samples."""

from __future__ import annotations

from copy import copy
from typing import Literal

from async_rlhf.config.base import Checked, above, at_least, at_most, below, configuration, inside, key, require
from async_rlhf.config.common import MAX_COEFFICIENT
from async_rlhf.config.online import OnlineConfig

IN_LOSS = at_most(MAX_COEFFICIENT, "the loss has to stay a number of 32 bits")


@configuration
class KLConfig(Checked):
    """The penalty that keeps the policy near the reference policy."""

    coef: float = key(0.05, at_least(0), IN_LOSS, main="training")
    """The coefficient of the KL penalty; with 0 no reference policy is loaded. This and every other KL here compares
    the distributions at generation.temperature, not at 1."""
    where: Literal["reward", "loss"] = "reward"
    """ "reward" subtracts it from the reward, "loss" adds it to the loss."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Per token, with d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."""
    corrected: bool = False
    """In the loss, weight the k3 of each token by pi / mu, where mu sampled it, and let the gradient flow through that
    weight: this gives the gradient of the KL of each token given its prefix. k3 alone does not, least of all with
    samples of older weights (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
    target: float | None = key(None, above(0), IN_LOSS)
    """Adapt the coefficient to keep the KL of a completion at this value (Ziegler et al., arXiv 1909.08593, section
    2.2); null leaves the coefficient fixed."""
    horizon: int = key(10_000, at_least(1))
    """Completions over which an adapted coefficient changes by at most 20%."""

    def check(self) -> None:
        right = 'must be "k2" or "k3" with kl.where "loss": the gradient of k1 is zero in expectation'
        right += " and would restrain nothing"
        require(self.where == "reward" or self.estimator != "k1", "kl.estimator", self.estimator, right)
        right = 'must be false unless kl.where is "loss" and kl.estimator "k3", whose gradient it corrects'
        able = self.where == "loss" and self.estimator == "k3"
        require(able or not self.corrected, "kl.corrected", self.corrected, right)
        require(self.target is None or self.coef > 0, "kl.coef", self.coef, "must be above 0 with kl.target: 0 stays 0")


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
    cap: float = key(2.0, at_least(1))
    """Upper bound of the weight, see importance."""


@configuration
class KLPenaltyConfig(OnlineConfig):
    """Objectives with an explicit KL penalty."""

    kl: KLConfig = key(KLConfig)
    """The penalty."""

    def check(self) -> None:
        super().check()
        completions = self.batch_size * self.samples_per_prompt
        right = f"must be at least the {completions} completions of a batch with kl.target"
        self.require(self.kl.target is None or self.kl.horizon >= completions, "kl.horizon", right)

    @property
    def kl_penalty(self) -> KLConfig:
        return self.kl

    def with_kl_coef(self, coef: float) -> KLPenaltyConfig:
        own, kl = copy(self), copy(self.kl)
        object.__setattr__(kl, "coef", coef)
        object.__setattr__(own, "kl", kl)
        return own


@configuration
class RatioConfig(KLPenaltyConfig):
    """Objectives on the clipped ratio pi / old (Schulman et al., arXiv 1707.06347, eq. 7)."""

    cliprange: float = key(0.2, above(0), below(1, ": the ratio is positive"))
    """The ratio is clipped at 1 - cliprange and 1 + cliprange."""
    cliprange_high: float | None = key(None, above(0))
    """The upper bound is 1 + this instead (Yu et al., "DAPO", arXiv 2503.14476); null for cliprange."""
    off_policy: OffPolicyConfig = key(OffPolicyConfig)
    """Corrections for stale samples."""

    def check(self) -> None:
        super().check()
        old, whole = self.off_policy.old_logprobs, self.generation.top_p == 1 and self.generation.top_k == 0
        right = 'must be "proximal" with generation.top_p below 1 or generation.top_k: the ratio of the whole'
        right += " policy to the truncated one that sampled begins below 1, where it would be clipped"
        self.require(whole or old == "proximal", "off_policy.old_logprobs", right)

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

    gamma: float = key(1.0, inside("[0, 1]"))
    """Discount from token to token."""
    gamma_over: Literal["tokens", "turns"] = "tokens"
    """ "turns" discounts from one answer of an episode to the next instead."""


@configuration
class GroupConfig(RatioConfig):
    """Objectives whose baseline is the rewards of the prompt's other completions."""

    non_eos_penalty = False
    """As for every algorithm, but none by default: verifiable rewards of completions that did not end by themselves
    should not change unasked."""
    mask_truncated: bool = False
    """Completions that did not end by themselves are neither trained on nor counted in the normaliser, but their
    rewards still count in the others' baselines ("overlong filtering": Yu et al., "DAPO", arXiv 2503.14476, section
    3.4)."""

    def check(self) -> None:
        super().check()
        self.keeps("samples_per_prompt", at_least(2))
