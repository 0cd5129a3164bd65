"""A t-test that may be read after every observation: is a mean difference above -margin, or not.

The t statistic of x_1 .. x_n does not depend on the unit of x. Its likelihood ratio, an effect size delta = mean / sd
against 0, is a martingale where the mean is 0, so the chance that it ever reaches 1 / error is at most error (Ville,
1939), however often one looks. It equals the Bayes factor with the right Haar prior 1 / sd (Lai, "On confidence
sequences", Annals of Statistics 4, 1976; Perez-Ortiz, Lardy, de Heide and Gruenwald, "E-statistics, group invariance
and anytime-valid testing", Annals of Statistics 52, 2024, arXiv 2208.07610). Averaged over a normal prior on delta it
has a closed form (Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
variance", arXiv 2310.03722). Here the prior is the half of the normal on one side, so there is a test for each side.

Each is also valid where the mean lies beyond 0 on the other side: to shift all x by the same amount leaves their
standard deviation, and moves t, and with it the ratio, one way at every n (see also Gruenwald and Koolen,
"Supermartingales for one-sided tests", arXiv 2502.04208).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import betaln, stdtr

EFFECT = 1.0
"""Standard deviation of the normal whose half is the prior on the effect size."""
_ROUNDING = 8 * 2.0**-52
"""Relative to the largest number, what may be rounding alone."""

Decision = Literal["non-inferior", "inferior", "undecided"]


class Look(NamedTuple):
    """What is known after some pairs."""

    pairs: int
    mean: float
    """Of the differences."""
    deviation: float
    """Their standard deviation; nan for one pair."""
    log_non_inferior: float
    """Log of the evidence that the mean is above -margin, against any mean that is not."""
    log_inferior: float
    """The same, that it is below -margin."""
    low: float
    """Ends of an interval for the mean. At all looks together it leaves out the mean on either side with probability
    ``error`` at most; -margin is outside at just the looks where one evidence has reached 1 / error."""
    high: float
    decision: Decision


def log_evidence(t: float, n: int) -> float:
    """Log likelihood ratio of the t statistic: mean above 0, with the prior of :data:`EFFECT`, against mean 0.

    With c = 1 / EFFECT and u = t^2 / (n - 1) it is that of

        2 sqrt(c^2 / (n + c^2)) ((1 + u) / (1 + u c^2 / (n + c^2)))^(n / 2)
          P(T_n <= sign(t) n sqrt(u / (n + c^2 + u c^2)))

    with T_n Student's t of n degrees of freedom. The first factors integrate delta over the whole normal, and the last
    is the share of delta > 0. It grows with t.

    Args:
        t: mean sqrt(n) / sd; may be infinite, and is for n = 1, where only the sign of x is known.
        n: observations, at least 1.
    """
    squared = 1 / EFFECT**2
    u = math.inf if n == 1 else t * t / (n - 1)
    if math.isinf(u):
        power, argument = math.log((n + squared) / squared), n / math.sqrt(squared)
    else:
        power = math.log1p(u) - math.log1p(u * squared / (n + squared))
        argument = n * math.sqrt(u / (n + squared + u * squared))
    share = _log_student_cdf(math.copysign(argument, t), n)
    return math.log(2) + (math.log(squared / (n + squared)) + n * power) / 2 + share


def _log_student_cdf(t: float, freedom: int) -> float:
    """Log of P(T <= t) for Student's t; where that is too small for a float, by the power series of the incomplete beta
    function (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.5.4 and 26.7.1).
    """
    if (share := stdtr(freedom, t)) > 0:
        return math.log(share)
    x = freedom / (freedom + t * t)
    terms = np.arange(10 + int(40 / (1 - x)))  # they fall faster than x^k
    series = 1 + np.cumprod(x * ((freedom + 1) / 2 + terms) / (freedom / 2 + 1 + terms)).sum()
    front = freedom / 2 * math.log(x) + math.log1p(-x) / 2 - math.log(freedom) - betaln(freedom / 2, 0.5)
    return float(front + math.log(series))


@lru_cache(maxsize=10_000)
def critical_t(n: int, error: float) -> float:
    """The t from which the evidence of ``n`` observations is at least 1 / error; infinite if none is enough."""
    wanted = -math.log(error)
    if n < 2 or log_evidence(math.inf, n) <= wanted:
        return math.inf
    low, high = 0.0, 1.0
    while log_evidence(high, n) < wanted:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if log_evidence(middle, n) < wanted else (low, middle)
    return high


def look(differences: Sequence[float], margin: float, error: float, min_pairs: int = 2) -> Look:
    """What the pairs so far say about the mean difference.

    Args:
        differences: independent, from one distribution; the error rates are proven if that is normal.
        margin: a mean above -margin is non-inferior.
        error: the largest chance of each wrong decision.
        min_pairs: with fewer nothing is decided.

    Raises:
        ValueError: no differences.
    """
    n = len(differences)
    if n == 0:
        raise ValueError("a look needs at least 1 difference; got 0")
    mean = math.fsum(differences) / n
    squares = math.fsum((difference - mean) ** 2 for difference in differences)
    deviation = math.sqrt(squares / (n - 1)) if n > 1 else math.nan
    t = _t_statistic(mean + margin, deviation, n, max(margin, *map(abs, differences)))
    above, below = (0.0, 0.0) if t == 0 and n == 1 else (log_evidence(t, n), log_evidence(-t, n))
    critical = critical_t(n, error)
    half = math.inf if math.isinf(critical) else critical * deviation / math.sqrt(n)
    decision: Decision = "undecided"
    if n >= min_pairs and max(above, below) >= -math.log(error):
        decision = "non-inferior" if above > below else "inferior"
    return Look(n, mean, deviation, above, below, mean - half, mean + half, decision)


def _t_statistic(mean: float, deviation: float, n: int, size: float) -> float:
    """mean sqrt(n) / deviation, where neither is taken for more than the rounding of numbers of this size."""
    if abs(mean) <= _ROUNDING * size:
        return 0.0
    if n == 1 or deviation <= _ROUNDING * size:
        return math.copysign(math.inf, mean)
    return mean * math.sqrt(n) / deviation
