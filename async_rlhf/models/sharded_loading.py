"""Models that rank 0 alone loads, where weights are sharded: the others have them without weights until then.

The host of rank 0 needs the files, and holds whole models. Each other rank gets rank 0's model with its parameters on
the meta device: it has all modules, buffers and settings, but its weights are only names, types and shapes. Whatever is
made of the model, such as a copy or adapters, is made on every rank, and has numbers on rank 0 alone. Once a model is
sharded, every rank makes room for its share (:func:`make_room`), and the strategy spreads rank 0's weights, one tensor
at a time.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from async_rlhf.config.base import require
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.models.adapters import are_trained
from async_rlhf.models.loading import brings_code, frozen_checksum
from async_rlhf.models.quantised import is_quantised
from async_rlhf.models.weights import saved_buffers

logger = logging.getLogger(__name__)

_MARK = "_weights_on_rank_0"


def only_on_rank_0(model: nn.Module) -> bool:
    """Whether rank 0 alone has a model's weights. All ranks say the same."""
    return hasattr(model, _MARK)


def loaded_once(ranks: Ranks, key: str, load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """What ``load`` returns, which rank 0 alone calls: see :func:`on_every_rank`. Every rank must call it."""
    model = on_every_rank(ranks, key, load() if ranks.is_main else None)
    return load() if model is None else model


def on_every_rank(ranks: Ranks, key: str, model: PreTrainedModel | None) -> PreTrainedModel | None:
    """Rank 0's model on rank 0, and the same without weights on the others. Every rank must call it.

    Args:
        ranks: that will shard it.
        key: the configuration key that the log names.
        model: None on all ranks but 0.

    Returns:
        The model; None on all ranks but 0 if they have to load all of it, too, and the log says why.
    """
    empty, why = ranks.broadcast(f"{key} without weights", lambda: _emptied(model))
    if empty is None:
        logger.info("%s: every rank loads all of it before it keeps its share: %s", key, why)
        return model
    model = empty if model is None else model
    setattr(model, _MARK, True)
    return model


def _emptied(model: PreTrainedModel | None) -> tuple[PreTrainedModel | None, str]:
    """A copy with its parameters on the meta device, tied ones still tied; or None, and why there can be none."""
    assert model is not None
    if brings_code(type(model)):
        return None, "it brings code of its own"
    if is_quantised(model):
        return None, "it is quantised"
    if are_trained(model):
        return None, "its adapters have been trained"
    on_meta = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    empty = copy.deepcopy(model, on_meta)
    try:
        pickle.dumps(empty)  # as it is sent
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return None, f"it cannot be sent to other ranks ({type(error).__name__}: {error})"
    return empty, ""


def make_room(model: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device memory for its weights, which have any values until they come from rank 0, and
    the saved buffers of rank 0's, whose weights stay as they are. Every rank must call it.

    Args:
        model: of which :func:`only_on_rank_0` is true; no longer then.
        device: where its weights, or this rank's shares of them, belong.
    """
    delattr(model, _MARK)
    made: dict[nn.Parameter, nn.Parameter] = {}  # several modules may share one
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                if parameter not in made:
                    room = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(room, parameter.requires_grad)
                module.register_parameter(name, made[parameter])
    for _, buffer in saved_buffers(model):
        dist.broadcast(buffer, src=0)


def require_alike(ranks: Ranks, **models: nn.Module | None) -> None:
    """Require every rank to have the same models under these names, but those that rank 0 alone has."""
    if ranks.count == 1:
        return
    whole = {key: model for key, model in models.items() if model is not None and not only_on_rank_0(model)}
    mine = {key: frozen_checksum(model) for key, model in whole.items()}
    for rank, theirs in enumerate(ranks.gather("models", mine)):
        for key in mine:
            found = f"different weights on ranks {rank} and {ranks.rank}"
            require(theirs.get(key) == mine[key], key, found, "must be the same model on every rank")
