"""Certificates of ``async-rlhf certify`` by simulation, many at once: tests compare them with the command's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_rlhf.studies.certify.bets import FRACTIONS, Question
from async_rlhf.studies.certify.sequential import critical_t

Floats = NDArray[np.float64]


def normal(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Of mean 0 and standard deviation 1, as all of these."""
    return rng.standard_normal(shape)


def skewed_up(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Exponential: a pair is now and then much better."""
    return rng.exponential(size=shape) - 1


def skewed_down(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Its mirror image."""
    return -skewed_up(rng, shape)


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Student's t with three degrees of freedom."""
    return rng.standard_t(3, size=shape) / math.sqrt(3)


def uniform(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Light tails."""
    return rng.uniform(-math.sqrt(3), math.sqrt(3), size=shape)


class Simulated(NamedTuple):
    """Shares of the decisions, and pairs until the end."""

    non_inferior: float
    inferior: float
    undecided: float
    mean_pairs: float


def t_statistics(x_RN: Floats) -> Floats:
    """Of the first 2, 3, .. N columns; [R, N - 1]."""
    n_N = np.arange(1, x_RN.shape[1] + 1)
    mean_RN = np.cumsum(x_RN, axis=1) / n_N
    squares_RN = np.cumsum(x_RN**2, axis=1) - n_N * mean_RN**2
    return (mean_RN * np.sqrt(n_N * np.maximum(n_N - 1, 1) / np.maximum(squares_RN, 1e-300)))[:, 1:]


def certificates(x_RN: Floats, error: float, min_pairs: int) -> tuple[NDArray[np.int64], Floats]:
    """Pairs until the end, and 1, -1 or 0 (non-inferior, inferior, undecided), for each row of differences + margin."""
    pairs = x_RN.shape[1]
    bounds_N = np.array([critical_t(n, error) if n >= min_pairs else math.inf for n in range(2, pairs + 1)])
    t_RN = t_statistics(x_RN)
    hit_RN = np.abs(t_RN) >= bounds_N
    first_R = hit_RN.argmax(axis=1)
    decided_R = hit_RN.any(axis=1)
    sign_R = np.sign(np.take_along_axis(t_RN, first_R[:, None], axis=1)[:, 0])
    return np.where(decided_R, first_R + 2, pairs), np.where(decided_R, sign_R, 0.0)


def simulated(x_RN: Floats, error: float, min_pairs: int) -> Simulated:
    """Many certificates."""
    pairs_R, decision_R = certificates(x_RN, error, min_pairs)
    shares = [float((decision_R == value).mean()) for value in (1, -1, 0)]
    return Simulated(*shares, float(pairs_R.mean()))


def bets_at_all_looks(d_RN: Floats, question: Question) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """After each pair, its number and whether its certificate is non-inferior, by the bets of the command."""
    bound, margin, rate = question.bound, question.margin, question.breakdown_rate
    shares_F11 = np.array(FRACTIONS)[:, None, None]

    def log_wealth(x_RN: Floats, null: float, low: float) -> Floats:
        gains_FRN = np.maximum(shares_F11 / (null - low) * (x_RN - null), -1.0)
        with np.errstate(divide="ignore"):
            logs_FRN = np.cumsum(np.log1p(gains_FRN), axis=2)
        return np.logaddexp.reduce(logs_FRN, axis=0) - math.log(len(FRACTIONS))

    mean_RN = log_wealth(np.clip(d_RN, -bound, bound), -margin, -bound)
    rate_RN = log_wealth(-(d_RN < -bound).astype(float), -rate, -1.0)
    reached_RN = np.minimum(mean_RN, rate_RN) >= -math.log(question.error)
    for n in range(question.min_pairs, d_RN.shape[1] + 1):
        yield n, reached_RN[:, n - 1]
