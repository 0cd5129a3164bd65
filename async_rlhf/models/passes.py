"""Which rows share a forward pass: at most so many rows, or so many tokens, and as much work for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rlhf.models.forest import size_of, walk
from async_rlhf.models.rows import by_length


class _Unit(NamedTuple):
    """Rows that belong together, and what they add to a pass."""

    number: int
    tokens: int
    cost: int
    more: int
    """Tokens, after the unit before."""
    more_cost: int
    keys: int
    """That its tokens attend to, at most: all tokens of its rows."""


class _Piece(NamedTuple):
    """Units that begin alike, in a pass that has the beginning once."""

    units: list[int]
    tokens: int
    cost: int
    keys: int


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
    shared: bool = False
    """Whether what packed rows have in common at their beginning is computed once."""
    keys: float = math.inf
    """At most so many keys for each token of the limit: attention's kernel copies those of every branch."""

    def split(
        self,
        lengths_B: Tensor,
        rows_per_unit: int = 1,
        ranks: int = 1,
        texts: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> list[Tensor]:
        """The units of each pass: those that begin alike together, padded those of similar length; the longest first.

        With a limit on tokens, passes cost about the same, and if possible there are as many for each rank. So a round,
        in which each rank has one pass, keeps no rank waiting.

        Args:
            lengths_B: tokens of each row, at least 1; those of a unit are adjacent. On the CPU.
            rows_per_unit: how many rows a unit has.
            ranks: who share the passes.
            texts: of each row; needed if what they have in common is computed once.
        """
        lengths_UR = lengths_B.view(-1, rows_per_unit)
        longest_U = lengths_UR.amax(dim=1)
        trees = list[list[_Unit]]()
        if self.packed:
            trees = self._trees(lengths_UR.tolist(), texts if self.shared else None)
        if self.tokens is None:
            if trees and self.shared:
                order = [unit.number for tree in trees for unit in tree]
                return list(torch.tensor(order).split(self.units or len(order)))
            return list(by_length(longest_U, self.units or max(1, len(longest_U))))
        if self.packed:
            return [torch.tensor(part) for part in self._mixed(trees, ranks)]
        order_U = torch.argsort(longest_U, descending=True, stable=True)
        longest = longest_U[order_U].tolist()
        fewest = len(self._sizes(longest, rows_per_unit, math.inf))
        wanted = min(-(-fewest // ranks) * ranks, len(longest))
        return list(order_U.split(self._even(longest, rows_per_unit, wanted))) if longest else []

    def _trees(self, lengths: list[list[int]], texts: Sequence[Sequence[np.ndarray]] | None) -> list[list[_Unit]]:
        """Units that begin alike, in an order in which each shares the most with the one before."""
        trees, rows, last = list[list[_Unit]](), len(lengths[0]) if lengths else 1, list[np.ndarray]()
        units = [[*chain(*texts[n * rows : (n + 1) * rows])] for n in range(len(lengths))] if texts else []
        order, alike = walk([unit[0] for unit in units]) if texts else (range(len(lengths)), [0] * len(lengths))
        for number, shared in zip(order, alike, strict=True):
            tokens, whole = sum(lengths[number]), sum(map(self._cost, lengths[number]))
            alone, more = tokens, tokens - shared
            if texts and len(units[number]) + len(last) > 2:
                alone, more = size_of(units[number]), size_of([*last, *units[number]]) - size_of(last)
            last = units[number] if texts else last
            if more == alone or not trees:
                trees.append([])
            # What is shared costs nothing; the rest looks at as many tokens as alone.
            trees[-1].append(_Unit(number, alone, whole * alone // tokens, more, whole * more // tokens, tokens))
        return trees

    def _cut(self, tree: list[_Unit], most: float) -> list[_Piece]:
        """A tree in pieces of at most so many tokens; of a unit that has more by itself, a piece of its own. A piece
        counts as many tokens as its keys ask for, if it has fewer.
        """
        pieces = list[_Piece]()
        for unit in tree:
            last = pieces[-1] if pieces else None
            tokens, keys = (last.tokens + unit.more, last.keys + unit.keys) if last else (0, 0)
            if last and max(tokens, keys / self.keys) <= most and len(last.units) < (self.units or math.inf):
                pieces[-1] = _Piece([*last.units, unit.number], tokens, last.cost + unit.more_cost, keys)
            else:
                pieces.append(_Piece([unit.number], unit.tokens, unit.cost, unit.keys))
        return [piece._replace(tokens=max(piece.tokens, math.ceil(piece.keys / self.keys))) for piece in pieces]

    def _mixed(self, trees: list[list[_Unit]], ranks: int) -> list[list[int]]:
        """Passes of any lengths, the most expensive first. A tree is cut where it is larger than a pass, and where
        ranks would wait for the one that has it.
        """
        limit, ways = self.tokens or 1, []
        for most in {limit, *(self._even_cut(trees, parts * ranks) for parts in (1, 2, 4) if ranks > 1)}:
            pieces = [piece for tree in trees for piece in self._cut(tree, most)]
            passes = self._joined(sorted(pieces, key=lambda piece: -piece.tokens), ranks)
            ways.append((sum(cost for cost, _ in passes[::ranks]), -most, passes))
        return [units for _, units in min(ways)[2]] if trees else []

    def _even_cut(self, trees: list[list[_Unit]], pieces: int) -> int:
        """The fewest tokens of a piece with which there are so many pieces at most; those of a pass, if there are more
        trees.
        """
        low, high = 0, self.tokens or 1
        while len(trees) <= pieces and high - low > 1:
            middle = (low + high) // 2
            fits = sum(len(self._cut(tree, middle)) for tree in trees) <= pieces
            low, high = (low, middle) if fits else (middle, high)
        return high

    def _joined(self, pieces: list[_Piece], ranks: int) -> list[tuple[int, list[int]]]:
        """Cost and units of passes, the most expensive first: each piece joins the cheapest pass that has room."""
        limit, count = self.tokens or 1, len(pieces)
        least = -(-sum(min(piece.tokens, limit) for piece in pieces) // limit)
        least = max(least, sum(2 * piece.tokens > limit for piece in pieces))  # no two of these share a pass
        if self.units is not None:
            least = max(least, -(-sum(len(piece.units) for piece in pieces) // self.units))
        for passes in range(-(-least // ranks) * ranks, count, ranks):
            parts = self._filled(pieces, passes)
            if parts is not None:
                return parts
        return sorted(((piece.cost, piece.units) for piece in pieces), key=lambda part: -part[0])

    def _filled(self, pieces: list[_Piece], passes: int) -> list[tuple[int, list[int]]] | None:
        """The same for a number of passes; None if some piece finds no room.

        A pass without room waits until a piece comes that is short enough: mostly once, as the largest come first.
        """
        most, room, costs = self.units or math.inf, [self.tokens or 0] * passes, [0] * passes
        parts: list[list[int]] = [[] for _ in range(passes)]
        cheapest, waiting = [(0, number) for number in range(passes)], list[tuple[int, int]]()
        for units, tokens, cost, _ in pieces:
            while waiting and -waiting[0][0] >= tokens:
                place = heappop(waiting)[1]
                heappush(cheapest, (costs[place], place))
            fewer = most - len(units)
            while cheapest and (mine := parts[place := cheapest[0][1]]) and (room[place] < tokens or len(mine) > fewer):
                heappop(cheapest)
                heappush(waiting, (-room[place], place))
            if not cheapest:
                return None
            _, place = heappop(cheapest)
            parts[place] += units
            room[place] -= tokens
            costs[place] += cost
            if len(parts[place]) < most:
                heappush(cheapest, (costs[place], place))
        return sorted(zip(costs, parts, strict=True), key=lambda part: -part[0])

    def _even(self, longest: list[int], rows: int, wanted: int) -> list[int]:
        """Sizes of at most ``wanted`` passes, the most expensive of which is nearly as cheap as can be."""
        low, high = 0, len(longest) * rows * self._cost(longest[0])
        sizes = self._sizes(longest, rows, math.inf)
        while high - low > 1 + high // 1000:
            limit = (low + high) // 2
            smaller = self._sizes(longest, rows, limit)
            if len(smaller) <= wanted:
                sizes, high = smaller, limit
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
