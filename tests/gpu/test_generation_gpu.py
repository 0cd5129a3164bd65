"""What only a GPU can show: weights that stay on it, vLLM beside the learner and in turn with it, low precision."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny import count_letters, tiny_config
from transformers import GPTNeoXForCausalLM

from async_rlhf.config import VLLMConfig
from async_rlhf.generation import process
from async_rlhf.models.snapshots import DeviceRing
from async_rlhf.run.trainer import OnlineTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
VLLM = {"engine": "vllm", "dtype": "bfloat16", "vllm": VLLMConfig(gpu_memory_utilization=0.3)}


def run(tokenizer, prompts, args) -> list[dict[str, float]]:
    torch.manual_seed(0)
    policy = GPTNeoXForCausalLM(tiny_config(hidden_size=64, intermediate_size=128)).cuda()
    trainer = OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
    trainer.train()
    rows = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]


def test_weights_for_a_worker_on_the_same_gpu_never_leave_it(tokenizer, prompts, make_args, monkeypatch):
    made = []
    for_model = DeviceRing.for_model

    def noted(*given, **options):
        made.append(for_model(*given, **options))
        return made[-1]

    monkeypatch.setattr(process.DeviceRing, "for_model", noted)
    generation = {"placement": "process", "device": "cuda:0"}
    rows = run(tokenizer, prompts, make_args("gpu", generation, staleness=1, device="cuda:0"))
    assert made[0].views(0)[made[0].specs[0].name].is_cuda
    assert [row["schedule/lag"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert max(row["engine/logprob_difference"] for row in rows) < 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_worker_takes_the_gpu_that_the_learner_does_not_use(tokenizer, prompts, make_args):
    rows = run(tokenizer, prompts, make_args("two", {"placement": "process"}, staleness=1, device="cuda:0"))
    assert max(row["engine/logprob_difference"] for row in rows) < 1e-3


@needs_vllm
@pytest.mark.parametrize(("placement", "staleness"), [("process", 1), ("inline", 0)])
def test_vllm_on_the_learners_gpu(tokenizer, prompts, make_args, placement, staleness):
    generation = {**VLLM, "placement": placement, "device": "cuda:0" if placement == "process" else None}
    rows = run(tokenizer, prompts, make_args("vllm", generation, staleness=staleness, device="cuda:0", bf16=True))
    assert [row["schedule/lag"] for row in rows][1:] == [staleness] * 5
    assert max(row["engine/logprob_difference"] for row in rows) < 0.05


@needs_vllm
def test_vllm_loads_new_weights_in_flight(tokenizer, prompts, make_args):
    generation = {**VLLM, "placement": "process", "device": "cuda:0", "in_flight": True, "response_length": 40}
    options = {"staleness": 2, "staleness_mode": "bounded", "device": "cuda:0", "bf16": True}
    rows = run(tokenizer, prompts, make_args("flight", generation, **options))
    assert max(row["engine/logprob_difference"] for row in rows) < 0.05


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_deterministic_run_is_repeated_and_resumed_bit_for_bit(tokenizer, prompts, make_args, staleness):
    options = {"staleness": staleness, "device": "cuda:0", "deterministic": True, "save_steps": 2}
    once = run(tokenizer, prompts, make_args("once", **options))
    again = run(tokenizer, prompts, make_args("again", **options))
    start = Path(make_args("once").output_dir) / "checkpoint-2"
    resumed = run(tokenizer, prompts, make_args("resumed", **options, resume_from=str(start)))
    once, again, resumed = (
        [{name: value for name, value in row.items() if not name.startswith("time/") and name != "eps"} for row in rows]
        for rows in (once, again, resumed)
    )
    assert once == again
    assert once[2:] == resumed
