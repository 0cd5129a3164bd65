"""Engines that know only checkpoints get the tensors that a checkpoint would have."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from tiny import tiny_config

from async_rlhf.models.weights import as_in_checkpoints, iterate_weights, named_weights

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
    hf.GPTNeoXForCausalLM: tiny_config,
    hf.LlamaForCausalLM: lambda: hf.LlamaConfig(**SIZES),
    hf.Qwen2ForCausalLM: lambda: hf.Qwen2Config(**SIZES),
    hf.MistralForCausalLM: lambda: hf.MistralConfig(**SIZES),
    hf.MixtralForCausalLM: lambda: hf.MixtralConfig(**SIZES, num_local_experts=3),
    hf.Qwen3MoeForCausalLM: lambda: hf.Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=32),
}
MIXTURES = {hf.MixtralForCausalLM, hf.Qwen3MoeForCausalLM}


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
