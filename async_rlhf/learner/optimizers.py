"""An optimiser and a schedule of the user's own, as transformers' Trainer takes them."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from async_rlhf.config.base import ConfigError, require
from async_rlhf.ranks.parallel import Parallel, trainable

Optimizers: TypeAlias = tuple[torch.optim.Optimizer | None, LRScheduler | None]


def checked_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, parallel: Parallel) -> torch.optim.Optimizer:
    """The user's optimiser, which must have exactly the parameters that are trained.

    Raises:
        ConfigError: it has others; or the weights are sharded, after it was made.
    """
    if not parallel.takes_optimizers:
        raise ConfigError(
            f"optimizers: got a {type(optimizer).__name__}; must be (None, None) but on one rank or with "
            'parallel.strategy "ddp": it holds weights as they were before they are sharded'
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {id(parameter) for parameter in trainable(model)}
    right = f"must have exactly the {len(trained)} that are trained, of the policy, a value model or adapters"
    require(held == trained, "optimizers", f"{type(optimizer).__name__} of {len(held)} parameters", right)
    return optimizer
