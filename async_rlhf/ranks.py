"""The ranks of a learner: processes that run the same program, each on a device of its own, led by rank 0.

Rank 0 alone has the loop, the schedule, the generators and the logs. Where it needs the others, it says so, and they
make the same call: a rank that is not the first does nothing but :meth:`Ranks.follow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_END = "end"
_NOTHING: tuple[str, Any] = ("", ())


class Ranks:
    """Who is there, and what they say to each other. Alone, as made without arguments, there is nobody to tell.

    Args:
        rank: of this process, from 0.
        count: R, processes in all.
        local_rank: its number on this host.
        local_count: processes on this host.
        group: carries what is said, between CPUs; none where there is one rank.
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
        self._together = False

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @contextmanager
    def calling(self, name: str, *args: Any) -> Iterator[None]:
        """Around something that every rank has to do: rank 0 has the others make the call of that name.

        Within one such call there may be others; all ranks come by them anyway.
        """
        if self.count == 1 or not self.leads or self._together:
            yield
            return
        self.from_lead((name, args))
        self._together = True
        try:
            yield
        finally:
            self._together = False

    def follow(self, calls: Mapping[str, Callable[..., Any]]) -> Any:
        """Make the calls that rank 0 says, until it ends. Returns what :meth:`end` was given."""
        while True:
            name, args = self.from_lead(_NOTHING)
            if name == _END:
                return args
            calls[name](*args)

    def end(self, value: Any = None) -> None:
        """On rank 0: let the others go on behind :meth:`follow`."""
        if self.count > 1:
            self.from_lead((_END, value))

    def from_lead(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values
