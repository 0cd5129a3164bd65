"""Advantages against their formulas, written again as loops over Python's floats."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from async_rlhf.algorithms.estimators import at_last, gae, group_normalized, leave_one_out, row_means, whiten

SCALES = ("group", "batch", "none")


def slow_std(values: list[float]) -> float:
    """With Bessel's correction."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


def slow_leave_one_out(groups: list[list[float]]) -> list[list[float]]:
    result = []
    for group in groups:
        row = []
        for k in range(len(group)):
            others = [group[j] for j in range(len(group)) if j != k]
            row.append(group[k] - math.fsum(others) / len(others))
        result.append(row)
    return result


def slow_group_normalized(groups: list[list[float]], scale: str) -> list[list[float]]:
    everything = [x for group in groups for x in group]
    result = []
    for group in groups:
        mean = math.fsum(group) / len(group)
        divisor = {
            "group": lambda group=group: slow_std(group) + 1e-4,
            "batch": lambda: slow_std(everything) + 1e-4,
            "none": lambda: 1.0,
        }[scale]()
        result.append([(x - mean) / divisor for x in group])
    return result


def flat(groups: list[list[float]]) -> list[float]:
    return [x for group in groups for x in group]


def make_rewards(seed: int, P: int, K: int) -> Tensor:
    """Groups of small integers with ties, of equal rewards, of wide and of narrow reals."""
    rng = random.Random(seed)
    kinds = [lambda: float(rng.randint(-1, 1)), lambda: -0.7, lambda: rng.gauss(0, 100), lambda: 5 + rng.gauss(0, 1e-3)]
    return torch.tensor([[kinds[p % 4]() for _ in range(K)] for p in range(P)], dtype=torch.float64)


# Advantages of groups


@pytest.mark.parametrize("K", [2, 3, 4, 9])
@pytest.mark.parametrize("P", [1, 2, 8])
def test_leave_one_out_is_its_formula(P, K):
    for seed in range(4):
        r_PK = make_rewards(seed, P, K)
        ours_PK = leave_one_out(r_PK)
        assert ours_PK.shape == (P, K)
        assert ours_PK.dtype == torch.float64
        assert flat(ours_PK.tolist()) == pytest.approx(flat(slow_leave_one_out(r_PK.tolist())), rel=1e-9, abs=1e-10)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("K", [2, 3, 4, 9])
