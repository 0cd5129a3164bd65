"""The routers of a mixture of experts: what they chose is recorded, and can be chosen again.

A router gives each token a few experts, and weighs them by its logits. Rounding that hardly changes the logits may
change the choice, and then the output by a jump. So the sampler's choice travels with the sample, and the learner takes
it in place of its own ("Rollout routing replay": Ma et al., arXiv 2510.11370). The weights are still computed from the
learner's own logits, with gradient.

The choice is an argument of each forward pass, which transformers hands through to every layer as it does that of
packed rows. So layers that are computed again for the backward pass get the same choice again, whatever has been
computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from async_rlhf.config.base import require
from async_rlhf.models.context_length import config_of
from async_rlhf.types import RouteShape

ROUTES = "expert_routes"
"""Argument of a model's forward pass: (B, T, L, E) experts, as :attr:`~async_rlhf.types.Experience.routes_BTLE`."""
ROUTERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "mixtral": ("MixtralTopKRouter", lambda router: True),
    "qwen3_moe": ("Qwen3MoeTopKRouter", lambda router: router.norm_topk_prob),
}
"""By the kind of model: the class of its routers, which take the likeliest experts by the softmax of their logits and
return logits, weights and experts; and whether the weights of a token's experts add up to 1."""


def require_routers(model: PreTrainedModel | str, trust: bool = False, key: str = "router_replay") -> None:
    """Require a model whose routers are known, by its configuration alone.

    Args:
        model: or its folder or hub name.
        trust: whether Python code that comes with a model may be run.
        key: for the error.

    Raises:
        ConfigError: it has no experts, or is of another kind.
    """
    config = config_of("model", model, trust)
    if config is None:  # such as a folder of adapters: the learner looks at what is loaded
        return
    kind = config.get_text_config().model_type
    rule = f"must be false: the model is of type {kind!r}, and the experts of {', '.join(ROUTERS)} alone are known"
    require(kind in ROUTERS, key, True, rule)


def route_shape(config: PretrainedConfig) -> RouteShape:
    """The sizes of a model's routes."""
    text: Any = config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or text.num_experts
    return RouteShape(text.num_hidden_layers, text.num_experts_per_tok, experts)


def _routers(model: nn.Module) -> Iterator[tuple[int, nn.Module, str, nn.Module]]:
    """The layers that have experts: number, layer, and the router's name in it and the router."""
    names = {name for name, _ in ROUTERS.values()}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for number, layer in [pair for layers in lists for pair in enumerate(layers)]:  # FSDP gives layers other classes
        for name, module in layer.named_modules():
            if type(module).__name__ in names:
                yield number, layer, name, module


def replay_routes(model: PreTrainedModel) -> None:
    """From now on the model takes the argument :data:`ROUTES`; without it the routers choose for themselves.

    Raises:
        ConfigError: the model's routers are not known.
    """
    require_routers(model)
    adds_up = ROUTERS[model.config.get_text_config().model_type][1]
    for number, layer, name, router in _routers(model):
        layer.register_forward_pre_hook(partial(_hand_over, number, name), with_kwargs=True)
        router.register_forward_hook(partial(_choose_again, adds_up))


def _hand_over(
    number: int, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a layer: give its router what is for it, or None. A copy of the model has hooks for its own routers."""
    routes_BTLE = kwargs.get(ROUTES)
    router: Any = layer.get_submodule(name)
    router.replayed_NE = None if routes_BTLE is None else routes_BTLE[..., number, :].flatten(0, -2)
    return args, {key: value for key, value in kwargs.items() if key != ROUTES}


def no_route(dtype: torch.dtype) -> int:
    """What stands for no choice: the largest number of uint8, or of uint16, which torch has as int16."""
    return torch.iinfo(torch.uint8).max if dtype == torch.uint8 else -1


def _choose_again(
    adds_up: Callable[[Any], bool], router: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """After a router: put what it was given in place of its choice, weighed by its own logits."""
    replayed_NE, router.replayed_NE = router.replayed_NE, None
    if replayed_NE is None:
        return None
    logits_NX, weights_NE, chosen_NE = output
    chosen_NE = torch.where(replayed_NE == no_route(replayed_NE.dtype), chosen_NE, replayed_NE.to(chosen_NE.dtype))
    found_NE = torch.softmax(logits_NX.float(), dim=-1).gather(1, chosen_NE)
    if adds_up(router):
        found_NE = found_NE / found_NE.sum(dim=-1, keepdim=True)
    return logits_NX, found_NE.to(weights_NE.dtype), chosen_NE


@contextmanager
def recorded_routes(model: nn.Module, shape: RouteShape | None) -> Iterator[list[Tensor]]:
    """Within, one forward pass is recorded. None records nothing.

    Yields:
        A list that afterwards has what the routers chose, (N, L, E) in the smallest type, for the tokens one after the
        other; 0 in layers without experts.
    """
    routes, chosen = list[Tensor](), dict[int, Tensor]()

    def note(number: int, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen[number] = output[2]

    routers = [] if shape is None else list(_routers(model))
    handles = [router.register_forward_hook(partial(note, number)) for number, _, _, router in routers]
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()
    if shape is not None:
        none_NE = torch.zeros_like(next(iter(chosen.values())))
        routes_NLE = torch.stack([chosen.get(number, none_NE) for number in range(shape.layers)], dim=1)
        routes.append(routes_NLE.to(torch.uint8 if shape.dtype == np.uint8 else torch.int16))
