"""What the algorithms on probability ratios share: KL penalties, one policy loss, and credit for groups."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from async_rlhf.algorithms.record import Needs
from async_rlhf.config.online import KLConfig
from async_rlhf.config.policy import GroupConfig, KLPenaltyConfig, RatioConfig
from async_rlhf.types import Experience, LossOutput, PolicyOutput

if TYPE_CHECKING:
    from torch import Tensor


def penalty_needs(config: KLPenaltyConfig) -> Needs:
    """A reference policy, if there is a penalty."""
    return Needs(reference=config.kl.coef > 0)


def ratio_needs(config: RatioConfig) -> Needs:
    """A reference policy if there is a penalty, and the log-probabilities before the update if old is "proximal".

    With one optimiser step per batch the policy being trained is itself the proximal one, and a separate pass would
    repeat what the step computes anyway. A penalty in the reward still needs the pass: it is due before the step.
    """
    several = config.num_mini_batches * config.num_epochs > 1
    in_reward = config.kl.coef > 0 and config.kl.where == "reward"
    proximal = config.off_policy.old_logprobs == "proximal"
    return Needs(reference=config.kl.coef > 0, old_logprobs=proximal and (several or in_reward))


# KL penalties


def kl_penalties(experience: Experience, kl: KLConfig) -> Tensor:
    """The KL penalty to subtract from the reward of each sampled token, before the update; (B, T), 0 elsewhere.

    The KL is that of the old policy: the policy before the update if its log-probabilities are known, else the
    behaviour policy.
    """
    if kl.coef == 0 or kl.where == "loss":
        return experience.behaviour_logprobs_BT.new_zeros(1, 1).expand_as(experience.behaviour_logprobs_BT)
    old_BT = experience.old_logprobs_BT
    logprobs_BT = experience.behaviour_logprobs_BT if old_BT is None else old_BT
    return kl.coef * _kl(logprobs_BT, experience, kl)


def _kl(logprobs_BT: Tensor, rows: Experience, kl: KLConfig) -> Tensor:
    from async_rlhf.algorithms.estimators import KL_ESTIMATORS

    assert rows.reference_logprobs_BT is not None
    sampled_BT = rows.sampled_BT  # mask before the exponential, in which values elsewhere could overflow
    return KL_ESTIMATORS[kl.estimator](logprobs_BT * sampled_BT, rows.reference_logprobs_BT * sampled_BT)


def kl_loss(output: PolicyOutput, rows: Experience, kl: KLConfig) -> Tensor:
    """The KL penalty of each sampled token if the penalty is in the loss, else 0; (B, T)."""
    from async_rlhf.algorithms.estimators import corrected_k3

    if kl.coef == 0 or kl.where == "reward":
        return output.logprobs_BT.new_zeros(output.logprobs_BT.shape)
    if kl.corrected:
        assert rows.reference_logprobs_BT is not None
        both = (rows.reference_logprobs_BT, rows.behaviour_logprobs_BT)
        reference_BT, behaviour_BT = (logprobs_BT * rows.sampled_BT for logprobs_BT in both)
        return kl.coef * corrected_k3(output.logprobs_BT * rows.sampled_BT, reference_BT, behaviour_BT)
    return kl.coef * _kl(output.logprobs_BT, rows, kl)


# Credit


def rest_of_score(experience: Experience, scores_B: Tensor) -> Tensor:
    """(B,): scores without the rewards that an environment gave at tokens."""
    import torch

    environment_B = experience.rewards_BT.sum(dim=1, dtype=torch.float64)  # rounded once, as scores are
    return scores_B - environment_B.to(scores_B.dtype)


def rewards_of_tokens(experience: Experience, rest_B: Tensor, kl: KLConfig) -> Tensor:
    """(B, T): the environment's rewards, less any KL penalty in the reward, plus ``rest_B`` at the last token."""
    from async_rlhf.algorithms.estimators import at_last

    return experience.rewards_BT - kl_penalties(experience, kl) + at_last(rest_B, experience.sampled_BT)


def rewards_of_groups(experience: Experience, config: GroupConfig) -> Tensor:
    """(P, K): scores less any KL penalty in the reward."""
    rewards_B = experience.scores_B - kl_penalties(experience, config.kl).sum(dim=1)
    return rewards_B.view(-1, config.samples_per_prompt)


def teaching(advantages_BT: Tensor, sampled_BT: Tensor, kl: KLConfig) -> Tensor:
    """Whether the loss of each sample has a gradient, by an advantage or by a KL penalty in the loss: (B,)."""
    teaching_BT = sampled_BT > 0
    if kl.coef == 0 or kl.where == "reward":
        teaching_BT &= advantages_BT != 0
    return teaching_BT.any(dim=1)


def credited(experience: Experience, advantages_PK: Tensor, config: GroupConfig) -> Experience:
    """The experience with one advantage for all tokens of each sample, and with the sample's weight."""
    sampled_BT, loss_weights_U = experience.sampled_BT, experience.loss_weights_U
    advantages_BT = advantages_PK.flatten()[:, None] * sampled_BT
    if config.mask_truncated:
        assert experience.truncated_B is not None
        loss_weights_U = loss_weights_U.masked_fill(experience.truncated_B, 0.0)
    if config.normalization == "token":
        loss_weights_U = loss_weights_U * sampled_BT.sum(dim=1)
    elif config.normalization == "constant":
        loss_weights_U = loss_weights_U * config.generation.longest_written
    has_gradient_U = teaching(advantages_BT, sampled_BT, config.kl)
    return replace(
        experience, advantages_BT=advantages_BT, loss_weights_U=loss_weights_U, has_gradient_U=has_gradient_U
    )


