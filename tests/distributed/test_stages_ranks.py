"""The supervised stages and the commands that sample, on several ranks, by torchrun: the same files as by one."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import stages
import torch
from launching import SCRIPT, chosen, family, finish, kill_all, left_of, process_of, start_ranks
from ports import free_port
from safetensors.torch import load_file
from tiny import json_rows, rare_unless

from async_rlhf.cli import _run
from async_rlhf.learner.learner import Learner

pytestmark = pytest.mark.distributed

STAGES = SCRIPT.with_name("stages.py")

COMMON = ["--device=cpu", "--learning_rate=1e-2", "--logging_steps=2", "--eval_steps=3", "--num_epochs=2"]
TRAINED: dict[str, tuple[list[str], tuple[str, ...]]] = {
    # 45 rows are 5 batches and 5 rows more: a step with an odd number of passes.
    "sft": (
        ["sft", "--train=texts.jsonl", "--model=policy", "--eval_fraction=0.2", "--weight_decay=0.5"],
        ("ddp", "fsdp", "zero2", "ddp, shared rows"),
    ),
    "sft by tokens": (
        ["sft", "--train=texts.jsonl", "--model=policy", "--eval_fraction=0.2", "--max_tokens_per_pass=50"],
        ("ddp", "fsdp"),
    ),
    "sft of adapters": (
        ["sft", "--train=texts.jsonl", "--model=policy", "--eval_fraction=0.2", "--lora.rank=2"],
        ("ddp", "fsdp"),
    ),
    "reward": (["reward", "--train=pairs.jsonl", "--model=policy"], ("ddp", "fsdp", "zero3", "fsdp, shared rows")),
    "reward by tokens": (["reward", "--train=pairs.jsonl", "--model=policy", "--max_tokens_per_pass=60"], ("ddp",)),
    "ratings": (["reward", "--train=rated.jsonl", "--model=policy", "--reference=texts.jsonl"], ("ddp", "fsdp")),
}
TRIED = [(name, strategy) for name, (_, tried) in TRAINED.items() for strategy in tried]
SELDOM = {("sft", "fsdp"), ("sft by tokens", "ddp"), ("sft of adapters", "ddp"), ("reward", "ddp"), ("ratings", "ddp")}
SHARDED = {("reward", "fsdp"), ("sft of adapters", "fsdp")}
"""With sharded checkpoints."""
RESUMED = [("sft", "ddp"), ("sft", "zero2"), ("sft of adapters", "fsdp"), ("reward", "fsdp"), ("reward", "zero3")]
SAMPLING = ["--device=cpu", "--response_length=8", "--batch_size=6"]
SHARED = {
    "said": ["generate", "--models.a=policy", "--models.b=other", "--data=texts.jsonl", *SAMPLING],
    "judged": [
        *("evaluate", "--models.a=policy", "--models.b=other", "--data=texts.jsonl", *SAMPLING),
        "--reward_model=judge",
    ],
    "again": ["relabel", "--data=pairs.jsonl", "--reward_model=judge", "--batch_size=4", "--device=cpu"],
    "made.jsonl": ["pairs", "--model=policy", "--prompts=texts.jsonl", "--reward=letters.py:letters", *SAMPLING],
    "drawn.jsonl": ["pairs", "--from_ratings=rated.jsonl"],
}


def trained(name: str, accumulate: int, strategy: str = "") -> list[str]:
    words, _ = TRAINED[name]
    chosen = [f"--parallel.strategy={strategy.split(',')[0]}"] if strategy else []
    chosen += ["--checkpoint_format=sharded"] if (name, strategy) in SHARDED else []
    chosen += ["--parallel.context_parallel=2"] if "shared" in strategy else []
    size = "--per_device_train_batch_size=4"
    out = f"--output_dir={name}{strategy and '-'}{strategy}"
    return [*words, *COMMON, size, f"--gradient_accumulation_steps={accumulate}", out, *chosen]


def shared(name: str) -> list[str]:
    return [*SHARED[name], f"--output={name}" if name.endswith(".jsonl") else f"--output_dir={name}"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Everything in this process, with as large a batch."""
    folder = tmp_path_factory.mktemp("alone")
    stages.write_inputs(folder)
    (folder / "other").symlink_to(folder / "policy")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(Learner, "_optimizer", stages.smooth_adamw)
        for words in (*(trained(name, 2) for name in TRAINED), *map(shared, SHARED)):
            assert _run(words[0], words[1:]) == 0, words
    torch.set_num_threads(before)
    return folder


@pytest.fixture(scope="module")
def spread(tmp_path_factory, request) -> Path:
    """Everything that is chosen on two ranks, and some stages once more from their checkpoints."""
    folder = tmp_path_factory.mktemp("spread")
    stages.write_inputs(folder)
    (folder / "other").symlink_to(folder / "policy")
    commands = [
        [*trained(name, 1, strategy), f"--save_steps={4 if (name, strategy) in RESUMED else 0}"]
        for name, strategy in TRIED
        if (name, strategy) in chosen(request)
    ]
    for name, strategy in RESUMED:
        commands.append([*trained(name, 1, strategy), f"--output_dir=again {name}-{strategy}", "--resume"])
    started(folder, [*commands, *map(shared, SHARED)], 400)
    return folder


