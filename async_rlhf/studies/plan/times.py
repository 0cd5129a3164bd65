"""Seconds of a batch: for a split of the devices, and how they vary from batch to batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

import numpy as np

from async_rlhf.studies.plan.config import ScalingConfig, SecondsConfig, VariationConfig, WorkloadConfig
from async_rlhf.studies.plan.simulate import Work


@dataclass(frozen=True, slots=True)
class Split:
    """The division of the devices. ``in_turn``: all devices alternate between both tasks, synchronous and inline.
    ``tensor_parallel``: devices of each generator.
    """

    generators: int
    learners: int
    in_turn: bool = False
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Seconds of one batch.

    Args:
        generate: of each request for a part of it, loading weights included; one for each generator, or more.
        learn: of the learner up to the update.
        publish: of the learner for publishing the weights.
        other: of the learner after the batch.
        rewards: of the reward functions, which run beside training.
        transfer: from publishing until the generators have the weights, beside the learner's work.
        evaluate: of each request for a part of an evaluation, if there are evaluations.
        load: of each generator for loading weights, if known.
        unstaged: how much longer a request is for which they do not wait in the generator's memory.
    """

    generate: tuple[float, ...]
    learn: float
    publish: float
    other: float = 0.0
    rewards: float = 0.0
    transfer: float = 0.0
    evaluate: tuple[float, ...] = ()
    load: float = 0.0
    unstaged: float = 0.0


class DoesNotFitError(ValueError):
    """A split that the devices' memory, or the batch, does not allow. The message says what is missing."""


class Times(Protocol):
    """A source of times."""

    def batches(self, split: Split) -> Sequence[BatchTimes]:
        """One or several batches, as they would be with this split.

        Raises:
            DoesNotFitError: the split is impossible.
        """

    def degrees(self) -> Sequence[int]:
        """Numbers of devices of a generator to try."""


@dataclass(frozen=True)
class Scaled:
    """Times of one split, scaled to others.

    Args:
        rows: the measured batches, or the one that was given.
        measured: the split that they were measured with.
        scaling: how times change with the number of devices.
        prompts: prompts of a batch, if known: a split must not leave a generator without prompts.
        workload: how batches are cut into requests, and how large evaluations are.
    """

    rows: Sequence[BatchTimes]
    measured: Split
    scaling: ScalingConfig
    prompts: int | None = None
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)

    def batches(self, split: Split) -> Sequence[BatchTimes]:
        """The rows, with times that shrink as :class:`~async_rlhf.studies.plan.config.ScalingConfig` says.

        A generator beyond those measured takes the seconds of another row: it samples other prompts and varies
        independently. Fewer generators than measured take their mean.
        """
        if self.prompts is not None and split.generators > self.prompts:
            raise DoesNotFitError(f"{split.generators} generators are more than the {self.prompts} prompts of a batch")
        learn = _part(self.scaling.learn_fixed, self.measured.learners / split.learners)
        return [
            replace(
                row,
                generate=self._requests(i, split),
                learn=row.learn * learn,
                publish=0.0 if split.in_turn else row.publish,
                transfer=0.0 if split.in_turn else row.transfer,
                evaluate=self._evaluation(row, split),
            )
            for i, row in enumerate(self.rows)
        ]

    def degrees(self) -> Sequence[int]:
        return (1,)

    def _requests(self, row: int, split: Split) -> tuple[float, ...]:
        seconds, measured = self.rows[row].generate, self.measured.generators
        if len(seconds) != measured:
            return seconds  # requests of so many prompts, whoever takes them
        if self.workload.prompts_per_request is not None:
            return self._cut(fmean(seconds), self.workload.prompts_per_request)
        part = _part(self.scaling.generate_fixed, measured / split.generators)
        return tuple(self._share(row, g, split) * part for g in range(split.generators))

    def _share(self, row: int, generator: int, split: Split) -> float:
        if split.generators < self.measured.generators:
            return fmean(self.rows[row].generate)
        further, known = divmod(generator, self.measured.generators)
        return self.rows[(row + further) % len(self.rows)].generate[known]

    def _cut(self, share: float, size: int) -> tuple[float, ...]:
        """Requests of so many prompts, if one of the measured size takes ``share`` seconds."""
        assert self.prompts is not None
        measured = self.prompts / self.measured.generators
        fixed = self.scaling.generate_fixed
        return tuple(share * _part(fixed, prompts / measured) for prompts in parts(self.prompts, size))

    def _evaluation(self, row: BatchTimes, split: Split) -> tuple[float, ...]:
        """Each generator's part of an evaluation."""
        if self.workload.eval_completions is None:
            return row.evaluate
        assert self.prompts is not None
        assert self.workload.samples_per_prompt is not None
        batches = self.workload.eval_completions / (self.prompts * self.workload.samples_per_prompt)
        share = sum(row.generate) / self.measured.generators
        part = _part(self.scaling.generate_fixed, batches * self.measured.generators / split.generators)
        return (share * part,) * split.generators


