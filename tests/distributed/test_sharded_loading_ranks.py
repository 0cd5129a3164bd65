"""On real ranks: a model that rank 0 alone loads trains as one that all load, and others hold no more than shares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SCRIPT, chosen, finish, launch, metrics_of, weights_of
from ranks import new_policy, new_reward_model
from tiny import byte_tokenizer, rare_unless

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "unit"))

import loading
from test_sharded_loading import KINDS, written

pytestmark = pytest.mark.distributed

ASYNC = {"staleness": 1, "reward_model": True, "annotate_batch_size": 8}
CASES: dict[str, dict[str, Any]] = {
    "dpo": {**ASYNC, "total_episodes": 96, "save_steps": 3, "lr_scheduler_type": "constant", "weight_decay": 1.0},
    "ppo": {**ASYNC, "algorithm": "ppo", "max_grad_norm": 0.0, "save_steps": 2, "total_episodes": 64},
    "ppo on the policy's body": {"algorithm": "ppo", "staleness": 1, "total_episodes": 32},
    "shared trunk": {"algorithm": "ppo", "shared_trunk": True, "total_episodes": 32},
    "lora": {"algorithm": "rloo", "staleness": 1, "lora": 2, "save_steps": 2, "total_episodes": 64},
    "ppo with lora": {**ASYNC, "algorithm": "ppo", "lora": 2, "save_steps": 2, "total_episodes": 64},
    "bf16": {**ASYNC, "bf16": True, "total_episodes": 32},
    "head in float32": {**ASYNC, "bf16": True, "head_float32": True, "total_episodes": 32},
    "packed": {**ASYNC, "max_tokens_per_pass": 150, "annotate_max_tokens": 200, "gradient_checkpointing": True},
    "packed in bf16": {**ASYNC, "max_tokens_per_pass": 150, "bf16": True, "packing": True, "total_episodes": 32},
    "two copies": {**ASYNC, "parallel": {"shard_size": 1}, "total_episodes": 32},
    "kept whole": {**ASYNC, "parallel": {"reshard_after_forward": False}, "total_episodes": 32},
}
TRIED = [(case, "fsdp") for case in CASES]
TRIED += [(case, "zero3") for case in ("dpo", "ppo on the policy's body", "ppo with lora", "bf16")]
OFTEN = {
    ("dpo", "fsdp"),
    ("packed in bf16", "fsdp"),
    ("ppo with lora", "fsdp"),
    ("two copies", "fsdp"),
    ("dpo", "zero3"),
}
OFTEN |= {("ppo on the policy's body", "zero3")}
RESUMED = [(case, strategy) for case, strategy in TRIED if "save_steps" in CASES[case]]


def write_models(folder: Path) -> Path:
    for name, model in (("policy", new_policy()), ("reward_model", new_reward_model())):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


def run_of(case: str, strategy: str, models: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    place = {"folder": str(folder), "name": f"{case}-{strategy}", "models": str(models)}
    return {**place, "strategy": strategy, **CASES[case], **changes}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request) -> Path:
    """The chosen cases on two ranks: rank 0 loads, each loads all, and rank 0 loads a checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    models, log = write_models(folder / "models"), folder / "log"
    tried = [one for one in TRIED if one in chosen(request)]
    each = [run_of(*one, models, folder / how, whole=how == "whole") for one in tried for how in ("spread", "whole")]
    finish(launch(each, 2, log), log, 600)
    again = []
    for case, strategy in (one for one in RESUMED if one in tried):
        start = folder / "spread" / f"{case}-{strategy}" / f"checkpoint-{CASES[case]['save_steps']}"
        again.append(run_of(case, strategy, models, folder / "resumed", resume_from=str(start), save_steps=0))
    finish(launch(again, 2, log), log, 400)
    return folder


def assert_same(left: Path, right: Path, first: int = 0) -> None:
    assert metrics_of(left) == metrics_of(right)[first:]
    ours, theirs = weights_of(left), weights_of(right)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("case", "strategy"), rare_unless(lambda i: TRIED[i] in OFTEN, TRIED))
def test_a_run_whose_models_rank_0_loads_is_the_one_whose_ranks_load_all_bit_for_bit(runs, case, strategy):
    assert_same(runs / "spread" / f"{case}-{strategy}", runs / "whole" / f"{case}-{strategy}")


@pytest.mark.parametrize(("case", "strategy"), rare_unless(lambda i: RESUMED[i] in OFTEN, RESUMED))
def test_so_is_one_that_is_resumed(runs, case, strategy):
    name = f"{case}-{strategy}"
    assert_same(runs / "resumed" / name, runs / "spread" / name, CASES[case]["save_steps"])


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_every_kind_of_model_is_spread_bit_for_bit(strategy, tmp_path):
    """Over three ranks, which divide few of the sizes; what each has together is the whole, and so are buffers."""
    folders = [[str(written(config, tmp_path / kind)), strategy] for kind, config in KINDS.items()]
    log = tmp_path / "log"
    said = finish(launch(folders, 3, log, SCRIPT.with_name("spread.py")), log, 200)
    assert said.count("spread: ") == 3 * len(KINDS)


def test_other_files_of_other_ranks_are_not_read(tmp_path):
    """Where every rank loads whole models, they are refused."""
    write_models(tmp_path / "models0")
    models = write_models(tmp_path / "models1")
    policy = new_policy()
    with torch.no_grad():
        policy.gpt_neox.layers[1].mlp.dense_4h_to_h.bias[0] = 1.0
    policy.save_pretrained(models / "policy")
    log = tmp_path / "log"
    run = {"folder": str(tmp_path), "strategy": "fsdp", "models": str(tmp_path / "models{rank}")}
    runs = [{**run, "name": "run"}, {**run, "name": "right", "models": str(tmp_path / "models0")}]
    finish(launch(runs, 2, log), log, 120)
    assert_same(tmp_path / "run", tmp_path / "right")
    process = launch([{**run, "name": "whole", "whole": True}], 2, log)
    with pytest.raises(AssertionError):
        finish(process, log, 120)
    assert "must be the same model on every rank" in log.read_text()


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[dict[str, int], dict[str, list[dict[str, Any]]]]:
    """Sizes of the models, and what each of two ranks held while rank 0 loaded them, and while each did.

    Under FSDP: DeepSpeed makes gradients and moments as it spreads weights, and these are larger.
    """
    folder = tmp_path_factory.mktemp("large")
    loading.write_models(folder / "tiny", 2, 64)
    sizes = loading.write_models(folder / "large", 5, 768)
    assert sizes["model"] > 200e6
    return sizes, {how: loading.launch(folder, 2, how == "whole") for how in ("spread", "whole")}


def room(sizes: dict[str, int]) -> float:
    """Half of policy, reference and reward model, and the largest tensor; the rest is for what the allocator keeps."""
    return 3 * sizes["model"] / 2 + sizes["largest"] + 64e6


def test_a_rank_but_0_holds_its_share_and_one_tensor_while_models_are_loaded(measured):
    """Whole models would be found: the same measurement says so of rank 0, and of ranks that load all."""
    sizes, found = measured
    assert [rank["bytes"] < room(sizes) for rank in found["spread"]] == [False, True], (sizes, found)
    assert [rank["bytes"] > room(sizes) for rank in found["whole"]] == [True, True], (sizes, found)
    assert len({tuple(rank["fingerprints"]) for how in found.values() for rank in how}) == 1
