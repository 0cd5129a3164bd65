"""Means, shares and win-rates with 95% confidence intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import fdtri, stdtrit

_Z = 1.959963984540054  # 97.5% quantile of the normal distribution


class Interval(NamedTuple):
    """An estimate and the ends of its 95% confidence interval."""

    estimate: float
    low: float
    high: float


def t_quantile(freedom: float) -> float:
    """97.5% quantile of Student's t."""
    return float(stdtrit(freedom, 0.975))


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


def clustered_mean_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> Interval:
    """The mean of values that are independent only between clusters; a cluster may be the values of one prompt.

    With n_g values and the sum of residuals e_g in cluster g, the variance of the mean is estimated by
    sum_g e_g^2 / (1 - n_g / n) / n^2, and Student's interval has Satterthwaite's degrees of freedom (Bell and
    McCaffrey, "Bias reduction in standard errors for linear regression with multi-stage samples", 2002). For G clusters
    of equal size that is G / (G - 1) sum_g e_g^2 / n^2 with G - 1 degrees; clusters of one value each give
    :func:`mean_interval`.

    Args:
        values: n of them.
        clusters: the cluster of each value.

    Raises:
        ValueError: fewer than two clusters, or another number of values.
    """
    count = len(set(clusters))
    if count == len(values):
        return mean_interval(values)
    if count < 2:
        raise ValueError(f"an interval needs at least 2 clusters; got {count}")
    mean = math.fsum(values) / len(values)
    squares, freedom = _between(values, clusters)
    half = t_quantile(freedom) * math.sqrt(squares) / len(values)
    return Interval(mean, mean - half, mean + half)


