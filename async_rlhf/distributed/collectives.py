"""The ranks of a learner: processes that run the same program, each on its own device.

All ranks execute the same collectives: rank 0 broadcasts what only it knows, each rank computes its share, and all, or
rank 0 alone, get the results. Every call names its place in the program; if ranks reach different places, an error is
raised at once, so nothing hangs.

A :class:`ContextGroup` is for long rows: ranks that follow one another compute the same rows, each a part of every one.
All but attention treats a token by itself. For attention the ranks exchange the parts of the sequence, with all heads,
for the whole sequence with a part of the heads, and back (Ulysses: Jacobs et al., arXiv 2309.14509). So each number is
that of one rank, up to rounding. What is computed of tokens meets on all ranks of the group before the loss, which may
be of whole rows; a rank's gradient is that of its own tokens, and the sum over all ranks is that of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from math import gcd
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from async_rlhf.distributed.messages import packed, unpacked

T = TypeVar("T")
FOR_EVER = timedelta(days=365)
"""The others wait for rank 0 as long as it takes; that it is alive is watched otherwise (failure_detector.py)."""
_LETTERS = 64
"""How many letters of a place's name the ranks compare."""


class OutOfStepError(RuntimeError):
    """Ranks have reached different places in the program. The message names them."""


@dataclass(eq=False)
class Ranks:
    """This process among the learner's ranks, and their collectives. Made without arguments, it is the only rank.

    Every rank must make every call in the same order: they are collectives. ``point`` names the place in the program.

    Args:
        rank: of this process, from 0.
        count: R, processes in all.
        local_rank: its number on this host.
        local_count: processes on this host.
        group: the process group of the collectives, between CPUs; None for one rank.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone has generators, reward functions, callbacks and logs."""
        return self.rank == 0

    def barrier(self, point: str) -> None:
        """Wait for every rank to reach this point, before something in which all take part.

        Raises:
            OutOfStepError: another rank is at another point: it has left out a collective or made one too many.
        """
        if self.count == 1:
            return
        mine = torch.frombuffer(bytearray(point.encode()[:_LETTERS].ljust(_LETTERS)), dtype=torch.uint8)
        points = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(points, mine, group=self.group)
        for rank, theirs in enumerate(points):
            if not torch.equal(theirs, mine):
                other = bytes(theirs.tolist()).decode(errors="replace").rstrip()
                raise OutOfStepError(
                    f"ranks are out of step: rank {self.rank} has come to {point!r}, rank {rank} to {other!r}"
                )

    def broadcast(self, point: str, compute: Callable[[], T]) -> T:
        """Broadcast what rank 0 computes; it is pickled. The others compute nothing."""
        if self.count == 1:
            return compute()
        box: list[Any] = [compute() if self.is_main else None]
        self.barrier(point)
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, point: str, value: T) -> list[T]:
        """Every rank's value, which is pickled, in the order of ranks, on every rank."""
        if self.count == 1:
            return [value]
        self.barrier(point)
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def collect(self, point: str, value: T) -> Iterator[T]:
        """Every rank's value, in the order of ranks, on rank 0; none on the others. Arrays are not pickled.

        They arrive as they are asked for, so rank 0 must ask for all of them before the next collective.
        """
        if self.count == 1:
            return iter((value,))
        self.barrier(point)
        if self.is_main:
            return chain((value,), map(self._receive, range(1, self.count)))
        self._send(value, 0)
        return iter(())

    def _send(self, value: object, rank: int) -> None:
        message = packed(value)
        dist.send(torch.tensor([len(message)]), rank, group=self.group)
        dist.send(message, rank, group=self.group)

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.long)
        dist.recv(size, rank, group=self.group)
        message = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(message, rank, group=self.group)
        return unpacked(message)

    def new_group(self) -> dist.ProcessGroup | None:
        """A group of its own, between CPUs, for collectives of another thread, which would mix with these; None for one
        rank. Every rank must call it.
        """
        if self.count == 1:
            return None
        self.barrier("a group for another thread")
        return dist.new_group(timeout=FOR_EVER, backend="gloo")


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
    output = torch.empty_like(parts)
    dist.all_to_all_single(output, parts, group=group)
    return output


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
