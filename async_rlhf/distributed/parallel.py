"""How the learner's work, and possibly its weights, are divided among ranks. Here: one process, and the base class.

DDP, FSDP and DeepSpeed are in ``learner/strategies``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from async_rlhf.distributed.collectives import WHOLE, Ranks
from async_rlhf.distributed.loss_scale import LossScale

Model = TypeVar("Model", bound=nn.Module)


class Parallel:
    """One process with all weights. Subclasses divide the work, or shard the weights as well.

    Args:
        ranks: the ranks that share the work.
    """

    is_sharded = False
    """Whether the weights are sharded, so that no rank can compute alone. Then :meth:`prepare` and :meth:`frozen` also
    spread those that rank 0 alone has, see :mod:`~async_rlhf.models.sharded_loading`."""
    casts_gathered = False
    """Whether sharded weights are cast, to the type that is computed in, before they are gathered."""
    takes_optimizers = True
    """Whether an optimiser can be made before the weights are handed over."""
    takes_shards = True
    """Whether what is trained can be written and read in shards, one rank's beside the other's."""
    device: torch.device | None = None
    """Where the ranks compute, if that is not where the weights are."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.loss_scale: LossScale | None = None
        """Set before :meth:`prepare` to train in float16."""
        self.context = WHOLE
        """The ranks that share the rows of a pass with this one; set before a learner is made."""
        self.optimizer: torch.optim.Optimizer
        self._model: nn.Module
        self._parts: Sequence[nn.Module]

    def prepare(
        self, model: nn.Module, parts: Sequence[nn.Module], make: Callable[[], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Prepare a model for training.

        Args:
            model: everything that is trained, with one forward pass.
            parts: the models in it.
            make: builds the optimiser, called after any sharding.
        """
        self._model, self._parts = model, parts
        self.optimizer = make()
        return self.optimizer

    @property
    def shards(self) -> int:
        """Over how many ranks the weights are sharded, if they are."""
        return self.ranks.count

    @property
    def groups(self) -> int:
        """How many passes the ranks compute at a time."""
        return self.ranks.count // self.context.size

    @property
    def trained(self) -> list[nn.Parameter]:
        """The trained parameters, in an order independent of ranks and optimiser groups: the index names each."""
        return trainable(self._model)

    def frozen(self, model: Model) -> Model:
        """Shard a model that is not trained: reference or reward model."""
        return model

    def forward(self, *args: Any) -> Any:
        """A forward pass of the model being trained."""
        return self._model(*args)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch's forward and backward pass. Gradients need reducing only after the last."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of the losses' sum over ranks."""
        # All strategies average gradients over ranks, each of which has that of its own rows, or of its part of them.
        (loss * self._factor).backward()

    @property
    def _factor(self) -> float:
        return self.ranks.count * (1.0 if self.loss_scale is None else self.loss_scale.value)

    def step(self, limit: float) -> list[float] | None:
        """Clip the gradients to a norm, take an optimiser step, and reset them.

        Returns:
            The norm of each part's gradient; the parts are clipped separately. None if the loss scale was too large:
            then the step is skipped.

        Raises:
            FloatingPointError: a norm is not finite; the weights are as they were.
        """
        if self.loss_scale is not None:
            for parameter in self.trained:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self.loss_scale.value)
        norms = [self._clip(trainable(part), limit) for part in self._parts]
        if self._overflowed(norms):
            self.optimizer.zero_grad()
            return None
        require_finite(norms)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norms

    def _overflowed(self, norms: list[float]) -> bool:
        return self.loss_scale is not None and self.loss_scale.overflowed(norms)

    def _clip(self, parameters: list[nn.Parameter], limit: float) -> float:
        return torch.nn.utils.clip_grad_norm_(parameters, limit).item()

    def moments(self) -> dict[str, Tensor]:
        """The optimiser's state under ``number of the parameter.name``, unsharded, in the memory of rank 0's host.

        Every rank must call it; the others get nothing.
        """
        moments, places = {}, set()
        for name, tensor in self.own_moments().items():
            whole = self.whole(tensor)
            if self.ranks.is_main:
                whole = whole.cpu()
                # A table that several parameters share would be refused by the file format.
                moments[name] = whole.clone() if whole.data_ptr() in places else whole
                places.add(whole.data_ptr())
        return moments

    def own_moments(self) -> dict[str, Tensor]:
        """The same, but this rank's share of each, and where it lies.

        Raises:
            TypeError: an optimiser of the user's keeps something else than tensors and integers.
        """
        moments = {}
        for i, parameter in enumerate(self.trained):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, (int, Tensor)):
                    kind = f"{type(self.optimizer).__name__} whose {name!r} is a {type(value).__name__}"
                    raise TypeError(f"optimizers: got {kind}; must hold tensors and integers, as checkpoints do")
                # bitsandbytes counts its steps by a Python integer.
                moments[f"{i}.{name}"] = torch.tensor(value) if isinstance(value, int) else value
        return moments

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`moments` or :meth:`own_moments` returned; the groups' learning rates stay as they are."""
        groups = self.optimizer.param_groups
        indices = {id(parameter): i for i, parameter in enumerate(p for group in groups for p in group["params"])}
        places = [indices[id(parameter)] for parameter in self.trained]
        state: dict[int, dict[str, Any]] = {}
        for key, tensor in moments.items():
            number, _, name = key.partition(".")
            counted = tensor.dim() == 0 and tensor.dtype == torch.int64
            held = int(tensor) if counted else self.share(int(number), tensor)
            state.setdefault(places[int(number)], {})[name] = held
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    @property
    def takes_part(self) -> bool:
        """Whether this rank must join in when rank 0 reads the weights or computes with them."""
        return self.ranks.is_main or self.is_sharded

    def device_of(self, model: Any) -> torch.device:
        """Where a transformers model computes; sharded weights may be kept elsewhere."""
        return model.device if self.device is None else self.device

    def architecture_of(self, model: nn.Module) -> type[Any]:
        """The model's own class, which sharding may have replaced."""
        return type(model)

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        """The unsharded shape of a parameter."""
        return parameter.shape

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a sharded tensor. Every rank must call it."""
        return tensor

    def share(self, number: int, tensor: Tensor) -> Tensor:
        """This rank's share of a tensor that belongs to the trained parameter of that number."""
        return tensor

    def room_for(self, number: int, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for this rank's share of a tensor of that whole size that belongs to that trained parameter."""
        return torch.empty(size, dtype=dtype)

    def barrier(self, point: str, model: nn.Module) -> None:
        """Wait for all ranks before something that needs every rank's share of a model's weights."""
        if self.is_sharded:
            self.ranks.barrier(point)
            self.reshard(model)

    def reshard(self, model: nn.Module) -> None:
        """Free weights that forward passes have left unsharded."""

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within, the parameters are whole and usable. Every rank must call it."""
        yield

    def unsharded(
        self, parameters: Sequence[nn.Parameter], compute: Callable[[], Tensor], dtype: torch.dtype | None
    ) -> Tensor:
        """A whole tensor that is computed from parameters. Every rank must call it.

        Args:
            parameters: sharded or not; a single one is the tensor itself.
            compute: gives the tensor, still sharded if the parameters are.
            dtype: to round it to, where possible before it is gathered; None for none.
        """
        with self.gathered(parameters):
            return self.whole(compute() if dtype is None else compute().to(dtype))

    def swap_parameter(self, parameter: nn.Parameter, tensor: Tensor | None) -> Callable[[], Any]:
        """Replace a sharded parameter by another tensor, whole on rank 0. Every rank must call it, and undo it too.

        Returns:
            A function that undoes it.
        """
        raise NotImplementedError(f"{type(self).__name__} spreads no weights")


ALONE = Parallel()
"""A single process with all weights."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The model's parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def decayed_groups(parameters: list[nn.Parameter], rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for the optimiser: biases and the weights of normalisation do not decay, as in transformers' Trainer."""
    if weight_decay == 0:
        return [{"params": parameters, "lr": rate}]
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    spared = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "lr": rate}, {"params": spared, "lr": rate, "weight_decay": 0}]
    return [group for group in groups if group["params"]]  # adapters have no parameters without decay


def require_finite(norms: Sequence[float]) -> None:
    """Raise FloatingPointError for a gradient that would ruin the weights."""
    for norm in norms:
        if not norm < float("inf"):
            raise FloatingPointError(f"the gradient's norm is {norm}; the weights were not touched")