def parts(prompts: int, size: int) -> list[int]:
    """Prompts of each request, if a request has so many."""
    whole, rest = divmod(prompts, size)
    return [size] * whole + [rest] * bool(rest)


def _part(fixed: float, part: float) -> float:
    """How long a part of some work takes, of which a share stays however small the part is."""
    return fixed + (1 - fixed) * part


def times_of(
    seconds: SecondsConfig, scaling: ScalingConfig, prompts: int | None, workload: WorkloadConfig | None = None
) -> Scaled:
    """The times that the user gives."""
    assert seconds.generate is not None
    assert seconds.train is not None
    measured = Split(scaling.generators or 1, scaling.learners)
    learn = seconds.score + seconds.train
    generate = (seconds.generate,) * measured.generators
    row = BatchTimes(generate, learn, seconds.publish, seconds.other, seconds.rewards, seconds.transfer)
    return Scaled([row], measured, scaling, prompts, workload or WorkloadConfig())


def draw(rows: Sequence[BatchTimes], variation: VariationConfig, batches: int, seed: int) -> Work:
    """A run's worth of batches, reproducible by its seed.

    The rows come in random order, each as often as any other. If a variation is given, the mean row is
    varied instead. Either way the mean is that of the rows, so choices differ only by the variation.

    Args:
        rows: at least one.
        variation: standard deviation / mean, or None to take the rows as they are.
        batches: how many.
        seed: of the order, and of the variation.
    """
    rng = np.random.default_rng(seed)  # every split's learner draws the same; so do generators that splits share
    rounds = math.ceil(batches / len(rows))
    order_B = np.concatenate([rng.permutation(len(rows)) for _ in range(rounds)])[:batches]
    generate_BG = np.array([row.generate for row in rows])
    learn_B, *rest = (np.array([getattr(row, name) for row in rows]) for name in _LEARNERS)
    learn_B = _varied(learn_B[:, None], variation.learn, order_B, rng)[:, 0]
    generate_BG = _varied(generate_BG, variation.generate, order_B, rng)
    rest_B = {name: seconds_B[order_B].tolist() for name, seconds_B in zip(_LEARNERS[1:], rest, strict=True)}
    evaluate, unstaged = rows[0].evaluate, rows[0].unstaged
    return Work(generate_BG.tolist(), learn_B.tolist(), **rest_B, evaluate=evaluate, unstaged=unstaged)


_LEARNERS = ("learn", "publish", "other", "rewards", "transfer")


def _varied(rows_BX: np.ndarray, variation: float | None, order_B: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if variation is None:
        return rows_BX[order_B]
    sigma = math.sqrt(math.log1p(variation**2))  # of the lognormal distribution with that standard deviation / mean
    factors_XB = np.exp(sigma * rng.standard_normal((rows_BX.shape[1], len(order_B))))
    return rows_BX.mean(axis=0) * (factors_XB / factors_XB.mean(axis=1, keepdims=True)).T
