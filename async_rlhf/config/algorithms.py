"""Configuration of each online algorithm: what it adds to :class:`~async_rlhf.config.online.OnlineConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from async_rlhf.config.base import Checked, require
from async_rlhf.config.online import (
    MAX_COEFFICIENT,
    MAX_LEARNING_RATE,
    MAX_LEARNING_RATE_WHY,
    NonEosPenalty,
    OnlineConfig,
)


@dataclass(frozen=True)
class KLConfig(Checked):
    """The penalty that keeps the policy near the reference policy.

    Args:
        coef: its coefficient; 0 needs no reference policy, and holds none.
        where: "reward" subtracts it from the reward, "loss" adds it to the loss.
        estimator: per token, with d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
        corrected: in the loss, weigh the k3 of each token by pi / mu, mu having sampled it, and let the gradient go
            through that weight too: it is then the gradient of the KL, which that of k3 alone is not, least of all
            with samples of older weights (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
        target: the KL of a completion that the coefficient is adapted to keep (Ziegler et al., arXiv 1909.08593,
            section 2.2); null leaves the coefficient as it is.
        horizon: completions over which an adapted coefficient changes by at most 20%.
    """

    coef: float = 0.05
    where: Literal["reward", "loss"] = "reward"
    estimator: Literal["k1", "k2", "k3"] = "k1"
    corrected: bool = False
    target: float | None = None
    horizon: int = 10_000

    def check(self) -> None:
        self.at_least(0, "coef")
        self.at_most(MAX_COEFFICIENT, "the loss has to stay a number of 32 bits", "coef", "target")
        self.above(0, "target")
        self.at_least(1, "horizon")
        require(
            self.where == "reward" or self.estimator != "k1",
            "kl.estimator",
            self.estimator,
            'must be "k2" or "k3" with kl.where "loss": the gradient of k1 is zero in expectation and would restrain '
            "nothing",
        )
        right = 'must be false unless kl.where is "loss" and kl.estimator "k3", whose gradient it corrects'
        able = self.where == "loss" and self.estimator == "k3"
        require(able or not self.corrected, "kl.corrected", self.corrected, right)
        require(self.target is None or self.coef > 0, "kl.coef", self.coef, "must be above 0 with kl.target: 0 stays 0")


@dataclass(frozen=True)
class OffPolicyConfig(Checked):
    """How a ratio-based objective corrects for samples of other weights than those being trained.

    Three policies: mu sampled, pi is being trained, and the clipped ratio is pi / old.

    Args:
        old_logprobs: "behaviour": old is mu, by the generator's own log-probabilities. "proximal": old is the policy
            before the update (decoupled PPO: Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298), and what
            lies between mu and old is corrected by importance weights.
        importance: with "proximal", the weight w = old / mu of each term of the loss: "none" leaves it out,
            "truncated" is min(w, cap), "masked" is w where w <= cap and else 0.
        level: one weight for each "token", or one for each "sequence", the product over its tokens.
        cap: see importance.
    """

    old_logprobs: Literal["behaviour", "proximal"] = "proximal"
    importance: Literal["none", "truncated", "masked"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    cap: float = 2.0

    def check(self) -> None:
        self.at_least(1, "cap")


@dataclass(frozen=True)
class OnlineDPOConfig(OnlineConfig):
    """Online DPO (arXiv 2402.04792) and IPO (arXiv 2310.12036) on the best and the worst of K samples.

    Args:
        beta: strength of the implicit KL penalty.
        loss_type: "sigmoid" (DPO) or "ipo".
    """

    beta: float = 0.1
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"

    def check(self) -> None:
        super().check()
        self.above(0, "beta")
        self.at_most(MAX_COEFFICIENT, "the loss has to stay a number of 32 bits", "beta")
        self.at_least(2, "samples_per_prompt")


@dataclass(frozen=True)
class KLPenaltyConfig(OnlineConfig):
    """Objectives with an explicit KL penalty.

    Args:
        kl: the penalty.
    """

    kl: KLConfig = field(default_factory=KLConfig)

    def check(self) -> None:
        super().check()
        completions = self.batch_size * self.samples_per_prompt
        right = f"must be at least the {completions} completions of a batch with kl.target"
        require(self.kl.target is None or self.kl.horizon >= completions, "kl.horizon", self.kl.horizon, right)

    @property
    def uses_reference(self) -> bool:
        return self.kl.coef > 0


@dataclass(frozen=True)
class OnlineBoKConfig(KLPenaltyConfig):
    """Best-of-K: supervised learning on the best of K samples (Stiennon et al., arXiv 2009.01325, as a trainer).

    Args:
        kl: the penalty.
    """

    kl: KLConfig = field(default_factory=lambda: KLConfig(coef=0.0))

    def check(self) -> None:
        super().check()
        right = "must be false: the best of K samples are no samples of the policy, and no weight makes them that"
        require(not self.kl.corrected, "kl.corrected", self.kl.corrected, right)
        self.at_least(2, "samples_per_prompt")


@dataclass(frozen=True)
class RatioConfig(KLPenaltyConfig):
    """Objectives on the clipped ratio pi / old (Schulman et al., arXiv 1707.06347, eq. 7).

    Args:
        cliprange: the ratio is clipped at 1 - cliprange and 1 + cliprange.
        cliprange_high: the upper bound is 1 + this instead (Yu et al., "DAPO", arXiv 2503.14476); null for cliprange.
        off_policy: corrections for stale samples.
    """

    cliprange: float = 0.2
    cliprange_high: float | None = None
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)

    def check(self) -> None:
        super().check()
        self.above(0, "cliprange", "cliprange_high")
        require(self.cliprange < 1, "cliprange", self.cliprange, "must be below 1: the ratio is positive")

    @property
    def upper_cliprange(self) -> float:
        """How far above 1 the ratio is clipped."""
        return self.cliprange if self.cliprange_high is None else self.cliprange_high

    @property
    def needs_proximal_pass(self) -> bool:
        """Whether log-probabilities are computed before the update, by a pass of its own.

        With one optimiser step for a batch the policy that is trained is the proximal one: the pass would repeat
        what the step computes anyway, but for a penalty that must be in the reward before the step.
        """
        several = self.num_mini_batches * self.num_epochs > 1
        in_reward = self.kl.coef > 0 and self.kl.where == "reward"
        return self.off_policy.old_logprobs == "proximal" and (several or in_reward)


@dataclass(frozen=True)
class GroupConfig(RatioConfig):
    """Objectives whose baseline is the rewards of the prompt's other completions.

    Args:
        non_eos_penalty: as for every algorithm, but none by default: what verifiable rewards say of a completion that
            did not end by itself is not to be changed unasked.
        mask_truncated: completions that did not end by themselves are not trained on, but their rewards count in the
            baselines of the others ("overlong filtering": Yu et al., "DAPO", arXiv 2503.14476, section 3.4).
    """

    non_eos_penalty: NonEosPenalty = False
    mask_truncated: bool = False

    def check(self) -> None:
        super().check()
        self.at_least(2, "samples_per_prompt")


@dataclass(frozen=True)
class RLOOConfig(GroupConfig):
    """REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740): one ratio and one advantage for each completion.

    Args:
        off_policy: corrections for stale samples; the level is "sequence", as the ratio's.
    """

    off_policy: OffPolicyConfig = field(default_factory=lambda: OffPolicyConfig(level="sequence"))

    def check(self) -> None:
        super().check()
        right = 'must be "sequence": the ratio of RLOO is one number for each completion'
        require(self.off_policy.level == "sequence", "off_policy.level", self.off_policy.level, right)


@dataclass(frozen=True)
class PPOConfig(RatioConfig):
    """PPO with a learned value function (Schulman et al., arXiv 1707.06347).

    Args:
        samples_per_prompt: K, completions per prompt; PPO needs no second one.
        gamma: discount from token to token.
        lam: lambda of generalised advantage estimation (arXiv 1506.02438).
        whiten_advantages: give the advantages of a batch mean 0 and standard deviation 1 over its tokens.
        vf_coef: weight of the value loss.
        cliprange_value: the value may move so far from its old estimate within one batch.
        shared_trunk: false trains a value model of its own, which starts from the reward model; true puts a value head
            on the policy.
        value_learning_rate: of the value model or head; null for learning_rate.
        bootstrap_truncated: response_length is a limit of time, not of the task: for a completion that did not end by
            itself the value of the whole text stands in place of the score that it would have got later (Pardo et
            al., arXiv 1712.00378). It takes non_eos_penalty: false.
    """

    samples_per_prompt: int = 1
    gamma: float = 1.0
    lam: float = 0.95
    whiten_advantages: bool = True
    vf_coef: float = 0.1
    cliprange_value: float = 0.2
    shared_trunk: bool = False
    value_learning_rate: float | None = None
    bootstrap_truncated: bool = False

    def check(self) -> None:
        super().check()
        right = "must be false with bootstrap_truncated, by which a completion that is cut off has no score to change"
        unchanged = not (self.bootstrap_truncated and self.non_eos_penalty)
        require(unchanged, "non_eos_penalty", self.non_eos_penalty, right)
        self.at_least(0, "gamma", "lam", "vf_coef")
        self.above(0, "cliprange_value", "value_learning_rate")
        self.at_most(MAX_LEARNING_RATE, MAX_LEARNING_RATE_WHY, "value_learning_rate")
        self.at_most(MAX_COEFFICIENT, "the loss has to stay a number of 32 bits", "vf_coef")
        for key in ("gamma", "lam"):
            require(getattr(self, key) <= 1, key, getattr(self, key), "must be in [0, 1]")


@dataclass(frozen=True)
class GRPOConfig(GroupConfig):
    """Group relative policy optimisation (Shao et al., arXiv 2402.03300) and its variants.

    Args:
        samples_per_prompt: K, the size of a group.
        kl: the penalty; GRPO has it in the loss.
        scale_rewards: advantages are (reward - mean of the group), divided by the standard deviation of the "group", of
            the whole "batch", or by "none" (Dr. GRPO: Liu et al., arXiv 2503.20783).
        normalization: "sequence" means over the tokens of each completion, then over completions (GRPO); "token" means
            over all tokens (DAPO); "constant" divides by response_length instead of a completion's own length
            (Dr. GRPO). Groups of equal rewards count in each of them.
    """

    samples_per_prompt: int = 8
    kl: KLConfig = field(default_factory=lambda: KLConfig(coef=0.04, where="loss", estimator="k3"))
    scale_rewards: Literal["group", "batch", "none"] = "group"
    normalization: Literal["sequence", "token", "constant"] = "sequence"


ALGORITHM_CONFIGS: dict[str, type[OnlineConfig]] = {
    "online_dpo": OnlineDPOConfig,
    "best_of_k": OnlineBoKConfig,
    "rloo": RLOOConfig,
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
}
"""The configuration of each algorithm, under its name in YAML."""


def algorithm_of(config: OnlineConfig) -> str:
    """The name of the algorithm that a configuration is of."""
    return next(name for name, kind in ALGORITHM_CONFIGS.items() if isinstance(config, kind))
