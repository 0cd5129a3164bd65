"""What is computed again in the backward pass."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from async_rlhf.config import OnlineConfig
from async_rlhf.models.kernels import recompute

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 50, "num_attention_heads": 4}

ON_A_CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, *_, **__: math.prod(query)}
"""FLOPs that torch does not count: here any number above 0 will do."""


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [(LlamaConfig, LlamaForCausalLM), (GPTNeoXConfig, GPTNeoXForCausalLM)])
def test_with_products_kept_nothing_that_counts_is_computed_again(kind, attention, bf16):
    """And the gradients are the same bit for bit."""
    torch.manual_seed(0)
    model = kind[1](kind[0](**SIZES, attn_implementation=attention)).train()
    tokens_BT = torch.randint(50, (2, 9))
    work, gradients = {}, {}
    for how in (False, "selective", True):
        model.gradient_checkpointing_disable()
        recompute(model, OnlineConfig(gradient_checkpointing=how))
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        with FlopCounterMode(display=False, custom_mapping=ON_A_CPU) as flops:
            loss.backward()
        work[how] = flops.get_total_flops()
        gradients[how] = [p.grad.clone() for p in model.parameters()]
    assert work["selective"] == work[False]
    assert work[True] > work[False]
    assert all(map(torch.equal, gradients["selective"], gradients[False]))