@pytest.mark.parametrize("P", [1, 2, 8])
def test_group_normalized_is_its_formula(P, K, scale):
    for seed in range(4):
        r_PK = make_rewards(seed, P, K)
        ours_PK = group_normalized(r_PK, scale)
        assert ours_PK.shape == (P, K)
        assert ours_PK.dtype == torch.float64
        expected = slow_group_normalized(r_PK.tolist(), scale)
        assert flat(ours_PK.tolist()) == pytest.approx(flat(expected), rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_exactly_zero_and_no_nan(scale):
    """Whatever the rounding of the mean does, a group without signal must not be divided up to noise of size 1."""
    for reward in (0.0, 1.0, -3.5, 1024.0, 0.1, 1 / 3, -0.7, 1e-30, 3e38):
        for dtype in (torch.float32, torch.float64):
            for K in (2, 3, 4, 8, 16):
                mixed_PK = torch.full((3, K), reward, dtype=dtype)
                mixed_PK[1, 0] = 7.0
                for advantages_PK in (group_normalized(mixed_PK, scale), leave_one_out(mixed_PK)):
                    assert advantages_PK[0].tolist() == advantages_PK[2].tolist() == [0.0] * K
                    assert reward > 1e38 or advantages_PK[1].ne(0).all()


# Generalised advantage estimation


def ragged(seed: int, B: int = 9, garbage: float = 1e3) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards, values, sampled) of rows with 1 to 6 prompt tokens and 0 to 9 sampled ones; the first have 0, 1 and 9.

    Rows of odd seeds have observations of 1 to 4 tokens before the first sampled token, between two and after the
    last, and rewards at tokens of every kind; in those of even seeds every token after the prompt is sampled, and only
    these have rewards. Values are garbage where no token was sampled.
    """
    rng, holes = random.Random(seed), seed % 2 == 1
    flags = []
    for row in range(B):
        flags.append([0.0] * rng.randint(1, 6))
        for _ in range([0, 1, 9][row] if row < 3 else rng.randint(0, 9)):
            flags[row] += [0.0] * (rng.randint(1, 4) if holes and rng.random() < 0.4 else 0) + [1.0]
        flags[row] += [0.0] * (rng.randint(1, 4) if holes and rng.random() < 0.5 else 0)
    T = max(map(len, flags)) + seed % 2
    torch.manual_seed(seed)
    sampled_BT = torch.tensor([row + [0.0] * (T - len(row)) for row in flags], dtype=torch.float64)
    given = [[float(t < len(row) and (rng.random() < 0.6 if holes else row[t])) for t in range(T)] for row in flags]
    rewards_BT = torch.randn(B, T, dtype=torch.float64) * torch.tensor(given, dtype=torch.float64)
    signs_BT = torch.randint(0, 2, (B, T)) * 2.0 - 1
    values_BT = torch.where(sampled_BT > 0, torch.randn(B, T, dtype=torch.float64) * 2, garbage * signs_BT)
    return rewards_BT, values_BT, sampled_BT


def inside(values_BT: Tensor, sampled_BT: Tensor, row: int) -> list[float]:
    return [x for x, m in zip(values_BT[row].tolist(), sampled_BT[row].tolist(), strict=True) if m]


def earned(rewards_BT: Tensor, sampled_BT: Tensor, row: int) -> list[float]:
    """For each sampled token its reward and those at the tokens after it that were not sampled."""
    parts: list[list[float]] = []
    for reward, sampled in zip(rewards_BT[row].tolist(), sampled_BT[row].tolist(), strict=True):
        if sampled:
            parts.append([reward])
        elif parts:
            parts[-1].append(reward)
    return [math.fsum(part) for part in parts]


def slow_deltas(rewards: list[float], values: list[float], gamma: float) -> list[float]:
    after = [*values, 0.0][1:]
    return [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The recursion, from the last token to the first."""
    advantages, later = [], 0.0
    for delta in reversed(slow_deltas(rewards, values, gamma)):
        later = delta + gamma * lam * later
        advantages.insert(0, later)
    return advantages


