"""Models while they are not trained: few bits, and a GPU's memory only where told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from async_rlhf.config import OnlineConfig
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.models.kernels import blocks, compile_blocks


class HostCopy(AbstractContextManager[None]):
    """Keeps a model's parameters in the host's memory; within, they are also on the device that it was on.

    Args:
        model: is changed in place; nothing may write to its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [(m, name) for m in model.modules() for name, p in m._parameters.items() if p is not None]
        mine = [module._parameters[name] for module, name in self._places]
        self._device = next(model.parameters()).device
        pinned = self._device.type == "cuda" and torch.accelerator.is_available()  # copied without waiting for each
        copied = {id(p): p.data.cpu().pin_memory() if pinned else p.data.cpu() for p in model.parameters()}
        held = {number: nn.Parameter(tensor, requires_grad=False) for number, tensor in copied.items()}
        self._host = [held[id(parameter)] for parameter in mine]  # one for all places that share a parameter
        self.__exit__()

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for (module, name), parameter in zip(self._places, parameters, strict=True):
            module._parameters[name] = parameter

    def __enter__(self) -> None:
        copied = {id(p): nn.Parameter(p.to(self._device, non_blocking=True), requires_grad=False) for p in self._host}
        self._put([copied[id(parameter)] for parameter in self._host])

    def __exit__(self, *_: object) -> None:
        self._put(self._host)


def on_device(model: nn.Module | None, config: OnlineConfig, parallel: Parallel) -> AbstractContextManager[None]:
    """What to enter, as often as one likes, while a frozen model computes; sharded weights come by themselves."""
    if model is None or parallel.is_sharded or not config.offload_frozen:
        return nullcontext()
    return HostCopy(model)


def frozen(model: PreTrainedModel, config: OnlineConfig, parallel: Parallel) -> PreTrainedModel:
    """A reference or reward model, ready to compute with: in few bytes, compiled if told, sharded if weights are."""
    compile_blocks(model, config)
    hold = hold_all if parallel.casts_gathered else hold_linear
    hold(model, autocast_dtype(config), config.head_float32)
    return parallel.frozen(model)


def hold_linear(model: nn.Module, dtype: torch.dtype | None, head_float32: bool) -> None:
    """Hold the weights of linear layers and experts in the type that they are cast to: the same numbers in half the
    memory.

    Embeddings and norms, which autocast leaves alone, stay as they are, and so do heads that compute in float32: those
    that give scores, and with ``head_float32`` a language model's.

    Args:
        model: is changed in place.
        dtype: of autocast; None for none, and then nothing changes.
        head_float32: see OnlineConfig.
    """
    if dtype is None:
        return
    kept = _heads(model, head_float32)
    embedded = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    _hold(_linear(model, lambda m: m not in kept and id(m.weight) not in embedded), dtype)


@contextmanager
def rounded_linear(model: nn.Module, dtype: torch.dtype, head_float32: bool) -> Iterator[None]:
    """Within, the same for a model that is trained, and for a head that is its embedding too: many short passes cast
    their weights once.

    Args:
        model: has its own parameters again afterwards, and they must not change meanwhile.
        dtype: see :func:`hold_linear`.
        head_float32: see there.
    """
    kept = _heads(model, head_float32)
    before = _hold(_linear(model, lambda m: m not in kept), dtype)
    try:
        yield
    finally:
        for parameters, name, parameter in before:
            parameters[name] = parameter


def hold_all(model: nn.Module, dtype: torch.dtype | None, head_float32: bool) -> None:
    """The same for weights that are cast when they are gathered: all of them, but for heads that compute in float32.

    With ``head_float32`` everything outside the blocks stays as it is, as it is gathered together with the head.
    """
    if dtype is None:
        return
    kept = _heads(model, head_float32)
    parts = blocks(model) if head_float32 and _generates(model) else [model]
    _hold(_own(module for part in parts for module in part.modules() if module not in kept), dtype)


Place: TypeAlias = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]
"""The parameters of a module, the name of one of them, and that parameter."""


def _own(modules: Iterable[nn.Module]) -> list[Place]:
    """The modules' own parameters, but those of few bits, which are integers."""
    parameters = [(m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
    return [entry for entry in parameters if entry[2].is_floating_point()]


def _linear(model: nn.Module, casts: Callable[[nn.Linear | Conv1D], bool]) -> list[Place]:
    """The parameters of linear layers that are cast, and of many experts in one."""
    experts = _own(m for m in model.modules() if not isinstance(m, nn.Conv1d))
    linear = _own(m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and casts(m))
    return linear + [entry for entry in experts if entry[2].dim() == 3]


def _hold(places: list[Place], dtype: torch.dtype) -> list[Place]:
    """Replace these parameters by rounded ones; those that are shared stay shared. Returns the places."""
    held: dict[nn.Parameter, nn.Parameter] = {}
    for parameters, name, parameter in places:
        if parameter not in held:
            held[parameter] = nn.Parameter(parameter.data.to(dtype), requires_grad=False)
        parameters[name] = held[parameter]
    return places


def _generates(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel) and model.can_generate()


def _heads(model: nn.Module, head_float32: bool) -> set[nn.Module]:
    """The heads that compute in float32."""
    if _generates(model):
        assert isinstance(model, PreTrainedModel)
        return {model.get_output_embeddings()} if head_float32 else set()
    score = getattr(model, "score", None)
    return {score} if isinstance(score, nn.Module) else set()
