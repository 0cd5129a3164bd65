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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

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


@dataclass
class Contributions:
    """See the top of this file. Positive: the step follows what the unit or the token asks for."""

    units_U: Tensor
    """(U,) float64."""
    tokens_BT: Tensor
    """(B, T) float64; by a finite difference, so they add up to those of units only about."""
    total: float
    """Of the whole batch, from the gradients that the learner itself computed."""
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

    @property
    def steps(self) -> int:
        """Optimiser steps that were taken."""
        return len(self.kept)


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
        seen, total = self._meter.see(units_U, weight)
        norms = super().step(limit)
        if norms is not None:  # else float16 overflowed, and nothing moved
            self._meter.count(seen, total, kept=min(1.0, limit / (norms[0] + 1e-6)))
        return norms


class _Seen(NamedTuple):
    """What was measured of a unit before one step, without what clipping leaves."""

    unit: int
    contribution: float
    tokens_BT: Tensor
    metrics: dict[str, float]
    log_ratios_BT: Tensor
    moves_BT: Tensor


class _Meter:
    """Measures, and adds up over steps."""

    def __init__(self, update: RepeatableUpdate, experience: Experience, delta: Sequence[Tensor]) -> None:
        self.update, self.experience, self.delta = update, experience, delta
        nothing_U = torch.zeros(experience.units, dtype=torch.float64)
        nothing_BT = torch.zeros(experience.sampled_BT.shape, dtype=torch.float64)
        self._found = Contributions(
            units_U=nothing_U.clone(),
            tokens_BT=nothing_BT.clone(),
            total=0.0,
            kept=[],
            log_ratios_BT=nothing_BT.float(),
            moves_BT=nothing_BT,
            seen_U=nothing_U.bool(),
            metrics={},
        )
        self._counts_U = nothing_U

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

    def see(self, units_U: Tensor, weight: float) -> tuple[list[_Seen], float]:
        """Measure the units of a step, and all together. The gradients of the whole mini-batch are there, and stay."""
        learner, policy = self.update.learner, self.update.policy
        scale = 1.0 if learner.parallel.loss_scale is None else learner.parallel.loss_scale.value
        seen, total = [], -inner([p.grad for p in policy], self.delta) / scale
        slopes = self._slopes(units_U.tolist())
        for u, (logprobs, values) in zip(units_U.tolist(), slopes, strict=True):
            rows = self._rows(u)
            with learner.autocast():
                output = self._output(u)
            loss = learner.algorithm.loss(output, rows, learner.batch_config)
            wanted = [*policy, output.logprobs_BT, *([] if output.values_BT is None else [output.values_BT])]
            found = torch.autograd.grad(loss.loss_sum / weight, wanted, allow_unused=True)
            contribution = -inner(found[: len(policy)], self.delta)
            tokens_BT = _chained(found[len(policy) :], [logprobs, values])
            metrics = {name: float(value) for name, value in loss.metrics.items()}
            log_ratios_BT = (output.logprobs_BT.detach() - rows.behaviour_logprobs_BT) * rows.sampled_BT
            seen.append(_Seen(u, contribution, tokens_BT, metrics, log_ratios_BT.cpu(), logprobs.cpu()))
        return seen, total

    def count(self, seen: Sequence[_Seen], total: float, kept: float) -> None:
        """Add a step that was taken, with what clipping has left of it."""
        found, size = self._found, self.experience.rows_per_unit
        found.kept.append(kept)
        found.total += kept * total
        for one in seen:
            u, rows, longest = one.unit, slice(one.unit * size, (one.unit + 1) * size), one.tokens_BT.shape[1]
            found.units_U[u] += kept * one.contribution
            found.tokens_BT[rows, :longest] += kept * one.tokens_BT
            if not found.seen_U[u]:
                found.log_ratios_BT[rows, :longest] = one.log_ratios_BT
                found.moves_BT[rows, :longest] = one.moves_BT
            found.seen_U[u] = True
            self._counts_U[u] += float(self.experience.loss_weights_U[u])
            for name, value in one.metrics.items():
                found.metrics.setdefault(name, torch.zeros_like(self._counts_U))[u] += value

    def result(self) -> Contributions:
        """All steps together."""
        metrics = {name: sums_U / self._counts_U for name, sums_U in self._found.metrics.items()}
        return replace(self._found, metrics=metrics)

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
