"""Clipped ratios and likelihoods, importance weights, value clipping and the adapted KL coefficient against formulas.

The oracles are loops over Python's floats.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rlhf.algorithms.estimators import (
    adapted_coefficient,
    clipped_likelihood,
    clipped_surrogate,
    clipped_value_loss,
    effective_sample_share,
    importance_weights,
    ratio_statistics,
)

CLIPRANGES = [(0.2, 0.2), (0.2, 0.28), (0.5, 0.1), (0.05, 2.0)]
STATISTICS = {
    "policy/behaviour_kl",
    "policy/logprob_difference",
    "val/ratio",
    "policy/behaviour_kl_k3",
    "val/ratio_var",
    "val/ratio_p01",
    "val/ratio_p50",
    "val/ratio_p99",
    "val/ratio_max",
    "val/ess_token",
    "val/ess_sequence",
}


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def normal(seed: int, *shape: int, width: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * width


# The clipped surrogate


def slow_surrogate(log_ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    ratio = math.exp(log_ratio)
    clipped = clip(ratio, 1 - low, 1 + high) * advantage
    return -min(ratio * advantage, clipped), float(clipped < ratio * advantage)


@pytest.mark.parametrize(("low", "high"), CLIPRANGES)
@pytest.mark.parametrize("width", [0.0, 0.05, 0.5, 5.0])
def test_clipped_surrogate_is_its_formula(low, high, width):
    """Advantages of both signs and 0; ratios from all 1 to all far away."""
    log_ratios_BT, advantages_BT = normal(0, 12, 30, width=width), normal(1, 12, 30)
    advantages_BT[::4] = 0
    loss_BT, clipped_BT = clipped_surrogate(log_ratios_BT, advantages_BT, low, high)
    seen = set()
    for row in range(12):
        for t in range(30):
            x, a = log_ratios_BT[row, t].item(), advantages_BT[row, t].item()
            loss, clipped = slow_surrogate(x, a, low, high)
            assert loss_BT[row, t].item() == pytest.approx(loss, rel=1e-12, abs=1e-14)
            assert clipped_BT[row, t].item() == clipped
            seen.add((a > 0, clipped))
    if width == 5.0:
        assert seen == {(True, 0.0), (True, 1.0), (False, 0.0), (False, 1.0)}


@pytest.mark.parametrize(("low", "high"), CLIPRANGES)
def test_clipped_surrogate_gradient(low, high):
    """-A r where nothing is clipped, exactly 0 where it is; with a pass of autograd's own check."""
    log_ratios_N, advantages_N = normal(2, 60, width=0.4).requires_grad_(), normal(3, 60)
    loss_N, clipped_N = clipped_surrogate(log_ratios_N, advantages_N, low, high)
    assert loss_N.requires_grad
    assert not clipped_N.requires_grad
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), log_ratios_N)
    for n in range(60):
        x, a = log_ratios_N[n].item(), advantages_N[n].item()
        _, clipped = slow_surrogate(x, a, low, high)
        by_formula = 0.0 if clipped else -a * math.exp(x)
        up, down = (slow_surrogate(x + step, a, low, high)[0] for step in (1e-6, -1e-6))
        assert (up - down) / 2e-6 == pytest.approx(by_formula, abs=1e-8)
        assert gradient_N[n].item() == pytest.approx(by_formula, rel=1e-12, abs=0)
    assert 5 < clipped_N.sum() < 55
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate(x, advantages_N, low, high)[0], (log_ratios_N,))


def test_a_ratio_that_overflows_is_no_nan_where_it_is_clipped_or_does_not_count():
    """exp(100) is infinite in float32, but -min(r A, 1.2 A) is a constant for A > 0, and zero for A = 0.

    The ratio of a long completion is there soon (RLOO), and advantages of 0 are common (groups of equal scores).
    """
    log_ratios_N = torch.tensor([100.0, 100.0, 1e4], requires_grad=True)
    loss_N, clipped_N = clipped_surrogate(log_ratios_N, torch.tensor([1.0, 0.0, 2.0]), 0.2, 0.2)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), log_ratios_N)
    assert loss_N.tolist() == pytest.approx([-1.2, 0.0, -2.4])
    assert clipped_N.tolist() == [1, 0, 1]
    assert gradient_N.tolist() == [0, 0, 0]


# The clipped likelihood


