"""A run without the gradients of some batches, beside the run itself: what they do to later weights, as momentum.

The *omission* of a batch is the run's own optimiser, from the weights and the state before that batch, with gradients
of zero where the run had those of the batch, and the run's own gradients everywhere else: after clipping, and at the
same learning rates. With AdamW the batch is then missing in the first moments, and in the second ones, which later
steps are divided by. Later batches are not sampled anew, and their gradients stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from async_rlhf.learner.learner import Learner
from async_rlhf.studies.explain.update import clones


class Omissions:
    """Follows the steps of a learner's optimiser, and changes nothing of them.

    Args:
        learner: on one rank.
    """

    def __init__(self, learner: Learner) -> None:
        self.batch = 0
        """That the learner is about to train on; whoever trains it sets it."""
        self.followed: list[Omission] = []
        """Those that are told of steps; each costs one more step of the optimiser."""
        self._optimizer, self._trained = learner.optimizer, learner.parallel.trained
        self._inside = False
        self._optimizer.register_step_pre_hook(self._before_step)

    def follow(self, batches: range) -> Omission:
        """Begin to leave out batches, of which :attr:`batch` must be the first."""
        self.followed.append(Omission(self._optimizer, self._trained, batches))
        return self.followed[-1]

    def _before_step(self, *_: Any) -> None:
        if self._inside:
            return
        self._inside, gradients = True, [parameter.grad for parameter in self._trained]
        for omission in self.followed:
            for parameter, gradient in zip(self._trained, gradients, strict=True):
                if gradient is not None:
                    absent = self.batch in omission.batches
                    parameter.grad = torch.zeros_like(gradient) if absent else gradient.clone()
            omission.step()
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        self._inside = False


class Omission:
    """Weights and optimiser state without the gradients of some batches: three copies of what AdamW trains."""

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Sequence[torch.nn.Parameter], batches: range) -> None:
        self.batches, self._optimizer, self._trained = batches, optimizer, trained
        self._weights = clones(trained)
        self._state = {
            parameter: {name: x.clone() if isinstance(x, Tensor) else x for name, x in state.items()}
            for parameter, state in optimizer.state.items()
        }

    def step(self) -> None:
        """Take an optimiser step with the gradients that the parameters have."""
        self._swap()
        self._optimizer.step()
        self._swap()

    def weights(self, of: Sequence[Tensor]) -> list[Tensor]:
        """Those of some of the trained parameters, by their identity; not copied."""
        weights_of = {id(parameter): weights for parameter, weights in zip(self._trained, self._weights, strict=True)}
        return [weights_of[id(parameter)] for parameter in of]

    def _swap(self) -> None:
        """Exchange weights and state with those of the learner, without a copy."""
        state = self._optimizer.state
        mine, self._state = self._state, dict(state)
        state.clear()  # not replaced: an optimiser that is made of several shares it with them
        state.update(mine)
        for i, parameter in enumerate(self._trained):
            parameter.data, self._weights[i] = self._weights[i], parameter.data
