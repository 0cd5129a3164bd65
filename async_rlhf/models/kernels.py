"""How a model of the learner computes: its attention, whether its blocks are compiled, what they compute again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.models.packing import keep_soft_cap

_GROUPED = ExpertsInterface()["grouped_mm"]


class _Cast:
    """Experts whose weights are in another type; no module, so that nothing that hangs on one happens twice."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._experts, name)
        return attribute.to(self._dtype) if isinstance(attribute, Tensor) and attribute.dim() == 3 else attribute


def _in_autocast(experts: Any, hidden: Tensor, *args: Tensor) -> Tensor:
    """Autocast does not know the product of a mixture's experts, which would compute in their weights' type."""
    kind = hidden.device.type
    cast = torch.is_autocast_enabled(kind)
    return _GROUPED(_Cast(experts, torch.get_autocast_dtype(kind)) if cast else experts, hidden, *args)


ExpertsInterface.register("grouped_mm", _in_autocast)


def use_attention(model: PreTrainedModel, config: OnlineConfig, key: str) -> None:
    """Make a model use the attention that the configuration names, if it names one; see :func:`keep_soft_cap`.

    Args:
        model: policy, reference, reward or value model.
        config: names it.
        key: the configuration key of the model, for errors.

    Raises:
        ConfigError: the model has no such attention, or a package for it is missing.
    """
    wanted = keep_soft_cap(model, config.attn_implementation)
    if wanted is not None:
        try:
            model.set_attn_implementation(wanted)
        except (ValueError, ImportError) as error:
            why = f"{type(model).__name__} ({key}) cannot use it: {error}"
            raise ConfigError(f"attn_implementation: got {wanted!r}; {why}") from error


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
