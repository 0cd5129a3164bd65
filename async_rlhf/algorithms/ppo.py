"""PPO with a learned value function."""

from __future__ import annotations

from dataclasses import replace

from async_rlhf.algorithms.policy import policy_loss, ratio_needs, rest_of_score, rewards_of_tokens, weighted_sums
from async_rlhf.algorithms.record import Algorithm, Needs
from async_rlhf.config.base import configuration, key
from async_rlhf.config.common import LEARNING_RATE
from async_rlhf.config.online import IN_LOSS
from async_rlhf.config.policy import DiscountConfig
from async_rlhf.types import Experience, LossOutput, PolicyOutput


@configuration
class PPOConfig(DiscountConfig):
    """PPO with a learned value function (Schulman et al., arXiv 1707.06347)."""

    samples_per_prompt = key(1)
    """K, completions per prompt; PPO needs only one."""
    lam: float = key(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation (arXiv 1506.02438)."""
    whiten_advantages: bool = True
    """Give the advantages of a batch mean 0 and standard deviation 1 over its tokens."""
    whiten_rewards: bool = False
    """Scale the rewards of a batch's tokens (KL penalties, and the score at the last token) to standard deviation 1
    around their mean, which stays, before advantages and returns are computed. A KL penalty is scaled with the rest, so
    its weight against the score stays."""
    vf_coef: float = key(0.1, ge=0, **IN_LOSS)
    """Weight of the value loss."""
    cliprange_value: float = key(0.2, gt=0)
    """How far the value may move from its old estimate within one batch."""
    shared_trunk: bool = False
    """False trains a value model of its own, which starts from the reward model; true puts a value head on the
    policy."""
    value_learning_rate: float | None = key(None, **LEARNING_RATE)
    """Learning rate of the value model or head, which often needs a higher one; null for learning_rate."""
    bootstrap_truncated: bool = False
    """Treat response_length as a time limit that is not part of the task: for a completion that did not end by itself,
    the value of the whole text replaces the score that it would have got later (Pardo et al., arXiv 1712.00378).
    Requires non_eos_penalty: false, and costs one more pass of the value model."""

    def check(self) -> None:
        super().check()
        rule = "must be false with bootstrap_truncated, by which a completion that is cut off has no score to change"
        unchanged = not (self.bootstrap_truncated and self.non_eos_penalty)
        self.require(unchanged, "non_eos_penalty", rule)


def ppo_needs(config: PPOConfig) -> Needs:
    """Values, besides what every ratio-based objective needs."""
    return replace(
        ratio_needs(config),
        values=True,
        end_values=config.bootstrap_truncated,
        shared_trunk=config.shared_trunk,
        value_learning_rate=config.value_learning_rate,
    )


def ppo_credit(experience: Experience, config: PPOConfig) -> Experience:
    """Advantages of tokens by GAE, with the score at the last token, and the returns that the value model learns.

    With ``bootstrap_truncated``, the expected later reward replaces the score of a sample that was cut off.
    """
    from async_rlhf.algorithms.estimators import gae, rewards_of_steps, whiten

    assert experience.values_BT is not None
    sampled_BT, rest_B = experience.sampled_BT, rest_of_score(experience, experience.scores_B)
    if config.bootstrap_truncated:
        assert experience.truncated_B is not None
        assert experience.end_values_B is not None
        later_B = config.gamma * experience.end_values_B
        rest_B = later_B.where(experience.truncated_B, rest_B)
    rewards_BT = rewards_of_tokens(experience, rest_B, config.kl)
    if config.whiten_rewards:
        rewards_BT = whiten(rewards_of_steps(rewards_BT, sampled_BT), sampled_BT, keep_mean=True)
    advantages_BT, returns_BT = gae(
        rewards_BT, experience.values_BT, sampled_BT, config.gamma, config.lam, config.gamma_over
    )
    if config.whiten_advantages:
        advantages_BT = whiten(advantages_BT, sampled_BT)
    loss_weights_U = sampled_BT.sum(dim=1)
    return replace(experience, advantages_BT=advantages_BT, returns_BT=returns_BT, loss_weights_U=loss_weights_U)


def ppo_loss(output: PolicyOutput, rows: Experience, config: PPOConfig) -> LossOutput:
    """The policy loss and ``vf_coef`` times the clipped value loss, summed over tokens."""
    from async_rlhf.algorithms.estimators import clipped_value_loss

    assert rows.values_BT is not None
    assert rows.returns_BT is not None
    assert output.values_BT is not None
    policy = policy_loss(output, rows, config)
    losses_BT, clipped_BT = clipped_value_loss(
        output.values_BT, rows.values_BT, rows.returns_BT, config.cliprange_value
    )
    value = (losses_BT * rows.sampled_BT).sum()
    metrics = {"val/clipfrac_avg": clipped_BT, "val/value_avg": output.values_BT.detach()}
    sums = {**policy.metrics, "loss/value_avg": value.detach(), **weighted_sums(metrics, rows)}
    return LossOutput(policy.loss_sum + config.vf_coef * value, sums)


PPO = Algorithm("ppo", PPOConfig, ppo_credit, ppo_loss, needs=ppo_needs)