def _between(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[float, float]:
    """n^2 times the variance of the mean, from the residuals of at least two clusters, and its degrees of freedom."""
    mean, groups = math.fsum(values) / len(values), defaultdict[Hashable, list[float]](list)
    for value, cluster in zip(values, clusters, strict=True):
        groups[cluster].append(value - mean)
    sizes_G = np.array([len(residuals) for residuals in groups.values()], dtype=np.float64)
    shares_G = sizes_G / len(values)
    scale_G = 1 / (1 - shares_G)
    squares = float(scale_G @ np.array([math.fsum(residuals) ** 2 for residuals in groups.values()]))
    # Satterthwaite: (tr M)^2 / tr M^2, where M is the quadratic form's matrix for independent values of variance 1,
    # M_gh = sqrt(scale_g scale_h) (sizes_g [g = h] - n shares_g shares_h).
    n = float(len(values))
    diagonal_G = scale_G * (sizes_G - n * shares_G**2)
    without_G = scale_G * n * shares_G**2
    off = float(without_G.sum()) ** 2 - float(without_G @ without_G)
    return squares, float(diagonal_G.sum()) ** 2 / (float(diagonal_G @ diagonal_G) + off)


def paired_difference(ours: Sequence[float], theirs: Sequence[float], clusters: Sequence[Hashable]) -> Interval:
    """Mean of our score minus theirs on the same prompts: prompts that are hard for both do not widen the interval.

    Raises:
        ValueError: see :func:`clustered_mean_interval`.
    """
    return clustered_mean_interval([a - b for a, b in zip(ours, theirs, strict=True)], clusters)


def variance_saved(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """How many times fewer pairs a paired difference needs than two independent groups: (Var a + Var b) / Var(a - b).

    That is (1 + Q) / 2 with Q = Var(a + b) / Var(a - b). If a and b are normal with equal variances, sum and difference
    are independent (Pitman, "A note on normal correlation", Biometrika 31, 1939), so Q has the F distribution, times
    its true value, and the interval is exact. With unequal variances Q varies less, and the interval is too wide.
    A bootstrap of the few pairs that there are would be too narrow.

    Args:
        ours: one value per pair.
        theirs: of the same pairs.

    Returns:
        None for fewer than three pairs, or if the difference does not vary.
    """
    if len(ours) < 3:
        return None
    a_R, b_R = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    apart, paired = float((a_R + b_R).var()), float((a_R - b_R).var())
    if paired <= 1e-30 * apart:
        return None
    widest = float(fdtri(len(a_R) - 1, len(a_R) - 1, 0.975))
    return Interval(*((1 + apart / paired * factor) / 2 for factor in (1, 1 / widest, widest)))


def crossed_mean_interval(values_SP: Sequence[Sequence[float]]) -> Interval:
    """The mean of a score over seeds and prompts, both drawn at random, with each seed's run answering each prompt.

    The score is mean + seed + prompt + rest, all random (two-way random effects, one observation a cell). With the mean
    squares of the analysis of variance, the mean's variance is estimated by (MS_seeds + MS_prompts - MS_rest) / (S P)
    (Cornfield and Tukey, 1956), with Satterthwaite's degrees of freedom (1946). With few seeds this alone is too
    narrow: the interval is never narrower than Student's over the seeds' means, nor than that over the prompts' means.
    With one seed it is over prompts alone, and with one prompt over seeds.

    Args:
        values_SP: one row for each seed, one value for each prompt.

    Raises:
        ValueError: fewer than two values in all, or rows of unequal lengths.
    """
    if len({len(row) for row in values_SP}) != 1:
        raise ValueError(f"every seed must have the same prompts; got {[len(row) for row in values_SP]}")
    values = np.asarray(values_SP, dtype=np.float64)
    seeds, prompts = values.shape
    if seeds == 1 or prompts == 1:
        return mean_interval(values.ravel().tolist())
    mean, means_S, means_P = values.mean(), values.mean(axis=1), values.mean(axis=0)
    rest_SP = values - means_S[:, None] - means_P + mean
    freedoms = np.array([seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1)])
    sums = np.array(
        [prompts * ((means_S - mean) ** 2).sum(), seeds * ((means_P - mean) ** 2).sum(), (rest_SP**2).sum()]
    )
    squares = sums / freedoms
    variance = max(squares[0] + squares[1] - squares[2], 0.0)
    freedom = variance**2 / (squares**2 / freedoms).sum() if variance > 0 else 1.0
    ends = [t_quantile(max(1.0, freedom)) * math.sqrt(variance / values.size)]
    ends += [side.high - side.estimate for side in map(mean_interval, (means_S.tolist(), means_P.tolist()))]
    return Interval(float(mean), float(mean - max(ends)), float(mean + max(ends)))


def wilson(successes: float, n: float, z: float = _Z) -> Interval:
    """A share, with Wilson's score interval (Wilson, 1927): accurate near 0 and 1, and never of zero width.

    Args:
        successes: out of n; a tie may count as half.
        n: independent trials, at least 1; need not be whole.
        z: half the width of the interval of a mean, in its standard errors.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n >= 1; got successes {successes}, n {n}")
    share, z2 = successes / n, z**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At 0 and n the ends are exact; rounding must not push the estimate outside them.
    return Interval(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def outcomes(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """For each prompt 1 where our score is the higher one, 1/2 for equal scores, else 0.

    Args:
        ours: one score per prompt.
        theirs: scores of the same prompts, in the same order.

    Raises:
        ValueError: the two differ in length.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"scores must be of the same prompts; got {len(ours)} and {len(theirs)}")
    return [(a > b) + (a == b) / 2 for a, b in zip(ours, theirs, strict=True)]


