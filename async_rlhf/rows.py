"""Rows: from lists of tokens to padded tensors, in batches that waste little on padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from async_rlhf.types import RolloutGroup

T = TypeVar("T")


def pad_rows(rows: Sequence[Sequence[float]], dtype: torch.dtype, fill: float = 0) -> Tensor:
    """(B, T) with each row on the left and ``fill`` to its right."""
    padded_BT = torch.full((len(rows), max(map(len, rows), default=0)), fill, dtype=dtype)
    for i, row in enumerate(rows):
        padded_BT[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded_BT


def response_tensors(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """The fields of an Experience that come from sampling: K neighbouring rows for each prompt."""
    pairs = [(group.prompt.tokens, rollout) for group in groups for rollout in group.rollouts]
    tokens_BT = pad_rows([prompt + rollout.tokens for prompt, rollout in pairs], torch.long)
    mask_BT = pad_rows([(0.0,) * len(prompt) + (1.0,) * len(r.tokens) for prompt, r in pairs], torch.float32)
    return {
        "tokens_BT": tokens_BT,
        "lengths_B": torch.tensor([len(prompt) + len(r.tokens) for prompt, r in pairs]),
        "response_mask_BT": mask_BT,
        "behaviour_logprobs_BT": pad_rows([(0.0,) * len(p) + r.logprobs for p, r in pairs], torch.float32),
        "truncated_B": torch.tensor([r.finish_reason == "length" for _, r in pairs], dtype=torch.bool),
    }


def by_length(lengths_B: Tensor, size: int) -> Iterator[Tensor]:
    """Row indices in batches of ``size``, rows of like length together, the longest first."""
    order_B = torch.argsort(lengths_B, descending=True, stable=True)
    if len(order_B):  # split() makes one empty part of nothing
        yield from order_B.split(size)


def dealt(parts: Sequence[T], rank: int, count: int) -> Iterator[tuple[T, bool]]:
    """A rank's parts, with whether they count.

    Every rank gets as many, as passes that need every rank demand. Where the last round has too few, the first part is
    dealt again and does not count.
    """
    for start in range(0, len(parts), count):
        number = start + rank
        yield (parts[number], True) if number < len(parts) else (parts[0], False)
