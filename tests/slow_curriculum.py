"""Which prompts a curriculum draws, by loops, from all scores so far: what data/curriculum.py is held against."""

from __future__ import annotations

import math
from collections.abc import Sequence

from numpy.random import Generator, Philox

Noted = Sequence[tuple[int, Sequence[float]]]
"""Of each prompt of a batch: its number in the stream, and the scores of its completions."""


def spreads_after(batches: Sequence[Noted], prompts: int) -> list[float | None]:
    """Of each prompt; None if it has not come."""
    spreads: list[float | None] = [None] * prompts
    for batch in batches:
        found = [(number, deviation(scores)) for number, scores in batch if not any(map(math.isnan, scores))]
        known = [spread for spread in spreads if spread is not None] or [spread for _, spread in found]
        for number, spread in found:
            before = spreads[number]
            spreads[number] = ((sum(known) / len(known) if before is None else before) + spread) / 2
    return spreads


def deviation(scores: Sequence[float]) -> float:
    mean = sum(scores) / len(scores)
    return math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))


def chances(batches: Sequence[Noted], prompts: int, share: float) -> list[float]:
    """Of each prompt to be the next."""
    spreads = spreads_after(batches, prompts)
    known = [spread for spread in spreads if spread is not None]
    if sum(known) == 0:
        return [1 / prompts] * prompts
    filled = [sum(known) / len(known) if spread is None else spread for spread in spreads]
    return [(1 - share) / prompts + share * spread / sum(filled) for spread in filled]


def drawn(index: int, size: int, seed: int, batches: Sequence[Noted], prompts: int, share: float) -> list[int]:
    """The prompts of a batch, by their numbers: those on which ``size`` points at equal distances fall if all prompts
    lie one behind the other, in a random order, each as long as it is likely.
    """
    random = Generator(Philox(key=[seed, 2**32 + index]))
    order, likely = random.permutation(prompts).tolist(), chances(batches, prompts, share)
    offset, found = random.random(), []
    for i in range(size):
        left, place = (i + offset) / size, 0
        while left >= likely[order[place]] and place < prompts - 1:
            left -= likely[order[place]]
            place += 1
        found.append(order[place])
    return found
