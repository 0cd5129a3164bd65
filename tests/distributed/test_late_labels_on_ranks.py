"""Labels that come late, with several ranks: rank 0 asks and chooses, and the others train on what it has chosen."""

from __future__ import annotations

import json

import pytest
import torch
from annotators import late
from launching import finish, launch, metrics_of, weights_of

from async_rlhf.run.feedback import FEEDBACK

pytestmark = pytest.mark.distributed
CHANGES = {"staleness": 2, "total_episodes": 96}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_on_late_labels_as_one_does(tmp_path, strategy):
    run = {"folder": str(tmp_path), "name": strategy, "strategy": strategy, "feedback": {"ask": "compare"}, **CHANGES}
    with late(tmp_path / strategy, {1: 4, 4: 6}).working():
        finish(launch([run], 2, tmp_path / "log"), tmp_path / "log", 200)
    said = tmp_path / strategy / FEEDBACK
    order = [json.loads(line)["sampled_as"] for line in said.read_text().splitlines()]
    assert order != sorted(order)
    again = {"ask": "compare", "labels_from": str(said)}
    one = {"folder": str(tmp_path), "name": "alone", "feedback": again, "gradient_accumulation_steps": 2, **CHANGES}
    finish(launch([one], 1, tmp_path / "log"), tmp_path / "log", 200)
    assert (tmp_path / "alone" / FEEDBACK).read_text() == said.read_text()
    for mine, its in zip(metrics_of(tmp_path / strategy), metrics_of(tmp_path / "alone"), strict=True):
        for name in ("schedule/lag", "objective/scores", "loss/policy_avg", "grad_norm", "reward/feedback"):
            assert mine[name] == pytest.approx(its[name], rel=1e-3, abs=1e-5), name
    left, right = weights_of(tmp_path / strategy), weights_of(tmp_path / "alone")
    for name, tensor in right.items():
        assert torch.allclose(left[name], tensor, rtol=0, atol=1e-5), name