def slow_gae_sum(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The same as an explicit sum of the remaining deltas."""
    deltas = slow_deltas(rewards, values, gamma)
    return [
        math.fsum((gamma * lam) ** later * deltas[t + later] for later in range(len(deltas) - t))
        for t in range(len(deltas))
    ]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.5, 0.0])
def test_gae_is_its_recursion_and_its_sum(gamma, lam):
    for seed in range(5):
        rewards_BT, values_BT, sampled_BT = ragged(seed)
        advantages_BT, returns_BT = gae(rewards_BT, values_BT, sampled_BT, gamma, lam)
        assert advantages_BT.dtype == returns_BT.dtype == torch.float64
        assert (advantages_BT * (1 - sampled_BT)).abs().max() == 0
        assert (returns_BT * (1 - sampled_BT)).abs().max() == 0
        for row in range(len(sampled_BT)):
            rewards, values = earned(rewards_BT, sampled_BT, row), inside(values_BT, sampled_BT, row)
            expected = slow_gae(rewards, values, gamma, lam)
            assert expected == pytest.approx(slow_gae_sum(rewards, values, gamma, lam), abs=1e-12)
            assert inside(advantages_BT, sampled_BT, row) == pytest.approx(expected, rel=1e-10, abs=1e-10)
            returns = [a + v for a, v in zip(expected, values, strict=True)]
            assert inside(returns_BT, sampled_BT, row) == pytest.approx(returns, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0)])
def test_gae_of_rows_without_holes_is_the_classic_recursion_bitwise(gamma, lam, dtype):
    """Rewards are where tokens were sampled; numbers of dimension 0 round as the package's tensors do."""
    for seed in range(0, 10, 2):
        rewards_BT, values_BT, sampled_BT = (x.to(dtype) for x in ragged(seed))
        advantages_BT, returns_BT = gae(rewards_BT, values_BT, sampled_BT, gamma, lam)
        for row in range(len(sampled_BT)):
            inside_T = sampled_BT[row] > 0
            values = list(values_BT[row, inside_T])
            advantages = slow_gae(list(rewards_BT[row, inside_T]), values, gamma, lam)
            assert inside(advantages_BT, sampled_BT, row) == [float(a) for a in advantages]
            returns = [float(a + v) for a, v in zip(advantages, values, strict=True)]
            assert inside(returns_BT, sampled_BT, row) == returns


def exact_rewards(sampled_BT: Tensor, rng: random.Random) -> Tensor:
    """Rewards everywhere whose sums, from one sampled token to the next, do not round in whatever order.

    Either one of them is a real number and the others are 0, or all are multiples of 1/8.
    """
    result = []
    for flags in sampled_BT.tolist():
        starts = [0, *(t for t, sampled in enumerate(flags) if sampled), len(flags)]
        row: list[float] = []
        for n in (end - start for start, end in itertools.pairwise(starts)):
            one = [rng.gauss(0, 1), *[0.0] * (n - 1)] if n else []
            row += rng.choice((rng.sample(one, n), [rng.randint(-16, 16) / 8 for _ in range(n)]))
        result.append(row)
    return torch.tensor(result, dtype=sampled_BT.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0)])
def test_gae_of_a_row_with_holes_is_that_of_its_sampled_tokens_alone_bitwise(gamma, lam, dtype):
    """Cut out what was not sampled, but for one token of the prompt; move what was given there to the token before."""
    for seed in range(1, 11, 2):
        _, values_BT, sampled_BT = (x.to(dtype) for x in ragged(seed))
        rewards_BT = exact_rewards(sampled_BT, random.Random(seed))
        with_holes = gae(rewards_BT, values_BT, sampled_BT, gamma, lam)
        for row in range(len(sampled_BT)):
            inside_T = sampled_BT[row] > 0
            moved_1T = torch.tensor([[0.0, *earned(rewards_BT, sampled_BT, row)]], dtype=dtype)
            values_1T = torch.cat([values_BT[row, :1], values_BT[row, inside_T]])[None]
            sampled_1T = (torch.arange(moved_1T.shape[1]) > 0).to(dtype)[None]
            alone = gae(moved_1T, values_1T, sampled_1T, gamma, lam)
            for whole_BT, part_1T in zip(with_holes, alone, strict=True):
                assert whole_BT.dtype == part_1T.dtype == dtype
                assert torch.equal(whole_BT[row, inside_T], part_1T[0, 1:])
                assert whole_BT[row, ~inside_T].abs().sum() == 0


# At the last sampled token, and means of rows


def test_at_last_is_its_loop():
    for seed in range(6):
        _, _, sampled_BT = ragged(seed)
        values_B = torch.randn(len(sampled_BT), dtype=torch.float64)
        expected = []
        for value, flags in zip(values_B.tolist(), sampled_BT.tolist(), strict=True):
            row = [0.0] * len(flags)
            for t in reversed(range(len(flags))):
                if flags[t]:
                    row[t] = value
                    break
            expected.append(row)
        ours_BT = at_last(values_B, sampled_BT)
        assert ours_BT.dtype == torch.float64
        assert ours_BT.tolist() == expected
        assert at_last(values_B.float(), sampled_BT.float()).dtype == torch.float32


