"""Sizes in the user's words, and prompts as long as the model has room for: the same for every algorithm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import PROMPTS, count_letters, new_args
from transformers import Phi3Config, Phi3ForCausalLM

from async_rlhf import GenerationConfig, OnlineDPOConfig, ParallelConfig
from async_rlhf.algorithms.table import BUILT_IN, find
from async_rlhf.commands.generate import run_generate
from async_rlhf.commands.pairs import run_pairs
from async_rlhf.config import ConfigError, GenerateConfig, PairsConfig
from async_rlhf.models.context_length import check_positions, longest_row, with_prompt_cap
from async_rlhf.models.forward import response_logprobs
from async_rlhf.models.saving import write_model
from async_rlhf.run.trainer import OnlineTrainer

LONG = {"query": "x" * 90, "name": "long"}
"""More than a response of 12 tokens leaves of 96 positions."""


def metrics(trainer: OnlineTrainer) -> list[dict[str, float]]:
    trainer.train()
    lines = map(json.loads, (Path(trainer.args.output_dir) / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "eps"))} for line in lines]


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_a_batch_has_as_many_completions_as_the_user_says(algorithm, make_policy, tokenizer, make_args):
    """The same run as with the old keys, bit for bit."""
    old = {"samples_per_prompt": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    new = {"total_episodes": 131_072, "completions_per_batch": 32, "batches": 2}
    runs = []
    for name, sizes in {"old": {"total_episodes": 16}, "new": {"gradient_accumulation_steps": 1, **new}}.items():
        args = make_args(name=name, algorithm=algorithm, **{**old, **sizes})
        assert (args.batch_size, args.num_batches, args.num_optimizer_steps) == (8, 2, 4)
        assert (args.summary()["completions per batch"], args.summary()["prompts"]) == (32, 16)
        inputs = {"reward_funcs": count_letters, "processing_class": tokenizer}
        runs.append(metrics(OnlineTrainer(make_policy(), args, PROMPTS, **inputs)))
    assert runs[0] == runs[1]
    assert [line["completions"] for line in runs[0]] == [32, 64]


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_ranks_share_the_completions_that_the_user_says(algorithm):
    alone = find(algorithm).config(completions_per_batch=256, batches=3)
    assert (alone.batch_size * alone.samples_per_prompt, alone.num_batches) == (256, 3)
    assert replace(alone, parallel=ParallelConfig(ranks=4)).batch_size == alone.batch_size


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"completions_per_batch": 9}, r"completions_per_batch: got 9; .* samples_per_prompt 2 x .*, such as 8"),
        (
            {"completions_per_batch": 64, "gradient_accumulation_steps": 2},
            r"completions_per_batch: got 64; must be 32, as per_device_train_batch_size 8 x gradient_accumulation",
        ),
        (
            {"batches": 3, "total_episodes": 64},
            r"batches: got 3; must be 8, as total_episodes 64 of 8 prompts a batch says",
        ),
        (
            {"completions_per_batch": 20, "total_episodes": 64},
            r"total_episodes: got 64; must be a multiple of the batch of 10 prompts \(completions_per_batch 20\).*60",
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_named(sizes, expected):
    with pytest.raises(ConfigError, match=expected):
        OnlineDPOConfig(**sizes)


def test_sizes_said_twice_alike_are_no_contradiction():
    both = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "completions_per_batch": 32}
    config = OnlineDPOConfig(**both, batches=2, total_episodes=32)
    assert (config.batch_size, config.num_batches) == (16, 2)


def test_a_longer_run_by_batches_goes_on(make_policy, tokenizer, make_args):
    inputs = {"reward_funcs": count_letters, "processing_class": tokenizer}
    sizes = {"total_episodes": 131_072, "completions_per_batch": 16, "save_steps": 1}
    OnlineTrainer(make_policy(), make_args(**sizes, batches=1), PROMPTS, **inputs).train()
    args = make_args(**sizes, batches=2, resume=True)
    assert OnlineTrainer(make_policy(), args, PROMPTS, **inputs).train().global_step == 2
    with pytest.raises(ConfigError, match="batches: got 1; must be at least the 2 that the checkpoint has seen"):
        OnlineTrainer(make_policy(), make_args(**sizes, batches=1, resume=True), PROMPTS, **inputs)


def test_prompts_are_as_long_as_the_model_has_room_for(make_policy, tokenizer, make_args):
    inputs = {"reward_funcs": count_letters, "processing_class": tokenizer}
    sizes = {"total_episodes": 8, "save_steps": 1}
    trainer = OnlineTrainer(make_policy(), make_args(max_prompt_length=None, **sizes), [*PROMPTS, LONG], **inputs)
    assert trainer.args.max_prompt_length == 84  # of 96 positions
    assert trainer.run.prompts.stream.dropped == 1
    trainer.train()
    # the same run, said in two ways
    for same in (None, 84):
        args = make_args(max_prompt_length=same, resume=True, **sizes)
        OnlineTrainer(make_policy(), args, [*PROMPTS, LONG], **inputs).train()
    args = make_args(max_prompt_length=80, resume=True, **sizes)
    with pytest.raises(ConfigError, match="max_prompt_length: was 84, is 80"):
        OnlineTrainer(make_policy(), args, [*PROMPTS, LONG], **inputs)


def test_the_cap_is_512_where_there_is_room(make_policy, tmp_path):
    policy = make_policy()
    policy.config.max_position_embeddings = 2048
    assert with_prompt_cap(new_args(tmp_path, max_prompt_length=None), policy).max_prompt_length == 512
    policy.config.max_position_embeddings = 53
    config = OnlineDPOConfig(generation=GenerationConfig(response_length=53))
    with pytest.raises(ConfigError, match=r"generation.response_length: got 53; must be below 53, the positions"):
        with_prompt_cap(config, policy)


def test_samples_of_a_small_model_need_no_cap_by_hand(make_policy, tokenizer, tmp_path):
    write_model(make_policy(), tokenizer, tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*PROMPTS[:4], LONG]))
    places = {"prompts": str(tmp_path / "prompts.jsonl"), "output": str(tmp_path / "pairs.jsonl")}
    rewards = [f"{Path(__file__).parents[1] / 'tiny.py'}:count_letters"]
    sampling = {"response_length": 12, "device": "cpu"}
    found = run_pairs(PairsConfig(model=str(tmp_path / "model"), reward_funcs=rewards, **places, **sampling))
    assert (found["prompts"], found["dropped"]) == (4, 1)
    held_out = {"data": str(tmp_path / "prompts.jsonl"), "output_dir": str(tmp_path / "said")}
    config = GenerateConfig(models={"a": str(tmp_path / "model")}, **held_out, **sampling)
    assert run_generate(config)["dropped"] == 1
    assert json.loads((tmp_path / "said" / "a.json").read_text())["config"]["max_prompt_length"] == 84
    run_generate(replace(config, max_prompt_length=84))  # done already


def test_rows_are_no_longer_than_where_rotary_frequencies_stay_as_they_are(tmp_path):
    """Beyond, a row has other log-probabilities beside a long row than beside a short one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    heads |= {"original_max_position_embeddings": 16, "eos_token_id": 1}
    policy = Phi3ForCausalLM(Phi3Config(**sizes, **heads, rope_parameters=rotary, initializer_range=0.3)).eval()
    found = []
    for longest in (16, 17):
        tokens_BT = torch.randint(1, 64, (2, longest), generator=torch.Generator().manual_seed(0))
        tokens_BT[0, :9] = torch.arange(1, 10)
        mask_BT = (torch.arange(longest) < torch.tensor([[9], [longest]])).float()
        mask_BT[:, :3] = 0
        with torch.no_grad():
            found.append(response_logprobs(policy, tokens_BT, mask_BT, 1.0).logprobs_BT[0, :9])
    assert (found[0] - found[1]).abs().max() > 0.01
    assert longest_row(policy, 100) == 16
    check_positions(policy, 10, 6)
    with pytest.raises(ConfigError, match=r"at most 10, for the model has 16 positions in pre-training \(longrope"):
        check_positions(policy, 11, 6)
    policy.save_pretrained(tmp_path / "policy")
    args = new_args(tmp_path, max_prompt_length=None)
    assert with_prompt_cap(args, str(tmp_path / "policy")).max_prompt_length == 4
    args = new_args(tmp_path, generation={"response_length": 16}, max_prompt_length=None)
    with pytest.raises(ConfigError, match="must be below 16, the positions of model in pre-training"):
        with_prompt_cap(args, policy)
