"""The ranks of a learner: processes that run the same program, each on its own device.

All ranks execute the same collectives: rank 0 broadcasts what only it knows, hands each rank its share of what is
large, and collects the results. Every call names its place in the program; if ranks reach different places, an error is
raised at once, so nothing hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
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

    Every rank must make every call in the same order: they are collectives. ``place`` names the point in the program.

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

    def barrier(self, place: str) -> None:
        """Wait for every rank to reach this place, before something in which all take part.

        Raises:
            OutOfStepError: another rank is at another place: it has left out a collective or made one too many.
        """
        if self.count == 1:
            return
        mine = torch.frombuffer(bytearray(place.encode()[:_LETTERS].ljust(_LETTERS)), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(found, mine, group=self.group)
        for rank, theirs in enumerate(found):
            if not torch.equal(theirs, mine):
                other = bytes(theirs.tolist()).decode(errors="replace").rstrip()
                raise OutOfStepError(
                    f"ranks are out of step: rank {self.rank} has come to {place!r}, rank {rank} to {other!r}"
                )

    def broadcast(self, place: str, compute: Callable[[], T]) -> T:
        """Broadcast what rank 0 computes, which is small: it is pickled. The others compute nothing."""
        if self.count == 1:
            return compute()
        box: list[Any] = [compute() if self.is_main else None]
        self.barrier(place)
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, place: str, value: T) -> list[T]:
        """Every rank's value, which is small, in the order of ranks, on every rank."""
        if self.count == 1:
            return [value]
        self.barrier(place)
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def scatter(self, place: str, compute: Callable[[], Sequence[T]]) -> T:
        """The value for this rank of those that rank 0 computes, one for each rank. Arrays are not pickled."""
        values = compute() if self.is_main else ()
        if self.count > 1:
            self.barrier(place)
        if not self.is_main:
            return self._receive(0)
        for rank in range(1, self.count):
            self._send(values[rank], rank)
        return values[0]

    def collect(self, place: str, value: T) -> Iterator[T]:
        """Every rank's value, in the order of ranks, on rank 0; none on the others. Arrays are not pickled.

        They arrive as they are asked for, so rank 0 must ask for all of them before the next collective.
        """
        if self.count == 1:
            return iter((value,))
        self.barrier(place)
        if self.is_main:
            return chain((value,), map(self._receive, range(1, self.count)))
        self._send(value, 0)
        return iter(())

    def start_sending(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        """Send a tensor that lies on the CPU, while this rank goes on; what is returned waits until it has gone."""
        work = dist.isend(tensor, rank, group=self.group)
        assert work is not None  # it is for ranks outside the group
        return work.wait

    def start_receiving(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        """Receive a tensor as large as was sent, while this rank goes on; what is returned waits until it is there."""
        work = dist.irecv(tensor, rank, group=self.group)
        assert work is not None
        return work.wait

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
