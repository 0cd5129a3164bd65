"""What each unit and each token of a batch adds to an update, to first order.

An update takes steps i = 1 .. M from theta_0 to theta_M, and moves the policy by delta = theta_M - theta_0. At step i
the optimiser gets the gradient g_i, which is the sum over the units u of the mini-batch of

    f_i grad l_u(theta_{i-1}) / W_i

with l_u the unit's loss, W_i the weight of the mini-batch, and f_i <= 1 what clipping the gradient's norm leaves. The
*contribution* of a unit is minus the inner product of its part of all g_i with delta: by how much it asks for the step
that was taken. The contributions of all units add up to minus the sum of the inner products of g_i with delta.

A unit's loss depends on the policy only through what it says of the unit's tokens: log-probabilities, and values where
a value head shares its trunk. By the chain rule the contribution of token t is minus f_i / W_i times

    d l_u / d logprob_t  *  (the derivative of logprob_t along delta)

summed over the steps; the contributions of a unit's tokens add up to the unit's. TracIn (Pruthi et al., arXiv
2002.08484, section 3) takes the same inner product, with the gradient of a test example's loss in place of delta.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from async_rlhf.distributed.parallel import Parallel
from async_rlhf.learner.learner import Learner
from async_rlhf.studies.explain.update import RepeatableUpdate, clones, inner, load
from async_rlhf.types import Experience, PolicyOutput

MOVED = 0.05
"""How far the finite difference moves the log-probability that moves most: by less, rounding counts; by more,
curvature."""
_STENCIL = ((1, 8 / 12), (-1, -8 / 12), (2, -1 / 12), (-2, 1 / 12))
"""Of the first derivative, exact to the fourth order: multiples of the distance, and their weights."""


@dataclass(frozen=True)
class Contributions:
    """See the top of this file. Positive: the step follows what the unit or the token asks for."""

    units_U: Tensor
    """(U,) float64."""
    tokens_BT: Tensor
    """(B, T) float64; by a finite difference, so they add up to those of units only about."""
    total: float
    """Of the whole batch, from the gradients that the learner itself computed."""
    steps: int
    """Optimiser steps that were taken."""
    kept: list[float]
    """What clipping left of the gradient of each step: 1 where it was not clipped."""
    log_ratios_BT: Tensor
    """log pi - log mu of each sampled token, (B, T), by the policy when the update first sees it; 0 elsewhere."""
    moves_BT: Tensor
    """(B, T) float64: the derivative of each sampled token's log-probability along the whole step, when the update
    first sees it: by how much the step raises it, to first order; 0 elsewhere."""
    seen_U: Tensor
    """(U,) bool: whether a step was taken on the unit. Everything is 0 for the others, such as ties."""
    metrics: dict[str, Tensor]
    """(U,) float64: metrics that the objective gives of each unit, means over the steps; NaN for one without a step."""


def contributions(update: RepeatableUpdate, experience: Experience, delta: Sequence[Tensor]) -> Contributions:
    """Take the update again and measure before each of its steps.

    Args:
        update: of the learner.
        experience: what the learner trains on, annotated and with credit.
        delta: how far the update moves each of ``update.policy``.
    """
    learner = update.learner
    meter = _Meter(update, experience, delta)
    update.rewind()
    steps = [step for step in learner.mini_batches(experience, update.batch) if step[1] > 0]
    with _watched(learner, meter, steps):
        learner.update(experience, update.batch)
    return meter.result()


@contextmanager
def _watched(learner: Learner, meter: _Meter, steps: list[tuple[Tensor, float]]) -> Iterator[None]:
    """Within, the meter sees every step that the learner takes, before the weights change."""
    own = learner.parallel
    learner.parallel = _Watched(own, meter, steps)
    try:
        yield
    finally:
        learner.parallel = own


class _Watched(Parallel):
    """A single process whose steps are seen."""

    def __init__(self, own: Parallel, meter: _Meter, steps: list[tuple[Tensor, float]]) -> None:
        vars(self).update(vars(own))
        self._meter, self._steps = meter, iter(steps)

    def step(self, limit: float) -> list[float] | None:
        units_U, weight = next(self._steps)
        seen = self._meter.see(units_U, weight)
        norms = super().step(limit)
        if norms is not None:  # else float16 overflowed, and nothing moved
            self._meter.count(seen, kept=min(1.0, limit / (norms[0] + 1e-6)))
        return norms


@dataclass
class _Seen:
    """What was measured before one step, without what clipping leaves."""

    units_U: Tensor
    contributions: list[float]
    tokens: list[Tensor]
    metrics: list[dict[str, float]]
    log_ratios: list[Tensor]
    moves: list[Tensor]
    total: float


@dataclass
class _Meter:
    """Measures, and adds up over steps."""

    update: RepeatableUpdate
    experience: Experience
    delta: Sequence[Tensor]
    kept: list[float] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        shape, units = self.experience.sampled_BT.shape, self.experience.units
        self._units_U = torch.zeros(units, dtype=torch.float64)
        self._tokens_BT = torch.zeros(shape, dtype=torch.float64)
        self._log_ratios_BT = torch.zeros(shape)
        self._moves_BT = torch.zeros(shape, dtype=torch.float64)
        self._first_U = torch.ones(units, dtype=torch.bool)
        self._metrics: dict[str, Tensor] = {}
        self._counts_U = torch.zeros(units, dtype=torch.float64)

    @cached_property
    def _distance(self) -> float:
        """In steps: how far to move the weights for a finite difference, from what the whole step does to the units."""
        units = range(self.experience.units)
        here = clones(self.update.policy)
        with torch.no_grad():
            before = [self._output(u).logprobs_BT for u in units]
            load(self.update.policy, here, self.delta, 1.0)
            after = [self._output(u).logprobs_BT for u in units]
        load(self.update.policy, here)
        most = max((a - b).abs().max().item() for a, b in zip(after, before, strict=True))
        return MOVED / most if most > 0 else 1.0

    def see(self, units_U: Tensor, weight: float) -> _Seen:
        """Measure the units of a step. The gradients of the whole mini-batch are there, and stay."""
        learner, policy = self.update.learner, self.update.policy
        scale = 1.0 if learner.parallel.loss_scale is None else learner.parallel.loss_scale.value
        seen = _Seen(units_U, [], [], [], [], [], -inner([p.grad for p in policy], self.delta) / scale)
        slopes = self._slopes(units_U.tolist())
        for u, (logprobs, values) in zip(units_U.tolist(), slopes, strict=True):
            rows = self._rows(u)
            with learner.autocast():
                output = self._output(u)
            loss = learner.algorithm.loss(output, rows, learner.batch_config)
            wanted = [*policy, output.logprobs_BT, *([] if output.values_BT is None else [output.values_BT])]
            found = torch.autograd.grad(loss.loss_sum / weight, wanted, allow_unused=True)
            seen.contributions.append(-inner(found[: len(policy)], self.delta))
            seen.tokens.append(_chained(found[len(policy) :], [logprobs, values]))
            seen.metrics.append({name: float(value) for name, value in loss.metrics.items()})
            log_ratios = (output.logprobs_BT.detach() - rows.behaviour_logprobs_BT) * rows.sampled_BT
            seen.log_ratios.append(log_ratios.cpu())
            seen.moves.append(logprobs.cpu())
        return seen

    def count(self, seen: _Seen, kept: float) -> None:
        """Add a step that was taken, with what clipping has left of it."""
        self.kept.append(kept)
        self.total += kept * seen.total
        for i, u in enumerate(seen.units_U.tolist()):
            self._units_U[u] += kept * seen.contributions[i]
            rows, longest = self._place(u, seen.tokens[i])
            self._tokens_BT[rows, :longest] += kept * seen.tokens[i]
            if self._first_U[u]:
                self._log_ratios_BT[rows, :longest] = seen.log_ratios[i]
                self._moves_BT[rows, :longest] = seen.moves[i]
            self._first_U[u] = False
            self._counts_U[u] += float(self.experience.loss_weights_U[u])
            for name, value in seen.metrics[i].items():
                empty_U = torch.zeros(self.experience.units, dtype=torch.float64)
                self._metrics.setdefault(name, empty_U)[u] += value

    def result(self) -> Contributions:
        """All steps together."""
        metrics = {name: sums_U / self._counts_U for name, sums_U in self._metrics.items()}
        return Contributions(
            units_U=self._units_U,
            tokens_BT=self._tokens_BT,
            total=self.total,
            steps=len(self.kept),
            kept=self.kept,
            log_ratios_BT=self._log_ratios_BT,
            moves_BT=self._moves_BT,
            seen_U=~self._first_U,
            metrics=metrics,
        )

    def _place(self, unit: int, part: Tensor) -> tuple[slice, int]:
        size = self.experience.rows_per_unit
        return slice(unit * size, (unit + 1) * size), part.shape[1]

    def _rows(self, unit: int) -> Experience:
        learner = self.update.learner
        device = learner.parallel.device_of(learner.policy)
        return self.experience.select([unit]).map(lambda _, x: x.to(device))

    def _output(self, unit: int) -> PolicyOutput:
        rows, learner = self._rows(unit), self.update.learner
        temperature = learner.config.generation.temperature
        how = temperature, True, rows.positions_BT, rows.routes_BTLE
        return learner.parallel.forward(rows.tokens_BT, rows.sampled_BT.cpu(), *how)

    def _slopes(self, units: list[int]) -> list[tuple[Tensor, Tensor | None]]:
        """The derivatives of log-probabilities and values of each unit along the step, from where the weights are."""
        policy, distance = self.update.policy, self._distance
        here, found = clones(policy), dict[int, Any]()
        with torch.no_grad():
            for multiple, share in _STENCIL:
                load(policy, here, self.delta, multiple * distance)
                for u in units:
                    output = self._output(u)
                    parts = (output.logprobs_BT, output.values_BT)
                    scaled = [None if x is None else x.double() * (share / distance) for x in parts]
                    found[u] = [_plus(a, b) for a, b in zip(found.get(u, (None, None)), scaled, strict=True)]
        load(policy, here)
        return [tuple(found[u]) for u in units]


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _chained(gradients: Sequence[Tensor | None], slopes: Sequence[Tensor | None]) -> Tensor:
    """Minus the sum of gradient times slope of what is there, on the CPU."""
    pairs = [(g, s) for g, s in zip(gradients, slopes, strict=False) if g is not None and s is not None]
    return -sum((g.double() * s for g, s in pairs), torch.zeros_like(next(s for s in slopes if s is not None))).cpu()