def slow_likelihood(
    log_ratio: float, advantage: float, logprob: float, low: float, high: float
) -> tuple[float, float, float]:
    """The loss, its derivative by the log-probability, and whether the weight was clipped."""
    ratio = math.exp(log_ratio)
    weight = clip(ratio, 1 - low, 1 + high)
    return -weight * advantage * logprob, -weight * advantage, float(weight != ratio)


@pytest.mark.parametrize(("low", "high"), [*CLIPRANGES, (1.0, 4.0)])
@pytest.mark.parametrize("width", [0.0, 0.5, 5.0])
def test_clipped_likelihood_and_its_gradient_are_their_formulas(low, high, width):
    """The gradient goes through the log-probability alone, and through every entry, clipped or not."""
    pi_BT, ratios_BT, advantages_BT = normal(0, 12, 30), normal(1, 12, 30, width=width), normal(2, 12, 30)
    advantages_BT[::4] = 0
    for x_BT in (pi_BT, ratios_BT):
        x_BT.requires_grad_()
    loss_BT, clipped_BT = clipped_likelihood(pi_BT, ratios_BT, advantages_BT, low, high)
    assert not clipped_BT.requires_grad
    gradient_BT, through_the_weight = torch.autograd.grad(loss_BT.sum(), (pi_BT, ratios_BT), allow_unused=True)
    assert through_the_weight is None or through_the_weight.abs().max() == 0
    seen = set()
    for row in range(12):
        for t in range(30):
            numbers = [x[row, t].item() for x in (ratios_BT, advantages_BT, pi_BT)]
            loss, gradient, clipped = slow_likelihood(*numbers, low, high)
            assert loss_BT[row, t].item() == pytest.approx(loss, rel=1e-12, abs=1e-14)
            assert gradient_BT[row, t].item() == pytest.approx(gradient, rel=1e-12, abs=1e-14)
            assert clipped_BT[row, t].item() == clipped
            assert advantages_BT[row, t] == 0 or gradient_BT[row, t] != 0
            seen.add((clipped, numbers[0] < 0))
    if width == 5.0:
        assert seen == {(0.0, True), (0.0, False), (1.0, False)} | ({(1.0, True)} if low < 1 else set())


def test_with_a_cliprange_of_one_a_weight_has_no_lower_bound():
    """Nor is a ratio that underflows to 0 counted as clipped; one that overflows is, and is no infinity."""
    log_ratios = torch.tensor([-1e4, -20.0, 0.0, 1e4])
    logprobs = torch.full((4,), -2.0, requires_grad=True)
    loss, clipped = clipped_likelihood(logprobs, log_ratios, torch.ones(4), 1.0, 4.0)
    assert loss.tolist() == pytest.approx([0.0, 2 * math.exp(-20.0), 2.0, 10.0])
    assert clipped.tolist() == [0, 0, 0, 1]
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.0, -math.exp(-20.0), -1.0, -5.0])


# Importance weights


def slow_weight(log_ratio: float, kind: str, cap: float) -> tuple[float, float]:
    weight = math.exp(log_ratio) if log_ratio < 700 else math.inf
    if kind == "truncated":
        return min(weight, cap), float(weight > cap)
    return (weight if weight <= cap else 0.0), float(weight > cap)


@pytest.mark.parametrize("kind", ["truncated", "masked"])
@pytest.mark.parametrize("cap", [1.0, 1.5, 2.0, 10.0])
def test_importance_weights_are_their_formula(kind, cap):
    log_ratios_BT = normal(5, 8, 40, width=1.5)
    log_ratios_BT[0, :3] = torch.tensor([0.0, 5.0, -5.0])
    weights_BT, capped_BT = importance_weights(log_ratios_BT, kind, cap)
    for row in range(8):
        for t in range(40):
            weight, capped = slow_weight(log_ratios_BT[row, t].item(), kind, cap)
            assert weights_BT[row, t].item() == pytest.approx(weight, rel=1e-12)
            assert capped_BT[row, t].item() == capped
    assert 0 < capped_BT.sum() < 320


def test_a_weight_that_overflows_is_capped_like_any_other():
    huge = torch.tensor([1e3, 1e4], dtype=torch.float64)
    weights, capped = importance_weights(huge, "truncated", 2.0)
    assert (weights.tolist(), capped.tolist()) == ([2, 2], [1, 1])
    weights, capped = importance_weights(huge, "masked", 2.0)
    assert (weights.tolist(), capped.tolist()) == ([0, 0], [1, 1])
    weights, capped = importance_weights(-huge, "masked", 2.0)
    assert (weights.tolist(), capped.tolist()) == ([0, 0], [0, 0])


