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
from scipy.special import gammaln, logsumexp

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
        self._all, self._recent = _no_ranks(), _no_ranks()
        """For each of the two kinds of rank, the count in each bin of [0, 1); and the same for the batches of this
        window."""
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
            ranks: of the compared tokens, in [0, 1): a sequence for each of two ways of ordering the vocabulary; empty
                if nothing of this batch was compared. It then counts for the bet on copies alone.
            groups: all completions of the batch.
            tokens: where the compared ones are; without them there are no bets on classes.

        Returns:
            The evidence: at :data:`LIMIT` a right sampler is ruled out.
        """
        if ranks:
            if self._batches % WINDOW == 0:
                self._recent, self._recent_classes, self._copies = _no_ranks(), _no_classes(), 0.0
            self._batches += 1
            ranks_KN = np.asarray(ranks, dtype=np.float64)
            for kind, ranks_N in enumerate(ranks_KN):
                _count((self._all, self._recent), np.full(len(ranks_N), kind), ranks_N)
            if tokens:
                prompts_N, _, positions_N = np.asarray(tokens).T
                both = self._all_classes, self._recent_classes
                # By position, each class twice as long as the one before, and by prompt.
                _count(both, np.minimum(np.frexp(positions_N)[1], _CLASSES - 1), ranks_KN[0])
                _count(both, _CLASSES + prompts_N % _CLASSES, ranks_KN[0])
                distances = np.asarray(self._distances(tokens, ranks_KN[-1].tolist()))
                _count(both, np.full(len(distances), -1), distances)
        self._copies += _bet_on_copies(groups)
        window = max(0, self._batches - 1) // WINDOW + 1
        # All windows together have the false-alarm chance of one: the sum of 1 / w^2 is pi^2 / 6.
        handicap = math.log10(window**2 * math.pi**2 / 6)
        recent = _not_uniform(self._recent, self._recent_classes)
        return max(_not_uniform(self._all, self._all_classes), recent - handicap, self._copies - handicap)

    def _distances(self, tokens: Sequence[Where], ranks: Sequence[float]) -> list[float]:
        """From the last rank in the same place, round the circle, as shares of the longest; uniform if ranks are."""
        distances = []
        for token, rank in zip(tokens, ranks, strict=True):
            key = f"{token.prompt}.{token.sample}"
            if token.position >= _TOKENS or (key not in self._last and len(self._last) == _ROWS):
                continue
            last = self._last.setdefault(key, [-1.0] * _TOKENS)
            before, last[token.position] = last[token.position], round(rank, 3)
            way = abs(rank - before)
            distances += [] if before < 0 else [2 * min(way, 1 - way)]
        return distances

    def state(self) -> dict[str, Any]:
        """The state, for JSON."""
        return {
            "all": self._all.tolist(),
            "recent": self._recent.tolist(),
            "classes": [self._all_classes.tolist(), self._recent_classes.tolist()],
            "last": self._last,
            "copies": self._copies,
            "batches": self._batches,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned. Bettors that an older version did not have begin anew."""
        # An older version had no bins before the first comparison.
        self._all, self._recent = (np.asarray(state[key]) if state[key] else _no_ranks() for key in ("all", "recent"))
        self._all_classes, self._recent_classes = map(
            np.asarray, state.get("classes") or (_no_classes(), _no_classes())
        )
        self._last = state.get("last", {})
        self._copies, self._batches = state["copies"], state["batches"]


def _no_ranks() -> np.ndarray:
    """No counts of either kind of rank."""
    return np.zeros((2, BINS), dtype=np.int64)


def _no_classes() -> np.ndarray:
    """No counts: of classes by position, of classes by prompt, and of distances."""
    return np.zeros((2 * _CLASSES + 1, _CLASS_BINS), dtype=np.int64)


def _count(all_counts: Sequence[np.ndarray], rows_N: np.ndarray, values_N: np.ndarray) -> None:
    """Add values in [0, 1) to the bins of these rows."""
    for counts_CB in all_counts:
        bins = counts_CB.shape[1]
        np.add.at(counts_CB, (rows_N, np.minimum((values_N * bins).astype(np.int64), bins - 1)), 1)


def _not_uniform(counts_KB: np.ndarray, counts_CB: np.ndarray) -> float:
    """log10 of the mean wealth of bettors, one per partition of [0, 1), that learn where the ranks fall."""
    whole, of_classes = _log_mean_gain(counts_KB), _log_mean_gain(counts_CB)
    return float(logsumexp([math.log(1 - _ON_CLASSES) + whole, math.log(_ON_CLASSES) + of_classes])) / math.log(10)


def _log_mean_gain(counts_CB: np.ndarray) -> float:
    """Log of the mean gain of the bettors on each row of counts, one for each partition."""
    rows, most = counts_CB.shape
    gains = [_log_gains(counts_CB.reshape(rows, bins, -1).sum(axis=2)) for bins in _PARTITIONS if bins <= most]
    return float(logsumexp(gains)) - math.log(rows * len(gains))


def _log_gains(counts_CM: np.ndarray) -> np.ndarray:
    """(C,): log of the product of m q(bin) over all ranks: m bins, q what a bettor has learnt from the ranks before.

    Each bin starts at 1/2 (Krichevsky and Trofimov, 1981). The order does not matter, so the counts are enough.
    """
    bins, total_C = counts_CM.shape[1], counts_CM.sum(axis=1)
    gains_C = gammaln(bins / 2) - gammaln(total_C + bins / 2) + total_C * math.log(bins)
    return gains_C + (gammaln(counts_CM + 0.5) - gammaln(0.5)).sum(axis=1)


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
    won = math.log(_STAKE) + float(logsumexp(copies)) - math.log(pairs)
    return float(logsumexp([kept, won])) / math.log(10)
