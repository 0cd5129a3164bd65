"""Reward models in 4 or 8 bits: close scores, less memory, the head as it is; refused where they cannot be."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny
import torch
from tiny import count_letters, json_rows, new_args
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from async_rlhf import OnlineDPOTrainer, PPOTrainer
from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.pairs import run_pairs
from async_rlhf.commands.relabel import run_relabel
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError, EvaluateConfig, PairsConfig, RelabelConfig
from async_rlhf.models import quantised
from async_rlhf.models.forward import score_rows
from async_rlhf.models.loading import frozen_checksum, load_reward_model
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import DataConfig, RunConfig

needs_it = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="pip install 'async-rlhf[quantized]'")
ROWS = [tuple(range(start, start + 24)) for start in (1, 40, 90, 200)]
SIZES = {**tiny.LLAMA_SIZES, "hidden_size": 128, "intermediate_size": 256}


@pytest.fixture
def gold(tmp_path, tokenizer) -> str:
    """The folder of a reward model whose layers are larger than a block of 4-bit weights."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=258, eos_token_id=256, pad_token_id=257, num_labels=1)
    write_model(LlamaForSequenceClassification(config), tokenizer, tmp_path / "gold")
    return str(tmp_path / "gold")


def linear_bytes(model: nn.Module) -> int:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not model.score]
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)


@needs_it
@pytest.mark.parametrize(("bits", "off"), [(8, 0.02), (4, 0.25)])
def test_scores_stay_close_and_memory_falls(gold, bits, off):
    whole, small = load_reward_model(gold), load_reward_model(gold, bits=bits)
    expected, found = score_rows(whole, ROWS, 2), score_rows(small, ROWS, 2)
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < off
    assert linear_bytes(small) * 32 == linear_bytes(whole) * bits
    assert type(small.score) is nn.Linear
    assert torch.equal(small.score.weight, whole.score.weight)
    assert small.score.weight.dtype == torch.float32
    assert not small.training
    rounded = load_reward_model(gold, bits=bits, dtype=torch.bfloat16)
    assert rounded.score.weight.dtype == torch.bfloat16
    assert (score_rows(rounded, ROWS, 2) - expected).norm() / expected.norm() < off + 0.05


@needs_it
@pytest.mark.parametrize("bits", [4, 8])
def test_the_checksum_covers_all_that_decides_a_score(gold, bits):
    model = load_reward_model(gold, bits=bits)
    before = frozen_checksum(model)
    assert frozen_checksum(model) == before == frozen_checksum(load_reward_model(gold, bits=bits))
    assert before != frozen_checksum(load_reward_model(gold))
    gold_as_it_was = shutil.copytree(gold, f"{gold}_as_it_was")
    # Twice the weights of a layer are the same few bits with twice the scale.
    doubled = load_reward_model(gold)
    with torch.no_grad():
        doubled.model.layers[0].mlp.up_proj.weight.mul_(2)
    doubled.save_pretrained(gold)
    doubled = load_reward_model(gold, bits=bits)
    layers = [each.model.layers[0].mlp.up_proj.weight for each in (model, doubled)]
    assert torch.equal(*layers)
    assert frozen_checksum(doubled) != before
    assert torch.equal(score_rows(model, ROWS, 2), score_rows(load_reward_model(gold_as_it_was, bits=bits), ROWS, 2))


