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

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from async_rlhf.distributed.parallel import Parallel
from async_rlhf.studies.explain.update import RepeatableUpdate, clones, inner, load
from async_rlhf.types import Experience, PolicyOutput

logger = logging.getLogger(__name__)

_QUIET = 10.0
"""Seconds after which it is said how far the work is."""
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
    log_ratios_BT: Tensor
    """log pi - log mu of each sampled token, (B, T), by the policy when the update first sees it; 0 elsewhere."""
    moves_BT: Tensor
    """(B, T) float64: the derivative of each sampled token's log-probability along the whole step, when the update
    first sees it: by how much the step raises it, to first order; 0 elsewhere."""
    seen_U: Tensor
    """(U,) bool: whether a step was taken on the unit. Everything is 0 for the others, such as ties."""
    total: float = 0.0
    """Of the whole batch, from the gradients that the learner itself computed."""
    kept: list[float] = field(default_factory=list)
    """What clipping left of the gradient of each step: 1 where it was not clipped."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
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
    update.rewind()
    learner = update.learner
    parallel = learner.parallel
    meter = learner.parallel = _Meter(update, experience, delta)
    try:
        learner.update(experience, update.batch)
    finally:
        learner.parallel = parallel
    return meter.result()


class _Meter(Parallel):
    """A single process whose steps are measured, before the weights change, and added up."""

    def __init__(self, update: RepeatableUpdate, experience: Experience, delta: Sequence[Tensor]) -> None:
        learner = update.learner
        vars(self).update(vars(learner.parallel))
        self._update, self._experience, self._delta = update, experience, delta
        steps = learner.mini_batches(experience, update.batch)
        self._steps = iter([step for step in steps if step[1] > 0])
        self._found = self._nothing()
        self._weights_U = torch.zeros_like(self._found.units_U)
        """Of each unit, over the steps."""
        self._said = time.monotonic()

    def _nothing(self) -> Contributions:
        nothing_U = torch.zeros(self._experience.units, dtype=torch.float64)
        nothing_BT = torch.zeros(self._experience.sampled_BT.shape, dtype=torch.float64)
        ratios_BT = nothing_BT.float()
        return Contributions(nothing_U, nothing_BT, ratios_BT, nothing_BT.clone(), nothing_U.bool())

    def step(self, limit: float) -> list[float] | None:
        here = self._measured(*next(self._steps))
        norms = super().step(limit)
        if norms is not None:  # else float16 overflowed, and nothing moved
            self._add(here, kept=min(1.0, limit / (norms[0] + 1e-6)))
        return norms

    @cached_property
    def _distance(self) -> float:
        """In steps: how far to move the weights for a finite difference, from what the whole step does to the units."""
        units = range(self._experience.units)
        policy = self._update.policy
        here = clones(policy)
        with torch.no_grad():
            before = [self._output(u).logprobs_BT for u in units]
            load(policy, here, self._delta, 1.0)
            after = [self._output(u).logprobs_BT for u in units]
        load(policy, here)
        most = max((a - b).abs().max().item() for a, b in zip(after, before, strict=True))
        return MOVED / most if most > 0 else 1.0

    def _measured(self, units_U: Tensor, weight: float) -> Contributions:
        """The units of a step, and all together, as if nothing were clipped. The gradients of the whole mini-batch are
        there, and stay.
        """
        learner, policy, here = self._update.learner, self._update.policy, self._nothing()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        here.total = -inner([p.grad for p in policy], self._delta) / scale
        here.seen_U[units_U] = True
        slopes = self._slopes(units_U.tolist())
        for u in self._telling(list(slopes), "gradients"):
            slope = slopes[u]
            rows = self._rows(u)
            with learner.autocast():
                output = self._output(u)
            loss = learner.algorithm.loss(output, rows, learner.batch_config)
            wanted = [*policy, *_parts(output)]
            gradients = torch.autograd.grad(loss.loss_sum / weight, wanted, allow_unused=True)
            here.units_U[u] = -inner(gradients[: len(policy)], self._delta)
            places = slice(u * len(rows), (u + 1) * len(rows)), slice(rows.tokens_BT.shape[1])
            chained = [g.double() * s for g, s in zip(gradients[len(policy) :], slope, strict=True) if g is not None]
            here.tokens_BT[places] = -sum(chained, torch.zeros_like(slope[0])).cpu()
            log_ratios_BT = (output.logprobs_BT.detach() - rows.behaviour_logprobs_BT) * rows.sampled_BT
            here.log_ratios_BT[places] = log_ratios_BT.cpu()
            here.moves_BT[places] = slope[0].cpu()
            for name, value in loss.metrics.items():
                here.metrics.setdefault(name, torch.zeros_like(here.units_U))[u] = float(value)
        return here

    def _add(self, here: Contributions, kept: float) -> None:
        """Add a step that was taken, with what clipping has left of it."""
        sums, experience = self._found, self._experience
        sums.kept.append(kept)
        sums.total += kept * here.total
        sums.units_U += kept * here.units_U
        sums.tokens_BT += kept * here.tokens_BT
        new_B = (here.seen_U & ~sums.seen_U).repeat_interleave(experience.rows_per_unit)
        sums.log_ratios_BT[new_B] = here.log_ratios_BT[new_B]
        sums.moves_BT[new_B] = here.moves_BT[new_B]
        sums.seen_U |= here.seen_U
        self._weights_U += here.seen_U * experience.loss_weights_U
        for name, values_U in here.metrics.items():
            sums.metrics[name] = sums.metrics.get(name, 0.0) + values_U

    def result(self) -> Contributions:
        """All steps together."""
        metrics = {name: sums_U / self._weights_U for name, sums_U in self._found.metrics.items()}
        return replace(self._found, metrics=metrics)

    def _rows(self, unit: int) -> Experience:
        device = self.device_of(self._update.learner.policy)
        return self._experience.select([unit]).map(lambda _, x: x.to(device))

    def _output(self, unit: int) -> PolicyOutput:
        rows, temperature = self._rows(unit), self._update.learner.config.generation.temperature
        how = temperature, True, rows.positions_BT, rows.routes_BTLE
        return self.forward(rows.tokens_BT, rows.sampled_BT.cpu(), *how)

    def _telling(self, units: Sequence[int], what: str) -> Iterator[int]:
        """The units of a mini-batch, and now and then how many are done."""
        for done, unit in enumerate(units):
            if time.monotonic() - self._said > _QUIET:
                self._said = time.monotonic()
                logger.info("explain: %s of %d of %d rows or pairs", what, done, len(units))
            yield unit

    def _slopes(self, units: list[int]) -> dict[int, list[Tensor]]:
        """The derivatives of log-probabilities and values of each unit along the step, from where the weights are."""
        policy, distance = self._update.policy, self._distance
        here, slopes = clones(policy), dict[int, list[Tensor]]()
        with torch.no_grad():
            for multiple, share in _STENCIL:
                load(policy, here, self._delta, multiple * distance)
                for u in self._telling(units, "derivatives"):
                    scaled = [x.double() * (share / distance) for x in _parts(self._output(u))]
                    slopes[u] = [a + b for a, b in zip(slopes[u], scaled, strict=True)] if u in slopes else scaled
        load(policy, here)
        return slopes


def _parts(output: PolicyOutput) -> list[Tensor]:
    """What a loss depends on: log-probabilities, and values where there are some."""
    return [output.logprobs_BT] if output.values_BT is None else [output.logprobs_BT, output.values_BT]
