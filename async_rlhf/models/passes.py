"""Which rows share a forward pass: at most so many rows, or so many tokens, and as much work for each rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

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
        if self.packed:
            return [order_U[part] for part in self._mixed(lengths_UR[order_U].tolist(), ranks)]
        longest = longest_U[order_U].tolist()
        fewest = len(self._sizes(longest, rows_per_unit, math.inf))
        wanted = min(-(-fewest // ranks) * ranks, len(longest))
        return list(order_U.split(self._even(longest, rows_per_unit, wanted))) if longest else []

    def _mixed(self, lengths: list[list[int]], ranks: int) -> list[list[int]]:
        """Passes of any lengths, the most expensive first: each unit joins the cheapest pass that has room for it."""
        tokens, limit, count = [sum(each) for each in lengths], self.tokens or 1, len(lengths)
        least = -(-sum(min(each, limit) for each in tokens) // limit)
        least = max(least, sum(2 * each > limit for each in tokens))  # no two of these share a pass
        if self.units is not None:
            least = max(least, -(-count // self.units))
        units = list(zip(tokens, (sum(map(self._cost, each)) for each in lengths), strict=True))
        for passes in range(-(-least // ranks) * ranks, count, ranks):
            parts = self._filled(units, passes)
            if parts is not None:
                return parts
        return [[number] for number in range(count)]

    def _filled(self, units: list[tuple[int, int]], passes: int) -> list[list[int]] | None:
        """The same for a number of passes, of tokens and cost of each unit; None if some unit finds no room.

        A pass without room waits until a unit comes that is short enough: mostly once, as the longest come first.
        """
        most, room, costs = self.units or len(units), [self.tokens or 0] * passes, [0] * passes
        parts: list[list[int]] = [[] for _ in range(passes)]
        cheapest, waiting = [(0, place) for place in range(passes)], list[tuple[int, int]]()
        for number, (tokens, cost) in enumerate(units):
            while waiting and -waiting[0][0] >= tokens:
                place = heappop(waiting)[1]
                heappush(cheapest, (costs[place], place))
            while cheapest and parts[place := cheapest[0][1]] and room[place] < tokens:
                heappop(cheapest)
                heappush(waiting, (-room[place], place))
            if not cheapest:
                return None
            _, place = heappop(cheapest)
            parts[place].append(number)
            room[place] -= tokens
            costs[place] += cost
            if len(parts[place]) < most:
                heappush(cheapest, (costs[place], place))
        return [parts[place] for _, place in sorted(zip(costs, range(passes), strict=True), reverse=True)]

    def _even(self, longest: list[int], rows: int, wanted: int) -> list[int]:
        """Sizes of at most ``wanted`` passes, the most expensive of which is nearly as cheap as can be."""
        low, high = 0, len(longest) * rows * self._cost(longest[0])
        sizes = self._sizes(longest, rows, math.inf)
        while high - low > 1 + high // 1000:
            limit = (low + high) // 2
            found = self._sizes(longest, rows, limit)
            if len(found) <= wanted:
                sizes, high = found, limit
            else:
                low = limit
        return sizes

    def _sizes(self, longest: list[int], rows: int, most: float) -> list[int]:
        """How many units each padded pass has, if they are filled in order up to the limits, and to a cost.

        Args:
            longest: tokens of the longest row of each unit, descending.
            rows: of a unit.
            most: the cost.
        """
        starts = [0]
        for number in range(1, len(longest)):
            units, length = number + 1 - starts[-1], longest[starts[-1]]
            many = self.units is not None and units > self.units
            if many or units * rows * length > (self.tokens or 0) or units * rows * self._cost(length) > most:
                starts.append(number)
        return [end - start for start, end in pairwise([*starts, len(longest)])]

    def _cost(self, length: int) -> int:
        """Of a row: 12 squares of the width for a token in each layer, and the width for each token that it sees."""
        return length * (12 * self.width + length)