def win_rate(outcomes: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Interval:
    """Share of prompts won; a tie (1/2) counts as half a win.

    The interval is Wilson's with the ties as half successes. Outcomes in {0, 1/2, 1} vary less than those of a coin
    with the same mean, so it covers at least 95%; a normal interval on them would have no width when one side wins all.
    Outcomes that depend on each other within clusters count as the number of independent ones that would vary as much,
    and a quantile of Student's t takes the place of the normal one, as in :func:`clustered_mean_interval`.

    Args:
        outcomes: 1, 1/2 or 0.
        clusters: the cluster of each outcome; None if all are independent.

    Raises:
        ValueError: no outcomes, or a single cluster of several.
    """
    n = len(outcomes)
    won = math.fsum(outcomes)
    if clusters is None or len(set(clusters)) == n:
        return wilson(won, n)
    count = len(set(clusters))
    if count < 2:
        raise ValueError(f"an interval needs at least 2 clusters; got {count}")
    apart = math.fsum((outcome - won / n) ** 2 for outcome in outcomes)
    together, freedom = _between(outcomes, clusters)
    share = apart / max(together, apart) if apart > 0 else count / n
    return wilson(won * share, n * share, t_quantile(freedom))


def length_controlled_win_rate(outcomes: Sequence[float], longer: Sequence[float]) -> Interval:
    """The win-rate if answers were of equal length: longer answers win more often for their length alone.

    A logistic regression P(win) = sigmoid(a + b tanh(d / sd(d))), with d how much longer our answer is, and the
    win-rate sigmoid(a) at d = 0 (Dubois et al., "Length-Controlled AlpacaEval", arXiv 2404.04475, eq. 2 for one pair
    of models). A normal prior of standard deviation 5 on a and b keeps them finite if one side wins all.

    Args:
        outcomes: 1, 1/2 or 0 for each prompt.
        longer: d for each prompt, in any unit.

    Returns:
        With a 95% interval from the curvature of the likelihood in a.

    Raises:
        ValueError: no outcomes, or another number of differences.
    """
    if not outcomes or len(outcomes) != len(longer):
        raise ValueError(f"need as many differences as outcomes, at least 1; got {len(longer)} and {len(outcomes)}")
    won_R, longer_R = np.asarray(outcomes, dtype=float), np.asarray(longer, dtype=float)
    spread = float(longer_R.std())
    features_R2 = np.stack([np.ones_like(longer_R), np.tanh(longer_R / spread if spread > 0 else longer_R * 0)], axis=1)
    prior = np.eye(2) / 5.0**2
    weights = np.zeros(2)
    for _ in range(100):  # Newton's method on a concave function
        wins_R = 1 / (1 + np.exp(-features_R2 @ weights))
        curvature = (features_R2 * (wins_R * (1 - wins_R))[:, None]).T @ features_R2 + prior
        step = np.linalg.solve(curvature, features_R2.T @ (won_R - wins_R) - prior @ weights)
        weights += step
        if np.abs(step).max() < 1e-10:
            break
    half = _Z * math.sqrt(np.linalg.inv(curvature)[0, 0])
    low, middle, high = (1 / (1 + math.exp(-x)) for x in (weights[0] - half, weights[0], weights[0] + half))
    return Interval(middle, low, high)


def pearson(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's correlation; None if one side does not vary, or there are fewer than two values."""
    first, second = (np.asarray(side, dtype=np.float64) - np.mean(side) for side in (a, b))
    size = math.sqrt(float(first @ first) * float(second @ second))
    return None if size == 0 else float(np.clip(float(first @ second) / size, -1, 1))


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks, where equal values share their mean rank."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    _, inverse_R, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse_R].tolist()


def correlation_interval(correlation: float, n: int, of_ranks: bool = False) -> Interval | None:
    """A correlation with its interval by Fisher's transform: tanh(atanh(r) +- z s), s = 1 / sqrt(n - 3).

    For ranks, s is sqrt((1 + r^2 / 2) / (n - 3)) (Bonett and Wright, 2000). None for fewer than four values.
    """
    if n < 4:
        return None
    half = _Z * math.sqrt((1 + correlation**2 / 2 if of_ranks else 1.0) / (n - 3))
    middle = math.atanh(min(max(correlation, -1 + 1e-15), 1 - 1e-15))
    return Interval(correlation, math.tanh(middle - half), math.tanh(middle + half))
