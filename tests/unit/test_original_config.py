"""Files of the original's format: what each key becomes, the size of batches, overrides, errors, migration, a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from tables import each
from tiny import PROMPTS, json_rows
from xxhash import xxh32

from async_rlhf import cli
from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.compat.original import common, parse_either, translate
from async_rlhf.compat.original.command import MigrateConfig, migrate
from async_rlhf.compat.original.keys import KEYS
from async_rlhf.config import ConfigError
from async_rlhf.config.parsing import parse
from async_rlhf.models.saving import write_model

ALL_KEYS = {
    "train": (213, "b43c9ce2"),
    "sft": (162, "ad8ac546"),
    "reward": (152, "985e8682"),
    "relabel": (26, "9df6f012"),
    "generate": (16, "c1d1ca60"),
    "evaluate": (10, "f466403c"),
}
"""How many keys the original has for each command, all fields of all its dataclasses, and the hash of their names."""

ONLINE = {
    "sft_model_path": "org/sft", "model_name_or_path": "org/sft", "reward_model_path": "org/reward",
    "dataset_name": "org/prompts", "output_dir": "run", "total_episodes": 512, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
}  # fmt: skip
DPO = ONLINE | {"loss_type": "sigmoid"}
SFT = {"model_name_or_path": "org/base", "dataset_name": "org/tldr", "output_dir": "sft", "task_type": "tldr"}
REWARD = {"model_name_or_path": "org/base", "dataset_name": "org/pairs", "output_dir": "rm"}
RELABEL = {"model_name_or_path": "org/gold", "dataset_name": "org/pairs"}
GENERATE = {"model_name_or_path": "org/sft", "dataset_name": "org/prompts"}
EVALUATE = {"model_name_or_path": "results/run", "gold_model_name": "org/gold"}
SMALLEST = {"train": DPO, "sft": SFT, "reward": REWARD, "relabel": RELABEL, "generate": GENERATE, "evaluate": EVALUATE}


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A folder of its own, and nothing of the machine: no job, no ranks, no integrations, an environment to restore."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = dict(os.environ)
    for name in ("SLURM_JOB_ID", "WANDB_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(common, "find_spec", lambda name: None)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def write(values: dict[str, object], name: str = "file.yml") -> str:
    Path(name).write_text(yaml.safe_dump(values, sort_keys=False))
    return name


def kind(command: str):
    return import_attribute(COMMANDS[command].config)


def translated(command: str, values: dict[str, object], *words: str, name: str = "file.yml"):
    translation, _ = translate(kind(command), command, write(values, name), words)
    return translation


def ours(command: str, values: dict[str, object], *words: str) -> dict[str, object]:
    return translated(command, values, *words).values


def resolved(command: str, values: dict[str, object], *words: str):
    return parse_either(kind(command), command, ["--config", write(values), *words])[0]


def note(command: str, values: dict[str, object], key: str, *words: str) -> str:
    return {row.key: row.note for row in translated(command, values, *words).rows}[key]


def error(command: str, values: dict[str, object], *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(command, values, *words)
    return str(caught.value)


# What holds in a file with nothing but the necessary: the original's defaults where they differ from ours.
TRAIN_DEFAULTS = {
    "algorithm": "online_dpo", "train.bf16": False, "model": "org/sft", "reward_model": "org/reward",
    "data.train": "org/prompts", "data.eval": "org/prompts", "data.eval_split": "test", "train.output_dir": "run",
    "train.total_episodes": 512, "train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 2,
    "train.eval_steps": 3,  # 32 batches // 10
    "train.eval_temperature": 0.01, "train.save_steps": 500, "train.num_epochs": 4, "train.learning_rate": 5e-5,
    "train.non_eos_penalty": False, "train.staleness": 0, "train.seed": 42, "train.generation.placement": "inline",
    "train.generation.batch_size": 64, "train.loss_type": "sigmoid",
}  # fmt: skip


def check(command: str, before: dict[str, object], given: dict[str, object], expected: dict[str, object], *words: str):
    """Given keys change the smallest file's translation as expected, None for "no longer there", and nothing else.

    What is written beyond that has the value of our own default.
    """
    values = ours(command, SMALLEST[command] | given, *words)
    wanted = {key: value for key, value in (before | expected).items() if value is not None}
    assert {key: values.get(key) for key in wanted} == wanted
    rows = translated(command, SMALLEST[command] | given, *words)
    for key in values.keys() - wanted.keys():
        assert values[key] == rows.defaults[key], key


def test_defaults_of_the_original_hold_where_they_differ():
    assert ours("train", DPO) == TRAIN_DEFAULTS
    assert note("train", DPO, "learning_rate") == "original's default"
    config = resolved("train", DPO)
    assert (config.train.samples_per_prompt, config.train.generation.temperature, config.train.beta) == (2, 0.7, 0.1)
    assert (config.train.num_epochs, config.train.learning_rate, config.data.eval_split) == (4, 5e-5, "test")
    ppo = resolved("train", ONLINE, "--algorithm", "ppo").train
    assert (ppo.kl.coef, ppo.samples_per_prompt, ppo.vf_coef, ppo.lam) == (0.05, 1, 0.1, 0.95)


TRAIN_CASES = [
    ({"learning_rate": "1e-5", "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": "1e-6"},
     {"train.learning_rate": 1e-5, "train.weight_decay": 0.1, "train.adam_beta1": 0.8, "train.adam_beta2": 0.95,
      "train.adam_epsilon": 1e-6}),
    ({"lr_scheduler_type": "cosine", "max_grad_norm": 0.5, "seed": 7, "gradient_checkpointing": True},
     {"train.lr_scheduler_type": "cosine", "train.max_grad_norm": 0.5, "train.seed": 7,
      "train.gradient_checkpointing": True}),
    ({"warmup_steps": 3, "bf16": True}, {"train.warmup_steps": 12, "train.bf16": True}),  # 3 batches of 4 epochs
    ({"warmup_ratio": 0.1, "fp16": True}, {"train.warmup_steps": 13, "train.fp16": True}),  # of 32 x 4 steps
    ({"warmup_ratio": 0.1, "warmup_steps": 2, "rloo_k": 4}, {"train.warmup_steps": 8, "train.samples_per_prompt": 4}),
    ({"num_mini_batches": 2}, {"train.num_mini_batches": 2, "train.eval_steps": 1}),  # 16 batches
    ({"num_ppo_epochs": 1}, {"train.num_epochs": 1}),
    ({"torch_dtype": "bfloat16"}, {"train.generation.dtype": "bfloat16", "train.bf16": True}),
    ({"torch_dtype": "float16", "bf16": False}, {"train.generation.dtype": "float16", "train.bf16": False}),
    ({"save_steps": 0.25, "num_sample_generations": 5}, {"train.save_steps": 8, "train.eval_steps": 6}),
    ({"save_steps": 0.2, "num_sample_generations": 100}, {"train.save_steps": 7, "train.eval_steps": 1}),  # 6.4, up
    ({"save_steps": 12}, {"train.save_steps": 12}),
    ({"save_strategy": "no"}, {"train.save_steps": 0}),
    ({"save_strategy": "steps", "save_total_limit": 2}, {"train.save_total_limit": 2}),
    ({"num_sample_generations": 0}, {"train.eval_steps": 0, "train.eval_temperature": None, "data.eval": None,
                                     "data.eval_split": None}),
    ({"dataset_test_split": "validation", "dataset_train_split": "train2", "max_length": 300, "response_length": 20,
      "temperature": 1, "non_eos_penalty": True, "penalty_reward_value": -3},
     {"data.eval_split": "validation", "data.train_split": "train2", "train.max_prompt_length": 300,
      "train.generation.response_length": 20, "train.generation.temperature": 1.0, "train.non_eos_penalty": True,
      "train.penalty_reward_value": -3.0}),
    ({"stop_token": "eos", "stop_token_id": 0, "torch_dtype": "auto", "kl_coef": 0.2, "cliprange": 0.3}, {}),
    ({"stop_token_id": 5, "local_rollout_forward_batch_size": 16, "model_name_or_path": "org/base"},
     {"train.generation.stop_token_ids": [5], "train.annotate_batch_size": 16, "train.generation.batch_size": 16,
      "tokenizer": "org/base"}),
    ({"loss_type": "ipo", "beta": 0.3}, {"train.loss_type": "ipo", "train.beta": 0.3}),
    ({"vllm": False, "sync": True, "single": True, "vllm_device": "cuda:1", "vllm_gpu_memory_utilization": 0.5}, {}),
    ({"vllm": True}, {"train.generation.engine": "vllm", "train.generation.placement": "process", "train.staleness": 1,
                      "train.generation.batch_size": None}),
    ({"vllm": True, "sync": True}, {"train.generation.engine": "vllm", "train.generation.placement": "process",
                                    "train.staleness": 0, "train.generation.batch_size": None}),
    ({"vllm": True, "single": True, "sync": False, "vllm_device": "cuda:0", "vllm_gpu_memory_utilization": 0.2},
     {"train.generation.engine": "vllm", "train.generation.vllm.gpu_memory_utilization": 0.2,
      "train.generation.batch_size": None}),
    ({"vllm": True, "vllm_device": "cuda:3"}, {"train.generation.engine": "vllm", "train.generation.device": "cuda:3",
                                               "train.generation.placement": "process", "train.staleness": 1,
                                               "train.generation.batch_size": None}),
    ({"save_generations": True, "logging_steps": 100}, {"train.num_samples_logged": 32}),
    ({"save_generations": False, "logging_steps": 100}, {"train.logging_steps": 100}),
    ({"logging_steps": 0.5}, {"train.logging_steps": 16}),
    ({"run_name": 5, "report_to": "wandb", "overwrite_output_dir": True, "use_cpu": True},
     {"train.run_name": "5", "train.report_to": ["wandb"], "train.overwrite_output_dir": True, "train.device": "cpu"}),
    ({"report_to": "none", "resume_from_checkpoint": True}, {"train.report_to": [], "train.resume": True}),
    ({"report_to": ["wandb", "tensorboard"], "resume_from_checkpoint": "run/checkpoint-4"},
     {"train.report_to": ["wandb", "tensorboard"], "train.resume_from": "run/checkpoint-4"}),
    ({"disable_tqdm": True, "ddp_timeout": 60}, {"train.progress": False, "train.parallel.timeout": 60.0}),
    ({"use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["a", "b"], "lora_dropout": 0.1,
      "lora_modules_to_save": ["c"], "lora_task_type": "CAUSAL_LM"},
     {"train.lora.rank": 8, "train.lora.alpha": 16.0, "train.lora.target_modules": ["a", "b"]}),
    ({"use_peft": True}, {"train.lora.rank": 16}),
    ({"use_peft": False, "lora_r": 8}, {"train.lora.rank": 0}),
    ({"sanity_check": True}, {"train.total_episodes": 32, "train.report_to": None, "train.save_steps": 0,
                              "train.eval_steps": None, "train.eval_temperature": None, "data.eval": None,
                              "data.eval_split": None}),
]  # fmt: skip


@each(TRAIN_CASES)
def test_what_keys_of_online_dpo_become(given, expected):
    check("train", TRAIN_DEFAULTS, given, expected)


def in_turn(algorithm: str, **values: object) -> dict[str, object]:
    """The defaults, but for what only online DPO has."""
    return TRAIN_DEFAULTS | {"algorithm": algorithm, "train.loss_type": None} | values


OF_PPO = {"kl_coef": 0.2, "cliprange": 0.3, "cliprange_value": 0.4, "vf_coef": 1, "gamma": 0.9, "lam": 0.8}


@each([
    ({}, {}),
    (OF_PPO, {f"train.{'kl.coef' if key == 'kl_coef' else key}": float(value) for key, value in OF_PPO.items()}),
    ({"whiten_rewards": False, "rloo_k": 4}, {}),
    ({"torch_dtype": "bfloat16", "use_peft": True, "lora_r": 4, "vllm": True}, {}),
    ({"fp16": True}, {"train.fp16": True}),
])  # fmt: skip
def test_what_keys_of_ppo_become(given, expected):
    check("train", in_turn("ppo"), given, expected, "--algorithm", "ppo")


def test_what_keys_of_rloo_and_best_of_k_become():
    rloo = in_turn("rloo") | {"train.gradient_accumulation_steps": 1, "train.total_episodes": 256}
    rloo["train.non_eos_penalty"] = None  # no penalty is our default too, for this algorithm
    assert resolved("train", DPO, "--algorithm", "rloo").train.non_eos_penalty is False
    assert resolved("train", DPO | {"non_eos_penalty": True}, "--algorithm", "rloo").train.non_eos_penalty is True
    check("train", {}, {}, rloo, "--algorithm", "rloo")
    check("train", {}, {"kl_coef": 0, "cliprange": 0.1}, rloo | {"train.kl.coef": 0.0, "train.cliprange": 0.1},
          "--algorithm", "rloo")  # fmt: skip
    bok = in_turn("best_of_k")
    check("train", {}, {"bok": True, "kl_coef": 0.3, "vllm": True, "beta": 0.5}, bok)
    assert resolved("train", DPO | {"bok": True, "kl_coef": 0.3}).train.kl.coef == 0  # it is only logged there


def test_several_ranks_may_be_said_instead_of_launched():
    values = DPO | {"total_episodes": 768, "save_steps": 0.25}
    assert ours("train", values)["train.save_steps"] == 12
    assert ours("train", values, "--train.parallel.ranks", "3")["train.save_steps"] == 4
    assert ours("train", values, "--train.parallel.ranks=4")["train.save_steps"] == 3


def test_mini_batches_and_rloo_of_four():
    """2 x 6 x 2 = 24 completions of 4 are 6 prompts: 2 mini-batches of 3 prompts, 12 completions, in passes of 2."""
    values = ONLINE | {"num_mini_batches": 2, "rloo_k": 4, "num_ppo_epochs": 3, "total_episodes": 240}
    values |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3}
    train = resolved("train", values | {"total_episodes": 480}, "--algorithm", "rloo").train  # accumulation % 4 != 0
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (2, 3)
    assert (train.batch_size, train.num_batches, train.total_episodes) == (12, 10, 120)
    assert train.num_optimizer_steps == 60
    text = error("train", values | {"per_device_train_batch_size": 2}, "--algorithm", "rloo")
    for key in ("gradient_accumulation_steps: got 3", "per_device_train_batch_size (2)", "rloo_k (4)"):
        assert key in text


STAGE_DEFAULTS = {
    "bf16": False, "eval_split": "test", "num_epochs": 3.0, "learning_rate": 5e-5, "per_device_train_batch_size": 8,
    "warmup_ratio": 0.0, "logging_steps": 500, "seed": 42,
}  # fmt: skip
SFT_DEFAULTS = STAGE_DEFAULTS | {
    "model": "org/base",
    "train": "org/tldr",
    "eval": "org/tldr",
    "output_dir": "sft",
    "completion_only": False,
    "max_length": 1024,
}
REWARD_DEFAULTS = STAGE_DEFAULTS | {
    "model": "org/base",
    "train": "org/pairs",
    "eval": "org/pairs",
    "output_dir": "rm",
    "center": False,
}
STAGE_CASES = [
    ({}, {}),
    ({"num_train_epochs": 1, "learning_rate": "1e-5", "lr_scheduler_type": "cosine", "warmup_ratio": 0.1},
     {"num_epochs": 1.0, "learning_rate": 1e-5, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1}),
    ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "weight_decay": 0.1, "seed": 1},
     {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "weight_decay": 0.1, "seed": 1}),
    ({"dataset_train_split": "a", "dataset_eval_split": "b"}, {"train_split": "a", "eval_split": "b"}),
    ({"fp16": True}, {"bf16": True}),
    ({"bf16": True, "gradient_checkpointing": True}, {"bf16": True, "gradient_checkpointing": True}),
    ({"evaluation_strategy": "steps", "eval_steps": 0.2}, {"eval_steps": 0.2}),
    ({"warmup_steps": 10, "logging_steps": 0.1}, {"warmup_steps": 10, "logging_steps": 0.1}),
    ({"evaluation_strategy": "steps", "eval_steps": 50}, {"eval_steps": 50}),
    ({"eval_strategy": "steps", "logging_steps": 100}, {"eval_steps": 100, "logging_steps": 100}),
    ({"eval_strategy": "epoch", "eval_steps": 50}, {}),
    ({"use_peft": True, "lora_r": 4, "lora_alpha": 8}, {"lora.rank": 4, "lora.alpha": 8.0}),
    ({"overwrite_output_dir": True, "report_to": "wandb"}, {"overwrite": True, "report_to": ["wandb"]}),
    ({"sanity_check": True}, {"train_split": "train[:64]", "eval_split": "test[:64]"}),
]  # fmt: skip


@each(STAGE_CASES)
def test_what_keys_of_sft_and_reward_become(given, expected):
    check("sft", SFT_DEFAULTS, given, expected)
    check("reward", REWARD_DEFAULTS, given, expected)


def test_what_keys_of_one_stage_become():
    check("sft", SFT_DEFAULTS, {"max_seq_length": 580, "packing": False}, {"max_length": 580})
    assert "every row is a sequence" in note("sft", SFT | {"packing": True}, "packing")
    check("reward", REWARD_DEFAULTS, {"max_length": 640, "tokenizer_name": "org/base"}, {"max_length": 640})
    check("reward", REWARD_DEFAULTS, {"model_revision": "step1"}, {"model": f"{REWARD['model_name_or_path']}@step1"})
    check("reward", REWARD_DEFAULTS, {"push_to_hub": True, "hub_model_id": "me/rm"}, {})
    assert "huggingface-cli upload" in note("reward", REWARD | {"push_to_hub": True}, "push_to_hub")
    without = {key: value for key, value in SFT.items() if key != "task_type"}
    assert "the whole of prompt and chosen" in note("sft", without, "task_type")
    assert error("sft", SFT | {"task_type": "xy"}).startswith("task_type: got 'xy'; must be")


RELABEL_DEFAULTS = {
    "data": "org/pairs", "reward_model": "org/gold", "splits": ["train", "validation"],
    "output_dir": "runs/pairs_relabel",
}  # fmt: skip
GENERATE_DEFAULTS = {
    "models": {"sft": "org/sft"}, "data": "org/prompts", "engine": "vllm", "response_length": 48,
    "output_dir": "org/sft/_generations",
}  # fmt: skip
EVALUATE_DEFAULTS = {
    "generations": "results/run/_generations",
    "output_dir": "results/run/_evaluation", "reward_model": "org/gold", "batch_size": 16,
}  # fmt: skip
HELD_OUT_CASES = [
    ("relabel", RELABEL_DEFAULTS, {}, {}),
    ("relabel", RELABEL_DEFAULTS, {"output_name": "me/relabelled", "batch_size": 64, "torch_dtype": "float16"},
     {"output_dir": "runs/relabelled", "batch_size": 64, "dtype": "float16"}),
    ("relabel", RELABEL_DEFAULTS, {"train_split": "a", "eval_split": "b"}, {"splits": ["a", "b"]}),
    ("relabel", RELABEL_DEFAULTS, {"train_split": "a", "eval_split": None}, {"splits": ["a"]}),
    ("relabel", RELABEL_DEFAULTS, {"sanity_check": True}, {"splits": ["validation"]}),
    ("relabel", RELABEL_DEFAULTS, {"load_in_8bit": True, "load_in_4bit": False}, {}),
    ("relabel", RELABEL_DEFAULTS, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "use_bnb_nested_quant": True},
     {}),
    ("relabel", RELABEL_DEFAULTS, {"push_to_hub": True, "seed": 3, "template": "hh", "tokenizer_name": "x"},
     {"reward_tokenizer": "x"}),
    ("generate", GENERATE_DEFAULTS, {}, {}),
    ("generate", GENERATE_DEFAULTS, {"split": "test", "temperature": 0.010001, "max_new_tokens": 128},
     {"split": "test", "temperature": 0.010001, "response_length": 128}),
    ("generate", GENERATE_DEFAULTS, {"torch_dtype": "bfloat16", "dataset_path": "out"},
     {"dtype": "bfloat16", "output_dir": "out"}),
    ("generate", GENERATE_DEFAULTS, {"model_paths": ["checkpoint-8"]},
     {"models": None, "run": "org/sft", "checkpoints": ["checkpoint-8"]}),
    ("generate", GENERATE_DEFAULTS, {"sanity_check": True}, {"max_prompts": 10}),
    ("generate", GENERATE_DEFAULTS, {"top_p": 0.9}, {"top_p": 0.9}),
    ("generate", GENERATE_DEFAULTS, {"top_p": 1, "num_gpus": 2, "save_generations": True, "wandb_run_id": "snow"},
     {"top_p": 1}),
    ("evaluate", EVALUATE_DEFAULTS, {}, {}),
    ("evaluate", EVALUATE_DEFAULTS, {"dataset_path": "made", "batch_size": 8},
     {"generations": "made", "batch_size": 8}),
    ("evaluate", EVALUATE_DEFAULTS, {"ref_model_name": "r", "gold_tokenizer_name": "x"},
     {"ref_model": "r", "reward_tokenizer": "x"}),
    ("evaluate", EVALUATE_DEFAULTS, {"sanity_check": True}, {"max_prompts": 10}),
    ("evaluate", EVALUATE_DEFAULTS, {"torch_dtype": "float16", "gold_model_revision": "r", "wandb_run_id": "snow"}, {}),
]  # fmt: skip


@each(HELD_OUT_CASES)
def test_what_keys_of_relabelling_generation_and_evaluation_become(command, before, given, expected):
    check(command, before, given, expected)
    resolved(command, SMALLEST[command] | given)


def test_a_folder_of_checkpoints_is_a_run():
    Path("run/checkpoint-8").mkdir(parents=True)
    values = ours("generate", GENERATE | {"model_name_or_path": "run"})
    assert (values["run"], values["output_dir"], "models" in values) == ("run", "run/_generations", False)
    only = {"gold_model_name": "org/gold", "dataset_path": "made/there"}
    assert ours("evaluate", only)["output_dir"] == "made/_evaluation"


SAMPLES = {"bool": True, "int": 1, "float": 0.5, "steps": 2, "str": "text", "list": ["a"], "any": 1}
VALID = {
    "bok": False,  # else another algorithm
    "whiten_rewards": True, "loss_type": "ipo", "task_type": "tldr", "torch_dtype": "float32",
    "fp16": False,  # not with bf16
    "stop_token": "eos", "model_revision": "step1", "save_strategy": "steps", "eval_strategy": "steps",
    "evaluation_strategy": "steps", "lr_scheduler_type": "cosine", "total_episodes": 64, "top_p": 0.9,
    "adam_beta1": 0.5,
    "overwrite_output_dir": False,  # not with resume
}  # fmt: skip


@each([*(("train", name) for name in ("online_dpo", "rloo", "ppo")), *((name, "") for name in KEYS if name != "train")])
def test_every_key_is_known_and_explained(command, algorithm):
    """Alone, beside what is needed, each gives a row of its own with a note, and a configuration that parses."""
    keys = set(KEYS[command])
    assert (len(keys), xxh32(" ".join(sorted(keys)).encode()).hexdigest()) == ALL_KEYS[command]
    words = ["--algorithm", algorithm] if command == "train" else []
    values = {key: VALID.get(key, SAMPLES[KEYS[command][key].kind]) for key in sorted(keys)} | SMALLEST[command]
    values = {key: deepcopy(value) for key, value in values.items()}  # of one list for several YAML would write aliases
    if command == "train":
        values["rloo_k"] = 2
    rows = {row.key: row for row in translated(command, values, *words).rows}
    assert keys <= rows.keys()
    assert all(row.note and len(row.note) > 5 for row in rows.values())
    resolved(command, values, *words)
    for key in keys:
        one = SMALLEST[command] | {"stop_token": "eos"} | {key: values[key]}
        one = {name: value for name, value in one.items() if name in KEYS[command]}
        assert key in {row.key for row in translated(command, one, *words).rows}, key


ALGORITHMS = [
    ({}, [], "file.yml", None),
    ({"bok": True, "loss_type": "ipo"}, [], "file.yml", "best_of_k"),
    ({"vllm": True}, [], "rloo_x.yml", "online_dpo"),
    ({"vllm": False}, [], "rloo_x.yml", "rloo"),
    *[({key: 0}, [], "file.yml", "online_dpo") for key in ("single", "save_generations", "sync")],
    ({"loss_type": "ipo"}, [], "file.yml", "online_dpo"),
    ({"beta": 0.2}, [], "file.yml", "online_dpo"),
    *[({key: 0.5}, [], "file.yml", "ppo") for key in ("vf_coef", "lam", "gamma", "cliprange_value")],
    ({"whiten_rewards": False}, [], "file.yml", "ppo"),
    ({"lam": 0.5, "beta": 0.5}, [], "file.yml", None),
    ({"lam": 0.5, "beta": 0.5}, ["--algorithm", "rloo"], "file.yml", "rloo"),
    ({"beta": 0.5}, ["--algorithm=ppo"], "file.yml", "ppo"),
    ({"output_dir": "results/ppo_x"}, [], "rloo.yml", "ppo"),
    ({"output_dir": "x/onlinedpo_y/"}, [], "file.yml", "online_dpo"),
    ({"run_name": "online_dpo_y"}, [], "file.yml", "online_dpo"),
    ({"run_name": "bo2_y"}, [], "file.yml", "best_of_k"),
    ({"run_name": "bold"}, [], "rloo.yml", "rloo"),
    ({}, [], "ppo_x.yml", "ppo"),
]


@each(ALGORITHMS)
def test_the_algorithm_is_found(given, words, name, expected):
    if expected is None:
        with pytest.raises(ConfigError, match="give --algorithm online_dpo, rloo, ppo or best_of_k"):
            translated("train", ONLINE | given, *words, name=name)
        return
    rows = translated("train", ONLINE | given, *words, name=name).rows
    assert rows[0].targets == {"algorithm": expected}
    assert rows[0].note


def test_places_and_run_ids(monkeypatch):
    """online_dpo.py puts a parent before the folder only within a job, the others always, with the current folder."""
    values = DPO | {"output_global_parent_dir": "results", "wandb_run_id": "slurm"}
    t = translated("train", values)
    assert (t.values["train.output_dir"], t.environment) == ("results/run", {})
    assert "SLURM_JOB_ID is not set" in note("train", values, "wandb_run_id")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    t = translated("train", values | {"output_dir": "dpo/run"})
    assert (t.values["train.output_dir"], t.environment) == ("results/77/dpo/run", {"WANDB_RUN_ID": "77_run"})
    resolved("train", values)
    assert os.environ["WANDB_RUN_ID"] == "77_run"
    del os.environ["WANDB_RUN_ID"]
    t = translated("train", values | {"wandb_run_id": "snow"})
    assert (t.values["train.output_dir"], t.environment) == ("run", {})
    assert "every run the same id" in note("train", values | {"wandb_run_id": "snow"}, "wandb_run_id")
    assert translated("train", values | {"wandb_run_id": "mine"}).environment == {"WANDB_RUN_ID": "mine"}
    values = ONLINE | {"output_global_parent_dir": "results"}
    assert ours("train", values, "--algorithm", "ppo")["train.output_dir"] == "results/here/run"
    assert ours("sft", SFT | {"output_global_parent_dir": "results"})["output_dir"] == "results/here/sft"
    t = translated("reward", REWARD | {"output_global_parent_dir": "results", "wandb_run_id": "slurm"})
    assert (t.values["output_dir"], t.environment) == ("results/here/rm", {})
    assert translated("reward", REWARD | {"wandb_run_id": "mine"}).environment == {}


def test_integrations_that_are_installed_are_the_default(monkeypatch):
    monkeypatch.setattr(common, "find_spec", lambda name: name == "wandb" or None)
    assert ours("train", DPO)["train.report_to"] == ["wandb"]
    assert ours("sft", SFT | {"report_to": "all"})["report_to"] == ["wandb"]
    assert ours("train", DPO | {"sanity_check": True, "report_to": "wandb"})["train.report_to"] == []


def test_env_is_exported_and_secrets_are_not_shown(capsys):
    resolved("train", DPO | {"env": {"WANDB_NOTES": 567}, "hub_token": "secret1", "push_to_hub_token": "secret2"})
    assert os.environ["WANDB_NOTES"] == "567"
    shown = capsys.readouterr().err
    assert "WANDB_NOTES" in shown
    for text in ("567", "secret"):
        assert text not in shown
    assert "env: got 'x'; must be a mapping" in error("train", DPO | {"env": "x"})


REFUSED = """
    LD_PRELOAD LD_LIBRARY_PATH PYTHONPATH PYTHONSTARTUP PATH HF_ENDPOINT HF_TOKEN WANDB_BASE_URL WANDB_API_KEY
    NCCL_NET_PLUGIN VLLM_PLUGINS ASYNC_RLHF_MODEL http_proxy wandb_notes BASH_ENV
