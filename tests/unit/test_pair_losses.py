"""recipes/pairs/pairs.py: each loss and its gradient against a slow one in float64, the pairs, and whole runs."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from tiny import PROMPTS, byte_tokenizer, count_letters, json_rows, new_policy

from async_rlhf import GenerationConfig, OnlineDPOConfig, OnlineTrainer
from async_rlhf.algorithms.table import find
from async_rlhf.config import ConfigError
from async_rlhf.types import Experience, PolicyOutput

PAIRS = find(f"{Path(__file__).parents[2] / 'recipes/pairs/pairs.py'}:PAIRS")
LOSSES = {
    "dpo": {},
    "hinge": {"loss_type": "hinge", "beta": 1.5},
    "conservative": {"flipped": 0.2},
    "robust": {"flipped": 0.2, "robust": True},
    "robust hinge": {"flipped": 0.3, "robust": True, "loss_type": "hinge"},
    "length-normalised": {"per_token": True, "beta": 2.0},
    "simpo": {"with_reference": False, "per_token": True, "beta": 2.0, "target": 1.0},
    "likelihood": {"nll": 0.2},
}


def config_of(**changes):
    return PAIRS.config(**{"output_dir": "unused", "total_episodes": 8, "samples_per_prompt": 4} | changes)


def rows_of(seed: int, prompts: int = 3, samples: int = 4) -> tuple[Experience, torch.Tensor]:
    """Rows in float64 with scores some of which are equal, and log-probabilities of the policy."""
    draw = torch.Generator().manual_seed(seed)
    B, T = prompts * samples, 6
    lengths_B = torch.randint(1, T + 1, (B,), generator=draw)
    sampled_BT = (torch.arange(T) < lengths_B[:, None]).double()
    logprobs_BT, reference_BT = (-torch.rand(B, T, generator=draw, dtype=torch.float64) * 3 for _ in range(2))
    rows = Experience(
        tokens_BT=torch.zeros(B, T, dtype=torch.long),
        lengths_B=lengths_B,
        sampled_BT=sampled_BT,
        behaviour_logprobs_BT=logprobs_BT.clone(),
        rewards_BT=torch.zeros(B, T),
        scores_B=torch.randint(0, 4, (B,), generator=draw).double(),
        loss_weights_U=torch.ones(B),
        reference_logprobs_BT=reference_BT,
    )
    return rows, logprobs_BT


def slow_loss(pairs, logprobs, c) -> float:
    """By loops over pairs and tokens."""
    total = 0.0
    for u in range(len(pairs) // 2):
        if not pairs.loss_weights_U[u]:
            continue
        sides, likelihood = [], 0.0
        for row in (2 * u, 2 * u + 1):
            drawn = [t for t in range(logprobs.shape[1]) if pairs.sampled_BT[row, t]]
            own = sum(float(logprobs[row, t]) for t in drawn)
            other = sum(float(pairs.reference_logprobs_BT[row, t]) for t in drawn) if c.with_reference else 0.0
            sides.append((own - other) / (len(drawn) if c.per_token else 1))
            if row % 2 == 0:
                likelihood = own / len(drawn)
        h = c.beta * (sides[0] - sides[1])

        def one(ahead: float) -> float:
            ahead -= c.target
            return max(0.0, 1 - ahead) if c.loss_type == "hinge" else math.log1p(math.exp(-ahead))

        right, wrong, e = one(h), one(-h), c.flipped
        loss = ((1 - e) * right - e * wrong) / (1 - 2 * e) if c.robust else (1 - e) * right + e * wrong
        total += loss - c.nll * likelihood
    return total


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["best_and_worst", "first_two", "all"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_the_formulas(name, kind):
    config = config_of(pairs=kind, **LOSSES[name])
    rows, _ = rows_of(len(name), prompts=8)
    pairs = PAIRS.credit(rows, config)
    draw = torch.Generator().manual_seed(7)
    logprobs_BT = (-torch.rand(pairs.tokens_BT.shape, generator=draw, dtype=torch.float64) * 3).requires_grad_()
    found = PAIRS.loss(PolicyOutput(logprobs_BT, torch.zeros_like(logprobs_BT)), pairs, config).loss_sum
    assert found.item() == pytest.approx(slow_loss(pairs, logprobs_BT.detach(), config), rel=1e-12)
    (gradient_BT,) = torch.autograd.grad(found, logprobs_BT)
    assert gradient_BT.abs().max() > 1e-3
    for row, t in [(0, 0), (1, 0), (len(pairs) - 2, 0), (int(gradient_BT[:, 0].abs().argmax()), 0)]:
        moved = []
        for step in (1e-6, -1e-6):
            other_BT = logprobs_BT.detach().clone()
            other_BT[row, t] += step
            moved.append(slow_loss(pairs, other_BT, config))
        assert gradient_BT[row, t].item() == pytest.approx((moved[0] - moved[1]) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("kind", ["best_and_worst", "first_two", "all"])
@pytest.mark.parametrize("min_gap", [0.0, 1.0])
def test_pairs_have_the_better_sample_first_and_a_gap(kind, min_gap):
    rows, _ = rows_of(5, prompts=8)
    rows.scores_B[:4] = 1.0
    rows.behaviour_logprobs_BT[:, 0] = torch.arange(len(rows))  # which row it is
    found = PAIRS.credit(rows, config_of(pairs=kind, min_gap=min_gap))
    which, scores = found.behaviour_logprobs_BT[:, 0].long().tolist(), rows.scores_B.tolist()
    pairs = list(zip(which[0::2], which[1::2], strict=True))
    weights = found.loss_weights_U.tolist()
    assert weights == [float(scores[a] - scores[b] > min_gap) for a, b in pairs]
    assert 0 < sum(weights) < len(weights)
    assert all(scores[a] >= scores[b] for a, b in pairs)
    if kind != "best_and_worst":
        among = 4 if kind == "all" else 2
        expected = [{4 * p + i, 4 * p + j} for i, j in combinations(range(among), 2) for p in range(8)]
        assert sorted(map(sorted, pairs)) == sorted(map(sorted, expected))
        assert all(a // 4 == b // 4 for a, b in pairs)
    assert PAIRS.rows_per_prompt(config_of(pairs=kind)) == len(which) / 8


def run(folder, config, algorithm=None):
    parts = {"reward_funcs": count_letters, "processing_class": byte_tokenizer(), "algorithm": algorithm}
    trainer = OnlineTrainer(new_policy(), config, PROMPTS, **parts)
    trainer.train()
    rows = json_rows(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "eps"} for row in rows]


def options(folder):
    return {
        "output_dir": str(folder),
        "total_episodes": 16,
        "completions_per_batch": 16,
        "samples_per_prompt": 4,
        "learning_rate": 1e-3,
        "staleness": 1,
        "max_prompt_length": 40,
        "non_eos_penalty": False,
        "progress": False,
        "generation": GenerationConfig(response_length=8),
    }


def test_with_its_defaults_it_is_online_dpo_bit_for_bit(tmp_path):
    ours = run(tmp_path / "ours", PAIRS.config(**options(tmp_path / "ours")), PAIRS)
    theirs = run(tmp_path / "theirs", OnlineDPOConfig(**options(tmp_path / "theirs")), find("online_dpo"))
    assert ours == theirs
    assert len(ours) == 4


def test_simpo_on_all_pairs_loads_no_reference(tmp_path):
    keys = LOSSES["simpo"] | {"pairs": "all"}
    found = run(tmp_path / "run", PAIRS.config(**options(tmp_path / "run") | keys), PAIRS)
    assert all("objective/kl" not in row for row in found)
    assert found[-1]["grad_norm"] > 0


def test_what_contradicts_is_named():
    with pytest.raises(ConfigError, match="robust: got True; must be false with flipped 0"):
        config_of(robust=True)
    with pytest.raises(ConfigError, match=r"flipped: got 0.5; must be below 0.5"):
        config_of(flipped=0.5)
