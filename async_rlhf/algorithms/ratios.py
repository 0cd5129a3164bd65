"""Probability ratios between policies: clipping, importance weights, and statistics to monitor them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor


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
        **{name: token_log_ratios_N.kthvalue(place + 1).values.exp() for name, place in places.items()},
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
