"""How much memory a pass takes, by models/memory.py: how many tokens fit into one, and whether all that it computes can
be kept for the backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.distributed.parallel import ALONE, Parallel, trainable
from async_rlhf.models.forward import autocast_dtype, in_sixteen_bits
from async_rlhf.models.memory import LearnerMemory, Pass, Shape
from async_rlhf.models.packing import is_packed, shares
from async_rlhf.models.passes import Passes

logger = logging.getLogger(__name__)

CPU_TOKENS = 2048
"""On a CPU more tokens gain nothing: matrices are large enough, and what a pass computes leaves the cache."""
_USED = 0.8
"""Of the memory that is left: the rest is for fragments, and for what is not counted."""
_MOST = 1 << 24
"""Tokens of a pass: more are of no use."""


@dataclass(frozen=True)
class PassMemory:
    """What passes through models hold besides what lies there between them, one model after the other.

    Args:
        models: with sizes, precision and ranks; what all of them keep for the backward pass is counted.
        with_gradient: whether a backward pass follows.
    """

    models: tuple[LearnerMemory, ...]
    with_gradient: bool

    @classmethod
    def of(
        cls, models: Iterable[PreTrainedModel], config: OnlineConfig, parallel: Parallel, with_gradient: bool
    ) -> PassMemory:
        """The models of a learner; ``gradient_checkpointing`` of the configuration must be decided."""
        memories = (memory_of(model, config, parallel, config.gradient_checkpointing) for model in models)
        return cls(tuple(memories), with_gradient)

    def bytes(self, tokens: int) -> float:
        """The most that a pass of so many tokens holds."""
        one = Pass(tokens, tokens)
        sized = [replace(memory, update=one, annotate=one) for memory in self.models]
        return sum(max((m.updating() if self.with_gradient else m.annotating()).values()) for m in sized)

    def of_whole_rows(self) -> PassMemory:
        """The same where ranks do not share rows."""
        return replace(self, models=tuple(replace(memory, context=1) for memory in self.models))

    def tokens(self, room: float) -> int:
        """The most tokens whose pass holds no more bytes; at least 1."""
        fits, exceeds = 1, _MOST
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            fits, exceeds = (middle, exceeds) if self.bytes(middle) <= room else (fits, middle)
        return fits


def passes_alone(key: str, model: PreTrainedModel, config: OnlineConfig) -> Passes:
    """The limits of a pass through a model that is not trained, and alone on its device; ``key`` as in the log."""
    tokens = config.tokens_annotated
    if tokens == "auto":
        memory = PassMemory.of([model], config, ALONE, with_gradient=False)
        tokens = fitting_tokens(f"annotate_max_tokens ({key})", memory, model.device, to_come=0.0)
    width = model.config.get_text_config().hidden_size
    return Passes(config.most_annotated, tokens, is_packed(model), width, shares(model))


def memory_of(model: PreTrainedModel, config: OnlineConfig, parallel: Parallel, recompute: bool | str) -> LearnerMemory:
    """A rank's memory for a model, without frozen ones, and with passes of no tokens."""
    return LearnerMemory(
        shape_of(model, parallel),
        frozen=0.0,
        ranks=parallel.shards if parallel.is_sharded else parallel.ranks.count,
        sharded=parallel.is_sharded,
        recompute=recompute,
        bf16=in_sixteen_bits(config, model),
        annotate=Pass(0, 0),
        update=Pass(0, 0),
        zero=3 if parallel.is_sharded and not parallel.casts_gathered else 0,
        context=parallel.context.size,
    )


