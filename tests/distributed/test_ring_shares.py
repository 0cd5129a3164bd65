"""Ranks of one host write their shares of the weights into the ring; the run is the one that gathers them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import chosen, finish, launch, metrics_of, weights_of
from ranks import widened
from tiny import LLAMA_SIZES, byte_tokenizer, rare_unless
from transformers import MixtralConfig, MixtralForCausalLM

pytestmark = pytest.mark.distributed

ASYNC = {"staleness": 1, "annotate_batch_size": 8, "total_episodes": 64}
BF16 = {"generation": {"dtype": "bfloat16"}, "total_episodes": 32}
CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp", "evaluate": True, "eval_steps": 2},
    "fsdp in bfloat16": {"strategy": "fsdp", "bf16": True, **BF16},
    "fsdp, kept whole": {"strategy": "fsdp", "parallel": {"reshard_after_forward": False}, "total_episodes": 32},
    "fsdp, two copies": {"strategy": "fsdp", "parallel": {"shard_size": 1}, "total_episodes": 32},
    "zero3": {"strategy": "zero3"},
    "zero3 in bfloat16": {"strategy": "zero3", **BF16},
    "zero3 on the host": {"strategy": "zero3", "parallel": {"cpu_offload": True}, "total_episodes": 32},
}
OFTEN = ("fsdp", "fsdp in bfloat16", "fsdp, two copies", "zero3")


def run_of(case: str, how: str, folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), "name": f"{case}-{how}", "publishing": how, **ASYNC, **CASES[case]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request) -> Path:
    """The chosen cases on two ranks, both ways; who is to write shares fails if anything is gathered."""
    folder = tmp_path_factory.mktemp("runs")
    each = [run_of(case, how, folder) for case in CASES if (case,) in chosen(request) for how in ("shares", "gathered")]
    finish(launch(each, 2, folder / "log"), folder / "log", 300)
    return folder


@pytest.mark.parametrize("case", rare_unless(lambda i: list(CASES)[i] in OFTEN, [(case,) for case in CASES]))
def test_what_ranks_write_is_what_rank_0_would_gather_bit_for_bit(runs, case):
    ours, theirs = runs / f"{case}-shares", runs / f"{case}-gathered"
    assert metrics_of(ours) == metrics_of(theirs)
    left, right = weights_of(ours), weights_of(theirs)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_three_ranks_whose_number_divides_nothing_write_theirs(tmp_path):
    """Some have fewer rows than others, or none."""
    changes = {"per_device_train_batch_size": 4, "total_episodes": 24, "staleness": 1}
    each = [
        {"folder": str(tmp_path), "name": f"{strategy}-{how}", "strategy": strategy, "publishing": how, **changes}
        for strategy in ("fsdp", "zero3")
        for how in ("shares", "gathered")
    ]
    finish(launch(each, 3, tmp_path / "log"), tmp_path / "log", 200)
    for strategy in ("fsdp", "zero3"):
        assert metrics_of(tmp_path / f"{strategy}-shares") == metrics_of(tmp_path / f"{strategy}-gathered")


def test_experts_that_the_ranks_do_not_divide_train_as_on_one_and_are_published_and_resumed(tmp_path):
    """Three on two ranks, which share each of them."""
    torch.manual_seed(0)
    tokens = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
    policy = widened(MixtralForCausalLM(MixtralConfig(**LLAMA_SIZES, **tokens, num_local_experts=3)))
    policy.save_pretrained(tmp_path / "models" / "policy")
    byte_tokenizer().save_pretrained(tmp_path / "models" / "policy")
    changes = {"staleness": 1, "total_episodes": 64, "save_steps": 2, "lr_scheduler_type": "constant"}
    run = {"folder": str(tmp_path), "models": str(tmp_path / "models"), **changes}
    fsdp = {**run, "strategy": "fsdp", "checkpoint_format": "sharded"}
    each = [{**fsdp, "name": how, "publishing": how} for how in ("shares", "gathered")]
    again = {"resume_from": str(tmp_path / "shares" / "checkpoint-2"), "resume_anyway": True, "save_steps": 0}
    finish(launch([*each, {**fsdp, "name": "again", **again}], 2, tmp_path / "log"), tmp_path / "log", 200)
    one = {**run, "name": "one", "gradient_accumulation_steps": 2}
    finish(launch([one], 1, tmp_path / "log"), tmp_path / "log", 100)
    ours, theirs = metrics_of(tmp_path / "shares"), metrics_of(tmp_path / "one")
    assert ours == metrics_of(tmp_path / "gathered")
    assert ours[2:] == metrics_of(tmp_path / "again")
    for name in ("loss/policy_avg", "grad_norm", "val/ratio"):
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-3, abs=1e-5)
    left, right, start = weights_of(tmp_path / "shares"), weights_of(tmp_path / "one"), policy.state_dict()
    assert left.keys() == right.keys()
    experts = [name for name in right if ".experts." in name]
    assert len(experts) == 2 * 3 * 3
    moved = max((right[name] - tensor).abs().max() for name, tensor in start.items() if name in right)
    assert all(torch.allclose(left[name], right[name], rtol=0, atol=1e-3 * moved) for name in right)
    assert all(torch.equal(left[name], weights_of(tmp_path / "again")[name]) for name in right)
