"""Long rows: ranks that follow one another compute the same rows, each a part of every one of them.

All but attention treats a token by itself. For attention the ranks exchange the parts of the sequence, with all heads,
for the whole sequence with a part of the heads, and back (Ulysses: Jacobs et al., arXiv 2309.14509). So each number is
that of one rank, up to rounding. What is computed of tokens meets on all ranks of the group before the loss, which may
be of whole rows; a rank's gradient is that of its own tokens, and the sum over all ranks is that of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from async_rlhf.distributed.collectives import Ranks


@dataclass(frozen=True)
class ContextGroup:
    """This process among the ranks that compute the same rows. Made without arguments, it is the only one.

    Args:
        size: C, ranks in the group.
        rank: of this process in it: the number of its part of the sequence, and of its heads.
        group: the process group; None for one rank.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, ranks: Ranks, size: int, timeout: float) -> ContextGroup:
        """This rank's group of so many; every rank must call it."""
        if size == 1:
            return cls()
        mine, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout))
        return cls(size, ranks.rank % size, mine)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the group, where all of it know the same."""
        return self.rank == 0

    def joined(self, tensor: Tensor) -> Tensor:
        """The tensor with every rank's own numbers, each of which is 0 on the others."""
        return tensor if self.group is None else _Joined.apply(tensor, self.group)

    def repeated(self, heads: Tensor) -> Tensor:
        """Key or value heads (B, K, T, D), each as often as the group needs to have as many for every rank.

        As K and C divide the number of query heads, so does what comes out: each keeps its queries.
        """
        return heads.repeat_interleave(self.size // gcd(heads.shape[1], self.size), dim=1)

    def exchanged(self, tensor: Tensor) -> Tensor:
        """The tensor cut along its second dimension, of which this rank gets its part from everyone, one after the
        other along the third: (B, heads, T / C, D) becomes (B, heads / C, T, D), and (B, T, heads / C, D) becomes
        (B, T / C, heads, D).
        """
        parts = tensor.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        return _Exchange.apply(parts, self.group).movedim(0, 2).flatten(2, 3)


WHOLE = ContextGroup()
"""Every rank computes whole rows."""


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found


class _Exchange(torch.autograd.Function):
    """From (C, ...), a part for each rank of the group, to (C, ...), this rank's part of each. Gradients go back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient.contiguous(), ctx.group), None


class _Joined(torch.autograd.Function):
    """The sum over the group, of which all compute the same loss: so each has the gradient of its own numbers."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = tensor.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
