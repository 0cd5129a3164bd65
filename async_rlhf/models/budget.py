"""How many tokens a pass may have, where the configuration leaves that to the machine."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.models.head import CHUNK_BYTES, KEPT_BYTES

logger = logging.getLogger(__name__)

CPU_TOKENS = 2048
"""On a CPU more tokens gain nothing: matrices are large enough, and what a pass computes leaves the cache."""
_USED = 0.8
"""Of the memory that is left: the rest is for fragments, and for what is not counted."""


_HEAD = KEPT_BYTES + 4 * CHUNK_BYTES
"""Bytes of logits and of what is computed from them, however many tokens there are; see models/head.py."""


class Memory(NamedTuple):
    """What a pass over tokens has to hold."""

    bytes_per_token: float
    free_bytes: float

    @property
    def tokens(self) -> int:
        """How many tokens fit, at least 1."""
        return max(1, int(_USED * self.free_bytes / self.bytes_per_token))


def fitting_tokens(
    key: str, models: Iterable[PreTrainedModel], device: torch.device, *, to_come: float, **how: bool
) -> int:
    """The largest number of tokens that a pass can have on this device; it is told in the log.

    Args:
        key: in the configuration, for the log.
        models: that a pass goes through, one after the other; all of them keep what the backward pass needs.
        device: where they compute.
        to_come: bytes that others will need there: gradients and the optimiser's state, if they are not there yet.
        how: see :func:`bytes_per_token`.
    """
    if device.type == "cpu":
        logger.info("%s: %d tokens a pass, as many as are of use on a CPU", key, CPU_TOKENS)
        return CPU_TOKENS
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + held - to_come - _HEAD
    memory = Memory(sum(bytes_per_token(model, **how) for model in models), free)
    logger.info(
        "%s: %d tokens a pass, for %.1f GB are left on %s, and a token takes %.0f kB",
        key,
        memory.tokens,
        memory.free_bytes / 1e9,
        device,
        memory.bytes_per_token / 1e3,
    )
    return memory.tokens


def bytes_per_token(model: PreTrainedModel, *, with_gradient: bool, checkpointing: bool, sixteen_bits: bool) -> float:
    """Bytes that a pass needs for each token, by the model's sizes, without the head, which computes in chunks.

    Attention keeps no matrix of scores.

    Args:
        model: of one of transformers' decoders.
        with_gradient: whether a backward pass follows.
        checkpointing: whether it computes each layer again.
        sixteen_bits: whether matrix products are in 16 bits.
    """
    config: Any = model.config.get_text_config()
    width, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 4 * width
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
    gated = any("gate" in name for name, _ in model.named_parameters())
    # In a layer: the residual stream, what two normalisations take and give, queries, keys and values before and after
    # rotation, and what attention gives; in the MLP what the activation takes and gives, and with a gate what is
    # multiplied and the product. Under autocast about half of them are in 16 bits.
    element = 3 if sixteen_bits else 4
    layer = (11 * width + (4 if gated else 2) * inner) * element
    kept = layers * (width * element if checkpointing else layer) + 2 * width * element if with_gradient else 0
    return float(kept + layer)


def bytes_to_come(parameters: Iterable[Tensor], state: bool) -> float:
    """Bytes of the gradients of this rank's parameters, and of AdamW's two moments unless they are there."""
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
    return float(sum(part.numel() * (part.element_size() + (0 if state else 8)) for part in local))
