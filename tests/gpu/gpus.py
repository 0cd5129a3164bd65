"""Where the tests of this folder run, and small real parts for them.

They are for GPUs. ASYNC_RLHF_GPU_TESTS_ON=cpu runs the same bodies on a CPU, so that a machine without a GPU shows that
they run: TCP between the processes, gloo in NCCL's place, vLLM's build for CPUs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tiny import PROMPTS, byte_tokenizer, count_letters, is_installed, new_args, tiny_config, widened
from transformers import GPTNeoXForCausalLM

from async_rlhf.config import OnlineConfig, VLLMConfig
from async_rlhf.run.trainer import OnlineTrainer

ON = os.environ.get("ASYNC_RLHF_GPU_TESTS_ON", "cuda")
if ON not in ("cuda", "cpu"):
    raise ValueError(f"ASYNC_RLHF_GPU_TESTS_ON: got {ON!r}; must be cuda or cpu")
GPU = ON == "cuda"
DEVICE = "cuda:0" if GPU else "cpu"
KV_CACHE_GB = 1.0 if GPU else 0.05
BF16_TOLERANCE = 0.05
"""Mean absolute difference, in nats per token, between the log-probabilities of an engine that computes in bfloat16 and
those of the learner under bfloat16 autocast, for the same weights."""
FLOAT32_TOLERANCE = 1e-3
"""The same in float32, which TF32 would exceed."""


def device_count() -> int:
    """GPUs here; as many as anybody asks for where a CPU takes their place."""
    return torch.cuda.device_count() if GPU else 8


def needs_gpus(count: int) -> pytest.MarkDecorator:
    reason = f"needs {count} CUDA device{'s' if count > 1 else ''}, and there are {device_count()}"
    return pytest.mark.skipif(device_count() < count, reason=reason)


needs_vllm = pytest.mark.skipif(not is_installed("vllm"), reason="needs vLLM: make setup-vllm")


def device(number: int) -> str:
    """The GPU of that number."""
    return f"cuda:{number}" if GPU else "cpu"


def vllm_memory() -> VLLMConfig:
    """Little: of so small a model, keys and values that filled a GPU would be millions of blocks."""
    return VLLMConfig(gpu_memory_utilization=0.3, kv_cache_gb=KV_CACHE_GB)


def with_vllm(**changes: object) -> dict[str, object]:
    """Options of generation."""
    return {"engine": "vllm", "dtype": "bfloat16", "vllm": vllm_memory(), **changes}


def policy() -> GPTNeoXForCausalLM:
    """On the device; its heads are of a size that vLLM has kernels for everywhere."""
    torch.manual_seed(0)
    return widened(GPTNeoXForCausalLM(tiny_config(hidden_size=64, intermediate_size=128))).to(DEVICE)


def metrics_of(args: OnlineConfig) -> list[dict[str, float]]:
    lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def train(
    folder: Path, name: str, generation: dict[str, object] | None = None, **options: object
) -> list[dict[str, float]]:
    """Six batches. Returns the metrics of each."""
    exact = {"bf16": False, "max_tokens_per_pass": None, "annotate_max_tokens": None}  # a GPU would decide otherwise
    args = new_args(folder, name, generation, **{"device": DEVICE, **exact, **options})
    OnlineTrainer(policy(), args, PROMPTS, reward_funcs=count_letters, processing_class=byte_tokenizer()).train()
    return metrics_of(args)


def largest(metrics: list[dict[str, float]], name: str) -> float:
    return max(row[name] for row in metrics if name in row)
