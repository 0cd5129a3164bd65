"""Evidence that tokens were not drawn as they should have been: tests that may be looked at after every batch.

Each test is a bet against the sampler. What a bettor owns starts at 1. If the sampler is right, it is never expected to
grow, however the bets are chosen; so the chance that it ever reaches 1 / a is at most a (Ville's inequality; Shafer,
"Testing by betting", 2021). Its logarithm to base 10 is the evidence, which may stop a run at any moment.

Two things are bet on. The tokens' ranks: a drawn token's place in the cumulative distribution, a random point of the
token's own probability, is uniform on [0, 1) (Rosenblatt, 1952), whatever the model and the prompt. And copies: of two
completions of one prompt the second equals the first with the first one's probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from async_rlhf.types import Group

FALSE_ALARMS = 6e-5
"""Most of the runs with a right sampler that this evidence ever stops; each of three tests has a third of them."""
WINDOW = 32
"""Batches after which a bettor forgets what it has seen: a fault that comes late is not outvoted by a good past."""
BINS = 32
_PARTITIONS = (2, 4, 8, 16, 32)
_STAKE = 0.05
"""Share of its fortune that the bettor on copies stakes on each batch."""

LIMIT = -math.log10(FALSE_ALARMS / 3)
"""The evidence that stops a run."""


class Evidence:
    """What the batches so far say against the sampler. Kept over a resume by :meth:`state`."""

    def __init__(self) -> None:
        self._all: list[list[int]] = []
        """For each kind of rank, how many fell into each of the bins of [0, 1)."""
        self._recent: list[list[int]] = []
        """The same for the batches of this window."""
        self._copies = 0.0
        """log10 of what the bettor on copies owns in this window."""
        self._batches = 0

    def add(self, ranks: Sequence[Sequence[float]], groups: Sequence[Group]) -> float:
        """Take a batch into account.

        Args:
            ranks: of the compared tokens, in [0, 1): a sequence for each way of ordering the vocabulary.
            groups: all completions of the batch.

        Returns:
            The evidence: at :data:`LIMIT` a right sampler is ruled out.
        """
        if self._batches % WINDOW == 0:
            self._recent, self._copies = [], 0.0
        for counts in (self._all, self._recent):
            if not counts:
                counts += [[0] * BINS for _ in ranks]
            for counts_of_one, values in zip(counts, ranks, strict=True):
                for value in values:
                    counts_of_one[min(int(value * BINS), BINS - 1)] += 1
        self._copies += _bet_on_copies(groups)
        window = self._batches // WINDOW + 1
        self._batches += 1
        # Over all windows together the chance of a false alarm is that of one: the sum of 1 / w^2 is pi^2 / 6.
        handicap = math.log10(window**2 * math.pi**2 / 6)
        return max(_not_uniform(self._all), _not_uniform(self._recent) - handicap, self._copies - handicap)

    def state(self) -> dict[str, Any]:
        """For JSON."""
        return {"all": self._all, "recent": self._recent, "copies": self._copies, "batches": self._batches}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        self._all, self._recent = state["all"], state["recent"]
        self._copies, self._batches = state["copies"], state["batches"]


def _not_uniform(counts: Sequence[Sequence[int]]) -> float:
    """log10 of what is owned by bettors that learn, for each partition of [0, 1), where the ranks fall; on average."""
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
    """log10 of what the bettor's fortune is multiplied by.

    The second of two completions, drawn by the same weights, equals the first with its probability p: 1 / p where it
    does and 0 where it does not is 1 on average, and so is the mean over pairs.
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
