"""Means, shares and win-rates with 95% confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_Z = 1.959963984540054  # 97.5% quantile of the normal distribution
_T_SMALL = (12.706204736432095, 4.302652729696142)  # of Student's t, 1 and 2 degrees of freedom


class Interval(NamedTuple):
    """An estimate and the ends of its 95% confidence interval."""

    estimate: float
    low: float
    high: float


def t_quantile(freedom: int) -> float:
    """97.5% quantile of Student's t, to 0.2% (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5)."""
    if freedom <= len(_T_SMALL):
        return _T_SMALL[freedom - 1]
    z = _Z
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**i for i, term in enumerate(terms))


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of independent values, with Student's interval: mean +- t s / sqrt(n).

    Raises:
        ValueError: fewer than two values.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval needs at least 2 values; got {n}")
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = t_quantile(n - 1) * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half)


def wilson(successes: float, n: int) -> Interval:
    """A share, with Wilson's score interval (Wilson, 1927): honest near 0 and 1, and never of zero width.

    Args:
        successes: out of n; a tie may count as half.
        n: independent trials, at least 1.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n >= 1; got successes {successes}, n {n}")
    share, z2 = successes / n, _Z**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At 0 and n the ends are exact; rounding must not put the estimate outside of them.
    return Interval(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def win_rate(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Share of prompts on which our score is the higher one; a tie counts as half a win.

    The interval is Wilson's with the ties as half successes. Outcomes in {0, 1/2, 1} vary less than those of a coin
    with the same mean, so it covers at least 95%; a normal interval on them would have no width when one side wins all.

    Args:
        ours: one score per prompt.
        theirs: scores of the same prompts, in the same order.

    Raises:
        ValueError: the two differ in length, or are empty.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"scores must be of the same prompts; got {len(ours)} and {len(theirs)}")
    wins = sum(a > b for a, b in zip(ours, theirs, strict=True))
    ties = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return wilson(wins + ties / 2, len(ours))
