"""Evidence that tokens were not drawn as they should have been: sequential tests, valid after every batch.

Each test is a bet against the sampler. The bettor's wealth starts at 1. If the sampler is right, the wealth is never
expected to grow, however the bets are chosen; so the chance that it ever reaches 1 / a is at most a (Ville's
inequality; Shafer, "Testing by betting", 2021). Its logarithm to base 10 is the evidence, and may stop a run any time.

There are bets on two things. Ranks: a drawn token's place in the cumulative distribution, taken as a random point of
its interval, is uniform on [0, 1) (Rosenblatt, 1952), whatever the model and the prompt. Copies: of two completions of
one prompt, the second equals the first with the first one's probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from async_rlhf.types import Group

FALSE_ALARMS = 6e-5
"""Largest share of runs with a right sampler that this evidence ever stops; each of three tests has a third of it."""
WINDOW = 32
"""Compared batches after which a bettor starts anew, so that a good past does not outweigh a late fault."""
BINS = 32
_PARTITIONS = (2, 4, 8, 16, 32)
_STAKE = 0.05
"""Share of its wealth that the bettor on copies stakes on each batch."""

LIMIT = -math.log10(FALSE_ALARMS / 3)
"""The evidence that stops a run."""


class Evidence:
    """The evidence of the batches so far against the sampler. :meth:`state` keeps it across a resume."""

    def __init__(self) -> None:
        self._all: list[list[int]] = []
        """For each kind of rank, the count in each bin of [0, 1)."""
        self._recent: list[list[int]] = []
        """The same for the batches of this window."""
        self._copies = 0.0
        """log10 of the wealth of the bettor on copies in this window."""
        self._batches = 0

    def add(self, ranks: Sequence[Sequence[float]], groups: Sequence[Group]) -> float:
        """Add a batch.

        Args:
            ranks: of the compared tokens, in [0, 1): a sequence for each way of ordering the vocabulary; empty if
                nothing of this batch was compared. It then counts for the bet on copies alone.
            groups: all completions of the batch.

        Returns:
            The evidence: at :data:`LIMIT` a right sampler is ruled out.
        """
        if ranks:
            if self._batches % WINDOW == 0:
                self._recent, self._copies = [], 0.0
            self._batches += 1
            for counts in (self._all, self._recent):
                if not counts:
                    counts += [[0] * BINS for _ in ranks]
                for counts_of_one, values in zip(counts, ranks, strict=True):
                    for value in values:
                        counts_of_one[min(int(value * BINS), BINS - 1)] += 1
        self._copies += _bet_on_copies(groups)
        window = max(0, self._batches - 1) // WINDOW + 1
        # All windows together have the false-alarm chance of one: the sum of 1 / w^2 is pi^2 / 6.
        handicap = math.log10(window**2 * math.pi**2 / 6)
        return max(_not_uniform(self._all), _not_uniform(self._recent) - handicap, self._copies - handicap)

    def state(self) -> dict[str, Any]:
        """The state, for JSON."""
        return {"all": self._all, "recent": self._recent, "copies": self._copies, "batches": self._batches}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self._all, self._recent = state["all"], state["recent"]
        self._copies, self._batches = state["copies"], state["batches"]


def _not_uniform(counts: Sequence[Sequence[int]]) -> float:
    """log10 of the mean wealth of bettors, one per partition of [0, 1), that learn where the ranks fall."""
    logs = [_log_gain(_merged(one, bins)) for one in counts for bins in _PARTITIONS]
    return (_log_sum(logs) - math.log(len(logs))) / math.log(10) if logs else 0.0


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
