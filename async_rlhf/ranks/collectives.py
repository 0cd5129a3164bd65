"""The ranks of a learner: processes that run the same program, each on its own device.

All ranks execute the same collectives: rank 0 broadcasts what only it knows, and all gather the results of their
shares. Every call names its place in the program; if ranks reach different places, an error is raised at once, so
nothing hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
FOR_EVER = timedelta(days=365)
"""The others wait for rank 0 as long as it takes; that it is alive is watched otherwise (ranks/watch.py)."""
_LETTERS = 64
"""How many letters of a place's name the ranks compare."""


class OutOfStepError(RuntimeError):
    """Ranks have reached different places in the program. The message names them."""


class Ranks:
    """This process among the learner's ranks, and their collectives. Made without arguments, it is the only rank.

    Every rank must make every call in the same order: they are collectives. ``place`` names the point in the program.

    Args:
        rank: of this process, from 0.
        count: R, processes in all.
        local_rank: its number on this host.
        local_count: processes on this host.
        group: the process group of the collectives, between CPUs; None for one rank.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        local_rank: int = 0,
        local_count: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.count = rank, count
        self.local_rank, self.local_count = local_rank, local_count
        self._group = group

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone has generators, reward functions, callbacks and logs."""
        return self.rank == 0

    def meet(self, place: str) -> None:
        """Wait for every rank to reach this place, before something in which all take part.

        Raises:
            OutOfStepError: another rank is at another place: it has left out a collective or made one too many.
        """
        if self.count == 1:
            return
        mine = torch.frombuffer(bytearray(place.encode()[:_LETTERS].ljust(_LETTERS)), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(found, mine, group=self._group)
        for rank, theirs in enumerate(found):
            if not torch.equal(theirs, mine):
                other = bytes(theirs.tolist()).decode(errors="replace").rstrip()
                raise OutOfStepError(
                    f"ranks are out of step: rank {self.rank} has come to {place!r}, rank {rank} to {other!r}"
                )

    def from_lead(self, place: str, compute: Callable[[], T]) -> T:
        """Broadcast what rank 0 computes. The others compute nothing."""
        if self.count == 1:
            return compute()
        box: list[Any] = [compute() if self.leads else None]
        self.meet(place)
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, place: str, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.count == 1:
            return [value]
        self.meet(place)
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    def apart(self) -> dist.ProcessGroup | None:
        """A group of its own, between CPUs, for collectives of another thread, which would mix with these; None for one
        rank. Every rank must call it.
        """
        if self.count == 1:
            return None
        self.meet("a group for another thread")
        return dist.new_group(timeout=FOR_EVER, backend="gloo")
