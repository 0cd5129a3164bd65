"""Tiny models of many families, in which attention matters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from tiny import LLAMA_SIZES
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from async_rlhf.models.packing import WINDOWED, keep_soft_cap

WINDOW = 8
KINDS = sorted({*WINDOWED, "gpt_neox", "gpt2", "llama", "opt"})


def sizes(kind: str) -> dict[str, object]:
    """A tiny model, with experts and a window where its kind has them."""
    common = {
        "vocab_size": 64,
        "vocab_size_per_layer_input": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    }
    if kind in ("gpt_neox", "gpt2", "opt"):
        return common | {"intermediate_size": 64, "max_position_embeddings": 64}
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    window = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1} if kind in WINDOWED else {}
    return common | LLAMA_SIZES | {"vocab_size": 64, "head_dim": 8} | experts | window


def made(kind: str, values: bool = False) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config: hf.PretrainedConfig = CONFIG_MAPPING[kind](**sizes(kind))
    if values:
        config.num_labels = 1
    model = (hf.AutoModelForSequenceClassification if values else hf.AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # else attention hardly matters
    keep_soft_cap(model)
    return model.eval()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def doubled(module: nn.Module) -> nn.Module:
    """The module in float64."""
    if isinstance(module, hf.PreTrainedModel) and module.config.model_type in ("mixtral", "qwen2_moe", "qwen3_moe"):
        module.set_experts_implementation("eager")  # the others have no float64
    return module.double()


@contextmanager
def in_float64(*modules: nn.Module) -> Iterator[None]:
    """Within, all is computed in float64, also what is said in float32: processors differ in its last digits alone, and
    a bound that is far above these is still far below any fault.
    """
    for module in modules:
        doubled(module)
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", lambda tensor: tensor.double())
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
