"""Log-probabilities and entropies from logits, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ENTROPY_ROWS = 1024  # rows at a time: the intermediate results are as large as the logits


def selected_logprobs(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """log softmax(logits)[target] of each row.

    Args:
        logits_NV: temperature-scaled logits, float32.
        targets_N: token ids.

    Returns:
        (N,) float32.
    """
    return -F.cross_entropy(logits_NV, targets_N, reduction="none")


def entropies(logits_NV: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits), one per row; tokens of probability 0 add nothing."""
    return torch.cat([entropies_of(torch.log_softmax(part_NV, dim=-1)) for part_NV in logits_NV.split(_ENTROPY_ROWS)])


def entropies_of(logprobs_NV: Tensor) -> Tensor:
    """The same from log-probabilities; without gradient."""
    least = torch.finfo(logprobs_NV.dtype).min
    parts = logprobs_NV.detach().split(_ENTROPY_ROWS)
    return torch.cat([-part.exp().mul_(part.clamp(min=least)).sum(dim=-1) for part in parts])
