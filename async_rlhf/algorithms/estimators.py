"""What objectives are made of: advantages, ratios between policies, and estimates of KL."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from async_rlhf.types import Experience, PolicyOutput

Steps = Literal["tokens", "turns"]
"""What a discount is from one to the next of."""
_GROUP_EPSILON = 1e-4
_WHITEN_EPSILON = 1e-8


def leave_one_out(rewards_PK: Tensor) -> Tensor:
    """Reward minus the mean reward of the other K - 1 samples: RLOO, arXiv 2402.14740, eq. 8.

    Args:
        rewards_PK: K >= 2.

    Returns:
        (P, K) advantages, exactly 0 where all rewards of a prompt are equal.
    """
    others = rewards_PK.shape[1] - 1
    advantages_PK = rewards_PK - (rewards_PK.sum(dim=1, keepdim=True) - rewards_PK) / others
    return _without_ties(advantages_PK, rewards_PK)


def _without_ties(advantages_PK: Tensor, rewards_PK: Tensor) -> Tensor:
    """0 for groups of equal rewards: the mean of eight 0.1 is not 0.1, and Adam makes any remainder a full step."""
    tied_P1 = (rewards_PK == rewards_PK[:, :1]).all(dim=1, keepdim=True)
    return advantages_PK.masked_fill(tied_P1, 0.0)


def group_normalized(rewards_PK: Tensor, scale: Literal["group", "batch", "none"]) -> Tensor:
    """(Reward - mean of the group) / (standard deviation + 1e-4): GRPO, arXiv 2402.03300, section 4.1.2.

    Args:
        rewards_PK: K >= 2.
        scale: which standard deviation, with Bessel's correction: of the "group" of one prompt, of the whole "batch";
            "none" divides by nothing (Dr. GRPO, arXiv 2503.20783).

    Returns:
        (P, K) advantages, exactly 0 where all rewards of a prompt are equal.
    """
    centred_PK = _without_ties(rewards_PK - rewards_PK.mean(dim=1, keepdim=True), rewards_PK)
    if scale == "none":
        return centred_PK
    deviation = rewards_PK.std(dim=1, keepdim=True) if scale == "group" else rewards_PK.std()
    return centred_PK / (deviation + _GROUP_EPSILON)


def gae(
    rewards_BT: Tensor, values_BT: Tensor, sampled_BT: Tensor, gamma: float, lam: float, over: Steps = "tokens"
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: Schulman et al., arXiv 1506.02438, eq. 16.

    delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lam A_(t+1), with V and A 0 after the last token.

    Args:
        rewards_BT: reward at each token; see :func:`rewards_of_steps`.
        values_BT: of the text before each sampled token.
        sampled_BT: 1 at the tokens that the policy drew.
        gamma: discount.
        lam: lambda.
        over: whether gamma discounts from each token to the next, or from each turn to the next, between whose tokens
            there is an observation.

    Returns:
        Advantages_BT and returns_BT = advantages + values, both 0 where no token was sampled.
    """
    values_BT, rewards_BT = values_BT * sampled_BT, rewards_of_steps(rewards_BT, sampled_BT)
    advantages_BT = torch.zeros_like(values_BT)
    next_advantage_B = next_value_B = torch.zeros_like(values_BT[:, 0])
    for t in reversed(range(values_BT.shape[1])):
        sampled_B, value_B, reward_B = sampled_BT[:, t] > 0, values_BT[:, t], rewards_BT[:, t]
        step: float | Tensor = gamma
        if over == "turns" and t + 1 < values_BT.shape[1]:
            step = torch.ones_like(value_B).masked_fill(sampled_BT[:, t + 1] == 0, gamma)
        delta_B = reward_B + step * next_value_B - value_B
        next_advantage_B = torch.where(sampled_B, delta_B + step * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(sampled_B, value_B, next_value_B)
        advantages_BT[:, t] = next_advantage_B
    advantages_BT = advantages_BT * sampled_BT
    return advantages_BT, advantages_BT + values_BT


def rewards_of_steps(rewards_BT: Tensor, sampled_BT: Tensor) -> Tensor:
    """(B, T): the reward of each time step at the token that begins it, 0 elsewhere.

    A time step goes from one sampled token to the next: rewards at the tokens between them are added to the earlier
    one's. Rewards before the first sampled token are ignored.
    """
    steps_BT = torch.zeros_like(rewards_BT)
    later_B = torch.zeros_like(rewards_BT[:, 0])
    for t in reversed(range(rewards_BT.shape[1])):
        sampled_B, reward_B = sampled_BT[:, t] > 0, rewards_BT[:, t] + later_B
        steps_BT[:, t] = reward_B.where(sampled_B, torch.zeros_like(reward_B))
        later_B = reward_B.masked_fill(sampled_B, 0.0)
    return steps_BT


def at_last(values_B: Tensor, sampled_BT: Tensor) -> Tensor:
    """(B, T): the value of each row at its last sampled token, 0 elsewhere and in rows that have none."""
    places_T = torch.arange(1, sampled_BT.shape[1] + 1, device=sampled_BT.device)
    numbers_BT = sampled_BT.bool() * places_T
    last_BT = (numbers_BT == numbers_BT.amax(dim=1, keepdim=True)) & (numbers_BT > 0)
    return torch.where(last_BT, values_B[:, None], torch.zeros_like(values_B[:, None]))


def row_means(values_BT: Tensor, sampled_BT: Tensor) -> Tensor:
    """(B,): means over the sampled tokens of each row, 0 where there are none.

    Summed in float64, so that the mean of equal float32 numbers is that number.
    """
    sums_B = (values_BT.double() * sampled_BT).sum(dim=1)
    return (sums_B / sampled_BT.double().sum(dim=1).clamp(min=1)).to(values_BT.dtype)


def whiten(values_BT: Tensor, mask_BT: Tensor, keep_mean: bool = False) -> Tensor:
    """Shift and scale to mean 0 and (population) variance 1 over the entries at ``mask_BT``; 0 elsewhere.

    Args:
        values_BT: anything.
        mask_BT: 1 at the entries that count.
        keep_mean: only scale the distances from the mean, which stays.

    Returns:
        (B, T): (x - mean) / sqrt(variance + 1e-8), plus the mean if that is kept.
    """
    inside_N = values_BT[mask_BT.bool()]
    if len(inside_N) == 0 or inside_N.min() == inside_N.max():  # the mean of twelve 0.7 is not 0.7
        return values_BT * mask_BT if keep_mean else torch.zeros_like(values_BT)
    count = mask_BT.sum().clamp(min=1)
    mean = (values_BT * mask_BT).sum() / count
    centred_BT = (values_BT - mean) * mask_BT
    whitened_BT = centred_BT * torch.rsqrt(centred_BT.square().sum() / count + _WHITEN_EPSILON)
    return whitened_BT + mean * mask_BT if keep_mean else whitened_BT


# Ratios: clipping, importance weights, and statistics to monitor them


def clipped_surrogate(log_ratios: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log_ratios): PPO, arXiv 1707.06347, eq. 7.

    Args:
        log_ratios: log pi - log pi_old, of tokens or of whole completions.
        advantages: of the same shape, or one that broadcasts.
        low: how far below 1 the ratio may go.
        high: how far above.

    Returns:
        The loss of each entry, and 1.0 where the clipped term is the smaller one (it has no gradient), else 0.0.
    """
    # The smaller term is A times the ratio bounded on one side only, which the sign of A decides. Bounding the
    # logarithm instead of the ratio keeps a ratio that overflows from turning a gradient of 0 into 0 x inf.
    top, bottom = math.log1p(high), math.log1p(-low)
    up = advantages >= 0
    bounded = torch.where(up, log_ratios.clamp(max=top), log_ratios.clamp(min=bottom))
    clipped = torch.where(up, (log_ratios > top) & (advantages > 0), log_ratios < bottom)
    return -bounded.exp() * advantages, clipped.to(log_ratios.dtype)


def clipped_likelihood(
    logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """-clip(r, 1 - low, 1 + high) A log pi, without gradient through the weight: CISPO, arXiv 2506.13585, eq. 4.

    Args:
        logprobs: log pi of tokens.
        log_ratios: log pi - log pi_old.
        advantages: of the same shape.
        low: how far below 1 the weight may go; 1 sets no lower bound.
        high: how far above.

    Returns:
        The loss of each entry, and 1.0 where the weight was clipped, else 0.0. No entry loses its gradient.
    """
    bottom, top = math.log1p(-low) if low < 1 else -math.inf, math.log1p(high)
    weights = log_ratios.detach().clamp(bottom, top).exp()
    clipped = (log_ratios < bottom) | (log_ratios > top)
    return -weights * advantages * logprobs, clipped.to(log_ratios.dtype)


def importance_weights(log_ratios: Tensor, kind: Literal["truncated", "masked"], cap: float) -> tuple[Tensor, Tensor]:
    """Importance weights w = pi_old / mu that correct for samples of mu, with a bound.

    Truncated: min(w, cap) (Ionides, "Truncated importance sampling", 2008). Masked: w where w <= cap, else 0.

    Args:
        log_ratios: log pi_old - log mu, of tokens or of whole completions.
        kind: "truncated" or "masked".
        cap: at least 1.

    Returns:
        The weights, without gradient, and 1.0 where the cap took effect, else 0.0.
    """
    ratios = log_ratios.detach().exp()
    above = (ratios > cap).to(log_ratios.dtype)
    return ratios.clamp(max=cap) if kind == "truncated" else torch.where(ratios > cap, 0.0, ratios), above


def effective_sample_share(log_weights_N: Tensor) -> Tensor:
    """(sum w)^2 / (N sum w^2): 1 if all weights are equal, 1 / N if one weight is all of the sum (Kong, 1992).

    Args:
        log_weights_N: N >= 1 logarithms of weights; a common offset changes nothing.
    """
    weights_N = (log_weights_N - log_weights_N.max()).exp()
    return weights_N.sum().square() / (len(weights_N) * weights_N.square().sum())


def ratio_statistics(token_log_ratios_N: Tensor, row_log_ratios_B: Tensor) -> dict[str, float]:
    """Statistics of how far pi has moved from mu, over the tokens and the completions of a batch.

    Args:
        token_log_ratios_N: log pi - log mu of each token.
        row_log_ratios_B: the same of each completion, summed over its tokens.

    Returns:
        Metrics by name: over tokens, the k1 and k3 estimates of KL(mu || pi), the mean absolute difference, and mean,
        variance and quantiles of pi / mu; and the effective sample shares of tokens and of completions.
    """
    if len(token_log_ratios_N) == 0:
        return {}
    last, ratios_N = len(token_log_ratios_N) - 1, token_log_ratios_N.exp().double()
    places = {f"val/ratio_p{q:02d}": round(last * q / 100) for q in (1, 50, 99)} | {"val/ratio_max": last}
    metrics = {
        "policy/behaviour_kl": -token_log_ratios_N.double().mean(),
        "policy/logprob_difference": token_log_ratios_N.abs().double().mean(),
        "val/ratio": ratios_N.mean(),
        "policy/behaviour_kl_k3": (torch.expm1(token_log_ratios_N) - token_log_ratios_N).mean(),
        "val/ratio_var": ratios_N.var(correction=0),
        # Each by a partial sort; torch.quantile refuses more than 16 million.
        **{name: token_log_ratios_N.kthvalue(index + 1).values.exp() for name, index in places.items()},
        "val/ess_token": effective_sample_share(token_log_ratios_N),
        "val/ess_sequence": effective_sample_share(row_log_ratios_B),
    }
    return {name: value.item() for name, value in metrics.items()}


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), as in OpenAI's implementation of PPO.

    Args:
        values: V, by the model being trained.
        old_values: V_old, from before the update.
        returns: R, the targets.
        cliprange: c.

    Returns:
        The loss of each entry, and 1.0 where the clipped term is the larger one (it has no gradient), else 0.0.
    """
    clipped = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    free_loss, clipped_loss = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(free_loss, clipped_loss) / 2, (clipped_loss > free_loss).to(values.dtype)


# KL(pi || ref) from samples of pi: J. Schulman, "Approximating KL divergence" (2020)


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d = log pi - log ref: unbiased, high variance, any sign."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d^2 / 2: biased, low variance; its gradient on samples of pi is that of each token's KL given its prefix."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, low variance, never negative."""
    d = logprobs - reference_logprobs
    return torch.expm1(-d) + d


def corrected_k3(logprobs: Tensor, reference_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """pi / mu times k3 for samples of mu: its mean over them is KL(pi || ref), its mean gradient that of this KL.

    All of it is about one token given its prefix. The KL of whole texts has another gradient: it also credits a token
    with the KL of the tokens that follow it.

    DeepSeek-V3.2, arXiv 2512.02556, section 3.1. The gradient of k3 alone, 1 - exp(-d) by the log-probability, is the
    gradient of KL(ref || pi) on samples of pi, and of neither KL on other samples.
    """
    return (logprobs - behaviour_logprobs).exp() * k3(logprobs, reference_logprobs)


def adapted_coefficient(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The penalty's coefficient after a batch: Ziegler et al., arXiv 1909.08593, section 2.2.

    coefficient x (1 + clip(kl / target - 1, -0.2, 0.2) x samples / horizon).

    Args:
        coefficient: before the batch.
        kl: mean KL of the batch's completions.
        target: the KL to keep.
        samples: completions of the batch.
        horizon: completions over which the coefficient changes by at most 20%.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


class ImportanceRatioStats:
    """Collects the ratios of one update's micro-batches. Every rank has one for its share.

    They stay on the learner's device until :meth:`on_cpu`, so that the host need not wait for it in between.
    """

    def __init__(self, parts: Iterable[tuple[Tensor, ...]] = ()) -> None:
        self._parts = list(parts)
        """Of each part entropies, log-ratios, those of rows, and which tokens were sampled, the latter on the CPU."""

    @classmethod
    def of(cls, parts: Sequence[ImportanceRatioStats]) -> ImportanceRatioStats:
        """One monitor with the data of several."""
        return cls(tensors for part in parts for tensors in part._parts)

    def add(self, output: PolicyOutput, rows: Experience, sampled_BT: Tensor) -> None:
        """Add the rows of one micro-batch; ``sampled_BT`` is theirs, on the CPU."""
        log_ratios_BT = (output.logprobs_BT.detach() - rows.behaviour_logprobs_BT) * rows.sampled_BT
        of_tokens = output.entropies_BT.flatten(), log_ratios_BT.flatten()
        self._parts.append((*of_tokens, log_ratios_BT.sum(dim=1), sampled_BT.bool().flatten()))

    def on_cpu(self) -> ImportanceRatioStats:
        """The same as one part on the CPU, where it can be sent to other ranks; none of none."""
        kinds = list(zip(*self._parts, strict=True))
        return ImportanceRatioStats([tuple(torch.cat(each).cpu() for each in kinds)] if kinds else [])

    def metrics(self) -> dict[str, float]:
        """Entropy, and statistics of the ratios of tokens and of whole completions.

        Means weight all tokens equally. A mean over rows of row means would give more weight to tokens of short rows,
        and its ratio would not be 1 where 1 is expected.
        """
        for entropies_N, log_ratios_N, row_log_ratios_B, sampled_N in self.on_cpu()._parts:
            if sampled_N.any():
                entropy = entropies_N[sampled_N].double().mean().item()
                return {"policy/entropy_avg": entropy, **ratio_statistics(log_ratios_N[sampled_N], row_log_ratios_B)}
        return {}
