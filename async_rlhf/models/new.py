"""New language models of a few architectures, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from async_rlhf.config import NewModelConfig
from async_rlhf.models.loading import disable_dropout

_KINDS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def new_language_model(size: NewModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A language model with random weights that depend only on architecture, size and seed, in float32.

    Args:
        size: architecture and size.
        tokenizer: its vocabulary is the model's.
        seed: of the weights.
    """
    heads: dict[str, Any] = {
        "vocab_size": max(tokenizer.get_vocab().values()) + 1,  # ids may have gaps
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "max_position_embeddings": size.max_positions,
        # The usual 0.02 suits widths in the thousands; a narrow model needs 1 / sqrt(width).
        "initializer_range": size.hidden_size**-0.5,
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attention_dropout": 0.0,
    }
    specific: dict[str, Any] = {
        "num_key_value_heads": size.num_heads,
        "head_dim": size.hidden_size // size.num_heads,
        # Three matrices instead of two: 8/3 of the width gives as many weights as 4 would.
        "intermediate_size": 8 * -(-size.hidden_size // 3),
    }
    if size.architecture == "gpt_neox":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
        specific = {"intermediate_size": 4 * size.hidden_size, "rope_parameters": rope, "hidden_dropout": 0.0}
    config, model = _KINDS[size.architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model(config(**heads, **specific))


def embed_added_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """The model with an embedding for every token of the tokenizer; new ones are drawn near the mean of the old."""
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > model.get_input_embeddings().num_embeddings:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.resize_token_embeddings(needed)
    return disable_dropout(model)
