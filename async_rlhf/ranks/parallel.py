"""How the learner's work, and perhaps its weights, are divided among ranks. Here: one process, and what all share.

DDP, FSDP and DeepSpeed are in ``learner/strategies``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from async_rlhf.ranks.collectives import Ranks

Model = TypeVar("Model", bound=nn.Module)


class Parallel:
    """One process with all of the weights. Subclasses spread the work, or the weights as well.

    Args:
        ranks: who shares the work.
    """

    spreads_weights = False
    """Whether every rank has a share of the weights, of which none can compute alone."""
    device: torch.device | None = None
    """Where the ranks compute, if that is not where the weights are."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.optimizer: torch.optim.Optimizer
        self._model: nn.Module
        self._parts: Sequence[nn.Module]

    def prepare(
        self, model: nn.Module, parts: Sequence[nn.Module], make: Callable[[], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Get a model ready to be trained.

        Args:
            model: everything that is trained, with one forward pass.
            parts: the models in it.
            make: builds the optimiser, of the weights as they are then.
        """
        self._model, self._parts = model, parts
        self.optimizer = make()
        return self.optimizer

    @property
    def trained(self) -> list[nn.Parameter]:
        """What is trained, in an order that neither ranks nor the optimiser's groups change: its number is its name."""
        return trainable(self._model)

    def frozen(self, model: Model) -> Model:
        """Get a model ready that is only asked: reference or reward model."""
        return model

    def forward(self, *args: Any) -> Any:
        """A forward pass of the model being trained."""
        return self._model(*args)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward pass of a micro-batch. Gradients need only meet after the last."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of the sum over ranks of their losses."""
        # Everything here takes the mean over ranks.
        (loss * self.ranks.count).backward()

    def step(self, limit: float) -> list[float]:
        """Clip the gradients to a norm, make a step, and forget them.

        Returns:
            The norm of each part's gradient, which were clipped apart.

        Raises:
            FloatingPointError: a norm is not finite; the weights are as they were.
        """
        norms = [self._clip(trainable(part), limit) for part in self._parts]
        require_finite(norms)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norms

    def _clip(self, parameters: list[nn.Parameter], limit: float) -> float:
        return torch.nn.utils.clip_grad_norm_(parameters, limit).item()

    def moments(self) -> dict[str, Tensor]:
        """The optimiser's state under ``number of the parameter.name``, whole, in the memory of rank 0's host.

        Every rank must ask; the others get nothing.
        """
        found = {}
        for i, parameter in enumerate(self.trained):
            for name, tensor in self.optimizer.state.get(parameter, {}).items():
                whole = self.whole(tensor)
                if self.ranks.leads:
                    found[f"{i}.{name}"] = whole.cpu()
        return found

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`moments` gave; the groups' rates stay as they are."""
        groups = self.optimizer.param_groups
        place = {id(parameter): i for i, parameter in enumerate(p for group in groups for p in group["params"])}
        places = [place[id(parameter)] for parameter in self.trained]
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in moments.items():
            number, _, name = key.partition(".")
            state.setdefault(places[int(number)], {})[name] = self.share(int(number), tensor)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    @property
    def takes_part(self) -> bool:
        """Whether this rank has to join in when rank 0 reads the weights, or computes with them for itself."""
        return self.ranks.leads or self.spreads_weights

    def device_of(self, model: Any) -> torch.device:
        """Where a model of transformers computes; weights that are spread may wait elsewhere."""
        return model.device if self.device is None else self.device

    def architecture_of(self, model: nn.Module) -> type[Any]:
        """The model's own class, which spreading may have replaced."""
        return type(model)

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        """Of all of a parameter."""
        return parameter.shape

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor of which this rank has a share. Every rank must ask."""
        return tensor

    def share(self, number: int, tensor: Tensor) -> Tensor:
        """This rank's share of something that belongs to the trained parameter of that number."""
        return tensor

    def meet(self, place: str, model: nn.Module) -> None:
        """Before something that needs every rank's share of a model's weights: wait until all have come."""
        if self.spreads_weights:
            self.ranks.meet(place)
            self.settle(model)

    def settle(self, model: nn.Module) -> None:
        """Give back what forward passes have left whole."""

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within, the parameters can be computed with. Every rank must ask."""
        yield

    def exchange(self, parameter: nn.Parameter, tensor: Tensor | None) -> Callable[[], Any]:
        """Put another tensor, whole on rank 0, in the place of a spread parameter. Every rank must, and undo it too.

        Returns:
            What undoes it.
        """
        raise NotImplementedError(f"{type(self).__name__} spreads no weights")


ALONE = Parallel()
"""One process with all of the weights, for what only asks where they are."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The model's parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def decayed_groups(parameters: list[nn.Parameter], rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for the optimiser: biases and the weights of normalisation do not decay, as in transformers' Trainer."""
    if weight_decay == 0:
        return [{"params": parameters, "lr": rate}]
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    spared = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "lr": rate},
        {"params": spared, "lr": rate, "weight_decay": 0},
    ]
    return [group for group in groups if group["params"]]  # of adapters none is spared


def require_finite(norms: Sequence[float]) -> None:
    """Raise FloatingPointError for a gradient that would ruin the weights."""
    for norm in norms:
        if not norm < float("inf"):
            raise FloatingPointError(f"the gradient's norm is {norm}; the weights were not touched")
