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
    return torch.cat([_entropies(part_NV) for part_NV in logits_NV.split(_ENTROPY_ROWS)])


def _entropies(logits_NV: Tensor) -> Tensor:
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    return -(logprobs_NV.exp() * logprobs_NV.clamp(min=torch.finfo(logprobs_NV.dtype).min)).sum(dim=-1)
