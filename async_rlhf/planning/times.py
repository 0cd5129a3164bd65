"""Seconds of a batch: for a split of the devices, and how they vary from batch to batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

import numpy as np

from async_rlhf.config.plan import ScalingConfig, SecondsConfig, VariationConfig
from async_rlhf.planning.simulate import Work


@dataclass(frozen=True, slots=True)
class Split:
    """The division of the devices. ``in_turn``: all devices alternate between both tasks, synchronous and inline."""

    generators: int
    learners: int
    in_turn: bool = False


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Seconds of one batch.

    Args:
        generate: of each generator for its share, loading weights included.
        learn: of the learner up to the update.
        publish: of publishing the weights.
        other: of the learner after the batch.
        rewards: of the reward functions, which run beside training.
    """

    generate: tuple[float, ...]
    learn: float
    publish: float
    other: float = 0.0
    rewards: float = 0.0


class DoesNotFitError(ValueError):
    """A split that the devices' memory, or the batch, does not allow. The message says what is missing."""


class Times(Protocol):
    """A source of times."""

    def batches(self, split: Split) -> Sequence[BatchTimes]:
        """One or several batches, as they would be with this split.

        Raises:
            DoesNotFitError: the split is impossible.
        """


@dataclass(frozen=True)
class Scaled:
    """Times of one split, scaled to others.

    Args:
        rows: the measured batches, or the one that was given.
        measured: the split that they were measured with.
        scaling: how times change with the number of devices.
        prompts: prompts of a batch, if known: a split must not leave a generator without prompts.
    """

    rows: Sequence[BatchTimes]
    measured: Split
    scaling: ScalingConfig
    prompts: int | None = None

    def batches(self, split: Split) -> Sequence[BatchTimes]:
        """The rows, with times that shrink as :class:`~async_rlhf.config.plan.ScalingConfig` says.

        A generator beyond those measured takes the seconds of another row: it samples other prompts and varies
        independently. Fewer generators than measured take their mean.
        """
        if self.prompts is not None and split.generators > self.prompts:
            raise DoesNotFitError(f"{split.generators} generators are more than the {self.prompts} prompts of a batch")
        generate = _shrunk(self.scaling.generate_fixed, self.measured.generators, split.generators)
        learn = _shrunk(self.scaling.learn_fixed, self.measured.learners, split.learners)
        return [
            BatchTimes(
                tuple(self._generate(i, g, split) * generate for g in range(split.generators)),
                row.learn * learn,
                0.0 if split.in_turn else row.publish,
                row.other,
                row.rewards,
            )
            for i, row in enumerate(self.rows)
        ]

    def _generate(self, row: int, generator: int, split: Split) -> float:
        if split.generators < self.measured.generators:
            return fmean(self.rows[row].generate)
        further, known = divmod(generator, self.measured.generators)
        return self.rows[(row + further) % len(self.rows)].generate[known]


def _shrunk(fixed: float, measured: int, now: int) -> float:
    return fixed + (1 - fixed) * measured / now


def given(seconds: SecondsConfig, scaling: ScalingConfig, prompts: int | None) -> Scaled:
    """The times that the user gives."""
    assert seconds.generate is not None
    assert seconds.train is not None
    measured = Split(scaling.generators or 1, scaling.learners)
    learn = seconds.score + seconds.train
    generate = (seconds.generate,) * measured.generators
    row = BatchTimes(generate, learn, seconds.publish, seconds.other, seconds.rewards)
    return Scaled([row], measured, scaling, prompts)


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
    return Work(generate_BG.tolist(), learn_B.tolist(), *(seconds_B[order_B].tolist() for seconds_B in rest))


_LEARNERS = ("learn", "publish", "other", "rewards")


def _varied(rows_BX: np.ndarray, variation: float | None, order_B: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if variation is None:
        return rows_BX[order_B]
    sigma = math.sqrt(math.log1p(variation**2))  # of the lognormal distribution with that standard deviation / mean
    factors_XB = np.exp(sigma * rng.standard_normal((rows_BX.shape[1], len(order_B))))
    return rows_BX.mean(axis=0) * (factors_XB / factors_XB.mean(axis=1, keepdims=True)).T
