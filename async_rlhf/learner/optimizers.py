"""The optimiser: one of a few by name, or the user's own, as transformers' Trainer takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from async_rlhf.config import OnlineConfig
from async_rlhf.config.base import ConfigError, require
from async_rlhf.distributed.parallel import Parallel, trainable
from async_rlhf.models.quantised import require_bitsandbytes

Optimizers: TypeAlias = tuple[torch.optim.Optimizer | None, LRScheduler | None]
Groups: TypeAlias = list[dict[str, Any]]


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
    rule = f"must have exactly the {len(trained)} that are trained, of the policy, a value model or adapters"
    require(held == trained, "optimizers", f"{type(optimizer).__name__} of {len(held)} parameters", rule)
    return optimizer


def require_optimizer(config: OnlineConfig, parallel: Parallel, own: torch.optim.Optimizer | None) -> None:
    """Require what the optimiser of that name needs; to be called before any model is loaded.

    Raises:
        ConfigError: it is not installed, or cannot train sharded weights, or the user has given another.
    """
    name = config.optimizer
    require(name == "adamw" or own is None, "optimizer", name, "must be left out with an optimiser in optimizers")
    require_bitsandbytes(name if name.endswith("_8bit") else None, "optimizer")
    rule = 'must be "adamw" but on one rank or with parallel.strategy "ddp"'
    require(name == "adamw" or parallel.takes_optimizers, "optimizer", name, rule)


def make_optimizer(config: OnlineConfig, groups: Groups, inside: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """The optimiser of that name.

    Args:
        config: its name, learning rate and coefficients.
        groups: parameters with their learning rate and weight decay.
        inside: the blocks of the models. Muon is for their matrices, and not for embeddings and heads.

    Raises:
        ConfigError: Muon, and no matrix of a block is trained.
    """
    betas = (config.adam_beta1, config.adam_beta2)
    adam: dict[str, Any] = {"betas": betas, "eps": config.adam_epsilon, "weight_decay": config.weight_decay}
    rate = config.learning_rate  # some schedules ask for the default
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, **adam, fused=True)
    if config.optimizer == "adafactor":
        # torch multiplies the rate by max(eps_2, RMS of the weights). 1 makes steps as large as AdamW's, so that one
        # learning rate suits both; weights of language models have an RMS around 0.02.
        return torch.optim.Adafactor(groups, lr=rate, eps=(None, 1.0), weight_decay=config.weight_decay)
    if config.optimizer == "muon":
        return _muon(groups, rate, adam, {id(parameter) for block in inside for parameter in block.parameters()})
    from bitsandbytes import optim

    kind = optim.PagedAdamW8bit if config.optimizer.startswith("paged") else optim.AdamW8bit
    return kind(groups, lr=rate, **adam)


def _muon(groups: Groups, rate: float, adam: dict[str, Any], inside: set[int]) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks, AdamW for everything else (Jordan et al., "Muon", 2024).

    Its steps have the size of AdamW's (Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982), so that one
    learning rate suits both.
    """

    def part(of_muon: bool) -> Groups:
        chosen = [
            group | {"params": [p for p in group["params"] if of_muon == (p.dim() == 2 and id(p) in inside)]}
            for group in groups
        ]
        return [group for group in chosen if group["params"]]

    matrices, others = part(of_muon=True), part(of_muon=False)
    require(bool(matrices), "optimizer", "muon", 'must be "adamw" where no matrix of the model\'s blocks is trained')
    decay = adam["weight_decay"]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    ]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=rate, **adam))
    return Together(optimizers)


class Together(torch.optim.Optimizer):
    """Several optimisers as one: one list of groups, one state, one step.

    Args:
        parts: optimisers of different parameters.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {"lr": parts[0].defaults["lr"]})
        self._link()

    def _link(self) -> None:
        """Give each part its groups and the common state, which loading replaces by others."""
        ends = list(accumulate(len(part.param_groups) for part in self.parts))
        for part, end in zip(self.parts, ends, strict=True):
            part.param_groups = self.param_groups[end - len(part.param_groups) : end]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        super().load_state_dict(state_dict)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """A step of each part."""
        assert closure is None
        for part in self.parts:
            part.step()
