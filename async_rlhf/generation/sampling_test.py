"""Evidence that tokens were not drawn as they should have been: sequential tests, valid after every batch.

Each test is a bet against the sampler. The bettor's wealth starts at 1. If the sampler is right, the wealth is never
expected to grow, however the bets are chosen; so the chance that it ever reaches 1 / a is at most a (Ville's
inequality; Shafer, "Testing by betting", 2021). Its logarithm to base 10 is the evidence, and may stop a run any time.

There are bets on two things. Ranks: a drawn token's place in the cumulative distribution, taken as a random point of
its interval, is uniform on [0, 1) (Rosenblatt, 1952), whatever the model, the prompt and the ranks before. So they are
among all tokens, among those of one class, and as distances from the rank that was last seen in the same place of a
batch. Copies: of two completions of one prompt, the second equals the first with the first one's probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from async_rlhf.types import Group

FALSE_ALARMS = 6e-5
"""Largest share of runs with a right sampler that this evidence ever stops. Three tests have a third of it each: ranks
since the beginning, ranks in a window, and copies in a window. The bettors of a test share what it begins with."""
WINDOW = 32
"""Compared batches after which a bettor starts anew, so that a good past does not outweigh a late fault."""
BINS = 32
_PARTITIONS = (2, 4, 8, 16, 32)
_CLASSES = 16
_CLASS_BINS = 8
_ON_CLASSES = 0.2
"""Share of the wealth that begins with the many bettors on classes: the others find their faults hardly later."""
_ROWS, _TOKENS = 256, 8
"""Ranks are kept of so many places of completions, and of so many first tokens in each: they bound the state."""
_STAKE = 0.05
"""Share of its wealth that the bettor on copies stakes on each batch."""

LIMIT = -math.log10(FALSE_ALARMS / 3)
"""The evidence that stops a run."""


class Where(NamedTuple):
    """Where a compared token is."""

    prompt: int
    """Place of the prompt in the batch."""
    sample: int
    """Its number among the prompt's K samples."""
    position: int
    """In the completion, from 0."""


