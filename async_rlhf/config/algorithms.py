"""Configuration of each online algorithm: what it adds to :class:`~async_rlhf.config.online.OnlineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from async_rlhf.config.base import Checked, above, at_least, at_most, below, inside, key, require
from async_rlhf.config.online import LEARNING_RATE, MAX_COEFFICIENT, NonEosPenalty, OnlineConfig

_IN_LOSS = at_most(MAX_COEFFICIENT, "the loss has to stay a number of 32 bits")


@dataclass(frozen=True)
class KLConfig(Checked):
    """The penalty that keeps the policy near the reference policy."""

    coef: float = key(0.05, at_least(0), _IN_LOSS)
    """Its coefficient; 0 needs no reference policy, and holds none. Like every KL here it is of the distributions at
    generation.temperature, not at 1."""
    where: Literal["reward", "loss"] = "reward"
    """ "reward" subtracts it from the reward, "loss" adds it to the loss."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Per token, with d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."""
    corrected: bool = False
    """In the loss, weigh the k3 of each token by pi / mu, mu having sampled it, and let the gradient go through that
    weight too: it is then the gradient of the KL, which that of k3 alone is not, least of all with samples of older
    weights (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
    target: float | None = key(None, above(0), _IN_LOSS)
    """The KL of a completion that the coefficient is adapted to keep (Ziegler et al., arXiv 1909.08593, section 2.2);
    null leaves the coefficient as it is."""
    horizon: int = key(10_000, at_least(1))
    """Completions over which an adapted coefficient changes by at most 20%."""

    def check(self) -> None:
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
    """

    old_logprobs: Literal["behaviour", "proximal"] = "proximal"
    """ "behaviour": old is mu, by the generator's own log-probabilities. "proximal": old is the policy before the
    update (decoupled PPO: Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298), and what lies between mu and old
    is corrected by importance weights."""
    importance: Literal["none", "truncated", "masked"] = "truncated"
    """With "proximal", the weight w = old / mu of each term of the loss: "none" leaves it out, "truncated" is min(w,
    cap), "masked" is w where w <= cap and else 0."""
    level: Literal["token", "sequence"] = "token"
    """One weight for each "token", or one for each "sequence", the product over its tokens."""
    cap: float = key(2.0, at_least(1))
    """See importance."""


@dataclass(frozen=True)
class OnlineDPOConfig(OnlineConfig):
    """Online DPO (arXiv 2402.04792) and IPO (arXiv 2310.12036) on the best and the worst of K samples."""

    beta: float = key(0.1, above(0), _IN_LOSS)
    """Strength of the implicit KL penalty: smaller lets the policy move further. It is in units of log-probabilities at
    generation.temperature, whose differences are larger than those at temperature 1."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """ "sigmoid" (DPO) or "ipo", which here takes sums over tokens, as its paper does, and not means: 1 / (2 beta) is a
    margin of whole completions, and beta is to be smaller than where means are taken."""

    def check(self) -> None:
        super().check()
        self.keeps("samples_per_prompt", at_least(2))


@dataclass(frozen=True)
class KLPenaltyConfig(OnlineConfig):
    """Objectives with an explicit KL penalty."""

    kl: KLConfig = key(KLConfig)
    """The penalty."""

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
    """Best-of-K: supervised learning on the best of K samples (Stiennon et al., arXiv 2009.01325, as a trainer)."""

    kl: KLConfig = key(lambda: KLConfig(coef=0.0))
    """The penalty."""

    def check(self) -> None:
        super().check()
        right = "must be false: the best of K samples are no samples of the policy, and no weight makes them that"
        require(not self.kl.corrected, "kl.corrected", self.kl.corrected, right)
        self.keeps("samples_per_prompt", at_least(2))


@dataclass(frozen=True)
class RatioConfig(KLPenaltyConfig):
    """Objectives on the clipped ratio pi / old (Schulman et al., arXiv 1707.06347, eq. 7)."""

    cliprange: float = key(0.2, above(0), below(1, ": the ratio is positive"))
    """The ratio is clipped at 1 - cliprange and 1 + cliprange."""
    cliprange_high: float | None = key(None, above(0))
    """The upper bound is 1 + this instead (Yu et al., "DAPO", arXiv 2503.14476); null for cliprange."""
    off_policy: OffPolicyConfig = key(OffPolicyConfig)
    """Corrections for stale samples."""

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
    """Objectives whose baseline is the rewards of the prompt's other completions."""

    non_eos_penalty: NonEosPenalty = False
    """As for every algorithm, but none by default: what verifiable rewards say of a completion that did not end by
    itself is not to be changed unasked."""
    mask_truncated: bool = False
    """Completions that did not end by themselves are not trained on nor in the normaliser, but their rewards count in
    the baselines of the others ("overlong filtering": Yu et al., "DAPO", arXiv 2503.14476, section 3.4)."""

    def check(self) -> None:
        super().check()
        self.keeps("samples_per_prompt", at_least(2))