def configurations(gold: str, folder: Path, **changes: object) -> dict[str, tuple]:
    """Each command with its configuration."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({**row, "prompt": row["query"]}) + "\n" for row in tiny.PROMPTS))
    pairs = folder / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "def f", "chosen": "(x)", "rejected": " and much more"}) + "\n")
    sizes = {"response_length": 4, "device": "cpu", "reward_model": gold, **changes}
    policy = str(folder / "policy")
    relabel = {key: value for key, value in sizes.items() if key != "response_length"}
    return {
        "relabel": (run_relabel, RelabelConfig(data=str(pairs), output_dir=str(folder / "relabelled"), **relabel)),
        "pairs": (run_pairs, PairsConfig(model=policy, prompts=str(rows), output=str(folder / "out.jsonl"), **sizes)),
        "evaluate": (
            run_evaluate,
            EvaluateConfig(models={"a": policy}, data=str(rows), output_dir=str(folder / "eval"), **sizes),
        ),
    }


def run_config(gold: str, folder: Path, algorithm: str = "online_dpo", **changes: object) -> RunConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny.PROMPTS))
    train = new_args(folder, algorithm=algorithm, reward_model_bits=8)
    train = replace(train, total_episodes=2 * train.batch_size)
    data = DataConfig(train=str(folder / "rows.jsonl"))
    given = {"model": str(folder / "policy"), "data": data, "reward_model": gold, "train": train} | changes
    return RunConfig.of(algorithm)(**given, algorithm=algorithm)


@needs_it
@pytest.mark.parametrize("bits", [4, 8])
def test_every_command_scores_with_it(gold, bits, tmp_path, make_policy, tokenizer):
    write_model(make_policy(), tokenizer, tmp_path / "policy")
    scores = {}
    for own in (None, bits):
        folder = tmp_path / str(own)
        folder.mkdir()
        (folder / "policy").symlink_to(tmp_path / "policy")
        for command, config in configurations(gold, folder, reward_model_bits=own).values():
            command(config)
        scores[own] = json_rows(folder / "relabelled" / "train.jsonl")
        scores[own] = [scores[own][0][f"{side}_score"] for side in ("chosen", "rejected")]
        assert (folder / "out.jsonl").stat().st_size > 0
        assert "gold_mean" in (folder / "eval" / "evaluation.json").read_text()
    assert scores[bits] != scores[None]
    assert scores[bits] == pytest.approx(scores[None], abs=0.15)


@needs_it
def test_a_run_scores_with_it_and_resumes(gold, tmp_path, make_policy, tokenizer):
    write_model(make_policy(), tokenizer, tmp_path / "policy")
    config = run_config(gold, tmp_path)
    config = replace(config, train=replace(config.train, save_steps=1))
    assert "objective/scores" in run_train(config)
    longer = replace(config.train, total_episodes=3 * config.train.batch_size, resume=True)
    assert "objective/scores" in run_train(replace(config, train=longer))
    with pytest.raises(ConfigError, match="reward_model_bits"):
        run_train(replace(config, train=replace(longer, reward_model_bits=4)))


@pytest.mark.parametrize("command", ["relabel", "pairs", "evaluate", "train"])
def test_without_the_package_it_says_how_to_install_it_before_anything_is_loaded(command, tmp_path, monkeypatch):
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)  # for machines that have it
    missing = str(tmp_path / "nothing")  # where loading began, this would be the error
    if command == "train":
        with pytest.raises(ConfigError, match=r"train\.reward_model_bits: got 8; needs bitsandbytes: pip install"):
            run_train(run_config(missing, tmp_path))
        args = new_args(tmp_path, reward_model_bits=8)
        with pytest.raises(ConfigError, match=r"^reward_model_bits: got 8; needs bitsandbytes: pip install"):
            OnlineDPOTrainer(missing, args, tiny.PROMPTS, reward_model=missing)
        return
    run, config = configurations(missing, tmp_path, reward_model_bits=4)[command]
    with pytest.raises(ConfigError, match=r"reward_model_bits: got 4; needs bitsandbytes: .*async-rlhf\[quantized\]"):
        run(config)


def test_what_cannot_be_held_in_few_bits_is_refused(tmp_path, make_policy, make_reward_model, tokenizer):
    alone = r"reward_model_bits: got (4|8); must be null without a reward_model that is given by name"
    functions = {"reward_model": None, "reward_funcs": ["tiny:count_letters"]}
    for number in range(3):
        with pytest.raises(ConfigError, match=alone):
            list(configurations("gold", tmp_path, reward_model_bits=4, **functions).values())[number]
    with pytest.raises(ConfigError, match=f"train.{alone}"):
        run_config("gold", tmp_path, **functions)
    args = new_args(tmp_path, reward_model_bits=8)
    for rewards in ({"reward_model": make_reward_model()}, {"reward_funcs": count_letters}):
        with pytest.raises(ConfigError, match=alone):
            OnlineDPOTrainer(make_policy(), args, tiny.PROMPTS, processing_class=tokenizer, **rewards)
    copied = r"reward_model_bits: got 8; must be null without value_model"
    with pytest.raises(ConfigError, match=f"train.{copied}"):
        run_config("gold", tmp_path, "ppo")
    assert run_config("gold", tmp_path, "ppo", value_model="value").value_model == "value"
    ppo = new_args(tmp_path, algorithm="ppo", reward_model_bits=8)
    with pytest.raises(ConfigError, match=copied):
        PPOTrainer(make_policy(), ppo, tiny.PROMPTS, reward_model="gold", processing_class=tokenizer)
    right = r"must be null with weights spread over ranks \(parallel.strategy\) and with ray.reward_workers"
    for changes in (
        {"parallel": replace(args.parallel, ranks=2, strategy="fsdp")},
        {"launch": "ray", "staleness": 1, "ray": replace(args.ray, reward_workers=1)},
    ):
        with pytest.raises(ConfigError, match=right):
            replace(args, **changes)
    with pytest.raises(ConfigError, match="reward_model_bits: got 3; must be one of 4, 8 or null"):
        new_args(tmp_path, reward_model_bits=3)