@pytest.mark.parametrize("garbage", [0.0, 1e30])
def test_row_means_are_their_loop(garbage):
    for seed in range(6):
        _, values_BT, sampled_BT = ragged(seed, garbage=garbage)
        expected = []
        for row in range(len(sampled_BT)):
            values = inside(values_BT, sampled_BT, row)
            expected.append(math.fsum(values) / len(values) if values else 0.0)
        assert row_means(values_BT, sampled_BT).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_row_means_of_equal_numbers_are_that_number_in_float32():
    """0.1 a hundred times is no longer 10 in float32."""
    torch.manual_seed(0)
    sampled_BT = (torch.rand(200, 300) < 0.7).float()
    sampled_BT[0] = 0
    values_B = torch.cat([torch.tensor([5.0, 0.1, 1 / 3, -0.7, 1e-30, 1e30]), torch.randn(194)])
    values_BT = values_B[:, None] * sampled_BT
    means_B = row_means(values_BT, sampled_BT)
    assert means_B.dtype == torch.float32
    assert means_B.tolist() == [0.0, *values_B[1:].tolist()]


# Whitening


def slow_whiten(values: list[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((x - mean) ** 2 for x in values) / len(values)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in values]


@pytest.mark.parametrize("garbage", [0.0, 1e3])
@pytest.mark.parametrize("width", [1.0, 30.0, 1e-4])
def test_whiten_is_its_formula(width, garbage):
    for seed in range(5):
        _, values_BT, mask_BT = ragged(seed, garbage=garbage)
        values_BT = torch.where(mask_BT > 0, values_BT * width + 2, values_BT)
        ours_BT = whiten(values_BT, mask_BT)
        assert ours_BT.dtype == torch.float64
        assert (ours_BT * (1 - mask_BT)).abs().max() == 0
        assert ours_BT[mask_BT > 0].tolist() == pytest.approx(slow_whiten(values_BT[mask_BT > 0].tolist()), rel=1e-9)


def test_whiten_survives_a_large_common_offset_in_float32():
    """The mean of the squares minus the square of the mean would lose every digit here."""
    torch.manual_seed(0)
    values_BT = torch.randn(8, 50) + 4096
    ours_BT = whiten(values_BT, torch.ones(8, 50))
    assert ours_BT.flatten().tolist() == pytest.approx(slow_whiten(values_BT.flatten().tolist()), abs=2e-3)


def test_whiten_of_nothing_of_one_and_of_equal_entries_is_zero():
    values_BT = torch.full((2, 3), 7.0, dtype=torch.float64)
    nothing_BT = torch.zeros_like(values_BT)
    one_BT = nothing_BT.clone()
    one_BT[1, 2] = 1
    for mask_BT in (nothing_BT, one_BT, torch.ones_like(values_BT)):
        assert torch.equal(whiten(values_BT, mask_BT), nothing_BT)
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("lam", [1.0, 0.7])
def test_a_discount_over_turns_leaves_the_tokens_of_a_turn_alone(lam):
    """By the definition: gamma once for each observation between a token and a later reward or value."""
    gamma, holes = 0.5, 0
    for seed in range(5):
        rewards_BT, values_BT, sampled_BT = ragged(seed)
        advantages_BT, _ = gae(rewards_BT, values_BT, sampled_BT, gamma, lam, over="turns")
        for row in range(len(sampled_BT)):
            places = sampled_BT[row].nonzero().flatten().tolist()
            rewards, values = earned(rewards_BT, sampled_BT, row), inside(values_BT, sampled_BT, row)
            steps = [1.0 if b == a + 1 else gamma for a, b in itertools.pairwise(places)] + [gamma] * bool(places)
            holes += sum(step == gamma for step in steps[:-1])
            after = [*values, 0.0][1:]
            deltas = [r + g * v_next - v for r, g, v_next, v in zip(rewards, steps, after, values, strict=True)]
            expected = [
                math.fsum(math.prod(g * lam for g in steps[t:later]) * deltas[later] for later in range(t, len(deltas)))
                for t in range(len(deltas))
            ]
            assert inside(advantages_BT, sampled_BT, row) == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert holes > 5