@dataclass(frozen=True)
class RLOOConfig(GroupConfig):
    """REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740): one ratio and one advantage for each completion."""

    off_policy: OffPolicyConfig = key(lambda: OffPolicyConfig(level="sequence"))
    """Corrections for stale samples; the level is "sequence", as the ratio's."""

    def check(self) -> None:
        super().check()
        right = 'must be "sequence": the ratio of RLOO is one number for each completion'
        require(self.off_policy.level == "sequence", "off_policy.level", self.off_policy.level, right)


@dataclass(frozen=True)
class PPOConfig(RatioConfig):
    """PPO with a learned value function (Schulman et al., arXiv 1707.06347)."""

    samples_per_prompt: int = key(1, at_least(1))
    """K, completions per prompt; PPO needs no second one."""
    gamma: float = key(1.0, inside("[0, 1]"))
    """Discount from token to token."""
    lam: float = key(0.95, inside("[0, 1]"))
    """Lambda of generalised advantage estimation (arXiv 1506.02438)."""
    whiten_advantages: bool = True
    """Give the advantages of a batch mean 0 and standard deviation 1 over its tokens."""
    vf_coef: float = key(0.1, at_least(0), _IN_LOSS)
    """Weight of the value loss."""
    cliprange_value: float = key(0.2, above(0))
    """The value may move so far from its old estimate within one batch."""
    shared_trunk: bool = False
    """False trains a value model of its own, which starts from the reward model; true puts a value head on the
    policy."""
    value_learning_rate: float | None = key(None, *LEARNING_RATE)
    """Of the value model or head, whose values often like a higher one; null for learning_rate."""
    bootstrap_truncated: bool = False
    """response_length is a limit of time, not of the task: for a completion that did not end by itself the value of the
    whole text stands in place of the score that it would have got later (Pardo et al., arXiv 1712.00378). It takes
    non_eos_penalty: false, and one more pass of the value model."""

    def check(self) -> None:
        super().check()
        right = "must be false with bootstrap_truncated, by which a completion that is cut off has no score to change"
        unchanged = not (self.bootstrap_truncated and self.non_eos_penalty)
        require(unchanged, "non_eos_penalty", self.non_eos_penalty, right)


@dataclass(frozen=True)
class GRPOConfig(GroupConfig):
    """Group relative policy optimisation (Shao et al., arXiv 2402.03300) and its variants."""

    samples_per_prompt: int = 8
    """K, the size of a group."""
    kl: KLConfig = key(lambda: KLConfig(coef=0.04, where="loss", estimator="k3"))
    """The penalty; GRPO has it in the loss."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Advantages are (reward - mean of the group), divided by the standard deviation (with Bessel's correction) of the
    "group", of the whole "batch", or by "none" (Dr. GRPO: Liu et al., arXiv 2503.20783)."""
    normalization: Literal["sequence", "token", "constant"] = "sequence"
    """ "sequence" means over the tokens of each completion, then over completions (GRPO); "token" means over all tokens
    (DAPO); "constant" divides by response_length instead of a completion's own length (Dr. GRPO). Groups of equal
    rewards count in each of them."""


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
