"""Bets on bounded numbers: a test of a mean that may be read after every observation, whatever their distribution.

Who bets on x - null, at odds that are fair if the mean of x is null, does not grow rich if the mean is not above: the
wealth is a supermartingale, so the chance that it ever reaches 1 / error is at most error (Ville, 1939). Nothing is
assumed of x but its lower end, and that observations are independent: Waudby-Smith and Ramdas, "Estimating means of
bounded random variables by betting", arXiv 2010.09686, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from async_rlhf.studies.certify.sequential import Decision, Look, look

FRACTIONS = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Bets, as shares of the largest that cannot lose more than there is. Each has a part of the wealth at the start."""


class Question(NamedTuple):
    """What was fixed before the first pair."""

    staleness: int
    margin: float
    error: float
    min_pairs: int
    bound: float
    """A pair that loses more is a breakdown. In the mean it counts as a loss of this; a gain counts as this at most."""
    breakdown_rate: float
    gain: float | None = None
    """What training has gained, if margin and bound were given as shares of it."""


class Known(NamedTuple):
    """What is known after some pairs."""

    normal: Look
    """What a t-test says, whose error rates are proven if differences are normal."""
    breakdowns: int
    log_mean: float
    """Log of the wealth from bets that the mean difference, within the bound, is above -margin."""
    log_rate: float
    """From bets that fewer pairs than ``breakdown_rate`` break down."""
    log_inferior: float
    """From bets that the mean difference, within the bound, is below -margin."""
    decision: Decision

    @property
    def log_non_inferior(self) -> float:
        """Both have to be so."""
        return min(self.log_mean, self.log_rate)


def log_wealth(x: Sequence[float], null: float, low: float) -> float:
    """Log of the wealth from bets that the mean of ``x`` is above ``null``; ``low`` is the least that x can be."""
    bets_F1 = np.array(FRACTIONS)[:, None] / (null - low)
    with np.errstate(divide="ignore"):  # the largest bet may lose everything
        logs_F = np.log1p(np.maximum(bets_F1 * (np.array(x) - null), -1.0)).sum(axis=1)
    return float(np.logaddexp.reduce(logs_F)) - math.log(len(FRACTIONS))


def known_of(differences: Sequence[float], question: Question) -> Known:
    """What the pairs so far say.

    Args:
        differences: stale minus synchronous, of independent pairs.
        question: what is to be decided.
    """
    bound, margin = question.bound, question.margin
    within = [min(max(difference, -bound), bound) for difference in differences]
    broken = [difference < -bound for difference in differences]
    above = log_wealth(within, -margin, -bound)
    below = log_wealth([-difference for difference in within], margin, -bound)
    rare = log_wealth([-float(breakdown) for breakdown in broken], -question.breakdown_rate, -1.0)
    decision: Decision = "undecided"
    if len(differences) >= question.min_pairs:
        decision = "non-inferior" if min(above, rare) >= -math.log(question.error) else decision
        decision = "inferior" if below >= -math.log(question.error) else decision
    normal = look(differences, margin, question.error, question.min_pairs)
    return Known(normal, sum(broken), above, rare, below, decision)


def fewest_pairs(question: Question) -> int:
    """Pairs, none of which breaks down, before which nothing can be called non-inferior."""
    number = 1
    while log_wealth([0.0] * number, -question.breakdown_rate, -1.0) < -math.log(question.error):
        number += 1
    return max(number, question.min_pairs)
