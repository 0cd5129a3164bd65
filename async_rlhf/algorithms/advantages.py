"""Credit: from rewards to advantages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
