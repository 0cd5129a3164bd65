"""Simulates every choice of split and staleness, and proposes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from async_rlhf.studies.plan.config import PlanConfig
from async_rlhf.studies.plan.one_queue import one_queue
from async_rlhf.studies.plan.simulate import Outcome, simulate
from async_rlhf.studies.plan.times import DoesNotFitError, Split, Times, draw

GAIN = 1.2
"""Speed-up from which on one queue over batches is proposed: with it, timing decides which weights draw a token."""


@dataclass(frozen=True)
class Choice:
    """One split of the devices.

    Args:
        split: the division of the devices.
        outcomes: by staleness; empty if the split is impossible.
        why_not: what makes it impossible.
    """

    split: Split
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    why_not: str = ""

    @property
    def fastest(self) -> float:
        """Seconds from batch to batch at the best staleness."""
        return min(outcome.step_seconds for outcome in self.outcomes.values())

    def smallest(self, limit: float) -> int | None:
        """The smallest staleness that takes no longer than the limit."""
        return next((s for s, outcome in sorted(self.outcomes.items()) if outcome.step_seconds <= limit), None)

    def enough(self, tolerance: float) -> int:
        """The smallest staleness that loses no more than the tolerance: it hides the variation of the times."""
        staleness = self.smallest(self.fastest * (1 + tolerance))
        assert staleness is not None
        return staleness


@dataclass(frozen=True)
class Proposal:
    """The settings to use, and their gain.

    Args:
        choice: the split.
        staleness: S.
        synchronous: the fastest synchronous step in seconds, and its split.
        in_flight: the speed-up by one queue over batches, where that is proposed; else 1.
    """

    choice: Choice
    staleness: int
    synchronous: tuple[float, Split]
    in_flight: float = 1.0

    @property
    def outcome(self) -> Outcome:
        return self.choice.outcomes[self.staleness]

    @property
    def speed_up(self) -> float:
        """Speed-up over the fastest synchronous choice."""
        return self.synchronous[0] / self.outcome.step_seconds


def splits(devices: int, degrees: Iterable[int] = (1,)) -> Iterator[Split]:
    """All devices in turn, and every way to divide them, with so many for each generator."""
    for each in degrees:
        if each <= devices:
            yield Split(devices // each, devices, True, each)
        for generators in range(1, -(-devices // each)):
            yield Split(generators, devices - generators * each, tensor_parallel=each)


def try_split(times: Times, split: Split, config: PlanConfig) -> Choice:
    """Simulate one split at every staleness."""
    try:
        rows = times.batches(split)
    except DoesNotFitError as error:
        return Choice(split, why_not=str(error))
    work = draw(rows, config.variation, config.batches, config.seed)
    speeds = [*config.scaling.speeds, *[1.0] * split.generators][: split.generators]
    work = replace(work, speeds=speeds, eval_steps=config.workload.eval_steps or 0 if work.evaluate else 0)
    if config.workload.in_flight:
        work = one_queue(work, config.workload, config.variation.lengths, config.seed, rows[0].load)
    # In turn, nothing overlaps, so nothing slows down.
    staleness = (0,) if split.in_turn else range(config.max_staleness + 1)
    return Choice(split, {s: simulate(work, s, config.overlap_slowdown) for s in staleness})


def search(times: Times, devices: int, config: PlanConfig) -> list[Choice]:
    """Every split of this many devices; impossible ones with the reason."""
    degrees = times.degrees() if config.workload.tensor_parallel is None else [config.workload.tensor_parallel]
    return [try_split(times, split, config) for split in splits(devices, degrees)]


def in_flight(times: Times, choices: list[Choice], config: PlanConfig) -> list[Choice]:
    """With one queue over batches, those splits again that may be the fastest with it: a generator then takes as long
    as completions are on average, and not as the longest.
    """
    shorter = (config.workload.response_tokens or 1.0) / (config.workload.response_length or 1.0)

    def least(choice: Choice) -> float:
        row = times.batches(choice.split)[0]
        return max(sum(row.generate) / choice.split.generators * shorter, row.learn + row.publish)

    possible = [choice for choice in choices if choice.outcomes and not choice.split.in_turn]
    best = sorted(possible, key=least)[: config.rows]
    queued = replace(config, workload=replace(config.workload, in_flight=True), batches=8 * (config.max_staleness + 1))
    return [try_split(times, choice.split, queued) for choice in best]


def propose(choices: list[Choice], tolerance: float, in_turn: bool) -> Proposal | None:
    """Among choices within the tolerance of the fastest, take the smallest staleness; then its fastest split.

    Args:
        choices: all that were simulated.
        tolerance: a share of the time.
        in_turn: whether all devices in turn may be proposed even if there is another choice.

    Returns:
        None if no split is possible.
    """
    possible = [choice for choice in choices if choice.outcomes]
    if not possible:
        return None
    proposed = [choice for choice in possible if in_turn or not choice.split.in_turn] or possible
    limit = min(choice.fastest for choice in proposed) * (1 + tolerance)
    able = [(s, choice) for choice in proposed if (s := choice.smallest(limit)) is not None]
    staleness, chosen = min(able, key=lambda pair: (pair[0], pair[1].outcomes[pair[0]].step_seconds))
    synchronous = min(((c.outcomes[0].step_seconds, c.split) for c in possible), key=lambda pair: pair[0])
    return Proposal(chosen, staleness, synchronous)
