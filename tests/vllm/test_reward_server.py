"""Rewards from vLLM's own classification server, as docs/rewards.md starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from ports import free_port
from tiny import LLAMA_SIZES, byte_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from async_rlhf.rewards.reward_models import reward_server

pytestmark = [pytest.mark.vllm, pytest.mark.rare]


def new_model(folder: Path) -> LlamaForSequenceClassification:
    """Heads of 32, which vLLM's attention on a CPU needs."""
    torch.manual_seed(0)
    sizes = {**LLAMA_SIZES, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": len(byte_tokenizer())}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1, pad_token_id=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def test_scores_are_those_of_the_model_and_no_sigmoid_of_them(tmp_path):
    model, port = new_model(tmp_path), free_port()
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path), "--served-model-name", "rm"]
    words += ["--runner", "pooling", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=environment)
    try:
        wait_until_up(f"http://127.0.0.1:{port}/health", server, tmp_path / "log")
        prompts, completions = ["hello ", "hello ", "q: "], ["world", "there", "yes"]
        found = reward_server(url=f"http://127.0.0.1:{port}/classify", model="rm", batch_size=2)(prompts, completions)
    finally:
        server.terminate()
        server.wait(60)
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    with torch.no_grad():
        right = [model(torch.tensor([byte_tokenizer().encode(text)])).logits.item() for text in texts]
    assert found == pytest.approx(right, abs=1e-4)
    assert not all(0 < score < 1 for score in found)


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise TimeoutError(log.read_text()[-2000:])
