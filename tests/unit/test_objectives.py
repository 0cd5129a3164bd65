"""The objectives against their formulas, written again as loops in float64 (docs/algorithms)."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from async_rlhf import OnlineDPOConfig
from async_rlhf.algorithms.estimators import k1, k2, k3
from async_rlhf.algorithms.preference import preference_loss
from async_rlhf.algorithms.table import find
from async_rlhf.models.head import entropies_of, selected_logprobs
from async_rlhf.types import Experience, PolicyOutput

DPO = find("online_dpo")
LOSS_TYPES = ("sigmoid", "ipo")


# Log-probabilities and entropies


def slow_log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    log_total = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - log_total for x in logits]


def slow_entropy(logits: list[float]) -> float:
    return -math.fsum(math.exp(x) * x for x in slow_log_softmax(logits))


def hard_logits() -> Tensor:
    """Rows of seven: random ones of several widths, huge gaps, ties of the largest and of all."""
    torch.manual_seed(0)
    random_rows = torch.cat([torch.randn(20, 7) * scale for scale in (0.1, 1.0, 5.0, 30.0)])
    extreme = torch.tensor(
        [
            [1e4, -1e4, 0, 1, 2, 3, 4],
            [3, -1e4, 3, -1e4, 3, -1e4, 2],
            [0, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 1e-3],
            [-1e4, -1e4, 0, 0, -1, -1, -1e4],
        ]
    )
    return torch.cat([random_rows, extreme])


def test_selected_logprobs_are_those_of_the_slow_softmax_for_every_target():
    logits_NV = hard_logits()
    for v in range(7):
        ours_N = selected_logprobs(logits_NV, torch.full((len(logits_NV),), v))
        assert ours_N.dtype == torch.float32
        expected = [slow_log_softmax(row)[v] for row in logits_NV.double().tolist()]
        assert ours_N.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_entropies_are_those_of_the_slow_softmax():
    logits_NV = hard_logits()
    expected = [slow_entropy(row) for row in logits_NV.double().tolist()]
    assert entropies_of(torch.log_softmax(logits_NV, dim=-1)).tolist() == pytest.approx(expected, abs=1e-5)
    assert entropies_of(torch.log_softmax(torch.zeros(1, 9), dim=-1)).item() == pytest.approx(math.log(9), abs=1e-6)
    assert entropies_of(torch.log_softmax(torch.tensor([[1e4, 0.0, -1e4]]), dim=-1)).item() == 0.0


def test_a_common_offset_of_the_logits_costs_no_accuracy():
    """softmax does not know the offset; subtracting a logsumexp of 1e4 from 1e4 would keep three digits."""
    logits_NV = torch.tensor([[1e4, 1e4, 1e4, 1e4, 1e4], [-1e4, -1e4, -1e4, -1e4, -1e4], [1e4, 9999, 9998, 0, 0]])
    rows = logits_NV.double().tolist()
    for v in range(5):
        expected = [slow_log_softmax(row)[v] for row in rows]
        ours_N = selected_logprobs(logits_NV, torch.full((3,), v))
        assert ours_N.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-5)
    assert entropies_of(torch.log_softmax(logits_NV, dim=-1)).tolist() == pytest.approx(
        [slow_entropy(row) for row in rows], abs=1e-5
    )


def test_gradient_of_selected_logprobs_is_one_hot_minus_softmax():
    torch.manual_seed(5)
    logits_NV = (torch.randn(6, 5, dtype=torch.float64) * 3).requires_grad_()
    targets_N = torch.tensor([0, 4, 2, 2, 1, 3])
    assert torch.autograd.gradcheck(lambda x: selected_logprobs(x, targets_N), (logits_NV,))
    weights = [1.0, -2.0, 0.5, 3.0, 0.0, 7.0]
    (gradient_NV,) = torch.autograd.grad(
        selected_logprobs(logits_NV, targets_N) @ torch.tensor(weights, dtype=torch.float64), logits_NV
    )
    step = 1e-6
    for n, v in itertools.product(range(6), range(5)):
        row = logits_NV[n].tolist()
        up, down = ([*row[:v], row[v] + sign * step, *row[v + 1 :]] for sign in (1, -1))
        target = int(targets_N[n])
        by_difference = (slow_log_softmax(up)[target] - slow_log_softmax(down)[target]) / (2 * step)
        by_formula = float(target == v) - math.exp(slow_log_softmax(row)[v])
        assert by_difference == pytest.approx(by_formula, abs=1e-8)
        assert gradient_NV[n, v].item() == pytest.approx(weights[n] * by_formula, abs=1e-10)


# KL estimators


def test_kl_estimators_are_their_formulas():
    torch.manual_seed(6)
    logprobs, reference = -torch.rand(3, 40).double() * 6, -torch.rand(3, 40).double() * 6
    for i, j in itertools.product(range(3), range(40)):
        d = logprobs[i, j].item() - reference[i, j].item()
        assert k1(logprobs, reference)[i, j].item() == pytest.approx(d, abs=1e-12)
        assert k2(logprobs, reference)[i, j].item() == pytest.approx(d * d / 2, abs=1e-12)
        assert k3(logprobs, reference)[i, j].item() == pytest.approx(math.exp(-d) - 1 + d, abs=1e-12)


def test_k3_is_accurate_and_never_negative_for_tiny_differences_in_float32():
    """Computed as written, exp(-d) - 1 rounds at 6e-8: a hundred thousand times the 5e-13 that is right for 1e-6."""
    for magnitude in (1e-6, 3e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.3, 5.0):
        for d in torch.tensor([magnitude, -magnitude]):
            exact = math.expm1(-d.item()) + d.item()
            ours = k3(d, torch.zeros(())).item()
            assert ours == pytest.approx(exact, rel=1e-3, abs=2e-7 * magnitude)
    d_N = torch.cat([torch.linspace(-3, 3, 20_001), torch.logspace(-12, 1, 20_001), -torch.logspace(-12, 1, 20_001)])
    values_N = k3(d_N, torch.zeros_like(d_N))
    assert values_N.min().item() >= 0
    assert k3(torch.zeros(3), torch.zeros(3)).tolist() == [0, 0, 0]


# Preference losses


def slow_preference_loss(chosen: float, rejected: float, beta: float, loss_type: str) -> float:
    h = chosen - rejected
    if loss_type == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    z = beta * h
    return math.log1p(math.exp(-z)) if z > 0 else -z + math.log1p(math.exp(z))  # -log sigmoid(z), for any z


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.02, 0.1, 1.7])
def test_preference_loss_is_its_formula(loss_type, beta):
    torch.manual_seed(7)
    chosen_U, rejected_U = torch.randn(60).double() * 20, torch.randn(60).double() * 20
    ours_U = preference_loss(chosen_U, rejected_U, beta, loss_type)
    expected = [
        slow_preference_loss(c, r, beta, loss_type) for c, r in zip(chosen_U.tolist(), rejected_U.tolist(), strict=True)
    ]
    assert ours_U.tolist() == pytest.approx(expected, rel=1e-11)
    in_float32_U = preference_loss(chosen_U.float(), rejected_U.float(), beta, loss_type)
    assert in_float32_U.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    shifted_U = preference_loss(chosen_U + 3.25, rejected_U + 3.25, beta, loss_type)
    assert shifted_U.tolist() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_preference_loss_gradient(loss_type):
    torch.manual_seed(8)
    chosen_U, rejected_U = (torch.randn(8).double().mul(5).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda c, r: preference_loss(c, r, 0.3, loss_type), (chosen_U, rejected_U))
    loss = preference_loss(chosen_U, rejected_U, 0.3, loss_type).sum()
    chosen_gradient_U, rejected_gradient_U = torch.autograd.grad(loss, (chosen_U, rejected_U))
    for u in range(8):
        h = chosen_U[u].item() - rejected_U[u].item()
        expected = -0.3 / (1 + math.exp(0.3 * h)) if loss_type == "sigmoid" else 2 * (h - 1 / 0.6)
        assert chosen_gradient_U[u].item() == pytest.approx(expected, rel=1e-9)
        assert rejected_gradient_U[u].item() == pytest.approx(-expected, rel=1e-9)


def test_large_margins_do_not_overflow():
    chosen_U = torch.tensor([1e6, -1e6, 3e4], requires_grad=True)
    loss_U = preference_loss(chosen_U, torch.zeros(3), 0.1, "sigmoid")
    assert loss_U.tolist() == pytest.approx([0.0, 1e5, 0.0], abs=1e-6)
    (gradient_U,) = torch.autograd.grad(loss_U.sum(), chosen_U)
    assert gradient_U.tolist() == pytest.approx([0.0, -0.1, 0.0], abs=1e-7)
    assert preference_loss(chosen_U, torch.zeros(3), 0.1, "ipo").tolist() == pytest.approx(
        [(1e6 - 5) ** 2, (1e6 + 5) ** 2, (3e4 - 5) ** 2], rel=1e-6
    )


# Online DPO


def dpo_config(K: int, beta: float = 0.1, loss_type: str = "sigmoid") -> OnlineDPOConfig:
    return OnlineDPOConfig(samples_per_prompt=K, beta=beta, loss_type=loss_type)


def ragged_experience(seed: int, P: int, K: int, garbage: float = 0.0) -> tuple[Experience, Tensor]:
    """P groups of K rows of every length, and log-probabilities of a policy.

    The first token of a row is its number. Among the groups: all scores equal (every fourth), ties for the best and
    the worst (small integers). Rows of odd seeds have observations of 1 to 4 tokens, with rewards that the scores
    contain, before their first sampled token, between two and after the last. Log-probabilities are ``garbage`` where
    no token was sampled.
    """
    rng, holes_rng = random.Random(seed), random.Random(f"holes {seed}")
    prompt_lengths = [rng.randint(1, 6) for _ in range(P)]
    flags = []
    for row in range(P * K):
        flags.append([0.0] * prompt_lengths[row // K])
        count = rng.randint(1, 9)
        for place in range(count + 1):  # the last is after the last sampled token
            flags[row] += [0.0] * (holes_rng.randint(1, 4) if seed % 2 and holes_rng.random() < 0.4 else 0)
            flags[row] += [1.0] * (place < count)
    B, T = P * K, max(map(len, flags))
    torch.manual_seed(seed)
    mask_BT = torch.tensor([row + [0.0] * (T - len(row)) for row in flags], dtype=torch.float64)
    given = [[seed % 2 * holes_rng.gauss(0, 1) * (t < len(row)) for t in range(T)] for row in flags]
    noise_BT = [torch.where(mask_BT > 0, -torch.rand(B, T).double() * 5, garbage) for _ in range(3)]
    tokens_BT = torch.randint(0, 1000, (B, T))
    tokens_BT[:, 0] = torch.arange(B)
    scores = [[float(rng.randint(-2, 2)) for _ in range(K)] for _ in range(P)]
    for p in range(P):
        if p % 4 == 3:
            scores[p] = [0.5] * K
        elif max(scores[p]) == min(scores[p]):
            scores[p][rng.randrange(K)] += 1
    experience = Experience(
        tokens_BT=tokens_BT,
        lengths_B=torch.tensor([len(row) for row in flags]),
        sampled_BT=mask_BT,
        behaviour_logprobs_BT=noise_BT[0],
        rewards_BT=torch.tensor(given, dtype=torch.float64),
        reference_logprobs_BT=noise_BT[1],
        scores_B=torch.tensor([score for group in scores for score in group]),
        loss_weights_U=torch.ones(B),
    )
    return experience, noise_BT[2]


def slow_pairs(experience: Experience, K: int) -> list[tuple[int, int] | None]:
    """For every prompt the rows of the first best and the first worst sample; None for a tie."""
    pairs: list[tuple[int, int] | None] = []
    scores = experience.scores_B.tolist()
    for start in range(0, len(scores), K):
        best = worst = start
        for row in range(start, start + K):
            if scores[row] > scores[best]:
                best = row
            if scores[row] < scores[worst]:
                worst = row
        pairs.append((best, worst) if scores[best] > scores[worst] else None)
    return pairs


def slow_sum(values_BT: Tensor, experience: Experience, row: int) -> float:
    values, mask = values_BT[row].tolist(), experience.sampled_BT[row].tolist()
    return math.fsum(value for value, inside in zip(values, mask, strict=True) if inside)


def slow_dpo(logprobs_BT: Tensor, experience: Experience, config: OnlineDPOConfig) -> tuple[float, dict[str, float]]:
    beta, loss = config.beta, 0.0
    names = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")
    metrics = dict.fromkeys((*names, "logps/rejected"), 0.0)
    for pair in slow_pairs(experience, config.samples_per_prompt):
        if pair is None:
            continue
        policy = [slow_sum(logprobs_BT, experience, row) for row in pair]
        reference = [slow_sum(experience.reference_logprobs_BT, experience, row) for row in pair]
        chosen, rejected = (p - r for p, r in zip(policy, reference, strict=True))
        loss += slow_preference_loss(chosen, rejected, beta, config.loss_type)
        metrics["rewards/chosen"] += beta * chosen
        metrics["rewards/rejected"] += beta * rejected
        metrics["rewards/margins"] += beta * (chosen - rejected)
        metrics["rewards/accuracies"] += chosen > rejected
        metrics["logps/chosen"] += policy[0]
        metrics["logps/rejected"] += policy[1]
    return loss, metrics


def of_pairs(logprobs_BT: Tensor, pairs: Experience) -> PolicyOutput:
    """What the policy gives for the rows that were chosen: their first token says which these are."""
    chosen_BT = logprobs_BT[pairs.tokens_BT[:, 0], : pairs.tokens_BT.shape[1]]
    return PolicyOutput(logprobs_BT=chosen_BT, entropies_BT=torch.zeros_like(chosen_BT))


def dpo_loss(logprobs_BT: Tensor, experience: Experience, config: OnlineDPOConfig):
    pairs = DPO.credit(experience, config)
    return DPO.loss(of_pairs(logprobs_BT, pairs), pairs, config)


@pytest.mark.parametrize("K", [2, 3, 4, 5])
def test_credit_pairs_the_first_best_with_the_first_worst(K):
    for seed in range(6):
        experience, _ = ragged_experience(seed, 9, K)
        pairs = DPO.credit(experience, dpo_config(K))
        expected = slow_pairs(experience, K)
        assert (len(pairs), pairs.units, pairs.rows_per_unit) == (18, 9, 2)
        assert pairs.loss_weights_U.tolist() == [0.0 if pair is None else 1.0 for pair in expected]
        assert expected.count(None) == 2
        for u, pair in enumerate(expected):
            for side in range(2):
                row = int(pairs.tokens_BT[2 * u + side, 0])
                assert row // K == u
                if pair is not None:
                    assert row == pair[side]
                length = int(experience.lengths_B[row])
                assert pairs.lengths_B[2 * u + side] == length
                assert pairs.scores_B[2 * u + side] == experience.scores_B[row]
                names = ("tokens_BT", "sampled_BT", "rewards_BT", "reference_logprobs_BT", "behaviour_logprobs_BT")
                for name in names:
                    kept = getattr(pairs, name)[2 * u + side, :length].tolist()
                    assert kept == getattr(experience, name)[row, :length].tolist(), name
                assert pairs.sampled_BT[2 * u + side, length:].sum() == 0


def test_a_difference_in_the_last_bit_of_a_score_is_no_tie():
    experience, _ = ragged_experience(0, 2, 3)
    above = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0)).item()
    experience = replace(experience, scores_B=torch.tensor([0.1, above, 0.1, 0.1, 0.1, 0.1]))
    pairs = DPO.credit(experience, dpo_config(3))
    assert pairs.loss_weights_U.tolist() == [1.0, 0.0]
    assert pairs.tokens_BT[:2, 0].tolist() == [1, 0]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(("K", "beta"), [(2, 0.1), (3, 0.03), (4, 0.5), (5, 1.0)])
def test_online_dpo_loss_and_metrics_are_their_formulas(K, beta, loss_type):
    config = dpo_config(K, beta, loss_type)
    for seed in range(6):
        experience, logprobs_BT = ragged_experience(seed, 7, K)
        ours = dpo_loss(logprobs_BT, experience, config)
        loss, metrics = slow_dpo(logprobs_BT, experience, config)
        assert ours.loss_sum.item() == pytest.approx(loss, rel=1e-6)
        for name, value in metrics.items():
            assert ours.metrics[name].item() == pytest.approx(value, rel=1e-6, abs=1e-6), name
            assert not ours.metrics[name].requires_grad


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("kind", ["wpo", "importance"])
def test_pairs_of_stale_samples_weigh_what_the_formula_says(kind, loss_type):
    """Each pair's loss times w(chosen) w(rejected), w = min(pi / mu, cap) of a completion or of its average token."""
    config = replace(dpo_config(3, 0.1, loss_type), pair_weights=kind, pair_weight_cap=1.05)
    for seed in range(6):
        experience, logprobs_BT = ragged_experience(seed, 7, 3)
        # Close to mu, so that not every weight is at the cap or 0.
        logprobs_BT = (experience.behaviour_logprobs_BT + 0.05 * logprobs_BT.sin()).detach().requires_grad_()
        pairs = DPO.credit(experience, config)
        ours = dpo_loss(logprobs_BT, experience, config)
        expected, weights, capped = 0.0, [], 0.0
        plain = replace(config, pair_weights="none", pair_weight_cap=2.0)
        rows = [int(pairs.tokens_BT[i, 0]) for i in range(len(pairs.tokens_BT))]
        for u in range(len(pairs.loss_weights_U)):
            weight = float(pairs.loss_weights_U[u])
            for row in rows[2 * u : 2 * u + 2]:
                length, log_ratio = 0, 0.0
                for t in range(experience.sampled_BT.shape[1]):
                    if experience.sampled_BT[row, t]:
                        log_ratio += logprobs_BT[row, t].item() - float(experience.behaviour_logprobs_BT[row, t])
                        length += 1
                ratio = math.exp(log_ratio / max(1, length) if kind == "wpo" else log_ratio)
                weight *= min(ratio, 1.05)
                capped += float(pairs.loss_weights_U[u]) * (ratio > 1.05) / 2
            weights.append(weight)
            one = replace(pairs, loss_weights_U=torch.eye(len(rows) // 2)[u] * pairs.loss_weights_U)
            alone = DPO.loss(of_pairs(logprobs_BT, pairs), one, plain)
            expected += alone.loss_sum.item() * (weight if pairs.loss_weights_U[u] else 0.0)
        assert ours.loss_sum.item() == pytest.approx(expected, rel=1e-6)
        assert ours.metrics["policy/importance_weight"].item() == pytest.approx(math.fsum(weights), rel=1e-6)
        assert ours.metrics["policy/importance_capped"].item() == pytest.approx(capped, abs=1e-9)
        (gradient_BT,) = torch.autograd.grad(ours.loss_sum, logprobs_BT)
        fixed = replace(pairs, loss_weights_U=torch.tensor(weights, dtype=pairs.loss_weights_U.dtype))
        theirs = DPO.loss(of_pairs(logprobs_BT, pairs), fixed, plain).loss_sum
        (expected_BT,) = torch.autograd.grad(theirs, logprobs_BT)
        assert torch.allclose(gradient_BT, expected_BT, rtol=1e-5, atol=1e-9)  # none through the weights


@pytest.mark.parametrize(("nats", "expected"), [(0.0, 0.5), (1e-6, 0.5), (-1e-6, 0.5), (1e-3, 1.0), (-1e-3, 0.0)])
def test_a_margin_within_rounding_counts_one_half(nats, expected):
    """The policy differs from the reference by rounding alone, or by as much as a first step moves it, in float32."""
    experience, _ = ragged_experience(5, 40, 2)
    reference_BT = experience.reference_logprobs_BT.float()
    experience = replace(experience, reference_logprobs_BT=reference_BT, scores_B=torch.arange(80.0))
    chosen_BT = torch.tensor([0.0, 1.0]).repeat(40)[:, None]  # of each pair the second
    first_BT = (experience.sampled_BT.cumsum(dim=1) == 1) & experience.sampled_BT.bool()
    ours = dpo_loss(reference_BT + nats * chosen_BT * first_BT, experience, dpo_config(2))
    moved = [bool(first_BT[row].any()) for row in range(1, 80, 2)]
    assert sum(moved) > 20
    slow = math.fsum(expected if any_tokens else 0.5 for any_tokens in moved)
    assert ours.metrics["rewards/accuracies"].item() == slow


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_online_dpo_gradient_is_the_difference_quotient_of_the_slow_loss(loss_type, seed):
    config = dpo_config(3, 0.2, loss_type)
    experience, logprobs_BT = ragged_experience(seed, 4, 3)
    logprobs_BT.requires_grad_()
    (gradient_BT,) = torch.autograd.grad(dpo_loss(logprobs_BT, experience, config).loss_sum, logprobs_BT)
    assert gradient_BT.abs().max() > 1e-3
    step, values_BT = 1e-5, logprobs_BT.detach()
    for row, t in itertools.product(*map(range, values_BT.shape)):
        quotient = 0.0
        for sign in (1, -1):
            moved_BT = values_BT.clone()
            moved_BT[row, t] += sign * step
            quotient += sign * slow_dpo(moved_BT, experience, config)[0] / (2 * step)
        assert gradient_BT[row, t].item() == pytest.approx(quotient, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", [8, 9])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_observation_changes_nothing_wherever_it_is_put(loss_type, seed):
    """Neither the loss, nor a metric, nor a gradient at a sampled token, if nothing was given for it.

    Seven tokens are put into each row at random places after the first: observations, or padding after its end.
    """
    config, rng = dpo_config(3, loss_type=loss_type), random.Random(seed)
    experience, logprobs_BT = ragged_experience(seed, 6, 3, garbage=-777.0)
    B, T = logprobs_BT.shape
    places = [[0, *sorted(rng.sample(range(1, T + 7), T - 1))] for _ in range(B)]
    lengths = [[*row, T + 7][n] for row, n in zip(places, experience.lengths_B.tolist(), strict=True)]

    def insert(name: str, x: Tensor) -> Tensor:
        if not name.endswith("_BT"):
            return x
        filling = 0 if name in ("sampled_BT", "rewards_BT") else 777
        return torch.full((B, T + 7), filling, dtype=x.dtype).scatter(1, torch.tensor(places), x)

    moved = replace(experience.map(insert), lengths_B=torch.tensor(lengths))
    outputs, gradients = [], []
    for rows, numbers_BT in ((experience, logprobs_BT), (moved, insert("logprobs_BT", logprobs_BT))):
        numbers_BT.requires_grad_()
        outputs.append(dpo_loss(numbers_BT, rows, config))
        (gradient_BT,) = torch.autograd.grad(outputs[-1].loss_sum, numbers_BT)
        assert (gradient_BT * (1 - rows.sampled_BT)).abs().max() == 0
        gradients.append(gradient_BT[rows.sampled_BT > 0])
    theirs, ours = outputs
    assert (moved.sampled_BT.argmax(dim=1) > experience.sampled_BT.argmax(dim=1)).any()
    assert ours.loss_sum.item() == pytest.approx(theirs.loss_sum.item(), rel=1e-9)
    assert set(ours.metrics) == set(theirs.metrics)
    for name, value in theirs.metrics.items():
        assert ours.metrics[name].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-9), name
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-12)
