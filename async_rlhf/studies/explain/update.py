"""One update that can be repeated: the learner is put back to where it was before, bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from async_rlhf.config import ConfigError
from async_rlhf.distributed.parallel import Parallel, trainable
from async_rlhf.learner.learner import Learner
from async_rlhf.run.checkpoint import learner_state, restore_learner
from async_rlhf.types import Experience, ScoredBatch

_MOMENTA = {"exp_avg", "momentum_buffer", "state1", "absmax1"}
"""What optimisers call first moments: torch's AdamW and Muon, and bitsandbytes, in 32 bits and the scales of its 8."""


class RepeatableUpdate:
    """The update by one batch. Make it when the learner is about to see that batch.

    Args:
        learner: on one rank.
        batch: the number of the batch.

    Raises:
        ConfigError: the learner has several ranks, or its weights are sharded.
    """

    def __init__(self, learner: Learner, batch: int) -> None:
        if type(learner.parallel) is not Parallel:
            raise ConfigError("run: the learner has several ranks; must be one, which has all weights and all rows")
        self.learner, self.batch = learner, batch
        tensors, values = learner_state(learner)
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self._values = copy.deepcopy(values)
        self._trained = learner.parallel.trained
        self._before = clones(self._trained)
        self.policy: list[nn.Parameter] = trainable(learner.policy)
        """What is trained of the policy, adapters where it has some: that whose step is explained."""
        tensor_of = {id(parameter): tensor for parameter, tensor in zip(self._trained, self._before, strict=True)}
        self.before = [tensor_of[id(parameter)] for parameter in self.policy]
        """The same tensors before the update."""

    def rewind(self) -> None:
        """Put weights, optimiser, schedules and the KL coefficient back to where they were before the update."""
        load(self._trained, self._before)
        self.learner.optimizer.zero_grad()
        tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}  # the optimiser changes its own
        restore_learner(self.learner, tensors, copy.deepcopy(self._values))

    def annotate(self, scored: ScoredBatch) -> Experience:
        """The experience that the learner made of the batch, or would have made of it with other scores."""
        self.rewind()
        return self.learner.annotate(scored)[0]

    def take(self, experience: Experience, as_with: Experience | None = None) -> list[Tensor]:
        """Take the update anew with this experience, and as many optimiser steps as another one takes, if one is given.
        Returns the policy's weights after it.
        """
        self.rewind()
        learner, like = self.learner, as_with or experience
        stepped = [weight > 0 for _, weight in learner.mini_batches(like, self.batch)]
        learner.update(experience, self.batch, stepped)
        return clones(self.policy)

    def take_without_gradient(self, steps: int) -> list[Tensor]:
        """The policy's weights after as many optimiser steps with gradients of zero: only what earlier batches left in
        the optimiser moves them, and weight decay.
        """
        self.rewind()
        for _ in range(steps):
            for parameter in self._trained:
                parameter.grad = torch.zeros_like(parameter)
            self.learner.optimizer.step()
            self.learner.optimizer.zero_grad()
            self.learner.scheduler.step()
        return clones(self.policy)

    def take_without_momentum(self, experience: Experience) -> list[Tensor]:
        """The policy's weights after the update with the optimiser's first moments of earlier batches at 0, and its
        second moments, which divide the step, as they were. What the step lacks then is the share of earlier batches.
        """
        self.rewind()
        for state in self.learner.optimizer.state.values():
            for name in _MOMENTA & state.keys():
                if state[name].is_floating_point():
                    state[name].zero_()
        self.learner.update(experience, self.batch)
        return clones(self.policy)

    def step_to(self, after: Sequence[Tensor]) -> list[Tensor]:
        """The difference of weights from those before the update."""
        return difference(after, self.before)


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of their numbers."""
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def load(
    parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor], step: Sequence[Tensor] = (), multiple: float = 0.0
) -> None:
    """Give parameters these numbers, moved by a multiple of a step if there is one."""
    for i, (parameter, tensor) in enumerate(zip(parameters, tensors, strict=True)):
        parameter.copy_(tensor + multiple * step[i] if step else tensor)


@torch.no_grad()
def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """The first minus the second ones."""
    return [x - y for x, y in zip(a, b, strict=True)]


def compared(step: Sequence[Tensor], original: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """The size of the difference of two steps, divided by that of the original one, and their cosine; None where a norm
    that divides is zero.
    """
    length, size = norm(step), norm(original)
    cosine = inner(step, original) / (length * size) if length * size else None
    return norm(difference(step, original)) / size if size else None, cosine


def inner(a: Sequence[Tensor | None], b: Sequence[Tensor]) -> float:
    """The inner product, in float64; None counts as zeros."""
    pairs = zip(a, b, strict=True)
    return sum((x.double() * y.double()).sum().item() for x, y in pairs if x is not None)


def norm(tensors: Sequence[Tensor]) -> float:
    """The Euclidean norm of all of them together, in float64."""
    return math.sqrt(inner(tensors, tensors))
