"""Losses on pairs of completions: DPO and IPO."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor


def preference_loss(
    chosen_logratios_U: Tensor, rejected_logratios_U: Tensor, beta: float, loss_type: Literal["sigmoid", "ipo"]
) -> Tensor:
    """Loss of each pair, with h the margin log pi(y+)/ref(y+) - log pi(y-)/ref(y-).

    "sigmoid" is -log sigmoid(beta h): Rafailov et al., "Direct Preference Optimization", arXiv 2305.18290, eq. 7.
    "ipo" is (h - 1/(2 beta))^2: Azar et al., arXiv 2310.12036, eq. 17, with summed log-probabilities.

    Args:
        chosen_logratios_U: log pi - log ref of the preferred completion, summed over its response tokens.
        rejected_logratios_U: the same of the other.
        beta: strength of the implicit KL penalty.
        loss_type: which of the two.

    Returns:
        (U,), one loss for each pair.
    """
    margins_U = chosen_logratios_U - rejected_logratios_U
    if loss_type == "sigmoid":
        return -F.logsigmoid(beta * margins_U)
    return (margins_U - 1 / (2 * beta)).square()