# Types


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: clipped_surrogate(x, x.flip(0), 0.2, 0.2),
        lambda x: clipped_likelihood(x, x.roll(1), x.flip(0), 0.2, 0.2),
        lambda x: importance_weights(x, "truncated", 1.5),
        lambda x: importance_weights(x, "masked", 1.5),
        lambda x: clipped_value_loss(x, x.flip(0), x.roll(1), 0.2),
    ],
    ids=["clipped_surrogate", "clipped_likelihood", "truncated", "masked", "clipped_value_loss"],
)
def test_values_and_flags_have_the_type_of_the_input(function, dtype):
    x_N = normal(15, 20).to(dtype)
    assert [tensor.dtype for tensor in function(x_N)] == [dtype, dtype]


# Diagnostics of the ratios


def slow_share(log_weights: list[float]) -> float:
    top = max(log_weights)
    weights = [math.exp(x - top) for x in log_weights]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize("width", [0.0, 0.1, 2.0, 300.0])
def test_effective_sample_share_is_its_formula(size, width):
    for seed in range(3):
        logs_N = normal(seed, size, width=width)
        ours = effective_sample_share(logs_N)
        assert ours.shape == ()
        assert ours.item() == pytest.approx(slow_share(logs_N.tolist()), rel=1e-10)
        assert 1 / size - 1e-12 <= ours.item() <= 1 + 1e-12


def slow_statistics(tokens: list[float], rows: list[float]) -> dict[str, float]:
    n = len(tokens)
    ratios = sorted(math.exp(x) for x in tokens)
    mean = math.fsum(ratios) / n
    return {
        "policy/behaviour_kl": -math.fsum(tokens) / n,
        "policy/logprob_difference": math.fsum(map(abs, tokens)) / n,
        "val/ratio": mean,
        "policy/behaviour_kl_k3": math.fsum(math.exp(x) - 1 - x for x in tokens) / n,
        "val/ratio_var": math.fsum((r - mean) ** 2 for r in ratios) / n,
        "val/ratio_p01": ratios[round((n - 1) * 1 / 100)],
        "val/ratio_p50": ratios[round((n - 1) * 50 / 100)],
        "val/ratio_p99": ratios[round((n - 1) * 99 / 100)],
        "val/ratio_max": ratios[-1],
        "val/ess_token": slow_share(tokens),
        "val/ess_sequence": slow_share(rows),
    }


