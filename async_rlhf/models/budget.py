"""What "auto" stands for in the keys that memory decides, by models/memory.py: how many tokens fit into a pass, and
whether all that it computes can be kept for the backward pass.

A run asks once, when it is built, and its checkpoints hold the answer. Everything else reads numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.config.sizes import PassLimits
from async_rlhf.config.stages import StageConfig
from async_rlhf.distributed.parallel import ALONE, Parallel, trainable
from async_rlhf.models.forward import autocast_dtype, in_sixteen_bits
from async_rlhf.models.memory import KEYS, USED, LearnerMemory, Pass, Shape
from async_rlhf.models.packing import has_soft_cap, holds_scores, is_packed, runs_kernel, shares
from async_rlhf.models.passes import Passes

logger = logging.getLogger(__name__)

CPU_TOKENS = 2048
"""On a CPU more tokens gain nothing: matrices are large enough, and what a pass computes leaves the cache."""
_MOST = 1 << 24
"""Tokens of a pass: more are of no use."""
_MANY = 1 << 22
"""Tokens with which the head computes by chunks, for any vocabulary."""
_AUTO = ("gradient_checkpointing", "max_tokens_per_pass", "annotate_max_tokens")
_RECOMPUTED = (False, "selective", True)
"""What ``gradient_checkpointing`` can be, from the least recomputed to the most."""
_ON_CPU: dict[str, Any] = dict(zip(_AUTO, (False, CPU_TOKENS, CPU_TOKENS), strict=True))
Config = TypeVar("Config", OnlineConfig, StageConfig)


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
        return max(self._moments(tokens))

    def of_whole_rows(self) -> PassMemory:
        """The same where ranks do not share rows."""
        return replace(self, models=tuple(replace(memory, context=1) for memory in self.models))

    def tokens(self, room: float) -> int:
        """The most tokens whose pass holds no more bytes; at least 1.

        What a moment holds is a line over tokens until the head computes by chunks, and a flatter one from there on.
        """

        def end(step: int, here: float, there: float) -> float:
            """Where a line leaves the room that is ``here`` at ``step`` tokens, and ``there`` at twice as many."""
            slope = (there - here) / step
            return step + (room - here) / slope if slope > 0 else math.copysign(_MOST, room - here)

        steep, flat = (
            [end(step, here, there) for here, there in zip(self._moments(step), self._moments(2 * step), strict=True)]
            for step in (1, _MANY)
        )
        return max(1, min(_MOST, math.floor(min(map(max, steep, flat)))))

    def _moments(self, tokens: int) -> list[float]:
        """Bytes at each moment that may be the peak of a pass of so many tokens, of all models together."""
        sized = [memory.with_passes(tokens, tokens) for memory in self.models]
        each = [(m.updating() if self.with_gradient else m.annotating()).values() for m in sized]
        return list(map(sum, product(*each)))


def passes_through(models: Sequence[PreTrainedModel], limits: PassLimits, device: torch.device) -> Passes:
    """The limits of a pass through models, one after the other, on a device."""
    width = models[0].config.get_text_config().hidden_size
    keys = KEYS if runs_kernel(device) else math.inf  # elsewhere none are copied for each branch
    return Passes(limits.units, limits.tokens, all(map(is_packed, models)), width, all(map(shares, models)), keys)


def memory_of(model: PreTrainedModel, config: OnlineConfig, parallel: Parallel, recompute: bool | str) -> LearnerMemory:
    """A rank's memory for a model, without frozen ones, and with passes of no tokens."""
    heads = model.config.get_text_config().num_attention_heads
    scores = heads * config.max_length if holds_scores(model) else 0
    return LearnerMemory(
        replace(shape_of(model, parallel), scores=scores, capped=has_soft_cap(model)),
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
        query_width=heads * head_size,
    )


def with_recorded(config: Config, recorded: Mapping[str, Any]) -> Config:
    """The configuration of a run that goes on: "auto" stands for what the checkpoint says that it stood for.

    Args:
        config: of a run or a stage.
        recorded: the configuration in the checkpoint, with dotted keys.
    """
    auto = [name for name in _AUTO if getattr(config, name, None) == "auto"]
    known: dict[str, Any] = {name: recorded[name] for name in auto if recorded.get(name) not in (None, "auto")}
    return replace(config, **known)


def with_least(config: OnlineConfig, rows_per_unit: int) -> OnlineConfig:
    """With the fewest tokens that "auto" can stand for: those of one unit, or row, as long as it can be.

    Args:
        config: of a run, or of a recipe.
        rows_per_unit: of the algorithm.
    """
    least = {"max_tokens_per_pass": rows_per_unit * config.max_length, "annotate_max_tokens": config.max_length}
    auto: dict[str, Any] = {name: tokens for name, tokens in least.items() if getattr(config, name) == "auto"}
    return replace(config, **auto)


