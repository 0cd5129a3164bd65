"""Engines that know only checkpoints get the tensors that a checkpoint would have."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_config
from transformers import (
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from async_rlhf.models.conversion import as_in_checkpoints
from async_rlhf.models.weights import iterate_weights, named_weights

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 11,  # layer 1 is not layer 10
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
MODELS = {
    GPTNeoXForCausalLM: tiny_config,
    LlamaForCausalLM: lambda: LlamaConfig(**SIZES),
    Qwen2ForCausalLM: lambda: Qwen2Config(**SIZES),
    MistralForCausalLM: lambda: MistralConfig(**SIZES),
    MixtralForCausalLM: lambda: MixtralConfig(**SIZES, num_local_experts=3),
    Qwen3MoeForCausalLM: lambda: Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=32),
}
MIXTURES = {MixtralForCausalLM, Qwen3MoeForCausalLM}


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_an_engine_gets_what_save_pretrained_writes(kind, tmp_path):
    torch.manual_seed(0)
    model = kind(MODELS[kind]())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = dict(as_in_checkpoints(model.config, iterate_weights(model)))
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor), name
    assert kind not in MIXTURES or len(named_weights(model)) < len(saved)  # the danger is real
