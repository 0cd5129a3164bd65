"""Families of models with random weights: two batches each, and the engine computes what the learner does."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
import transformers as hf
from tiny import byte_tokenizer, count_letters, new_args, rare, widened
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from async_rlhf import GRPOTrainer
from async_rlhf.config import ConfigError

SIZES = {
    **{"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257},
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 8},
    # mixtures
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_topk": 2, "top_k": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "shared_expert_intermediate_size": 16, "num_shared_experts": 1},
    # latent attention; states
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8},
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
GATED = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
GATED |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gptj": {**GPT2, "rotary_dim": 4},
    "codegen": {**GPT2, "rotary_dim": 4},
    "gpt_bigcode": GPT2,  # its attention has a dropout of its own
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 5},
    "falcon": {"num_kv_heads": 2},
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 8},
    "jamba": {
        **{"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
        **{"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4},
    },
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4},
    "recurrent_gemma": {
        **{"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
        **{"block_types": ["recurrent", "recurrent", "attention"]},
    },
    "nemotron_h": {
        **{"num_hidden_layers": None, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 4},
        **{"mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    },
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"], "mamba_headdim": 8, "mamba_ngroups": 1, "chunk_size": 8},
        **{"n_mamba_heads": 8, "attention_head_dim": 16},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), GATED),
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 8},  # every layer is linear: no cache of transformers'
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "llama4_text": {"intermediate_size_mlp": 48, "moe_layers": [1], "attention_chunk_size": 64},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "gemma4_text": {
        **{"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8},
        **{"hidden_size_per_layer_input": 0},
    },
    "xlstm": {"num_heads": 4, "qk_dim_factor": 0.5, "num_blocks": 2},
    **{name: {"num_key_value_heads": 4, "head_dim": None} for name in ("deepseek_v2", "deepseek_v3")},
    "seed_oss": {"residual_dropout": 0.1, "attention_dropout": 0.1},
}  # fmt: skip
QUICK = ("seed_oss", "mamba2", "recurrent_gemma", "jamba")
PLAIN = (
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text gpt_oss gpt_neox nemotron "
    "olmo olmo2 olmo3 olmoe phi phi3 cohere cohere2 glm glm4 glm4_moe granite granitemoe starcoder2 stablelm "
    "smollm3 ernie4_5 ernie4_5_moe exaone4 helium persimmon arcee apertus hunyuan_v1_dense dots1 biogpt doge "
    "diffllama vaultgemma"
)


def model_of(name: str):
    kind = CONFIG_MAPPING[name]
    known = {
        *inspect.signature(kind.__init__).parameters,
        *getattr(kind, "__dataclass_fields__", ()),
        *kind.attribute_map,
    }
    sizes = {key: value for key, value in {**SIZES, **OWN.get(name, {})}.items() if value is not None}
    torch.manual_seed(0)
    config = kind(**{key: value for key, value in sizes.items() if key in known})
    return widened(hf.AutoModelForCausalLM.from_config(config))


def differences(folder, name: str) -> list[float]:
    """Two batches of GRPO; how far engine and learner are apart, in nats a token, for each."""
    rows = [{"query": "f" * (3 + i % 4) + str(i)} for i in range(16)]
    sizes = {"samples_per_prompt": 2, "completions_per_batch": 8, "total_episodes": 16, "max_prompt_length": 32}
    generation = {"response_length": 8, "mismatch_steps": 1}
    args = new_args(folder, "run", generation, "grpo", staleness=0, learning_rate=1e-3, **sizes)
    trainer = GRPOTrainer(model_of(name), args, rows, processing_class=byte_tokenizer(), reward_funcs=[count_letters])
    trainer.train()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["engine/logprob_difference"] for line in lines]


@pytest.mark.parametrize("name", [*QUICK, *map(rare, sorted({*PLAIN.split(), *OWN} - {*QUICK}))])
def test_the_engine_computes_what_the_learner_does(tmp_path, name):
    found = differences(tmp_path, name)
    assert len(found) >= 2
    assert max(found) < 1e-5


def test_where_no_cache_can_be_used_the_reason_is_said(tmp_path, caplog):
    assert max(differences(tmp_path, "kimi_linear")) < 1e-5
    said = "no cache can be used (ValueError: `get_seq_length` can only be called on Attention layers"
    assert sum(said in record.message for record in caplog.records) == 1


def test_there_are_forty_families():
    assert len({*PLAIN.split(), *OWN}) >= 40


def test_a_model_that_draws_random_numbers_in_training_is_refused_by_its_module(tmp_path):
    """Its routers add noise in training mode, whatever becomes of dropout."""
    with pytest.raises(ConfigError, match=r"model: two passes in training mode differ, first in its module 'model\."):
        differences(tmp_path, "phimoe")