class SamplingTest:
    """The evidence of the batches so far against the sampler. :meth:`state` keeps it across a resume."""

    def __init__(self) -> None:
        self._all: list[list[int]] = []
        """For each kind of rank, the count in each bin of [0, 1)."""
        self._recent: list[list[int]] = []
        """The same for the batches of this window."""
        self._all_classes, self._recent_classes = _no_classes(), _no_classes()
        """For each class, the same in fewer bins."""
        self._last: dict[str, list[float]] = {}
        """For some places of completions, the last ranks of the first tokens; -1 for none."""
        self._copies = 0.0
        """log10 of the wealth of the bettor on copies in this window."""
        self._batches = 0

    def add(self, ranks: Sequence[Sequence[float]], groups: Sequence[Group], tokens: Sequence[Where] = ()) -> float:
        """Add a batch.

        Args:
            ranks: of the compared tokens, in [0, 1): a sequence for each way of ordering the vocabulary; empty if
                nothing of this batch was compared. It then counts for the bet on copies alone.
            groups: all completions of the batch.
            tokens: where the compared ones are; without them there are no bets on classes.

        Returns:
            The evidence: at :data:`LIMIT` a right sampler is ruled out.
        """
        if ranks:
            if self._batches % WINDOW == 0:
                self._recent, self._recent_classes, self._copies = [], _no_classes(), 0.0
            self._batches += 1
            for counts in (self._all, self._recent):
                if not counts:
                    counts += [[0] * BINS for _ in ranks]
                for counts_of_one, values in zip(counts, ranks, strict=True):
                    for value in values:
                        counts_of_one[min(int(value * BINS), BINS - 1)] += 1
            for i, token in enumerate(tokens):
                found = [(number, ranks[0][i]) for number in _classes_of(token)]
                distance = self._distance(token, ranks[-1][i])
                for number, value in found if distance is None else [*found, (-1, distance)]:
                    for counts in (self._all_classes, self._recent_classes):
                        counts[number][min(int(value * _CLASS_BINS), _CLASS_BINS - 1)] += 1
        self._copies += _bet_on_copies(groups)
        window = max(0, self._batches - 1) // WINDOW + 1
        # All windows together have the false-alarm chance of one: the sum of 1 / w^2 is pi^2 / 6.
        handicap = math.log10(window**2 * math.pi**2 / 6)
        recent = _not_uniform(self._recent, self._recent_classes)
        return max(_not_uniform(self._all, self._all_classes), recent - handicap, self._copies - handicap)

    def _distance(self, token: Where, rank: float) -> float | None:
        """From the last rank in this place, round the circle, as a share of the longest; uniform if the rank is."""
        place = f"{token.prompt}.{token.sample}"
        if token.position >= _TOKENS or (place not in self._last and len(self._last) == _ROWS):
            return None
        last = self._last.setdefault(place, [-1.0] * _TOKENS)
        before, last[token.position] = last[token.position], round(rank, 3)
        way = abs(rank - before)
        return None if before < 0 else 2 * min(way, 1 - way)

    def state(self) -> dict[str, Any]:
        """The state, for JSON."""
        return {
            "all": self._all,
            "recent": self._recent,
            "classes": [self._all_classes, self._recent_classes],
            "last": self._last,
            "copies": self._copies,
            "batches": self._batches,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned. Bettors that an older version did not have begin anew."""
        self._all, self._recent = state["all"], state["recent"]
        self._all_classes, self._recent_classes = state.get("classes") or (_no_classes(), _no_classes())
        self._last = state.get("last", {})
        self._copies, self._batches = state["copies"], state["batches"]


def _classes_of(token: Where) -> list[int]:
    """By position, each class twice as long as the one before, and by prompt."""
    return [min(token.position.bit_length(), _CLASSES - 1), _CLASSES + token.prompt % _CLASSES]


def _no_classes() -> list[list[int]]:
    """No counts: of classes by position, of classes by prompt, and of distances."""
    return [[0] * _CLASS_BINS for _ in range(2 * _CLASSES + 1)]


def _not_uniform(counts: Sequence[Sequence[int]], counts_of_classes: Sequence[Sequence[int]]) -> float:
    """log10 of the mean wealth of bettors, one per partition of [0, 1), that learn where the ranks fall."""
    whole, of_classes = _log_mean_gain(counts), _log_mean_gain(counts_of_classes)
    return _log_sum([math.log(1 - _ON_CLASSES) + whole, math.log(_ON_CLASSES) + of_classes]) / math.log(10)


def _log_mean_gain(counts: Sequence[Sequence[int]]) -> float:
    partitions = ((one, bins) for one in counts for bins in _PARTITIONS if bins <= len(one))
    logs = [_log_gain(_merged(one, bins)) if any(one) else 0.0 for one, bins in partitions]
    return _log_sum(logs) - math.log(len(logs)) if logs else 0.0


def _merged(counts: Sequence[int], bins: int) -> list[int]:
    size = len(counts) // bins
    return [sum(counts[i * size : (i + 1) * size]) for i in range(bins)]


def _log_gain(counts: Sequence[int]) -> float:
    """Log of the product of m q(bin) over all ranks: m bins, q what the bettor has learnt from the ranks before.

    Each bin starts at 1/2 (Krichevsky and Trofimov, 1981). The order does not matter, so the counts are enough.
    """
    bins, total = len(counts), sum(counts)
    gain = math.lgamma(bins / 2) - math.lgamma(total + bins / 2) + total * math.log(bins)
    return gain + sum(math.lgamma(count + 0.5) - math.lgamma(0.5) for count in counts)


def _bet_on_copies(groups: Sequence[Group]) -> float:
    """log10 of the factor on the bettor's wealth.

    The second of two completions, drawn by the same weights, equals the first with the first one's probability p. So a
    bet that pays 1 / p if it does, and else 0, pays 1 on average, and so does the mean over pairs.
    """
    pairs, copies = 0, []
    for group in groups:
        for first, second in pairwise(group.samples):
            shorter = min(len(first), len(second))
            same_weights = np.array_equal(first.versions[:shorter], second.versions[:shorter])
            pairs += same_weights
            if same_weights and np.array_equal(first.tokens, second.tokens):
                copies.append(-float(first.logprobs.sum(dtype=np.float64)))
    if pairs == 0:
        return 0.0
    kept = math.log1p(-_STAKE)
    if not copies:
        return kept / math.log(10)
    won = math.log(_STAKE) + _log_sum(copies) - math.log(pairs)
    return _log_sum([kept, won]) / math.log(10)


def _log_sum(logs: Sequence[float]) -> float:
    largest = max(logs)
    return largest + math.log(sum(math.exp(x - largest) for x in logs))
