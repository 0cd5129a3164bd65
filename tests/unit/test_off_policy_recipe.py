"""AsymRE and TOPR of recipes/science, worked by hand: each completion counts once, however long it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rlhf.algorithms.table import find
from async_rlhf.config import ConfigError, KLConfig
from async_rlhf.types import Experience, PolicyOutput

PLACE = Path(__file__).parents[2] / "recipes" / "science" / "off_policy.py"
LENGTHS = [4, 1, 2, 3]
SCORES = [1.0, 0.0, 0.0, 0.0]
"""Of two samples each of two prompts; the second has a tie."""


def rows() -> Experience:
    """Every token of a row has the same log-probability: -0.1, -0.2, ... by the policy that sampled."""
    sampled_BT = (torch.arange(5) > 0) & (torch.arange(5) <= torch.tensor(LENGTHS)[:, None])
    return Experience(
        tokens_BT=torch.ones(4, 5, dtype=torch.long),
        lengths_B=torch.tensor(LENGTHS) + 1,
        sampled_BT=sampled_BT.float(),
        behaviour_logprobs_BT=-0.1 * torch.arange(1.0, 5)[:, None] * sampled_BT,
        rewards_BT=torch.zeros(4, 5),
        scores_B=torch.tensor(SCORES),
        loss_weights_U=torch.ones(4),
    )


def gradients(name: str, logps: list[float], **changes) -> tuple[float, list[float]]:
    """The loss over its weight, and its derivative by the log-probability of each completion."""
    record = find(f"{PLACE}:{name}")
    config = record.config(
        output_dir="unused", total_episodes=8, samples_per_prompt=2, kl=KLConfig(coef=0.0), **changes
    )
    credited = record.credit(rows(), config)
    leaf_B = torch.tensor(logps, requires_grad=True)
    tokens_B = credited.sampled_BT.sum(dim=1)
    output = PolicyOutput((leaf_B / tokens_B)[:, None] * credited.sampled_BT, torch.zeros(4, 5))
    loss = record.loss(output, credited, config).loss_sum / credited.loss_weights_U.sum()
    loss.backward()
    return loss.item(), leaf_B.grad.tolist()


def test_asymre():
    loss, found = gradients("ASYMRE", [-1.0, -2.0, -3.0, -4.0], shift=0.1)
    advantages = [0.6, -0.4, 0.1, 0.1]  # less the mean of the prompt, plus the shift, ties too
    assert found == pytest.approx([-a / 4 for a in advantages])
    assert loss == pytest.approx(sum(a * x for a, x in zip(advantages, (1, 2, 3, 4), strict=True)) / 4)


def test_topr():
    """Right answers weigh 1, wrong ones pi / mu where that is below 1. The second prompt has nothing to say."""
    behind = [-0.4, -0.2, -0.6, -1.2]  # log mu of each completion
    for logps, weight in (([-9.0, -1.2, -1.0, -1.0], 0.36787944), ([-9.0, -0.1, -1.0, -1.0], 1.0)):
        _, found = gradients("TOPR", logps)
        assert found == pytest.approx([-1 / 4, weight / 4, 0.0, 0.0], abs=1e-7)
    assert behind[1] - -1.2 == pytest.approx(1.0)


def test_a_penalty_that_would_not_be_in_the_loss_is_refused():
    record = find(f"{PLACE}:TOPR")
    given = {"output_dir": "unused", "total_episodes": 8, "samples_per_prompt": 2}
    right = r"kl.where: got 'loss'; must be \"reward\""
    with pytest.raises(ConfigError, match=right):
        record.config(**given, kl=KLConfig(where="loss", estimator="k3"))
    assert record.config(**given).normalization == "sequence"
