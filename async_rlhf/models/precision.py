"""The type that a run computes in."""

from __future__ import annotations

import torch

from async_rlhf.config import OnlineConfig


def autocast_dtype(config: OnlineConfig) -> torch.dtype | None:
    """The type of forward and backward passes; None for that of the weights, float32."""
    return torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None
