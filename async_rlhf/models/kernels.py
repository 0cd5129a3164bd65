"""Which kernels a model of the learner computes with: its attention, and whether its blocks are compiled."""

from __future__ import annotations

from torch import nn
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


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that a model repeats."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]
