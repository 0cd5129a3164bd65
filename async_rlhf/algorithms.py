"""The table of algorithms. Each is a record: how scores become credit, and a pure loss on tensors.

``credit`` takes the experience of all K samples of each prompt, K neighbouring rows a prompt and one row a unit, and
returns the rows to train on with what their loss needs. ``loss`` takes what the policy gives for some of those rows
and returns sums. Neither knows a model, an optimiser or the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from async_rlhf.config import (
    GroupConfig,
    GRPOConfig,
    KLPenaltyConfig,
    OnlineBoKConfig,
    OnlineDPOConfig,
    PPOConfig,
    RatioConfig,
    RLOOConfig,
)
from async_rlhf.objectives.advantages import at_last, gae, group_normalized, leave_one_out, row_means, whiten
from async_rlhf.objectives.kl import KL_ESTIMATORS, corrected_k3
from async_rlhf.objectives.preference import preference_loss
from async_rlhf.objectives.ratios import clipped_surrogate, importance_weights
from async_rlhf.objectives.values import clipped_value_loss
from async_rlhf.types import Experience, LossOutput, PolicyOutput


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One objective.

    Args:
        credit: (experience of all samples, config) -> experience to train on.
        loss: (output of the policy, experience of the same rows, config) -> sums.
    """

    credit: Callable[[Experience, Any], Experience]
    loss: Callable[[PolicyOutput, Experience, Any], LossOutput]


# What objectives share


def kl_penalties(experience: Experience, config: KLPenaltyConfig) -> Tensor:
    """What the KL penalty takes from the reward of each sampled token, before the update; (B, T), 0 elsewhere.

    The policy is the one whose ratio is clipped: that before the update where its log-probabilities are known, else
    the one that sampled.
    """
    if config.kl.coef == 0 or config.kl.where == "loss":
        return torch.zeros_like(experience.behaviour_logprobs_BT)
    old_BT = experience.old_logprobs_BT
    logprobs_BT = experience.behaviour_logprobs_BT if old_BT is None else old_BT
    return config.kl.coef * _kl(logprobs_BT, experience, config)


def _kl(logprobs_BT: Tensor, rows: Experience, config: KLPenaltyConfig) -> Tensor:
    assert rows.reference_logprobs_BT is not None
    mask_BT = rows.sampled_BT  # before the exponential: whatever stands outside could overflow in it
    return KL_ESTIMATORS[config.kl.estimator](logprobs_BT * mask_BT, rows.reference_logprobs_BT * mask_BT)


def _kl_loss(output: PolicyOutput, rows: Experience, config: KLPenaltyConfig) -> Tensor:
    """The KL penalty of each sampled token where it is a part of the loss, else 0; (B, T)."""
    if config.kl.coef == 0 or config.kl.where == "reward":
        return torch.zeros_like(output.logprobs_BT)
    if config.kl.corrected:
        assert rows.reference_logprobs_BT is not None
        both = (rows.reference_logprobs_BT, rows.behaviour_logprobs_BT)
        reference_BT, behaviour_BT = (logprobs_BT * rows.sampled_BT for logprobs_BT in both)
        return config.kl.coef * corrected_k3(output.logprobs_BT * rows.sampled_BT, reference_BT, behaviour_BT)
    return config.kl.coef * _kl(output.logprobs_BT, rows, config)


def _credited(experience: Experience, advantages_B: Tensor, weights_U: Tensor, config: KLPenaltyConfig) -> Experience:
    """With one advantage for all tokens of a sample, and what it weighs.

    Its loss has a gradient through its tokens, where it has an advantage or there is a KL penalty in the loss.
    """
    in_loss = config.kl.coef > 0 and config.kl.where == "loss"
    sampled_BT = experience.sampled_BT
    teaches_U = ((advantages_B != 0) | in_loss) & (sampled_BT.sum(dim=1) > 0)
    advantages_BT = advantages_B[:, None] * sampled_BT
    return replace(experience, advantages_BT=advantages_BT, weights_U=weights_U, teaches_U=teaches_U)


def _weights(experience: Experience, config: GroupConfig) -> Tensor:
    """1 for each sample, 0 for one that is masked because it was cut off."""
    if not config.mask_truncated:
        return experience.weights_U
    assert experience.truncated_B is not None
    return experience.weights_U.masked_fill(experience.truncated_B, 0.0)


