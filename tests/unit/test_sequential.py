"""The sequential t-test: its formula against integrals in float64, its error rates by simulation."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import simulated_certificates as simulated

from async_rlhf.commands.evaluation.statistics import variance_saved
from async_rlhf.studies.certify.sequential import critical_t, log_evidence, look

ERROR, MAX_PAIRS = 0.05, 30


def t_of(x):
    return x.mean() * math.sqrt(len(x)) / x.std(ddof=1)


def evidence_by_integration(x):
    """Likelihood of x itself, over all sd = s with weight ds / s: delta half normal, against delta 0."""
    n, x = len(x), x / np.sqrt(np.mean(x**2))
    s_S1 = np.exp(np.linspace(-3, 3, 1501))[:, None]
    delta_D = np.linspace(0, 6 if n < 100 else 1, 2001)  # beyond it nothing counts
    weights_D = np.exp(-(delta_D**2) / 2) * math.sqrt(2 / math.pi) * (delta_D[1] - delta_D[0])
    weights_D[0] /= 2  # the trapezoid's end
    log_SD = -n * np.log(s_S1) - ((x**2).sum() / s_S1**2 - 2 * x.sum() * delta_D / s_S1 + n * delta_D**2) / 2
    largest = log_SD.max()
    above = math.log((np.exp(log_SD - largest) * weights_D).sum()) + largest
    none = log_SD[:, 0]
    return above - math.log(np.exp(none - none.max()).sum()) - none.max()


@pytest.mark.parametrize(
    ("n", "mean"), [(2, 0.5), (2, -1), (3, 2), (5, -2), (10, 1), (30, 0.2), (100, -0.3), (1000, 0.15), (1000, -0.05)]
)
def test_evidence_is_the_bayes_factor_with_a_right_haar_prior(n, mean):
    x = np.random.default_rng(n).standard_normal(n) + mean
    assert log_evidence(t_of(x), n) == pytest.approx(evidence_by_integration(x), abs=3e-3)


@pytest.mark.parametrize("n", [2, 5, 30, 1000, 10**6])
def test_evidence_grows_with_t_and_is_finite(n):
    grid = [-math.inf, -1e200, -1e9, -40.0, -3.0, -1e-9, 0.0, 1e-9, 3.0, 40.0, 1e9, 1e200, math.inf]
    found = [log_evidence(t, n) for t in grid]
    assert all(map(math.isfinite, found))
    assert all(b >= a - 1e-9 * max(1, abs(a)) for a, b in pairwise(found))


def test_one_observation_knows_only_its_sign():
    # P(x > 0) for delta half normal of width 1 is 3/4, against 1/2.
    assert log_evidence(2.0, 1) == pytest.approx(math.log(1.5))
    assert log_evidence(-2.0, 1) == pytest.approx(math.log(0.5))
    assert look([0.4], 0.1, ERROR).decision == "undecided"


@pytest.mark.parametrize("n", [4, 5, 30, 1000])
def test_the_critical_t_is_where_evidence_is_enough(n):
    assert log_evidence(critical_t(n, ERROR), n) == pytest.approx(-math.log(ERROR), abs=1e-9)
    assert critical_t(3, ERROR) == math.inf


@pytest.mark.parametrize(("n", "error"), [(2, 0.4), (2, 0.9), (30, 0.9)])
def test_the_critical_t_of_few_pairs_and_of_a_large_error(n, error):
    assert 0 < critical_t(n, error) < 20
    assert log_evidence(critical_t(n, error), n) == pytest.approx(-math.log(error), abs=1e-9)


def test_looks_at_none_one_and_two_pairs():
    with pytest.raises(ValueError, match="at least 1 difference; got 0"):
        look([], 0.1, ERROR)
    edge = look([-0.1], 0.1, ERROR)
    assert (edge.log_non_inferior, edge.log_inferior) == (0.0, 0.0)
    one = look([0.4], 0.1, ERROR)
    assert (one.log_non_inferior, one.log_inferior) == pytest.approx((math.log(1.5), math.log(0.5)))
    assert math.isnan(one.deviation)
    two = look([0.0, 1.0], 0.1, ERROR)
    assert two.deviation == pytest.approx(math.sqrt(0.5))
    assert two.log_non_inferior == pytest.approx(log_evidence(0.6 * math.sqrt(2) / math.sqrt(0.5), 2))


def test_the_decision_is_the_interval_without_the_margin():
    rng = np.random.default_rng(5)
    seen = set()
    for mean in (-0.3, 0.0, 0.3):
        for n in range(2, 40):
            found = look((rng.standard_normal(n) * 0.2 + mean).tolist(), 0.1, ERROR)
            outside = "non-inferior" if found.low > -0.1 else "inferior" if found.high < -0.1 else "undecided"
            assert found.decision == outside
            seen.add(outside)
    assert len(seen) == 3


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_the_unit_does_not_matter(unit):
    d = np.random.default_rng(7).standard_normal(12)
    first, scaled = look(d.tolist(), 0.5, ERROR), look((d * unit).tolist(), 0.5 * unit, ERROR)
    assert scaled.log_non_inferior == pytest.approx(first.log_non_inferior, abs=1e-9)
    assert scaled.low == pytest.approx(first.low * unit)


def test_differences_that_do_not_vary():
    assert look([0.0] * 4, 0.02, ERROR).decision == "non-inferior"
    assert look([0.0] * 3, 0.02, ERROR).decision == "undecided"  # three pairs never reach 20
    assert look([-0.5] * 4, 0.02, ERROR).decision == "inferior"
    for edge in ([-0.1] * 30, [-0.3 + 0.2] * 30, [-0.1 * (1 + 1e-16)] * 30):  # the edge itself, but for rounding
        assert look(edge, 0.1, ERROR).decision == "undecided"


def test_nothing_is_decided_before_min_pairs():
    found = look([0.0] * 9, 0.02, ERROR, min_pairs=10)
    assert found.decision == "undecided"
    assert found.log_non_inferior > -math.log(ERROR)
    assert look([0.0] * 10, 0.02, ERROR, min_pairs=10).decision == "non-inferior"


def ends(differences, margin):
    """As the command goes on: a look after each pair."""
    for n in range(1, len(differences) + 1):
        found = look(differences[:n], margin, ERROR)
        if found.decision != "undecided":
            break
    return n, {"non-inferior": 1, "inferior": -1, "undecided": 0}[found.decision]


def test_the_simulation_is_of_this_test():
    x_RN = np.random.default_rng(11).standard_normal((150, MAX_PAIRS)) + np.linspace(-1, 1, 150)[:, None]
    pairs_R, decision_R = simulated.certificates(x_RN, ERROR, 2)
    assert [ends((x - 0.3).tolist(), 0.3) for x in x_RN] == list(zip(pairs_R, decision_R, strict=True))


REPEATS = 20_000


def share_wrong(draw, mean=0.0, pairs=MAX_PAIRS, repeats=REPEATS):
    x_RN = draw(np.random.default_rng(13), (repeats, pairs)) + mean
    return simulated.simulated(x_RN, ERROR, 2)


def test_error_rates_hold_at_the_edge_however_long_one_looks():
    slack = 3 * math.sqrt(ERROR * (1 - ERROR) / REPEATS)
    for draw in (simulated.normal, simulated.uniform, simulated.heavy_tailed, simulated.skewed_up):
        assert share_wrong(draw).non_inferior < ERROR + slack
    long = share_wrong(simulated.normal, pairs=1000, repeats=2000)
    assert 0.02 < long.non_inferior < ERROR + 0.015  # and it is not far below, or the test would be wasteful
    assert share_wrong(simulated.normal, mean=-0.2).non_inferior < 0.01
    assert share_wrong(simulated.normal, mean=0.2).inferior < 0.01


def test_skewed_down_is_what_the_proof_does_not_cover():
    """docs/commands/certify.md says so; if this ever fails, the page must change."""
    assert share_wrong(simulated.skewed_down).non_inferior > 0.1


def test_it_decides_soon_where_the_margin_is_wide():
    found = share_wrong(simulated.normal, mean=1.0)
    assert found.non_inferior > 0.98
    assert found.mean_pairs < 12
    assert found.inferior < 0.001


def test_a_t_test_that_is_read_after_each_pair_errs_far_more_often():
    """The fault that this test is there for."""
    rng = np.random.default_rng(17)
    t_RN = simulated.t_statistics(rng.standard_normal((REPEATS, MAX_PAIRS)))
    bounds_N = np.quantile(simulated.t_statistics(rng.standard_normal((REPEATS, MAX_PAIRS))), 1 - ERROR, axis=0)
    assert (t_RN[:, -1] >= bounds_N[-1]).mean() < ERROR + 0.006  # read once, at the end
    assert (t_RN >= bounds_N).any(axis=1).mean() > 4 * ERROR


def test_what_pairing_saves():
    rng = np.random.default_rng(20)
    a = rng.standard_normal(2000)
    b = 0.9 * a + math.sqrt(1 - 0.81) * rng.standard_normal(2000)
    found = variance_saved(a.tolist(), b.tolist())
    assert found.estimate == pytest.approx((a.var() + b.var()) / (a - b).var())
    assert found.low < 10 < found.high
    assert found.high / found.low < 1.3
    assert variance_saved([1.0, 2.0], [1.0, 3.0]) is None
    assert variance_saved([1.0, 2.0, 4.0], [0.0, 1.0, 3.0]) is None


def test_the_interval_of_what_pairing_saves_holds_the_truth():
    rng, held = np.random.default_rng(23), 0
    for _ in range(600):
        a, noise = rng.standard_normal((2, 6))
        found = variance_saved(a.tolist(), (0.8 * a + 0.6 * noise).tolist())
        held += found.low <= 5 <= found.high
    assert 0.92 < held / 600 < 0.98
