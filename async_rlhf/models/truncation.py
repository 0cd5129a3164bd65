"""Distributions that tokens are drawn from: logits over a temperature, perhaps without the less likely tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from async_rlhf.system.determinism import cumulative_sums


class Distribution(NamedTuple):
    """What makes a distribution from logits. Log-probabilities are those of the distribution that results."""

    temperature: float
    """Logits are divided by it, before anything is cut off."""
    top_p: float = 1.0
    """Keep a token if those that are likelier have less than this probability together; 1 keeps all (Holtzman et al.,
    arXiv 1904.09751)."""
    top_k: int = 0
    """Keep only the tokens that are as likely as the k-th; 0 keeps all. What top_p cuts off is found among these."""

    @property
    def whole(self) -> bool:
        """Whether every token can be drawn."""
        return self.top_p >= 1 and self.top_k == 0


def truncated(logits_NV: Tensor, distribution: Distribution, drawn_N: Tensor | None = None) -> Tensor:
    """Logits with minus infinity for every token that is cut off; the very same tensor if none is.

    Equally likely tokens are kept or cut off together, so the result does not depend on how ties are sorted.

    Args:
        logits_NV: raw logits, without temperature.
        distribution: what is kept.
        drawn_N: tokens that were drawn by an engine that rounds differently. They are kept, with all that are as
            likely: at the border, rounding decides.

    Returns:
        (N, V), of the type of the logits.
    """
    if distribution.whole:
        return logits_NV
    scaled_NV = logits_NV.float() / distribution.temperature
    sorted_NV = scaled_NV.sort(dim=-1, descending=True).values
    least_N1 = sorted_NV[:, -1:]
    if distribution.top_k > 0:
        kth = min(distribution.top_k, logits_NV.shape[-1]) - 1
        least_N1 = sorted_NV[:, kth, None]
    if distribution.top_p < 1:
        among_NV = sorted_NV.masked_fill(sorted_NV < least_N1, -torch.inf)
        probabilities_NV = among_NV.double().softmax(dim=-1)
        likelier_NV = cumulative_sums(probabilities_NV) - probabilities_NV
        last_N1 = (likelier_NV < distribution.top_p).sum(dim=-1, keepdim=True).clamp(min=1) - 1
        least_N1 = torch.maximum(least_N1, sorted_NV.gather(-1, last_N1))
    if drawn_N is not None:
        least_N1 = torch.minimum(least_N1, scaled_NV.gather(-1, drawn_N[:, None]))
    return logits_NV.masked_fill(scaled_NV < least_N1, -torch.inf)