def _old_logprobs(output: PolicyOutput, rows: Experience, config: RatioConfig) -> Tensor:
    """Of the policy that the clipped ratio is taken against.

    Without a pass before the update the proximal policy is the one being trained, as it is in the only step.
    """
    if config.off_policy.old_logprobs == "behaviour":
        return rows.behaviour_logprobs_BT
    return output.logprobs_BT.detach() if rows.old_logprobs_BT is None else rows.old_logprobs_BT


def _weigh(losses: Tensor, log_ratios_BT: Tensor, config: RatioConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses times the importance weights of old / mu, and metrics of the same shape.

    Args:
        losses: (B, T), or (B, 1) for one of each sample.
        log_ratios_BT: log pi_old - log mu, 0 where no token was sampled.
        config: says which weights.
    """
    correction = config.off_policy
    if correction.old_logprobs == "behaviour" or correction.importance == "none":
        return losses, {}
    logs = log_ratios_BT.sum(dim=1, keepdim=True) if correction.level == "sequence" else log_ratios_BT
    weights, above = importance_weights(logs, correction.importance, correction.cap)
    metrics = {"policy/importance_weight": weights, "policy/importance_capped": above}
    return losses * weights, {name: values.expand_as(losses) for name, values in metrics.items()}


def _ratio_metrics(log_ratios: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    return {"policy/approxkl_avg": log_ratios.detach().square() / 2, "policy/clipfrac_avg": clipped}


# Online DPO and best-of-K


def _best(scores_PK: Tensor) -> Tensor:
    """Row of the best sample of each prompt; of equal scores the first."""
    return scores_PK.argmax(dim=1) + torch.arange(len(scores_PK)) * scores_PK.shape[1]


def _differ(scores_PK: Tensor) -> Tensor:
    """1.0 for each prompt whose samples did not all score the same."""
    return (scores_PK.amax(dim=1) > scores_PK.amin(dim=1)).float()


def best_and_worst(experience: Experience, config: OnlineDPOConfig) -> Experience:
    """The best and the worst scored sample of each prompt as a pair; of equal scores the first.

    Where all scores of a prompt are equal there is no preference: its pair has weight 0 and is not trained on.
    """
    scores_PK = experience.scores_B.view(-1, config.samples_per_prompt)
    rows_B = torch.stack([_best(scores_PK), _best(-scores_PK)], dim=1).flatten()
    return replace(experience.select(rows_B), rows_per_unit=2, weights_U=_differ(scores_PK))


def online_dpo_loss(output: PolicyOutput, pairs: Experience, config: OnlineDPOConfig) -> LossOutput:
    """The preference loss of each pair, and what DPO is watched by."""
    assert pairs.reference_logprobs_BT is not None
    mask_BT = pairs.sampled_BT
    logps_B = (output.logprobs_BT * mask_BT).sum(dim=1)
    reference_B = (pairs.reference_logprobs_BT * mask_BT).sum(dim=1)
    ratios_B = logps_B - reference_B
    chosen_U, rejected_U = ratios_B[0::2], ratios_B[1::2]
    losses_U = preference_loss(chosen_U, rejected_U, config.beta, config.loss_type) * pairs.weights_U
    with torch.no_grad():
        metrics = {
            "loss/policy_avg": losses_U,
            "rewards/chosen": config.beta * chosen_U,
            "rewards/rejected": config.beta * rejected_U,
            "rewards/accuracies": _ranked_right(chosen_U - rejected_U, logps_B, reference_B, mask_BT),
            "rewards/margins": config.beta * (chosen_U - rejected_U),
            "logps/chosen": logps_B[0::2],
            "logps/rejected": logps_B[1::2],
            "objective/scores_margin": pairs.scores_B[0::2] - pairs.scores_B[1::2],
        }
        sums = {name: (values_U * pairs.weights_U).sum() for name, values_U in metrics.items()}
    return LossOutput(losses_U.sum(), sums)


def _ranked_right(margins_U: Tensor, logps_B: Tensor, reference_B: Tensor, mask_BT: Tensor) -> Tensor:
    """1 for a positive margin, 0 for a negative one, 1/2 for one that may be rounding, as all are at the first step.

    Rounding is the float32 step of the sums that the margin is made of, and that at 1 for each token: so much do
    log-probabilities near 0 carry over from logits.
    """
    sizes_B = logps_B.abs() + reference_B.abs() + mask_BT.sum(dim=1)
    rounding_U = torch.finfo(torch.float32).eps * (sizes_B[0::2] + sizes_B[1::2])
    return (torch.where(margins_U.abs() <= rounding_U, 0.0, margins_U).sign() + 1) / 2


def best_of_k(experience: Experience, config: OnlineBoKConfig) -> Experience:
    """The best sample of each prompt by its reward; none of a prompt whose samples are all equally good."""
    rewards_B = experience.scores_B - kl_penalties(experience, config).sum(dim=1)
    rewards_PK = rewards_B.view(-1, config.samples_per_prompt)
    return replace(experience.select(_best(rewards_PK)), weights_U=_differ(rewards_PK))


def best_of_k_loss(output: PolicyOutput, rows: Experience, config: OnlineBoKConfig) -> LossOutput:
    """Minus the log-probability of each sample, and the KL penalty of its tokens where that is in the loss."""
    logps_B = (output.logprobs_BT * rows.sampled_BT).sum(dim=1)
    losses_B = (_kl_loss(output, rows, config).sum(dim=1) - logps_B) * rows.weights_U
    metrics = {"loss/policy_avg": losses_B, "logps/chosen": logps_B * rows.weights_U}
    return LossOutput(losses_B.sum(), {name: values_B.detach().sum() for name, values_B in metrics.items()})


# RLOO


def rloo_credit(experience: Experience, config: RLOOConfig) -> Experience:
    """One advantage for each sample: its reward less the mean reward of the prompt's other samples."""
    rewards_B = experience.scores_B - kl_penalties(experience, config).sum(dim=1)
    advantages_B = leave_one_out(rewards_B.view(-1, config.samples_per_prompt)).flatten()
    return _credited(experience, advantages_B, _weights(experience, config), config)


def rloo_loss(output: PolicyOutput, rows: Experience, config: RLOOConfig) -> LossOutput:
    """The clipped surrogate on the ratio of whole samples."""
    assert rows.advantages_BT is not None
    mask_BT, old_BT = rows.sampled_BT, _old_logprobs(output, rows, config)
    log_ratios_B1 = ((output.logprobs_BT - old_BT) * mask_BT).sum(dim=1, keepdim=True)
    advantages_B1 = row_means(rows.advantages_BT, mask_BT)[:, None]
    surrogate_B1, clipped_B1 = clipped_surrogate(log_ratios_B1, advantages_B1, config.cliprange, config.upper_cliprange)
    weighed_B1, metrics = _weigh(surrogate_B1, (old_BT - rows.behaviour_logprobs_BT) * mask_BT, config)
    losses_B = (weighed_B1.squeeze(1) + _kl_loss(output, rows, config).sum(dim=1)) * rows.weights_U
    metrics |= _ratio_metrics(log_ratios_B1, clipped_B1)
    sums = {name: (values_B1.squeeze(1) * rows.weights_U).sum() for name, values_B1 in metrics.items()}
    return LossOutput(losses_B.sum(), {"loss/policy_avg": losses_B.detach().sum(), **sums})


# GRPO and PPO: one ratio for each token


def grpo_credit(experience: Experience, config: GRPOConfig) -> Experience:
    """One advantage for each sample, normalised within its group, and what a sample weighs."""
    rewards_B = experience.scores_B - kl_penalties(experience, config).sum(dim=1)
    rewards_PK = rewards_B.view(-1, config.samples_per_prompt)
    advantages_B = group_normalized(rewards_PK, config.scale_rewards).flatten()
    weights_U = _weights(experience, config)
    if config.normalization == "token":
        weights_U = weights_U * experience.sampled_BT.sum(dim=1)
    elif config.normalization == "constant":
        weights_U = weights_U * config.generation.response_length
    return _credited(experience, advantages_B, weights_U, config)


def grpo_loss(output: PolicyOutput, rows: Experience, config: GRPOConfig) -> LossOutput:
    """The clipped surrogate and the KL penalty of each token, meaned as the configuration says."""
    losses_BT, metrics = _token_losses(output, rows, config)
    losses_BT = losses_BT + _kl_loss(output, rows, config)
    losses_B = losses_BT.sum(dim=1)
    if config.normalization == "sequence":
        losses_B = losses_B / rows.sampled_BT.sum(dim=1).clamp(min=1)
    losses_B = losses_B * (rows.weights_U > 0)
    sums = _weighted_sums(metrics, rows)
    return LossOutput(losses_B.sum(), {"loss/policy_avg": losses_B.detach().sum(), **sums})


def ppo_credit(experience: Experience, config: PPOConfig) -> Experience:
    """Advantages of tokens by GAE, with the score at the last token, and the returns that the values learn.

    With ``bootstrap_truncated`` a sample that was cut off has what is expected later in place of the score.
    """
    assert experience.values_BT is not None
    mask_BT, given_BT = experience.sampled_BT, experience.rewards_BT
    scores_B = experience.scores_B - given_BT.double().sum(dim=1).to(given_BT.dtype)  # rounded once, as scores are
    if config.bootstrap_truncated:
        assert experience.truncated_B is not None
        assert experience.end_values_B is not None
        scores_B = torch.where(experience.truncated_B, config.gamma * experience.end_values_B, scores_B)
    rewards_BT = given_BT - kl_penalties(experience, config) + at_last(scores_B, mask_BT)
    advantages_BT, returns_BT = gae(rewards_BT, experience.values_BT, mask_BT, config.gamma, config.lam)
    if config.whiten_advantages:
        advantages_BT = whiten(advantages_BT, mask_BT)
    weights_U = mask_BT.sum(dim=1)
    return replace(experience, advantages_BT=advantages_BT, returns_BT=returns_BT, weights_U=weights_U)


def ppo_loss(output: PolicyOutput, rows: Experience, config: PPOConfig) -> LossOutput:
    """The clipped surrogate and ``vf_coef`` times the clipped value loss, summed over tokens."""
    assert rows.values_BT is not None
    assert rows.returns_BT is not None
    assert output.values_BT is not None
    mask_BT = rows.sampled_BT
    policy_BT, metrics = _token_losses(output, rows, config)
    policy_BT = policy_BT + _kl_loss(output, rows, config)
    value_BT, value_clipped_BT = clipped_value_loss(
        output.values_BT, rows.values_BT, rows.returns_BT, config.cliprange_value
    )
    policy, value = policy_BT.sum(), (value_BT * mask_BT).sum()
    metrics |= {"val/clipfrac_avg": value_clipped_BT, "val/value_avg": output.values_BT.detach()}
    losses = {"loss/policy_avg": policy.detach(), "loss/value_avg": value.detach()}
    return LossOutput(policy + config.vf_coef * value, losses | _weighted_sums(metrics, rows))


def _token_losses(output: PolicyOutput, rows: Experience, config: RatioConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighed surrogate of each sampled token, 0 elsewhere, and metrics of the same shape."""
    assert rows.advantages_BT is not None
    mask_BT, old_BT = rows.sampled_BT, _old_logprobs(output, rows, config)
    log_ratios_BT = (output.logprobs_BT - old_BT) * mask_BT
    surrogate_BT, clipped_BT = clipped_surrogate(
        log_ratios_BT, rows.advantages_BT, config.cliprange, config.upper_cliprange
    )
    weighed_BT, metrics = _weigh(surrogate_BT, (old_BT - rows.behaviour_logprobs_BT) * mask_BT, config)
    return weighed_BT * mask_BT, metrics | _ratio_metrics(log_ratios_BT, clipped_BT)


def _weighted_sums(metrics: dict[str, Tensor], rows: Experience) -> dict[str, Tensor]:
    """The mean of each metric over the tokens of a row, times the row's weight, summed over rows."""
    mask_BT = rows.sampled_BT
    tokens_B = mask_BT.sum(dim=1).clamp(min=1)
    return {
        name: ((values_BT * mask_BT).sum(dim=1) / tokens_B * rows.weights_U).sum()
        for name, values_BT in metrics.items()
    }


ALGORITHMS = {
    "online_dpo": Algorithm(best_and_worst, online_dpo_loss),
    "best_of_k": Algorithm(best_of_k, best_of_k_loss),
    "rloo": Algorithm(rloo_credit, rloo_loss),
    "ppo": Algorithm(ppo_credit, ppo_loss),
    "grpo": Algorithm(grpo_credit, grpo_loss),
}
