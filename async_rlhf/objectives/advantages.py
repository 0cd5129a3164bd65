"""Credit: from rewards to advantages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
    """0 for groups of equal rewards: the mean of eight 0.1 is not 0.1, and Adam makes a full step of any remainder."""
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


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: Schulman et al., arXiv 1506.02438, eq. 16.

    delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lam A_(t+1), with V and A 0 after the last token.

    Args:
        rewards_BT: of each response token.
        values_BT: of the text before each response token.
        mask_BT: 1 at response tokens, which are neighbours.
        gamma: discount.
        lam: lambda.

    Returns:
        Advantages_BT and returns_BT = advantages + values, both 0 outside the response.
    """
    values_BT = values_BT * mask_BT
    advantages_BT = torch.zeros_like(values_BT)
    next_advantage_B = next_value_B = torch.zeros_like(values_BT[:, 0])
    for t in reversed(range(values_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        next_advantage_B = (delta_B + gamma * lam * next_advantage_B) * mask_BT[:, t]
        next_value_B = values_BT[:, t]
        advantages_BT[:, t] = next_advantage_B
    return advantages_BT, advantages_BT + values_BT


def whiten(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Shift and scale to mean 0 and (population) variance 1 over the entries at ``mask_BT``; 0 elsewhere.

    Args:
        values_BT: anything.
        mask_BT: 1 at the entries that count.

    Returns:
        (B, T): (x - mean) / sqrt(variance + 1e-8).
    """
    count = mask_BT.sum().clamp(min=1)
    mean = (values_BT * mask_BT).sum() / count
    centred_BT = (values_BT - mean) * mask_BT
    return centred_BT * torch.rsqrt(centred_BT.square().sum() / count + _WHITEN_EPSILON)
