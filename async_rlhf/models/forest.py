"""Texts that begin alike, as one sequence in which what they share stands once: a forest.

The K samples of a prompt share the prompt, both sides of a pair do, and so do conversations that fork. Sorted, each
text shares the most with the one before it; what it adds is a branch, which goes on from a place in the sequence.
Everything in a model but attention treats a token by itself and knows its position. So a branch is computed as in a
text of its own if its positions go on from that place, and if it attends to the text's beginning and to itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from async_rlhf.distributed.collectives import WHOLE, ContextGroup
from async_rlhf.models.rows import moved

Range: TypeAlias = tuple[int, int]
"""Start and stop of tokens of a sequence that follow one another."""
LEAST = 4
"""Tokens that texts share before it pays: each branch takes a call of attention, or a part of one."""
CALL = 4096
"""What a call of attention costs by itself, in pairs of tokens."""


def walk(texts: Sequence[np.ndarray], least: int = LEAST) -> tuple[list[int], list[int]]:
    """The texts in an order in which each shares the most with the one before.

    Args:
        texts: (T,) each, of any type whose elements can be compared.
        least: tokens that must be shared.

    Returns:
        Indices of the texts, and how many of its first tokens each shares with the one before it.
    """
    names = [text.tobytes() for text in texts]
    order = sorted(range(len(texts)), key=names.__getitem__)
    alike = [_alike(texts[a], texts[b]) for a, b in pairwise(order)]
    return order, [0, *(n if n >= least else 0 for n in alike)][: len(order)]


def _alike(first: np.ndarray, other: np.ndarray) -> int:
    """How many first elements are equal."""
    shorter = min(len(first), len(other))
    (different,) = np.nonzero(first[:shorter] != other[:shorter])
    return int(different[0]) if len(different) else shorter


def size_of(texts: Sequence[np.ndarray]) -> int:
    """How many tokens the forest of these texts has."""
    return sum(map(len, texts)) - sum(walk(texts)[1])


class Branch(NamedTuple):
    """Tokens that follow one another."""

    start: int
    """Place in the sequence."""
    length: int
    before: tuple[Range, ...]
    """The tokens that it goes on from, in their order: it attends to these and to its own."""

    @property
    def position(self) -> int:
        """Of its first token in the text."""
        return sum(stop - start for start, stop in self.before)


def grown(lengths: Iterable[int], alike: Iterable[int]) -> tuple[list[Branch], list[list[Range]]]:
    """The branches of a walk, and the tokens of each of its texts as ranges of the sequence."""
    branches, texts = list[Branch](), list[list[Range]]()
    path, end = list[Range](), 0
    for length, shared in zip(lengths, alike, strict=True):
        path, new = _first(path, shared), length - shared
        if new and path and path[-1][1] == end:  # it goes on where the last branch ends
            branches[-1] = branches[-1]._replace(length=branches[-1].length + new)
            path = [*path[:-1], (path[-1][0], end + new)]
        elif new:
            branches.append(Branch(end, new, tuple(path)))
            path = [*path, (end, end + new)]
        end += new
        texts.append(path)
    return branches, texts


def _first(path: list[Range], count: int) -> list[Range]:
    """The first tokens of a path."""
    ranges = list[Range]()
    for start, stop in path:
        if count <= 0:
            break
        ranges.append((start, min(stop, start + count)))
        count -= stop - start
    return ranges


class Call(NamedTuple):
    """Branches whose attention is computed at once: tokens that follow one another."""

    length: int
    outside: tuple[Range, ...]
    """What some of them attend to besides these tokens, all of it before them."""
    branches: tuple[Branch, ...]

    @property
    def is_causal(self) -> bool:
        """Whether each token attends to itself and all before it."""
        return not self.outside and len(self.branches) == 1

    @property
    def cost(self) -> float:
        keys = self.length + sum(stop - start for start, stop in self.outside)
        return CALL + self.length * keys / (2 if self.is_causal else 1)

    def joined(self, other: Call) -> Call:
        """This and the next."""
        start = self.branches[0].start
        ranges = sorted({*self.outside, *(r for r in other.outside if r[1] <= start)})
        outside = list[Range]()
        for first, stop in ranges:
            if outside and first <= outside[-1][1]:
                outside[-1] = (outside[-1][0], max(outside[-1][1], stop))
            else:
                outside.append((first, stop))
        return Call(self.length + other.length, tuple(outside), self.branches + other.branches)


class Forest:
    """Which tokens of a sequence each of them attends to.

    Compiled code looks at no attribute of such an object that it does not use. Of a tuple it would look at all, and the
    branches are as many as there are texts: there would be a graph for each number of them. A dataclass would be taken
    apart by what shards models.

    Args:
        branches: of the whole sequence.
        device: where the model computes.
        context: the ranks that share the sequence.
    """

    def __init__(self, branches: list[Branch], device: torch.device, context: ContextGroup = WHOLE) -> None:
        def bounds(lengths: Iterable[int]) -> Tensor:
            numbers = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            return moved(numbers, device)

        self.branches, self.device, self.context = branches, device, context
        keys = [branch.length + branch.position for branch in branches]
        self.longest = max(branch.length for branch in branches)
        """Tokens of a branch."""
        self.longest_keys = max(keys)
        self.starts = self.key_starts = bounds(branch.length for branch in branches)
        """Where each branch begins, and where the last one ends: int32, on the device; and where its keys begin."""
        self.keys: Tensor | None = None
        """The tokens that each branch attends to, branch by branch; None if each attends to itself alone."""
        self._masks: dict[object, Tensor | None] = {}
        if any(branch.before for branch in branches):
            ranges = [r for b in branches for r in (*b.before, (b.start, b.start + b.length))]
            places = torch.from_numpy(np.concatenate([np.arange(*r) for r in ranges]))
            self.keys, self.key_starts = moved(places, device), bounds(keys)

    def with_text(self, length: int) -> Forest:
        """The same, followed by a text of so many tokens."""
        last = self.branches[-1]
        branches = [*self.branches, Branch(last.start + last.length, length, ())] if length else self.branches
        return Forest(branches, self.device, self.context)

    def shared_by(self, context: ContextGroup) -> Forest:
        """The same for other ranks."""
        return Forest(self.branches, self.device, context)

    @cached_property
    def whole(self) -> Forest:
        """The same for a rank that has all of it."""
        return self.shared_by(WHOLE)

    @cached_property
    def calls(self) -> list[Call]:
        """Of attention, for all branches: short ones that follow one another share a call."""
        calls = list[Call]()
        for branch in self.branches:
            call = Call(branch.length, branch.before, (branch,))
            both = calls[-1].joined(call) if calls else call
            if calls and both.cost <= calls[-1].cost + call.cost:
                calls[-1] = both
            else:
                calls.append(call)
        return calls

    @cached_property
    def cuts(self) -> list[int]:
        """Where the sequence is cut into pieces, of which what calls attend to outside themselves consists."""
        end = self.branches[-1].start + self.branches[-1].length
        return sorted({0, end, *(bound for call in self.calls for r in call.outside for bound in r)})

    def pieces(self, call: Call) -> list[int]:
        """Numbers of those pieces that a call attends to outside itself."""
        cuts = self.cuts
        return [n for a, b in call.outside for n in range(bisect_left(cuts, a), bisect_left(cuts, b))]

    def mask(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """(1, 1, Q, K): 0 where a call's tokens attend, and -inf elsewhere; None where each attends to all before it.

        Args:
            number: of the call.
            window: how many positions back a token attends, itself counted; None for any number.
            dtype: of the queries.
        """
        key = number, window, dtype
        if key not in self._masks:
            seen = _seen(self.calls[number], window)
            if seen is not None:
                bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)[None, None]
                seen = moved(bias, self.device)
            self._masks[key] = seen
        return self._masks[key]


def _seen(call: Call, window: int | None) -> Tensor | None:
    """(Q, K) bool: which tokens outside the call, and of the call, each of its tokens attends to."""
    if call.is_causal and (window is None or call.length <= window):
        return None
    start, stop = call.branches[0].start, call.branches[0].start + call.length
    ranges = [*call.outside, (start, stop)]
    columns = dict(zip((r[0] for r in ranges), accumulate((b - a for a, b in ranges), initial=0), strict=False))
    seen = torch.zeros(call.length, sum(b - a for a, b in ranges), dtype=torch.bool)
    firsts = sorted(columns)
    for branch in call.branches:
        rows, position = slice(branch.start - start, branch.start - start + branch.length), 0
        positions = torch.arange(branch.position, branch.position + branch.length)[:, None]
        for a, b in (*branch.before, (branch.start, branch.start + branch.length)):
            first = firsts[bisect_left(firsts, a + 1) - 1]
            here = slice(columns[first] + a - first, columns[first] + b - first)
            distance = positions - torch.arange(position, position + b - a)
            seen[rows, here] = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            position += b - a
    return seen