def started(folder: Path, commands: list[list[str]], timeout: float) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = ["--nproc-per-node=2", f"--master-port={free_port()}"]
        return finish(start_ranks(commands, options, folder / "log", STAGES), folder / "log", timeout)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return json_rows(path)


@pytest.mark.parametrize(("name", "strategy"), rare_unless(lambda i: TRIED[i] not in SELDOM, TRIED))
def test_two_ranks_train_as_one(alone, spread, name, strategy):
    """The same weights, losses and norms in every line, and results, to rounding."""
    mine, one = spread / f"{name}-{strategy}", alone / name
    left, right = (load_file(folder / "model.safetensors") for folder in (mine, one))
    start = load_file(alone / "policy" / "model.safetensors")
    moved = max((right[key] - start[key]).abs().max().item() for key in right.keys() & start.keys())
    assert moved > 1e-3
    assert left.keys() == right.keys()
    for key, tensor in right.items():
        assert torch.allclose(left[key], tensor, rtol=0, atol=1e-3 * moved), key
    ours, theirs = lines_of(mine / "metrics.jsonl"), lines_of(one / "metrics.jsonl")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    command = TRAINED[name][0][0]
    results = [json.loads((folder / f"{command}.json").read_text())["results"] for folder in (mine, one)]
    for found, wanted in (*zip(ours, theirs, strict=True), results):
        assert found.keys() == wanted.keys()
        for key in {key for key, value in wanted.items() if isinstance(value, (int, float))}:
            assert found[key] == pytest.approx(wanted[key], rel=2e-3, abs=2e-4), key
    assert sorted(path.name for path in mine.iterdir()) == sorted(path.name for path in one.iterdir())


@pytest.mark.parametrize(("name", "strategy"), RESUMED)
def test_a_resumed_stage_is_the_uninterrupted_one(spread, name, strategy):
    whole, resumed = spread / f"{name}-{strategy}", spread / f"again {name}-{strategy}"
    left, right = (load_file(folder / "model.safetensors") for folder in (resumed, whole))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], tensor) for key, tensor in right.items())
    assert lines_of(resumed / "metrics.jsonl") == lines_of(whole / "metrics.jsonl")
    assert "4 of them before" in (spread / "log").read_text(errors="replace")


def test_of_models_that_are_sharded_rank_0_alone_has_weights_before(spread):
    """Each training on both ranks says where its weights are."""
    text = (spread / "log").read_text(errors="replace")
    for strategy in ("ddp", "zero2", "fsdp", "zero3"):
        found = [re.findall(rf"{strategy}: on rank {rank}: (cpu|meta)", text) for rank in range(2)]
        assert len(found[0]) == len(found[1]) > 0, strategy
        other = "meta" if strategy in ("fsdp", "zero3") else "cpu"
        assert [set(devices) for devices in found] == [{"cpu"}, {other}], strategy


def test_what_is_sampled_and_judged_is_the_same(alone, spread):
    """Bit for bit: each rank decodes some of the batches that one rank decodes."""
    for name in ("a", "b"):
        for folder in ("said", "judged/generations"):
            assert (spread / folder / f"{name}.jsonl").read_text() == (alone / folder / f"{name}.jsonl").read_text()
    for file in ("judged/samples.jsonl", "judged/evaluation.txt", "again/train.jsonl", "made.jsonl", "drawn.jsonl"):
        assert (spread / file).read_text() == (alone / file).read_text(), file
    both = [json.loads((folder / "judged" / "evaluation.json").read_text())["results"] for folder in (spread, alone)]
    assert both[0] == both[1]


def test_one_rank_speaks(spread):
    log = (spread / "log").read_text(errors="replace")
    assert log.count("generate: 45 prompts, 2 models") == 1
    assert log.count("relabel: scoring the chosen side") == 1


def test_a_rank_that_is_killed_ends_the_others_and_the_stage_goes_on_exactly(tmp_path):
    """The same command twice; the second is killed after a checkpoint, and resumed."""
    stages.write_inputs(tmp_path)
    log = tmp_path / "log"
    words = [*trained("sft", 1, "fsdp"), "--save_steps=10", "--num_epochs=15"]
    whole, cut = [*words, "--output_dir=whole"], [*words, "--output_dir=cut"]
    options = ["--nproc-per-node=2", f"--master-port={free_port()}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        process = start_ranks([whole, cut], options, log, STAGES)
    try:
        place = tmp_path / ".cut.unfinished"
        deadline = time.monotonic() + 120
        while not list(place.glob("checkpoint-*")):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        members = family(process)
        process_of(1, log).kill()
        assert process.wait(60) != 0
        assert left_of(members, 30) == []
    finally:
        kill_all(process)
    assert "rank 1 is gone, without a word" in log.read_text(errors="replace")
    assert not (tmp_path / "cut").exists()
    started(tmp_path, [[*cut, "--resume"]], 120)
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(left[key], tensor) for key, tensor in right.items())
    assert lines_of(tmp_path / "cut" / "metrics.jsonl") == lines_of(tmp_path / "whole" / "metrics.jsonl")
    assert not place.exists()
