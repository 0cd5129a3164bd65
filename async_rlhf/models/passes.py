"""Which rows share a forward pass: at most so many rows, or so many tokens, and as much work for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from async_rlhf.models.rows import by_length


@dataclass(frozen=True)
class Passes:
    """The limits of one pass. Rows that belong together are a unit, and share a pass."""

    units: int | None
    """At most so many units; None for as many as their tokens allow."""
    tokens: int | None = None
    """At most so many tokens: real ones of packed rows, else cells, padding included. A unit that has more by itself
    gets a pass of its own. None for any number."""
    packed: bool = False
    """Whether the rows are packed."""
    width: int = 1
    """Size of the model's hidden states. By it, what a token costs depends on how many it looks at."""

    def split(self, lengths_B: Tensor, rows_per_unit: int = 1, ranks: int = 1) -> list[Tensor]:
        """The units of each pass: padded, those of similar length together, the longest first.

        With a limit on tokens, passes cost about the same, and if possible there are as many for each rank. So a round,
        in which each rank has one pass, keeps no rank waiting.

        Args:
            lengths_B: tokens of each row, at least 1; those of a unit are adjacent. On the CPU.
            rows_per_unit: how many rows a unit has.
            ranks: who share the passes.
        """
        lengths_UR = lengths_B.view(-1, rows_per_unit)
        longest_U = lengths_UR.amax(dim=1)
        if self.tokens is None:
            return list(by_length(longest_U, self.units or max(1, len(longest_U))))
        order_U = torch.argsort(longest_U, descending=True, stable=True)
        units = [self._unit(lengths) for lengths in lengths_UR[order_U].tolist()]
        if self.packed:
            return [order_U[part] for part in self._mixed(units, ranks)]
        fewest = len(self._sizes(units))
        wanted = min(-(-fewest // ranks) * ranks, len(units))
        return list(order_U.split(self._even(units, wanted))) if units else []

    def _mixed(self, units: list[_Part], ranks: int) -> list[list[int]]:
        """Passes of any lengths, the most expensive first: each unit joins the cheapest pass that has room for it."""
        limit, count = self.tokens or 1, len(units)
        least = -(-sum(min(unit.tokens, limit) for unit in units) // limit)
        least = max(least, sum(2 * unit.tokens > limit for unit in units))  # no two of these share a pass
        if self.units is not None:
            least = max(least, -(-count // self.units))
        for passes in range(-(-least // ranks) * ranks, count, ranks):
            parts = self._filled(units, passes)
            if parts is not None:
                return parts
        return [[number] for number in range(count)]

    def _filled(self, units: list[_Part], passes: int) -> list[list[int]] | None:
        """The same for a number of passes; None if some unit finds no room.

        A pass without room waits until a unit comes that is short enough: mostly once, as the longest come first.
        """
        most, room, costs = self.units or len(units), [self.tokens or 0] * passes, [0] * passes
        parts: list[list[int]] = [[] for _ in range(passes)]
        cheapest, waiting = [(0, place) for place in range(passes)], list[tuple[int, int]]()
        for number, unit in enumerate(units):
            while waiting and -waiting[0][0] >= unit.tokens:
                place = heappop(waiting)[1]
                heappush(cheapest, (costs[place], place))
            while cheapest and parts[place := cheapest[0][1]] and room[place] < unit.tokens:
                heappop(cheapest)
                heappush(waiting, (-room[place], place))
            if not cheapest:
                return None
            _, place = heappop(cheapest)
            parts[place].append(number)
            room[place] -= unit.tokens
            costs[place] += unit.cost
            if len(parts[place]) < most:
                heappush(cheapest, (costs[place], place))
        return [parts[place] for _, place in sorted(zip(costs, range(passes), strict=True), reverse=True)]

    def _even(self, units: list[_Part], wanted: int) -> list[int]:
        """Sizes of at most ``wanted`` passes, the most expensive of which is nearly as cheap as can be."""
        low, high = 0, self._joined(units).cost
        sizes = self._sizes(units)
        while high - low > 1 + high // 1000:
            limit = (low + high) // 2
            found = self._sizes(units, limit)
            if len(found) <= wanted:
                sizes, high = found, limit
            else:
                low = limit
        return sizes

    def _sizes(self, units: list[_Part], most: int | None = None) -> list[int]:
        """How many units each pass has, if they are filled in order up to the limits, and to a cost."""
        sizes, part = [], _NOTHING
        for unit in units:
            longer = self._joined([part, unit])
            if part.units and self._exceeds(longer, most):
                sizes.append(part.units)
                longer = unit
            part = longer
        return [*sizes, part.units] if units else sizes

    def _exceeds(self, part: _Part, most: int | None) -> bool:
        many = self.units is not None and part.units > self.units
        return many or part.tokens > (self.tokens or 0) or (most is not None and part.cost > most)

    def _unit(self, lengths: list[int]) -> _Part:
        longest = max(lengths)
        each = lengths if self.packed else [longest] * len(lengths)
        return _Part(1, len(lengths), longest, sum(each), sum(map(self._cost, each)))

    def _joined(self, parts: list[_Part]) -> _Part:
        """One pass with all these units, the first of which are the longest."""
        units, rows, longest = (
            sum(part.units for part in parts),
            sum(part.rows for part in parts),
            max(part.longest for part in parts),
        )
        if self.packed:
            return _Part(units, rows, longest, sum(part.tokens for part in parts), sum(part.cost for part in parts))
        return _Part(units, rows, longest, rows * longest, rows * self._cost(longest))

    def _cost(self, length: int) -> int:
        """Of a row: 12 squares of the width for a token in each layer, and the width for each token that it sees."""
        return length * (12 * self.width + length)


class _Part(NamedTuple):
    """Units that share a pass, or one of them."""

    units: int
    rows: int
    longest: int
    tokens: int
    cost: int


_NOTHING = _Part(0, 0, 0, 0, 0)