@pytest.mark.parametrize("width", [0.0, 0.2, 3.0])
def test_ratio_statistics_are_their_formulas(width):
    for size in (1, 2, 3, 4, 7, 60, 101, 250):
        tokens_N, rows_B = normal(size, size, width=width), normal(size + 1, max(1, size // 5), width=width)
        ours = ratio_statistics(tokens_N, rows_B)
        expected = slow_statistics(tokens_N.tolist(), rows_B.tolist())
        assert set(ours) == set(expected) == STATISTICS
        for name, value in ours.items():
            assert isinstance(value, float)
            assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("size", [1, 2, 50, 1000, 9999])
def test_quantiles_are_those_of_a_full_sort_bit_for_bit_without_one(monkeypatch, size):
    tokens_N = normal(3, size).float().round(decimals=2)  # with ties
    ordered_N = tokens_N.sort().values.exp()
    monkeypatch.setattr(torch.Tensor, "sort", None)
    ours = ratio_statistics(tokens_N, tokens_N[:1])
    for q in (1, 50, 99):
        assert ours[f"val/ratio_p{q:02d}"] == np.quantile(ordered_N.numpy(), q / 100, method="nearest"), q
        assert ours[f"val/ratio_p{q:02d}"] == ordered_N[round((size - 1) * q / 100)], q
    assert ours["val/ratio_max"] == ordered_N[-1]


def test_ratio_statistics_of_nothing_are_nothing():
    """Neither without completions, nor where all completions are empty."""
    assert ratio_statistics(torch.zeros(0), torch.zeros(0)) == {}
    assert ratio_statistics(torch.zeros(0), torch.zeros(3)) == {}


def test_the_k3_of_tiny_log_ratios_is_accurate_in_float32():
    """Engine noise is 1e-6; the 5e-13 that is right is a hundred thousandth of what exp(x) - 1 - x rounds to."""
    for magnitude in (1e-6, 1e-4, 1e-2):
        tokens_N = torch.tensor([magnitude, -magnitude])
        exact = math.fsum(math.expm1(x) - x for x in tokens_N.tolist()) / 2
        ours = ratio_statistics(tokens_N, torch.zeros(1))["policy/behaviour_kl_k3"]
        assert ours == pytest.approx(exact, rel=1e-3, abs=2e-7 * magnitude)


# The clipped value loss


def slow_value_loss(value: float, old: float, target: float, c: float) -> tuple[float, float]:
    unclipped, clipped = (value - target) ** 2, (clip(value, old - c, old + c) - target) ** 2
    return 0.5 * max(unclipped, clipped), float(clipped > unclipped)


def value_cases() -> tuple[Tensor, Tensor, Tensor]:
    """Values inside and outside the range around the old ones, and returns on either side of both."""
    old_BT = normal(10, 10, 30)
    return old_BT + normal(11, 10, 30, width=0.5), old_BT, old_BT + normal(12, 10, 30)


@pytest.mark.parametrize("cliprange", [0.01, 0.2, 0.5, 10.0])
def test_clipped_value_loss_is_its_formula(cliprange):
    values_BT, old_BT, returns_BT = value_cases()
    loss_BT, clipped_BT = clipped_value_loss(values_BT, old_BT, returns_BT, cliprange)
    for row in range(10):
        for t in range(30):
            numbers = [x[row, t].item() for x in (values_BT, old_BT, returns_BT)]
            loss, clipped = slow_value_loss(*numbers, cliprange)
            assert loss_BT[row, t].item() == pytest.approx(loss, rel=1e-10, abs=1e-14)
            assert clipped_BT[row, t].item() == clipped
    assert (clipped_BT.sum() > 0) == (cliprange < 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_inside_the_range_is_never_counted_as_clipped(dtype):
    """Clipping leaves it as it is, to the last bit: old + (V - old) is not always V, and would be larger by chance."""
    values_N, old_N, returns_N = (normal(seed, 5000).to(dtype) for seed in (16, 17, 18))
    near_N = (values_N - old_N).abs() < 0.199
    assert near_N.sum() > 500
    loss_N, clipped_N = clipped_value_loss(values_N, old_N, returns_N, 0.2)
    assert clipped_N[near_N].sum() == 0
    torch.testing.assert_close(loss_N[near_N], 0.5 * (values_N - returns_N)[near_N] ** 2)


@pytest.mark.parametrize("cliprange", [0.05, 0.2, 1.0])
def test_clipped_value_loss_gradient(cliprange):
    """V - R, exactly 0 where the clipped term is the larger one; neither old values nor returns are trained."""
    values_N, old_N, returns_N = (x.flatten()[:80] for x in value_cases())
    values_N.requires_grad_()
    loss_N, clipped_N = clipped_value_loss(values_N, old_N, returns_N, cliprange)
    assert not clipped_N.requires_grad
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), values_N)
    for n in range(80):
        v, old, target = (x[n].item() for x in (values_N, old_N, returns_N))
        _, clipped = slow_value_loss(v, old, target, cliprange)
        by_formula = 0.0 if clipped else v - target
        up, down = (slow_value_loss(v + step, old, target, cliprange)[0] for step in (1e-6, -1e-6))
        assert (up - down) / 2e-6 == pytest.approx(by_formula, abs=1e-8)
        assert gradient_N[n].item() == pytest.approx(by_formula, rel=1e-12, abs=0)
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old_N, returns_N, cliprange)[0], (values_N,))


# The adapted KL coefficient


def test_adapted_coefficient_is_its_formula():
    rng = random.Random(0)
    for _ in range(300):
        coefficient, target = rng.uniform(0.001, 1), rng.uniform(0.1, 20)
        kl = target * rng.choice([0.0, rng.uniform(-1, 3), rng.uniform(0.75, 1.25), 100.0])
        samples, horizon = rng.randint(1, 600), rng.randint(600, 20_000)
        error = clip(kl / target - 1, -0.2, 0.2)
        expected = coefficient * (1 + error * samples / horizon)
        assert adapted_coefficient(coefficient, kl, target, samples, horizon) == pytest.approx(expected, rel=1e-12)
