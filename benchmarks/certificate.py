"""Error rates and pairs of the sequential test of `async-rlhf certify`, by simulation; prints Markdown tables.

    python benchmarks/certificate.py [--repeats 100000] [--prior]

Pairs are drawn from a distribution of which the answer is known, and looked at one after the other, as the command
does (the same test: tests/unit/test_sequential.py compares). All distributions have standard deviation 1 in these
tables; the test does not depend on the unit. --prior compares priors on the effect size: half normals of several
widths.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from smallest import parse

from async_rlhf.commands.evaluation.statistics import variance_saved
from async_rlhf.studies.certify import sequential
from async_rlhf.studies.certify.bets import FRACTIONS, Question
from async_rlhf.studies.certify.sequential import critical_t

ERROR, MIN_PAIRS, MAX_PAIRS = 0.05, 5, 30
"""The defaults of the command."""
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


def collapsing(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Normal, but one pair in twenty is ten standard deviations lower: a run that breaks down."""
    lower = rng.random(shape) < 0.05
    return (rng.standard_normal(shape) - 10 * lower + 0.5) / math.sqrt(1 + 100 * 0.05 * 0.95)


def uniform(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Light tails."""
    return rng.uniform(-math.sqrt(3), math.sqrt(3), size=shape)


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Floats]] = {
    "normal": normal,
    "uniform": uniform,
    "heavy-tailed (t, 3 degrees)": heavy_tailed,
    "skewed up (exponential)": skewed_up,
    "skewed down (exponential)": skewed_down,
    "one in 20 breaks down": collapsing,
}


class Simulated(NamedTuple):
    """Shares of the decisions, and pairs until the end."""

    non_inferior: float
    inferior: float
    undecided: float
    mean_pairs: float
    pairs_90: float
    """Nine of ten certificates end with so many or fewer."""


def t_statistics(x_RN: Floats) -> Floats:
    """Of the first 2, 3, .. N columns; [R, N - 1]."""
    n_N = np.arange(1, x_RN.shape[1] + 1)
    mean_RN = np.cumsum(x_RN, axis=1) / n_N
    squares_RN = np.cumsum(x_RN**2, axis=1) - n_N * mean_RN**2
    return (mean_RN * np.sqrt(n_N * np.maximum(n_N - 1, 1) / np.maximum(squares_RN, 1e-300)))[:, 1:]


def certificates(x_RN: Floats, error: float = ERROR, min_pairs: int = MIN_PAIRS) -> tuple[NDArray[np.int64], Floats]:
    """Pairs until the end, and 1, -1 or 0 (non-inferior, inferior, undecided), for each row of differences + margin."""
    pairs = x_RN.shape[1]
    bounds_N = np.array([critical_t(n, error) if n >= min_pairs else math.inf for n in range(2, pairs + 1)])
    t_RN = t_statistics(x_RN)
    hit_RN = np.abs(t_RN) >= bounds_N
    first_R = hit_RN.argmax(axis=1)
    decided_R = hit_RN.any(axis=1)
    sign_R = np.sign(np.take_along_axis(t_RN, first_R[:, None], axis=1)[:, 0])
    return np.where(decided_R, first_R + 2, pairs), np.where(decided_R, sign_R, 0.0)


def simulated(x_RN: Floats, error: float = ERROR, min_pairs: int = MIN_PAIRS) -> Simulated:
    """Many certificates."""
    pairs_R, decision_R = certificates(x_RN, error, min_pairs)
    shares = [float((decision_R == value).mean()) for value in (1, -1, 0)]
    return Simulated(*shares, float(pairs_R.mean()), float(np.quantile(pairs_R, 0.9)))


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


def bets_table(repeats: int, rng: np.random.Generator) -> list[str]:
    """Shares of certificates that the bets, and the t-test, call non-inferior; true where the last column says so."""
    question = Question(1, 0.03, ERROR, MIN_PAIRS, 0.3, 0.1)
    lines = ["| differences, margin 0.03, bound 0.3, up to 60 pairs | bets | t-test | is it |", "|---|---|---|---|"]
    cases: dict[str, tuple[Callable[[tuple[int, int]], Floats], bool]] = {
        "normal, mean -0.03, deviation 0.03": (lambda shape: rng.normal(-0.03, 0.03, shape), False),
        "exponential below 0, mean -0.03": (lambda shape: -rng.exponential(0.03, shape), False),
        "exponential above, mean -0.03": (lambda shape: rng.exponential(0.03, shape) - 0.06, False),
        "1 in 10 loses 0.6, others +0.03": (
            lambda shape: rng.normal(0.03, 0.01, shape) - 0.6 * (rng.random(shape) < 0.1), False),
        "1 in 20 loses 0.6, others 0": (
            lambda shape: rng.normal(0, 0.01, shape) - 0.6 * (rng.random(shape) < 0.05), True),
        "normal, mean 0, deviation 0.03": (lambda shape: rng.normal(0, 0.03, shape), True),
        "normal, mean 0, deviation 0.05": (lambda shape: rng.normal(0, 0.05, shape), True),
    }  # fmt: skip
    for name, (draw, holds) in cases.items():
        d_RN = draw((repeats // 10, 60))
        found_R = np.zeros(len(d_RN), dtype=bool)
        for _, reached_R in bets_at_all_looks(d_RN, question):
            found_R |= reached_R
        _, decision_R = certificates(d_RN + question.margin)
        by_t = f"{(decision_R > 0).mean():.1%}"
        lines.append(f"| {name} | {found_R.mean():.1%} | {by_t} | {'yes' if holds else 'no'} |")
    return lines


def fixed_sample(effect: float, power: float, rng: np.random.Generator, repeats: int) -> int:
    """Pairs that one t-test at the end needs, at the same error, to find a mean of ``effect`` deviations so often."""
    for n in range(2, 200):
        null = t_statistics(rng.standard_normal((repeats, n)))[:, -1]
        found = t_statistics(rng.standard_normal((repeats, n)) + effect)[:, -1]
        if (found >= np.quantile(null, 1 - ERROR)).mean() >= power:
            return n
    return 200


def error_table(repeats: int, rng: np.random.Generator) -> list[str]:
    """Wrong decisions at the edge between the hypotheses, where they are most frequent."""
    least = (MIN_PAIRS, 10, 20)
    lines = [
        "| differences of pairs, mean = -margin | non-inferior, `min_pairs` "
        + " | ".join(map(str, least))
        + " | inferior |",
        "|---" * (len(least) + 2) + "|",
    ]
    for name, draw in DISTRIBUTIONS.items():
        x_RN = draw(rng, (repeats, MAX_PAIRS))
        found = [simulated(x_RN, min_pairs=one) for one in least]
        shares = " | ".join(f"{one.non_inferior:.1%}" for one in found)
        lines.append(f"| {name} | {shares} | {found[0].inferior:.1%} |")
    longer = simulated(rng.standard_normal((repeats // 10, 1000)))
    lines.append(f"| normal, up to 1,000 pairs | {longer.non_inferior:.1%} | | | {longer.inferior:.1%} |")
    return lines


def pairs_table(repeats: int, rng: np.random.Generator) -> list[str]:
    """How long it takes, if S = k is in truth as good as S = 0."""
    lines = [
        "| margin / deviation of a difference | non-inferior | inferior | undecided | pairs, mean | 90% end by "
        "| one t-test of the same power |",
        "|---|---|---|---|---|---|---|",
    ]
    for effect in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
        found = simulated(rng.standard_normal((repeats, MAX_PAIRS)) + effect)
        fixed = fixed_sample(effect, min(found.non_inferior, 0.99), rng, repeats)
        lines.append(
            f"| {effect} | {found.non_inferior:.1%} | {found.inferior:.2%} | {found.undecided:.1%} "
            f"| {found.mean_pairs:.1f} | {found.pairs_90:.0f} | {fixed} |"
        )
    return lines


def peeking_table(repeats: int, rng: np.random.Generator) -> list[str]:
    """What the sequential test is for: a t-test for a fixed number that is read after each pair."""
    t_RN = t_statistics(rng.standard_normal((repeats, MAX_PAIRS)))
    bounds_N = np.quantile(t_statistics(rng.standard_normal((repeats, MAX_PAIRS))), 1 - ERROR, axis=0)
    ever = float((t_RN >= bounds_N).any(axis=1).mean())
    return [
        f"A t-test at level {ERROR} that is read after each of 2 to {MAX_PAIRS} pairs: {ever:.1%} wrongly non-inferior."
    ]


def coverage_table(repeats: int, rng: np.random.Generator) -> list[str]:
    """How often the interval of what pairing saves holds the truth."""
    lines = [
        "| pairs | runs of S = 0 and S = k | correlation | Var + Var over Var of difference | the interval holds it |",
        "|---|---|---|---|---|",
    ]
    shapes = {
        "normal": (normal, 1.0),
        "normal, S = k twice as wide": (normal, 2.0),
        "heavy-tailed": (heavy_tailed, 1.0),
    }
    for pairs in (5, 10, 30):
        for name, (draw, wider) in shapes.items():
            for correlation in (0.0, 0.8):
                truth = (1 + wider**2) / (1 + wider**2 - 2 * correlation * wider)
                held = 0
                for _ in range(repeats):
                    a_R, b_R = draw(rng, (2, pairs))
                    b_R = wider * (correlation * a_R + math.sqrt(1 - correlation**2) * b_R)
                    found = variance_saved(a_R.tolist(), b_R.tolist())
                    held += found is not None and found.low <= truth <= found.high
                lines.append(f"| {pairs} | {name} | {correlation} | {truth:.1f} | {held / repeats:.1%} |")
    return lines


def prior_table(repeats: int, rng: np.random.Generator) -> list[str]:
    """Mean number of pairs by the width of the prior."""
    effects = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
    lines = ["| prior's width | " + " | ".join(map(str, effects)) + " |", "|---" * (len(effects) + 1) + "|"]
    kept = sequential.EFFECT
    drawn = rng.standard_normal((repeats, 60))
    for width in (0.5, 0.75, 1.0, 1.5, 2.0, 4.0):
        sequential.EFFECT = width
        critical_t.cache_clear()
        lines.append(f"| {width} | " + " | ".join(f"{simulated(drawn + one).mean_pairs:.1f}" for one in effects) + " |")
    sequential.EFFECT = kept
    critical_t.cache_clear()
    return lines


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=100_000, help="certificates for each number")
    parser.add_argument("--prior", action="store_true", help="compare priors instead")
    options = parse(parser, repeats=40)
    rng = np.random.default_rng(0)
    repeats = options.repeats
    tables = (
        [prior_table(repeats // 5, rng)]
        if options.prior
        else [
            bets_table(repeats, np.random.default_rng(1)),
            error_table(repeats, rng),
            pairs_table(repeats, rng),
            peeking_table(repeats, rng),
            coverage_table(max(repeats // 50, 1), rng),
        ]
    )
    print("\n\n".join("\n".join(table) for table in tables))


if __name__ == "__main__":
    main()
