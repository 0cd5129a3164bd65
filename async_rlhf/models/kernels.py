"""How a model of the learner computes: its attention, whether its blocks are compiled, what they compute again."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from async_rlhf.config import ConfigError, OnlineConfig


def use_attention(model: PreTrainedModel, config: OnlineConfig, key: str) -> None:
    """Make a model use the attention that the configuration names, if it names one.

    Args:
        model: policy, reference, reward or value model.
        config: names it.
        key: the configuration key of the model, for errors.

    Raises:
        ConfigError: the model has no such attention, or a package for it is missing.
    """
    if config.attn_implementation is not None:
        try:
            model.set_attn_implementation(config.attn_implementation)
        except (ValueError, ImportError) as error:
            told = f"{type(model).__name__} ({key}) cannot use it: {error}"
            raise ConfigError(f"attn_implementation: got {config.attn_implementation!r}; {told}") from error


def compile_blocks(model: nn.Module, config: OnlineConfig) -> None:
    """Compile a model's blocks if the configuration says so; one by one, so that all share what is compiled."""
    if config.torch_compile:
        for block in blocks(model):
            block.compile(dynamic=True)  # passes have other lengths each time


def recompute(model: PreTrainedModel, config: OnlineConfig) -> None:
    """Compute activations again in the backward pass if the configuration says so: all, or all but products."""
    if config.gradient_checkpointing in (True, "selective"):
        again: dict[str, Any] = {"use_reentrant": False}
        if config.gradient_checkpointing == "selective":
            again["context_fn"] = partial(create_selective_checkpoint_contexts, _kept)
        model.gradient_checkpointing_enable(again)
        model.enable_input_require_grads()  # else nothing before the first adapter would be recomputed


def _kept(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep what counts as work: matrix products, and attention, whoever's kernel it is."""
    counted = getattr(op, "overloadpacket", op) in flop_registry
    if counted or any(part in op.name() for part in ("grouped_mm", "attention", "attn")):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that a model repeats."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]
