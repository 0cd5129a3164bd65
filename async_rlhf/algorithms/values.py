"""The loss of a value model."""

from __future__ import annotations

import torch
from torch import Tensor


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
