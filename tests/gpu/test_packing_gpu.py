"""Packed rows on a GPU: PyTorch's kernel for them, and passes that its memory limits."""

from __future__ import annotations

import pytest
import torch
from tiny import LLAMA_SIZES, tiny_config
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MistralConfig, MistralForCausalLM, PretrainedConfig

from async_rlhf.config import OnlineConfig
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.models import packing
from async_rlhf.models.budget import PassMemory
from async_rlhf.models.forward import response_logprobs
from async_rlhf.models.packing import choose, shares

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS_B = torch.tensor([60, 7, 33, 3])


def configuration(kind: str) -> PretrainedConfig:
    if kind == "gpt_neox":
        return tiny_config()
    return MistralConfig(**LLAMA_SIZES, vocab_size=258, head_dim=16, sliding_window=16)


@pytest.mark.parametrize("kind", ["gpt_neox", "mistral"])
def test_pytorchs_kernel_for_packed_rows_gives_what_padded_rows_give(kind, monkeypatch):
    """In bfloat16, with grouped heads and a window that is shorter than the rows: to a few of its last digits."""
    torch.manual_seed(0)
    model = {"gpt_neox": GPTNeoXForCausalLM, "mistral": MistralForCausalLM}[kind](configuration(kind)).cuda()
    tokens_BT = torch.randint(0, 258, (4, 60), device="cuda")
    tokens_BT[2, :20] = tokens_BT[0, :20]  # which is computed once
    places_T = torch.arange(60)
    mask_BT = ((places_T >= 2) & (places_T < LENGTHS_B[:, None])).float()
    calls: list[tuple[int, int]] = []
    kernel = packing.varlen_attn

    def counted(*given, **options):
        calls.append(options["window_size"])
        return kernel(*given, **options)

    monkeypatch.setattr(packing, "varlen_attn", counted)
    found = []
    for wanted in (False, True):
        choose(wanted, False, {"policy": model}, True)
        assert shares(model) is wanted
        calls.clear()
        with torch.autocast("cuda", torch.bfloat16):
            logprobs_BT = response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT
        model.zero_grad()
        logprobs_BT.sum().backward()
        found.append((logprobs_BT.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    assert calls == [(15, 0) if kind == "mistral" else (-1, 0)] * 2  # once a layer, backward pass and all
    (padded_BT, right), (packed_BT, gradients) = found
    torch.testing.assert_close(packed_BT, padded_BT, rtol=0.02, atol=0.02)
    for name, gradient in right.items():
        assert (gradients[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-3, name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_passes_that_auto_makes_fit_and_use_much_of_the_memory(checkpointing):
    """With 4 GB to spare: what a pass of so many tokens takes is at most that, and at least a third of it."""
    config = GPTNeoXConfig(
        vocab_size=4096, hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, intermediate_size=4096
    )
    model = GPTNeoXForCausalLM(config).cuda()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.train()
    room = 4e9
    config = OnlineConfig(bf16=True, gradient_checkpointing=checkpointing)
    passes = PassMemory.of([model], config, Parallel(), with_gradient=True)
    rows = max(1, passes.tokens(0.8 * room) // 512)
    tokens_BT = torch.randint(0, 4096, (rows, 512), device="cuda")
    model.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        loss = response_logprobs(model, tokens_BT, torch.ones(rows, 512).index_fill(1, torch.tensor([0]), 0), 1.0)
    activations = torch.cuda.max_memory_allocated() - before
    loss.logprobs_BT.sum().backward()
    assert room / 3 <= activations <= room
