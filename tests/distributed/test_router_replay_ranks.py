"""Router replay on two ranks: each gets the routes of the rows that it computes, however weights are spread."""

from __future__ import annotations

import json

import pytest
import torch
from launching import finish, launch, metrics_of, weights_of
from tiny import byte_tokenizer, mixture

pytestmark = pytest.mark.distributed

STRATEGIES = ("ddp", "fsdp", "zero2", "zero3")
CHANGES = {"router_replay": True, "total_episodes": 32, "save_steps": 2, "lr_scheduler_type": "constant"}
SAME = ("loss/policy_avg", "grad_norm", "val/ratio", "engine/logprob_difference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a generator process at S = 1, and resumed; with FSDP also inline, where all ranks sample."""
    folder = tmp_path_factory.mktemp("routes")
    for model in (mixture("mixtral"), byte_tokenizer()):
        model.save_pretrained(folder / "models" / "policy")
    run = {"folder": str(folder), "models": str(folder / "models"), "staleness": 1, **CHANGES}
    each = [{**run, "name": name, "strategy": name} for name in STRATEGIES]
    each[1] |= {"gradient_checkpointing": True}
    again = [
        {
            **one,
            "name": f"{one['name']}-again",
            "resume_from": str(folder / one["name"] / "checkpoint-2"),
            "save_steps": 0,
        }
        for one in each
    ]
    inline = {**run, "staleness": 0, "strategy": "fsdp", "name": "fsdp-inline"}
    runs = [*each, *({**one, "resume_anyway": True} for one in again), inline]
    finish(launch(runs, 2, folder / "log"), folder / "log", 400)
    alone = [{**run, "name": "one"}, {**run, "staleness": 0, "name": "one-inline"}]
    alone = [{**one, "gradient_accumulation_steps": 2} for one in alone]
    finish(launch(alone, 1, folder / "log"), folder / "log", 100)
    return folder


@pytest.mark.parametrize("name", [*STRATEGIES, "fsdp-inline"])
def test_two_ranks_train_as_one(folder, name):
    ours, theirs = metrics_of(folder / name), metrics_of(folder / ("one-inline" if "inline" in name else "one"))
    for key in SAME:
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("name", STRATEGIES)
def test_they_resume_bit_for_bit_with_routes_from_the_checkpoint(folder, name):
    held = (folder / name / "checkpoint-2" / "resume" / "rollouts.jsonl").read_text().splitlines()
    assert all("routes_TLE" in s for row in held for group in json.loads(row)["groups"] for s in group["samples"])
    assert metrics_of(folder / f"{name}-again") == metrics_of(folder / name)[2:]
    ours, theirs = weights_of(folder / f"{name}-again"), weights_of(folder / name)
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
