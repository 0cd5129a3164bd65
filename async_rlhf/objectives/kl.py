"""Estimators of KL(pi || ref) from samples of pi: J. Schulman, "Approximating KL divergence" (2020)."""

from __future__ import annotations

import torch
from torch import Tensor


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d = log pi - log ref: unbiased, high variance, any sign."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d^2 / 2: biased, low variance, its gradient is that of the KL."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, low variance, never negative."""
    d = logprobs - reference_logprobs
    return torch.expm1(-d) + d
