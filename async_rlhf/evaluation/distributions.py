"""Distribution functions that intervals and tests need, by the incomplete beta function."""

from __future__ import annotations

import math
from functools import cache


def log_student_cdf(t: float, freedom: float) -> float:
    """Log of P(T <= t) for Student's t, with the digits of its small values."""
    if t == 0:
        return -math.log(2)
    x = freedom / (freedom + t * t) if abs(t) < 1e150 else 0.0
    log_tail = log_incomplete_beta(freedom / 2, 0.5, x, t * t / (freedom + t * t) if x > 0 else 1.0) - math.log(2)
    return log_tail if t < 0 else math.log1p(-math.exp(log_tail))


@cache
def student_quantile(share: float, freedom: float) -> float:
    """The quantile of Student's t, for a share of at least a half; ``freedom`` need not be whole."""
    low, high = 0.0, 1.0
    while log_student_cdf(high, freedom) < math.log(share):
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if log_student_cdf(middle, freedom) < math.log(share) else (low, middle)
    return (low + high) / 2


def log_incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """Log of the regularised incomplete beta function I_x(a, b), with rest = 1 - x.

    By its continued fraction on the side where that converges fast (Abramowitz and Stegun, Handbook of Mathematical
    Functions, 26.5.8).
    """
    if x <= 0:
        return -math.inf
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    if x < (a + 1) / (a + b + 2):
        return front - math.log(a) + math.log(_beta_fraction(a, b, x))
    return math.log1p(-math.exp(front - math.log(b) + math.log(_beta_fraction(b, a, rest))))


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1 / (1 + d_1 / (1 + d_2 / (1 + ...))), by Lentz's method."""
    upper, lower = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = lower
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            lower, upper = 1 / (1 + term * lower), 1 + term / upper
            value *= lower * upper
        if abs(lower * upper - 1) < 1e-15:
            return value
    raise ArithmeticError(f"the continued fraction has not converged: a {a}, b {b}, x {x}")  # not seen for n to 10^6


def f_quantile(share: float, freedom: int) -> float:
    """The quantile of Fisher's F with equal degrees of freedom on both sides: of a ratio of two equal variances."""
    low, high = 0.0, 1.0  # of x = F / (1 + F), whose distribution is a beta
    for _ in range(100):
        middle = (low + high) / 2
        below = log_incomplete_beta(freedom / 2, freedom / 2, middle, 1 - middle) < math.log(share)
        low, high = (middle, high) if below else (low, middle)
    return high / (1 - high)