def with_sizes(
    config: OnlineConfig,
    trained: Sequence[PreTrainedModel],
    frozen: Sequence[PreTrainedModel],
    parallel: Parallel,
    device: torch.device,
    rows_per_unit: int,
    taken: float = 0.0,
    judge: PreTrainedModel | None = None,
    apart: Sequence[PreTrainedModel] = (),
) -> OnlineConfig:
    """The configuration with no "auto" left that memory decides: what it means here is told in the log. Every rank must
    call it, and all find the same.

    Args:
        config: sizes and precision.
        trained: policy and value model, before they are sharded.
        frozen: reference and reward model on the learner's device.
        parallel: how weights will be sharded.
        device: of this rank.
        rows_per_unit: of the algorithm.
        taken: the share of the device that others will take.
        judge: the reward model, if it is one of the frozen ones. It is counted as if ranks did not share its rows.
        apart: models that are alone on GPUs of their own.
    """
    auto = [name for name in _AUTO if getattr(config, name) == "auto"]
    if not auto:
        return config
    if device.type != "cuda":
        for name in auto:
            if _ON_CPU[name]:
                logger.info("%s: %d tokens a pass, as many as are of use on a CPU", name, CPU_TOKENS)
        return replace(config, **{name: _ON_CPU[name] for name in auto})
    unused, total = torch.cuda.mem_get_info(device)
    room = USED * min(unused + torch.cuda.memory_reserved(device), (1 - taken) * total)
    for name in auto:  # in this order: whether activations are kept decides how many tokens fit
        if name == "gradient_checkpointing":
            needed = {
                again: bytes_of_update(config, trained, frozen, parallel, rows_per_unit, again)
                for again in (False, "selective")
            }
            here = next((again for again, size in needed.items() if size <= room), True)
            again: Any = max(parallel.ranks.gather(name, here), key=_RECOMPUTED.index)
            what = "%s: %s: the learner takes %.1f GB without it, %.1f with selective, of %.1f that can be used of %s"
            said = {False: "off", True: "on"}.get(again, again)
            logger.info(what, name, said, *(size / 1e9 for size in needed.values()), room / 1e9, device)
            config = replace(config, gradient_checkpointing=again)
            continue
        with_gradient, left = name == "max_tokens_per_pass", room - _held(trained, frozen, config, parallel)
        passes = PassMemory.of(trained, config, parallel, with_gradient)
        limits = [passes.tokens(left)]
        if not with_gradient:
            limits += [_judged(judge, config, parallel).tokens(left)] if judge is not None else []
            free = ((model, torch.cuda.mem_get_info(model.device)[0]) for model in apart)
            limits += [_judged(model, config, ALONE).tokens(USED * bytes_there) for model, bytes_there in free]
        tokens: Any = min(parallel.ranks.gather(name, min(limits)))
        what = "%s: %d tokens a pass, which takes %.1f GB of the %.1f GB that are left on %s"
        logger.info(what, name, tokens, passes.bytes(tokens) / 1e9, left / 1e9, device)
        config = replace(config, **{name: tokens})
    return config


def _judged(model: PreTrainedModel, config: OnlineConfig, parallel: Parallel) -> PassMemory:
    return PassMemory.of([model], config, parallel, with_gradient=False).of_whole_rows()


def _held(
    trained: Sequence[PreTrainedModel], frozen: Sequence[PreTrainedModel], config: OnlineConfig, parallel: Parallel
) -> float:
    """Bytes that a rank of the learner holds between two passes: weights, gradients, AdamW's moments, DDP's buckets."""
    shards = parallel.shards if parallel.is_sharded else 1
    more = 8 if parallel.is_sharded or parallel.ranks.count == 1 else 12
    total = sum((4.0 if autocast_dtype(config) is None else 2.0) * model.num_parameters() for model in frozen)
    for model in trained:
        total += 4.0 * shape_of(model, parallel).parameters
        total += sum(part.numel() * (part.element_size() + more) for part in trainable(model))
    return total / shards


def bytes_of_update(
    config: OnlineConfig,
    trained: Sequence[PreTrainedModel],
    frozen: Sequence[PreTrainedModel],
    parallel: Parallel,
    rows_per_unit: int,
    recompute: bool | str,
) -> float:
    """Bytes that a rank of the learner holds at the peak of an update whose passes are as large as they can be, or with
    "auto" as they must be, with AdamW; see :func:`with_sizes`.
    """
    rows = with_least(config, rows_per_unit).training_limits.rows(config.max_length, rows_per_unit)
    tokens, sampled = rows * config.max_length, rows * config.generation.longest_written
    total = _held(trained, frozen, config, parallel)
    for model in trained:
        memory = memory_of(model, config, parallel, recompute).with_passes(tokens, sampled)
        total += max(memory.updating().values())
    return total