# The policy loss


def policy_loss(output: PolicyOutput, rows: Experience, config: RatioConfig) -> LossOutput:
    """The clipped surrogate on the ratio pi / old, plus the KL penalty if the penalty is in the loss.

    The ratio is that of each token; or of the sample, the product over its tokens (RLOO, arXiv 2402.14740); or the
    geometric mean over them (GSPO, arXiv 2507.18071, eq. 7). The last two are multiplied by the mean of the tokens'
    advantages. With the ratio of the sample, the sample is one action: its loss is one surrogate plus the KL of all its
    tokens. Otherwise the tokens' surrogates and penalties are summed, and with ``normalization`` "sequence" divided by
    the number of tokens.
    """
    sampled_BT = rows.sampled_BT
    surrogate, metrics = _surrogate(output, rows, config)
    penalties_BT = kl_loss(output, rows, config.kl)
    tokens_B = sampled_BT.sum(dim=1).clamp(min=1)
    if config.ratio == "sequence":
        losses_B = surrogate.squeeze(1) + penalties_BT.sum(dim=1)
    else:
        losses_B = ((surrogate + penalties_BT) * sampled_BT).sum(dim=1)
        if config.normalization == "sequence":
            losses_B = losses_B / tokens_B
    losses_B = losses_B * (rows.loss_weights_U > 0)
    sums = {"loss/policy_avg": losses_B.detach().sum()}
    return LossOutput(losses_B.sum(), sums | weighted_sums(metrics, rows))


def weighted_sums(metrics: dict[str, Tensor], rows: Experience) -> dict[str, Tensor]:
    """Sums over rows of weight times metric: a metric of rows, (B, 1), or the row's mean of one of tokens, (B, T)."""
    sampled_BT, sums = rows.sampled_BT, {}
    tokens_B = sampled_BT.sum(dim=1).clamp(min=1)
    for name, values in metrics.items():
        means_B = values.squeeze(1) if values.shape[1] == 1 else (values * sampled_BT).sum(dim=1) / tokens_B
        sums[name] = (means_B * rows.loss_weights_U).sum()
    return sums


def _surrogate(output: PolicyOutput, rows: Experience, config: RatioConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted surrogate of each token, (B, T), or of each sample, (B, 1); and metrics of the same shape."""
    from async_rlhf.algorithms.estimators import clipped_likelihood, clipped_surrogate, row_means

    assert rows.advantages_BT is not None
    sampled_BT, old_BT, advantages = rows.sampled_BT, _old_logprobs(output, rows, config), rows.advantages_BT
    log_ratios = (output.logprobs_BT - old_BT) * sampled_BT
    if config.ratio != "token":
        log_ratios = log_ratios.sum(dim=1, keepdim=True)
        advantages = row_means(advantages, sampled_BT)[:, None]
    if config.ratio == "sequence_mean":
        log_ratios = log_ratios / sampled_BT.sum(dim=1, keepdim=True).clamp(min=1)
    low, high = config.cliprange, config.upper_cliprange
    if config.surrogate == "cispo":
        losses, clipped = clipped_likelihood(output.logprobs_BT, log_ratios, advantages, low, high)
    else:
        losses, clipped = clipped_surrogate(log_ratios, advantages, low, high)
    weighed, metrics = _weigh(losses, (old_BT - rows.behaviour_logprobs_BT) * sampled_BT, config)
    metrics |= {"policy/approxkl_avg": log_ratios.detach().square() / 2, "policy/clipfrac_avg": clipped}
    return weighed, metrics


def _old_logprobs(output: PolicyOutput, rows: Experience, config: RatioConfig) -> Tensor:
    """Log-probabilities by the old policy, the denominator of the clipped ratio.

    Without a pass before the update, the proximal policy is the one being trained, in its only step.
    """
    if config.off_policy.old_logprobs == "behaviour":
        return rows.behaviour_logprobs_BT
    return output.logprobs_BT.detach() if rows.old_logprobs_BT is None else rows.old_logprobs_BT


def _weigh(losses: Tensor, log_ratios_BT: Tensor, config: RatioConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses times the importance weights old / mu, and metrics of these weights.

    Args:
        losses: (B, T), or (B, 1) for one loss per sample.
        log_ratios_BT: log pi_old - log mu, 0 where no token was sampled.
        config: says which weights.
    """
    from async_rlhf.algorithms.estimators import importance_weights

    correction = config.off_policy
    if correction.old_logprobs == "behaviour" or correction.importance == "none":
        return losses, {}
    logs = log_ratios_BT.sum(dim=1, keepdim=True) if correction.level == "sequence" else log_ratios_BT
    weights, above = importance_weights(logs, correction.importance, correction.cap)
    weighed = losses * weights
    metrics = {"policy/importance_weight": weights, "policy/importance_capped": above}
    return weighed, {name: values.expand_as(weighed) for name, values in metrics.items()}
