"""Frozen reward models whose linear layers are held in 4 or 8 bits by bitsandbytes."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from async_rlhf.config.base import require


def require_bitsandbytes(bits: int | None, key: str = "reward_model_bits") -> None:
    """Require what :func:`quantised` needs; to be called before anything is loaded.

    Raises:
        ConfigError: says how to install it.
    """
    right = "needs bitsandbytes: pip install 'async-rlhf[quantized]'"
    require(bits is None or find_spec("bitsandbytes") is not None, key, bits, right)


def quantised(bits: int, dtype: torch.dtype) -> BitsAndBytesConfig:
    """How transformers loads such a model: all linear layers but the head, which would round the scores themselves.

    Args:
        bits: 4, as nf4 (Dettmers et al., "QLoRA", 2023), or 8, as LLM.int8() (Dettmers et al., 2022).
        dtype: of everything else. Layers in 4 bits also compute in it, those in 8 bits take float16 inputs.
    """
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # says the latter at every call
    kept = ["score"]
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=kept
    )


def saved_tensors(model: nn.Module) -> dict[str, Tensor] | None:
    """All tensors that decide the output of a quantised model, the scales of its blocks too, which are no parameters;
    None for other models.

    To be read before the first forward pass, in which bitsandbytes may pack weights otherwise and round their scales.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return None
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
