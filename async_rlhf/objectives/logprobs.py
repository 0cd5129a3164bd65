"""Log-probabilities and entropies from logits, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def selected_logprobs(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """log softmax(logits)[target] of each row, without a second (N, V) tensor for the result.

    Args:
        logits_NV: temperature-scaled logits, float32.
        targets_N: token ids.

    Returns:
        (N,) float32.
    """
    chosen_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    return chosen_N - torch.logsumexp(logits_NV, dim=-1)


def entropies(logits_NV: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits), one per row: logsumexp(x) - sum softmax(x) x."""
    return torch.logsumexp(logits_NV, dim=-1) - (logits_NV.softmax(dim=-1) * logits_NV).sum(dim=-1)
