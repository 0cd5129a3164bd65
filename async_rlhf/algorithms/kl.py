"""Estimators of KL(pi || ref) from samples of pi: J. Schulman, "Approximating KL divergence" (2020)."""

from __future__ import annotations

import torch
from torch import Tensor


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