def shape_of(model: PreTrainedModel, parallel: Parallel) -> Shape:
    """The sizes of a decoder of transformers, sharded or not; of a mixture of experts, those that a token meets."""
    config: Any = model.config.get_text_config()
    heads = config.num_attention_heads
    feed_forward = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        feed_forward = experts * (getattr(config, "moe_intermediate_size", None) or feed_forward)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    gated = any("gate" in name for name, _ in model.named_parameters())
    return Shape(
        parameters=float(sum(parallel.shape_of(parameter).numel() for parameter in model.parameters())),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        kv_width=(getattr(config, "num_key_value_heads", None) or heads) * head_size,
        feed_forward=feed_forward,
        block="llama" if gated else "gpt_neox",
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )


def fitting_tokens(key: str, passes: PassMemory, device: torch.device, to_come: float) -> int:
    """The largest number of tokens that a pass can have on this device; it is told in the log.

    Args:
        key: in the configuration, for the log.
        passes: what a pass takes.
        device: where it is computed.
        to_come: bytes that others will need there: gradients and the optimiser's state, if they are not there yet.
    """
    if device.type == "cpu":
        logger.info("%s: %d tokens a pass, as many as are of use on a CPU", key, CPU_TOKENS)
        return CPU_TOKENS
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + held - to_come
    tokens = passes.tokens(_USED * free)
    told = (key, tokens, passes.bytes(tokens) / 1e9, free / 1e9, device)
    logger.info("%s: %d tokens a pass, which takes %.1f GB of the %.1f GB that are left on %s", *told)
    return tokens


def bytes_to_come(parameters: Iterable[Tensor], state: bool) -> float:
    """Bytes of the gradients of this rank's parameters, and of AdamW's two moments unless they are there."""
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
    return float(sum(part.numel() * (part.element_size() + (0 if state else 8)) for part in local))


def with_checkpointing(
    config: OnlineConfig,
    trained: Sequence[PreTrainedModel],
    frozen: Sequence[PreTrainedModel],
    parallel: Parallel,
    device: torch.device,
    rows_per_unit: int,
    taken: float = 0.0,
) -> OnlineConfig:
    """The configuration with ``gradient_checkpointing`` decided: what "auto" means here is told in the log.

    Args:
        config: sizes and precision.
        trained: policy and value model, before they are sharded.
        frozen: reference and reward model on the learner's device.
        parallel: how weights will be sharded.
        device: of this rank.
        rows_per_unit: of the algorithm.
        taken: the share of the device that others will take.
    """
    if config.gradient_checkpointing != "auto":
        return config
    if device.type != "cuda":
        return replace(config, gradient_checkpointing=False)
    free, total = torch.cuda.mem_get_info(device)
    room = _USED * min(free + torch.cuda.memory_reserved(device), (1 - taken) * total)
    needed = bytes_without_checkpointing(config, trained, frozen, parallel, rows_per_unit)
    needed = max(parallel.ranks.gather("gradient_checkpointing", needed))
    told = "on" if needed > room else "off"
    what = "gradient_checkpointing: %s, for without it the learner takes %.1f GB of the %.1f GB that can be used of %s"
    logger.info(what, told, needed / 1e9, room / 1e9, device)
    return replace(config, gradient_checkpointing=needed > room)


def bytes_without_checkpointing(
    config: OnlineConfig,
    trained: Sequence[PreTrainedModel],
    frozen: Sequence[PreTrainedModel],
    parallel: Parallel,
    rows_per_unit: int,
) -> float:
    """Bytes that a rank of the learner holds at the peak of an update whose passes are as large as they can be, with
    AdamW; see :func:`with_checkpointing`.
    """
    rows = config.rows_of_pass(rows_per_unit)
    one = Pass(rows * config.max_length, rows * config.generation.longest_written)
    shards = parallel.shards if parallel.is_sharded else 1
    each = 4.0 if autocast_dtype(config) is None else 2.0
    total = sum(each * model.num_parameters() for model in frozen) / shards
    for model in trained:
        memory = replace(memory_of(model, config, parallel, recompute=False), update=one, annotate=one)
        held = 4.0 * memory.shape.parameters / shards
        total += held + bytes_to_come(trainable(model), state=False) / shards + max(memory.updating().values())
    return total