"""


@each(REFUSED.split())
def test_a_file_sets_no_variable_that_loads_code_or_sends_keys_elsewhere(name):
    before = dict(os.environ)
    for command, values in SMALLEST.items():
        if command in ("train", "generate", "evaluate"):
            message = error(command, values | {"env": {"WANDB_NOTES": "x", name: "/their/secret.so"}})
            assert f"env: got {name!r}; a file may set only " in message
            assert "CUDA_VISIBLE_DEVICES" in message
            assert "export others in the shell" in message
            assert "secret" not in message
    assert dict(os.environ) == before


@each(["two\nlines", ["a"], None, {"a": 1}])
def test_a_variable_is_text_on_one_line(value):
    assert "env.WANDB_NOTES: got " in error("train", DPO | {"env": {"WANDB_NOTES": value}})


def test_a_variable_without_end_is_found_by_its_line():
    message = error("train", DPO | {"env": {"WANDB_NOTES": "nu\0ll"}})
    assert "got 'nu\\x00ll'; must be without NUL characters" in message


def test_a_run_id_of_two_lines_is_no_key_of_the_rewritten_file():
    text = migrate(MigrateConfig(write(DPO | {"wandb_run_id": "mine\nreward_funcs: [theirs:function]"})))
    assert "reward_funcs" not in yaml.safe_load(text)


def test_a_dry_run_sets_no_variable_and_a_mistake_neither(capsys):
    before = dict(os.environ)
    file = write(DPO | {"env": {"WANDB_NOTES": "x"}, "wandb_run_id": "mine"})
    assert run_cli("train", "--config", file, "--dry-run") == 0
    assert run_cli("train", "--config", file, "--train.staleness", "-1") == 2
    assert {name: value for name, value in os.environ.items() if before.get(name) != value} in (
        {},
        {"GOMP_SPINCOUNT": "3000"},  # of the command line itself
    )


def test_overrides_of_the_original_beat_the_file_and_ours_beat_both(monkeypatch):
    def dpo(*words: str):
        return resolved("train", DPO | {"learning_rate": 1e-6}, *words)

    assert dpo("--learning_rate", "2e-6").train.learning_rate == 2e-6
    assert dpo("--learning_rate=2e-6", "--train.learning_rate", "3e-6").train.learning_rate == 3e-6
    monkeypatch.setenv("ASYNC_RLHF_TRAIN__LEARNING_RATE", "4e-6")
    assert dpo().train.learning_rate == 4e-6
    monkeypatch.delenv("ASYNC_RLHF_TRAIN__LEARNING_RATE")
    vllm = dpo("--vllm", "--sync", "--penalty_reward_value", "-2")
    assert (vllm.train.generation.engine, vllm.train.staleness, vllm.train.penalty_reward_value) == ("vllm", 0, -2.0)
    assert dpo("--vllm", "false").train.generation.engine == "transformers"
    lora = dpo("--use_peft", "--lora_target_modules", "a", "b", "--no_disable_dropout", "--model", "mine")
    assert (lora.train.lora.target_modules, lora.model) == (["a", "b"], "mine")
    assert resolved("train", DPO | {"vllm": True}, "--no_vllm").train.generation.engine == "transformers"
    assert dpo("--bok").algorithm == "best_of_k"
    assert resolved("sft", SFT, "--num_train_epochs", "2", "--num_epochs", "5").num_epochs == 5


ERRORS = [
    ("train", DPO | {"leraning_rate": 1}, [], "leraning_rate: got 1; .* did you mean 'learning_rate'"),
    ("train", DPO | {"task_type": "tldr"}, [], "task_type: got 'tldr'; files for async-rlhf sft have it"),
    ("train", DPO, ["--leraning_rate", "1"], "--leraning_rate: is neither .* did you mean --learning_rate"),
    ("train", DPO | {"model": "x"}, [], "model: is a key of async-rlhf train, but 'sft_model_path' one of the"),
    ("train", DPO | {"loss_type": "hinge"}, [], "loss_type: got 'hinge'; must be 'sigmoid' or 'ipo'"),
    ("train", DPO | {"total_episodes": None}, [], "total_episodes: got None; must be given"),
    ("train", DPO | {"total_episodes": 500}, [], "total_episodes: got 500; must be a multiple of the batch of 16 pro"),
    ("train", DPO | {"total_episodes": 500}, ["--algorithm", "rloo"], "batch of 16 completions"),
    ("train", DPO | {"dataset_name": None}, [], "dataset_name: got None; must be given"),
    ("train", DPO | {"output_dir": None}, [], "output_dir: got None; must be given"),
    ("train", DPO | {"seed": "one"}, [], "seed: got 'one'; must be a number"),
    ("train", DPO | {"seed": 1.5}, [], "seed: got 1.5; must be an integer"),
    ("train", DPO | {"vllm": "maybe"}, [], "vllm: got 'maybe'; must be true or false"),
    ("train", DPO | {"stop_token": "period"}, [], "stop_token: got 'period'; must be 'eos'"),
    ("train", DPO | {"stop_token_id": -5}, [], "stop_token_ids: got .-5.; must be ids of tokens"),
    ("train", DPO | {"torch_dtype": "int8"}, [], "torch_dtype: got 'int8'; must be float32"),
    ("train", DPO | {"lr_scheduler_type": "cosine_with_restarts"}, [], "lr_scheduler_type.*cosine_with_restarts"),
    ("train", DPO | {"bok": True}, ["--algorithm", "rloo"], "algorithm: got 'rloo'; must be best_of_k with bok"),
    ("train", DPO, ["--algorithm", "grpo"], "algorithm: got 'grpo'; must be one of online_dpo.*migrate the file"),
    ("train", DPO | {"num_mini_batches": 0}, [], "num_mini_batches: got 0; must be at least 1"),
    ("train", DPO, ["--learning_rate"], "learning_rate: got None; must be followed by its value"),
    ("generate", GENERATE | {"top_p": 1.5}, [], "top_p: got 1.5; must be at most 1"),
    ("evaluate", {"gold_model_name": "x"}, [], "model_name_or_path: got None; must be given, or dataset_path"),
    ("reward", REWARD | {"model_name_or_path": None}, [], "model_name_or_path: got None; must be given"),
    ("relabel", RELABEL | {"dataset_name": None}, [], "dataset_name: got None; must be given"),
]  # fmt: skip


@each(ERRORS)
def test_what_cannot_be_had_is_named(command, values, words, expected):
    assert re.search(expected, error(command, values, *words), re.DOTALL), error(command, values, *words)


def test_files_of_ours_are_left_alone(capsys):
    mine = {"train": "a.jsonl", "output_dir": "out", "learning_rate": 1e-4, "model": "m", "seed": 3}
    assert resolved("sft", mine).learning_rate == 1e-4
    Path("broken.yml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"--config: 'broken.yml', line 1: is no YAML"):
        translate(kind("train"), "train", "broken.yml")
    assert capsys.readouterr().err == ""


def run_cli(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return ended.value.code or 0


def test_dry_run_prints_the_table_and_the_configuration(capsys):
    file = write(DPO | {"vllm": True, "max_grad_norm": 0.5, "hub_strategy": "every_save"})
    assert run_cli("train", "--config", file, "--dry-run", "--learning_rate", "2e-6") == 0
    out, err = capsys.readouterr()
    config = yaml.safe_load(out)
    assert config["train"]["learning_rate"] == 2e-6
    assert "# batches: 32" in out
    lines = [line.split("│") for line in err.splitlines() if line.startswith("│")]
    cells = {line[1].strip(): [cell.strip() for cell in line[2:5]] for line in lines if line[1].strip()}
    assert cells["(algorithm)"] == ["", "algorithm = online_dpo", "only its trainer reads loss_type"]
    assert cells["max_grad_norm"][:2] == ["0.5", "train.max_grad_norm = 0.5"]
    assert cells["max_grad_norm"][2] == "mapped; was ignored there, here gradients are clipped"
    assert cells["hub_strategy"][1] == ""
    assert cells["num_ppo_epochs"] == ["4", "train.num_epochs = 4", "original's default"]
    assert err.count("keys of the original, and what they are here") == 1
    assert run_cli("train", "--config", write(DPO | {"los_type": 1}), "--dry-run") == 2
    assert "did you mean 'loss_type'" in capsys.readouterr().err


def test_as_a_program_without_a_network():
    file = write(DPO | {"vllm": True})
    words = [sys.executable, "-m", "async_rlhf.cli", "train", "--config", file, "--sync", "--dry-run"]
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["train"]["staleness"] == 0
    assert "vllm" in done.stderr


MIGRATIONS = [
    ("train", DPO | {"vllm": True, "save_steps": 0.25, "bf16": True, "torch_dtype": "bfloat16", "hub_strategy": "x"}),
    ("train", ONLINE | {"gamma": 0.9, "report_to": ["wandb"], "run_name": "two\nlines: #", "hub_model_id": "a\nb: c"}),
    ("train", ONLINE | {"bok": True, "sanity_check": True}),
    ("train", ONLINE | {"output_dir": "rloo", "use_peft": True, "num_mini_batches": 2}),
    ("train", DPO | {"use_peft": True, "lora_target_modules": ["a: b", "'c'"], "save_generations": True}),
    ("sft", SFT | {"use_peft": True, "report_to": "wandb"}),
    ("reward", REWARD | {"eval_strategy": "steps", "eval_steps": 10}),
    ("relabel", RELABEL | {"output_name": "me/out"}),
    ("generate", GENERATE | {"max_new_tokens": 9}),
    ("generate", GENERATE | {"model_paths": ["checkpoint-1"]}),
    ("evaluate", EVALUATE | {"ref_model_name": "org/sft"}),
]


@pytest.mark.quick
@each(MIGRATIONS)
def test_a_migrated_file_is_the_same_configuration(command, values):
    before = parse_either(kind(command), command, ["--config", write(values)])[1]
    text = migrate(MigrateConfig(file="file.yml"))
    assert f"async-rlhf {command} --config" in text  # found out by the keys
    Path("ours.yml").write_text(text)
    assert translate(kind(command), command, "ours.yml")[0] is None
    assert parse(kind(command), command, ["--config", "ours.yml"])[1] == before


def test_migrate_is_a_command(capsys):
    write(DPO | {"save_steps": 0.25, "hub_strategy": "every_save", "wandb_run_id": "mine"})
    assert run_cli("config", "migrate", "file.yml") == 0
    out, err = capsys.readouterr()
    assert (out.splitlines()[2], err) == ("algorithm: online_dpo  # (algorithm): only its trainer reads loss_type", "")
    assert "  learning_rate: 5.0e-05  # learning_rate: 5.0e-05 (original's default)\n" in out
    assert "\n# environment: export WANDB_RUN_ID=mine\n" in out
    assert "\n# hub_strategy: every_save (no effect here" in out
    assert "WANDB_RUN_ID" not in os.environ
    assert run_cli("config", "migrate", "file.yml", "--output", "ours.yml", "--ranks", "2") == 0
    saved = yaml.safe_load(Path("ours.yml").read_text())
    assert (saved["train"]["save_steps"], saved["train"]["parallel"]) == (4, {"ranks": 2})
    assert run_cli("config", "migrate", "file.yml", "--output", "ours.yml") == 2
    assert "output: got 'ours.yml'; is there already" in capsys.readouterr().err
    assert run_cli("config", "migrate", "file.yml", "--algorithm", "ppo") == 0
    assert "algorithm: ppo" in capsys.readouterr().out


@each(
    [
        (["migrate", "nowhere.yml"], "file: got 'nowhere.yml'; there is no such file"),
        (["migrate", "ours.yml"], "file: got 'ours.yml'; must be a YAML file with keys of the original"),
        (["migrate", "sft.yml", "--ranks", "2"], "ranks: got .*must be left out: only files for train have it"),
        (["show"], "got 'show'; must be: async-rlhf config migrate FILE"),
    ]
)
def test_what_cannot_be_migrated_is_named(words, expected, capsys):
    write({"model": "x"}, "ours.yml")
    write(SFT, "sft.yml")
    assert run_cli("config", *words) == 2
    assert re.search(expected, capsys.readouterr().err)


def test_a_file_of_the_original_trains(tmp_path, make_policy, make_reward_model, tokenizer, capsys):
    write_model(make_policy(), tokenizer, tmp_path / "sft")
    write_model(make_reward_model(), tokenizer, tmp_path / "reward")
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    file = write(
        {
            "model_name_or_path": str(tmp_path / "sft"),
            "sft_model_path": str(tmp_path / "sft"),
            "reward_model_path": str(tmp_path / "reward"),
            "dataset_name": "prompts.jsonl",
            "dataset_test_split": "validation",
            "max_length": 32,
            "output_dir": "rloo_tiny",
            "output_global_parent_dir": "results",
            "learning_rate": "1e-4",
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_mini_batches": 1,
            "num_ppo_epochs": 1,
            "total_episodes": 32,
            "response_length": 8,
            "stop_token": "eos",
            "non_eos_penalty": True,
            "local_rollout_forward_batch_size": 8,
            "num_sample_generations": 2,
            "save_steps": 0.5,
            "save_strategy": "steps",
            "wandb_run_id": "snow",
            "hub_strategy": "all_checkpoints",
            "report_to": "none",
        }
    )
    assert run_cli("train", "--config", file, "--train.num_threads", "1", "--disable_tqdm") == 3  # ties alone
    run = Path("results/here/rloo_tiny")
    lines = json_rows(run / "metrics.jsonl")
    assert sum("eval_objective/scores" in line for line in lines) == 2
    assert {"checkpoint-2", "checkpoint-4", "final"} <= {path.name for path in run.iterdir()}
    kept = yaml.safe_load((run / "run.yml").read_text())
    assert (kept["algorithm"], kept["train"]["total_episodes"], kept["train"]["learning_rate"]) == ("rloo", 16, 1e-4)
    assert parse(kind("train"), "train", ["--config", str(run / "run.yml")])[0].train.num_batches == 4


RUN = """
reward_model_path: 'org/rm'
sft_model_path: org/sft
dataset_name: "org/tldr"
dataset_test_split: validation
max_length: 512
num_mini_batches: 1
num_ppo_epochs: 1
num_sample_generations: {tables}
response_length: 53
stop_token: 'eos'
non_eos_penalty: True
learning_rate: {rate}  # text to YAML 1.1, which wants a dot
logging_steps: 100
save_strategy: steps
save_steps: 0.25
hub_strategy: all_checkpoints
output_global_parent_dir: results
wandb_run_id: {run_id}
local_rollout_forward_batch_size: 32
model_name_or_path: org/sft
"""
STAGE = """
model_name_or_path: org/base
dataset_name: org/pairs
dataset_eval_split: validation
num_train_epochs: 1
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
per_device_eval_batch_size: 8
gradient_checkpointing: False
ddp_find_unused_parameters: false
evaluation_strategy: 'steps'
eval_steps: 0.2
lr_scheduler_type: cosine
logging_steps: 100
fp16: yes
push_to_hub: True
hub_model_id: 'org/{name}'
output_dir: {name}
run_name: {name}
output_global_parent_dir: results
wandb_run_id: slurm
"""
SFT_FILE = f"{STAGE}learning_rate: 1e-5\ntask_type: 'tldr'\nmax_seq_length: 580\nreport_to: wandb\n"
REWARD_FILE = f"{STAGE}learning_rate: 1.0e-05\nmax_length: 640\nsave_steps: 0.2\nuse_peft: False\n"
DPO_FILE = "loss_type: sigmoid\nsave_generations: true\n"
VLLM_FILE = f"{DPO_FILE}vllm: True\ntorch_dtype: bfloat16\nbf16: True\n"
SINGLE_FILE = f"{VLLM_FILE}single: True\nvllm_device: cuda:0\nvllm_gpu_memory_utilization: 0.2\n"
RUN_FILES = {
    # name: algorithm, per device, accumulation, ranks, episodes, further keys, batches, prompts of each
    "bo2_pythia410m": ("best_of_k", 16, 8, 1, 131072, "bok: True\nfp16: True\n", 1024, 128),
    "onlinedpo_pythia1b": ("online_dpo", 8, 16, 1, 131072, DPO_FILE, 1024, 128),
    "onlinedpo_pythia1b_4gpu": ("online_dpo", 16, 8, 4, 131072, f"{DPO_FILE}bf16: True\n", 256, 512),
    "onlinedpo_pythia1b_vllm_1gpu": ("online_dpo", 4, 128, 1, 131072, SINGLE_FILE, 256, 512),
    "onlinedpo_pythia1b_vllm_4gpu": ("online_dpo", 8, 21, 3, 129024, VLLM_FILE, 256, 504),
    "onlinedpo_pythia2.8b": ("online_dpo", 2, 64, 1, 131072, DPO_FILE, 1024, 128),
    "onlinedpo_pythia2.8b_4gpu": ("online_dpo", 4, 32, 4, 131072, f"{DPO_FILE}bf16: True\n", 256, 512),
    "onlinedpo_pythia2.8b_vllm_4gpu": ("online_dpo", 6, 28, 3, 129024, VLLM_FILE, 256, 504),
    "onlinedpo_pythia410m": ("online_dpo", 8, 16, 1, 131072, DPO_FILE, 1024, 128),
    "onlinedpo_pythia410m_4gpu": ("online_dpo", 32, 4, 4, 131072, f"{DPO_FILE}bf16: True\n", 256, 512),
    "onlinedpo_pythia410m_vllm": ("online_dpo", 8, 21, 3, 129024, f"{DPO_FILE}vllm: True\n", 256, 504),
    "onlinedpo_pythia410m_vllm_1gpu": ("online_dpo", 8, 64, 1, 131072, SINGLE_FILE, 256, 512),
    "onlinedpo_pythia410m_vllm_4gpu": ("online_dpo", 21, 8, 3, 129024, VLLM_FILE, 256, 504),
    "ppo_pythia410m": ("ppo", 8, 16, 1, 131072, "fp16: True\nnum_ppo_epochs: 1\n", 1024, 128),
    "rloo_pythia410m": ("rloo", 16, 8, 1, 131072, "fp16: True\n", 1024, 64),
}
STAGE_FILES = {
    **{f"rm_{size}": ("reward", REWARD_FILE.format(name=f"rm_{size}")) for size in ("410m", "1b", "2.8b")},
    **{f"sft_{size}": ("sft", SFT_FILE.format(name=f"sft_{size}")) for size in ("1b", "2.8b")},
    "relabel_rm": (
        "relabel",
        "model_name_or_path: org/gold\ntokenizer_name: org/base\ndataset_name: org/pairs\ntorch_dtype: float16\n"
        "batch_size: 64\noutput_name: org/relabelled\npush_to_hub: True\n",
    ),
    "generate": (
        "generate",
        "save_generations: True\ndataset_name: org/tldr\nmax_new_tokens: 128\ntemperature: 0.010001\n"
        "wandb_run_id: snow\n",
    ),
    "evaluate": (
        "evaluate",
        "ref_model_name: org/sft\ngold_model_name: org/gold\ngold_tokenizer_name: org/base\nbatch_size: 8\n"
        "wandb_run_id: snow\n",
    ),
}
assert len(RUN_FILES) + len(STAGE_FILES) == 23


def as_is(command: str, text: str, *words: str):
    """The configuration of a file and what is said beside the table of its keys; every key twice is the same."""
    Path("twice.yml").write_text(text + text)
    twice = parse_either(kind(command), command, ["--config", "twice.yml", *words])
    Path("file.yml").write_text(text)
    assert parse_either(kind(command), command, ["--config", "file.yml", *words])[1] == twice[1]
    assert run_cli(command, "--config", "file.yml", "--dry-run", *words) == 0
    return twice[0]


@pytest.mark.quick
@each(RUN_FILES)
def test_each_of_the_files_for_training_runs_as_it_is(name, monkeypatch, capsys):
    algorithm, rows, accumulation, ranks, episodes, more, batches, prompts = RUN_FILES[name]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    text = RUN.format(tables=4 + batches % 2, rate="3e-6", run_id="slurm" if ranks == 1 else "snow")
    text += f"per_device_train_batch_size: {rows}\ngradient_accumulation_steps: {accumulation}\n"
    text += f"total_episodes: {episodes}\noutput_dir: {name}_tldr6.9b\nrun_name: '{name}_tldr6.9b'\n{more}"
    config = as_is("train", text, "--train.parallel.ranks", str(ranks))
    monkeypatch.setenv("RANK", "0")
    for variable, value in {"WORLD_SIZE": ranks, "MASTER_ADDR": "host", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(variable, str(value))
    launched = parse_either(kind("train"), "train", ["--config", "file.yml"])[0] if ranks > 1 else config
    place = ("vllm", *(("inline", 0) if "single" in more else ("process", 1)))
    for train in (config.train, launched.train):
        assert (config.algorithm, train.parallel.ranks, train.learning_rate) == (algorithm, ranks, 3e-6)
        assert (train.num_batches, train.num_optimizer_steps, train.batch_size) == (batches, batches, prompts)
        assert train.samples_per_prompt == (1 if algorithm == "ppo" else 2)
        assert (train.save_steps, train.eval_steps) == (batches // 4, batches // 4)
        assert (train.bf16, train.fp16) == ("bf16: True" in more, "fp16: True" in more)
        found = (train.generation.engine, train.placement, train.staleness)
        assert found == (place if "vllm" in more else ("transformers", "inline", 0))
    said = capsys.readouterr().err
    assert said.count("is there again") > 20  # of the file with every key twice


@pytest.mark.quick
@each(STAGE_FILES)
def test_each_of_the_files_for_stages_runs_as_it_is(name, monkeypatch):
    command, text = STAGE_FILES[name]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    model = ["--model_name_or_path", "results/run"] if command in ("generate", "evaluate") else []
    config = as_is(command, text, *model)
    if command in ("sft", "reward"):
        assert (config.learning_rate, config.num_epochs) == (1e-5, 1)


def test_of_a_key_that_is_there_again_the_last_value_counts(capsys):
    text = yaml.safe_dump(DPO, sort_keys=False) + "beta: 0.1\nhub_token: t0p\nenv: {WANDB_NAME: a0, WANDB_NAME: b0}\n"
    start = len(text.splitlines())
    Path("file.yml").write_text(text + 'beta: "0.3"\nhub_token: s3cret\n')
    config, _ = parse_either(kind("train"), "train", ["--config", "file.yml"])
    assert config.train.beta == 0.3
    assert os.environ["WANDB_NAME"] == "b0"
    said = capsys.readouterr().err
    told = [line for line in said.splitlines() if line.startswith("warning: ")]
    place = f"warning: 'file.yml', line {start}: the key 'WANDB_NAME' is there again (line {start}), with *** before"
    assert [line for line in told if line.startswith(place)]
    place = f"warning: 'file.yml', line {start + 1}: the key 'beta' is there again (line {start - 2}), "
    assert place + "with '0.1' before and '\"0.3\"' now; the last one counts" in told
    assert len(told) == 3
    assert not {"t0p", "s3cret"} & set(said.replace("'", " ").split())


def test_our_own_files_have_no_key_twice(capsys):
    Path("mine.yml").write_text("train: a.jsonl\noutput_dir: out\nmodel: m\nseed: 3\nseed: 3\n")
    assert run_cli("sft", "--config", "mine.yml", "--dry-run") == 2
    assert "line 5: got the key 'seed' again (line 4); must be there once" in capsys.readouterr().err
