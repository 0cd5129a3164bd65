"""Generation for evaluation by vLLM, one engine for all checkpoints; reward models that vLLM loads."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from conftest import new_policy, widen
from tiny import tiny_config
from transformers import GPTNeoXForSequenceClassification

from async_rlhf.commands import generate as module
from async_rlhf.commands.evaluation.generations import read_generations
from async_rlhf.commands.evaluation.likelihood import EncodedRow, response_logprob_sums
from async_rlhf.commands.generate import run_generate
from async_rlhf.commands.reward_scale import center_scores
from async_rlhf.commands.stage import json_lines
from async_rlhf.config import GenerateConfig, VLLMConfig
from async_rlhf.models.forward import score_rows
from async_rlhf.models.loading import load_policy, load_reward_model
from async_rlhf.models.saving import write_model

pytestmark = [pytest.mark.vllm, pytest.mark.ends_vllm]


def test_all_checkpoints_by_one_engine(tmp_path, tokenizer, monkeypatch):
    for seed, name in enumerate(("checkpoint-1", "checkpoint-2", "final")):
        write_model(new_policy(seed), tokenizer, tmp_path / "run" / name)
    (tmp_path / "held.jsonl").write_text(json_lines([{"query": f"p{i}"} for i in range(12)]))
    from async_rlhf.generation.vllm_engine import VLLMEngine

    started = []
    real = VLLMEngine.__init__
    monkeypatch.setattr(VLLMEngine, "__init__", lambda self, *args: started.append(1) or real(self, *args))
    config = GenerateConfig(
        run=str(tmp_path / "run"),
        data=str(tmp_path / "held.jsonl"),
        output_dir=str(tmp_path / "generations"),
        engine="vllm",
        vllm=VLLMConfig(kv_cache_gb=0.05, block_size=32),
        response_length=8,
        batch_size=1,
        device="cpu",
    )
    results = run_generate(config)
    assert len(started) == 1
    assert list(results["models"]) == ["checkpoint-1", "checkpoint-2", "final"]
    _, found = read_generations(tmp_path / "generations")
    for source, lines in found.values():
        rows = [EncodedRow(line.prompt_tokens + line.tokens, len(line.prompt_tokens)) for line in lines]
        sums = response_logprob_sums(load_policy(source), rows, temperature=0.7, batch_size=4)
        assert [sum(line.logprobs) for line in lines] == pytest.approx(sums.tolist(), rel=1e-3, abs=1e-3)
    texts = [[line.completion for line in lines] for _, lines in found.values()]
    assert texts[0] != texts[1] != texts[2]
    assert run_generate(replace(config, checkpoints=["final"]))["models"].keys() == {"final"}
    assert len(started) == 1
    assert module._CHUNK * config.batch_size < 12  # more than one request to the engine


def test_vllm_scores_as_we_do(tmp_path, tokenizer, monkeypatch):
    """A reward model with its zero moved, in the format that every program reads."""
    from vllm import LLM, PoolingParams

    torch.manual_seed(1)
    size = tiny_config(hidden_size=64, num_attention_heads=2)
    size.num_labels = 1
    model = widen(GPTNeoXForSequenceClassification(size)).eval()
    rows = [(65 + i, 66, *range(70, 72 + i), 256) for i in range(6)]
    assert abs(center_scores(model, rows, 4)) > 1e-3
    write_model(model, tokenizer, tmp_path / "reward")
    ours = score_rows(load_reward_model(str(tmp_path / "reward")), rows, 4)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM replaces it, for the whole process
    monkeypatch.setenv("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))
    engine = LLM(str(tmp_path / "reward"), runner="pooling", enforce_eager=True, dtype="float32", max_model_len=96)
    outputs = engine.encode(
        [{"prompt_token_ids": list(row)} for row in rows],
        pooling_params=PoolingParams(use_activation=False),
        pooling_task="classify",
        use_tqdm=False,
    )
    theirs = torch.tensor([output.outputs.data.item() for output in outputs])
    engine.llm_engine.engine_core.shutdown()
    assert theirs.tolist() == pytest.approx(ours.tolist(), abs=1e-4)
    assert theirs.mean().item() == pytest.approx(0.0, abs=1e-3)
    assert theirs.std().item() > 1e-2
