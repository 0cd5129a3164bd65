"""Measures that part from the score: what a policy looks like that exploits its reward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from scipy.special import stdtr

SHARE = 0.1
"""Share of the logged batches that "the start" and "the end" are."""
LEAST = 8
"""Logged batches that these are at least, but for runs of fewer than three times as many."""
FEWEST = 6
"""Logged batches from which start and end are compared."""
CHANCE = 1e-4
"""How likely a difference may be where there is none: so small because runs have many measures."""
KL_PER_TOKEN = 0.05
"""Nats per token to the reference, below which its growth is nothing to tell."""
KL_RISE = 1.25
"""Factor by which KL grows over the second half of a run while the score does not."""
ENTROPY = 0.3
"""Share of the entropy at the start that is left."""
LENGTH = 1.8
"""Factor by which completions have grown longer."""
DEVIATION = 1.5
"""Factor by which reward models differ more from each other."""
DEVIATES = "_deviation"
"""The end of the names of rewards that say how much reward models differ."""

Row = Mapping[str, float]
"""A line of metrics.jsonl."""


class Mean:
    """Some values: their mean, which is NaN without any, and its standard error."""

    def __init__(self, values: Sequence[float]) -> None:
        self.mean = fmean(values) if values else math.nan
        self.count = len(values)
        # Of a very large or small value the square is no number.
        largest = max((abs(value - self.mean) for value in values), default=0.0) or 1.0
        squares = sum(((value - self.mean) / largest) ** 2 for value in values)
        single = self.count < 2
        self.error = 0.0 * self.mean if single else largest * math.sqrt(squares / (self.count - 1) / self.count)

    def __format__(self, form: str) -> str:
        return format(self.mean, form)

    def rises_to(self, other: Mean) -> float:
        """By how many standard errors the other mean is above this one."""
        error, difference = math.hypot(self.error, other.error), other.mean - self.mean
        return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0

    def surely_below(self, other: Mean) -> bool:
        """Whether the other mean is so far above this one that chance is no explanation: Welch's t-test."""
        t = self.rises_to(other)
        if not t > 0 or math.isinf(t):  # values that are all the same say little if they are few
            return t > 0 and min(self.count, other.count) >= LEAST
        largest = max(self.error, other.error)
        squares = [(part.error / largest) ** 2 for part in (self, other)]
        parts = zip(squares, (self, other), strict=True)
        freedom = sum(squares) ** 2 / sum(square**2 / (part.count - 1) for square, part in parts if square)
        return float(stdtr(freedom, -t)) < CHANCE


class StartAndEnd:
    """The start, the middle and the end of one metric. What it has not is NaN, which is beyond no threshold.

    Args:
        values: of the logged batches.
        least: of how many of them each is the mean, if there are so many.
    """

    def __init__(self, values: Sequence[float], least: int = LEAST) -> None:
        count = max(2, min(least, len(values) // 3), round(SHARE * len(values)))
        middle, quarter = len(values) // 2, max(1, len(values) // 4)
        self.enough = len(values) >= FEWEST
        self.start, self.end = Mean(values[:count]), Mean(values[-count:])
        self.middle = Mean(values[max(0, middle - count // 2 - 1) : middle + count // 2 + 1])
        self.third_quarter, self.last_quarter = Mean(values[-2 * quarter : -quarter]), Mean(values[-quarter:])

    @property
    def rises(self) -> bool:
        """From start to end."""
        return self.enough and self.start.surely_below(self.end)

    @property
    def falls(self) -> bool:
        """From start to end."""
        return self.enough and self.end.surely_below(self.start)


class Drift(NamedTuple):
    """A measure that has drifted from the score."""

    title: str
    text: str


def values_of(rows: Sequence[Row], key: str) -> list[float]:
    """Of the lines that have it."""
    return [row[key] for row in rows if isinstance(row.get(key), (int, float))]


def drifts(rows: Sequence[Row], weights: Sequence[float] = ()) -> Iterator[Drift]:
    """What has drifted from the score by now.

    Args:
        rows: lines of metrics.jsonl, those of training.
        weights: ``reward_weights``; one below 0 is of a penalty, which is to fall.
    """
    score, kl, entropy, length = (
        StartAndEnd(values_of(rows, key))
        for key in ("objective/scores", "objective/kl", "policy/entropy_avg", "val/response_length")
    )
    up = f"training score rose from {score.start:.3g} to {score.end:.3g}"
    far = length.end.mean > 0 and kl.end.mean / length.end.mean >= KL_PER_TOKEN
    grows = kl.enough and far and kl.middle.mean > 0 and kl.end.mean / kl.middle.mean >= KL_RISE
    if grows and kl.middle.surely_below(kl.end) and score.third_quarter.rises_to(score.last_quarter) < 1:
        yield Drift(
            "KL grows without a gain",
            f"Over the second half KL went from {kl.middle:.3g} to {kl.end:.3g} nats, the score from "
            f"{score.third_quarter:.3g} to {score.last_quarter:.3g}. An earlier checkpoint is as good and closer to "
            "the reference; early_stopping_patience ends a run there.",
        )
    if entropy.enough and entropy.start.mean > 0 and entropy.end.mean <= ENTROPY * entropy.start.mean:
        yield Drift(
            "The policy has become narrow",
            f"Entropy per token fell from {entropy.start:.3g} to {entropy.end:.3g} nats"
            f"{f'; the {up}' if score.rises else ''}. Read samples: it may have found one phrase that the reward "
            "likes. A larger beta or KL penalty, or a lower learning rate, keeps it open.",
        )
    if not score.rises:
        return
    for key in rewards_of(rows, weights):
        part, name = StartAndEnd(values_of(rows, key)), key.removeprefix("reward/")
        if key.endswith(DEVIATES):
            if part.rises and part.end.mean >= DEVIATION * part.start.mean:
                yield Drift(
                    "The reward models disagree more and more",
                    f"The {up}, and {name} from {part.start:.3g} to {part.end:.3g}. The policy finds what only some "
                    "of them like: take their minimum or mean_less_deviation, or use an earlier checkpoint.",
                )
        elif part.falls:
            yield Drift(
                "The rewards part",
                f"The {up}, but {name} fell from {part.start:.3g} to {part.end:.3g}; it was highest about batch "
                f"{_peak(rows, key):.0f}. If it says what you want, the policy exploits the others: use an earlier "
                "checkpoint, give it a larger weight (reward_weights), or stop at its held-out peak.",
            )
    if length.enough and length.start.mean > 0 and length.end.mean >= LENGTH * length.start.mean:
        yield Drift(
            "Answers grow with the score",
            f"The {up}, the length from {length.start:.3g} to {length.end:.3g} tokens. The reward may pay for length: "
            "compare at equal length (async-rlhf evaluate), or set length_penalty.",
        )


def rewards_of(rows: Sequence[Row], weights: Sequence[float] = ()) -> list[str]:
    """The metrics of a run's rewards, but for those that count against the score."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key.startswith("reward/")))
    functions = [key for key in keys if key not in ("reward/model", "reward/skipped")]
    against = {key for key, weight in zip(functions, weights or [1.0] * len(functions), strict=False) if weight < 0}
    return [key for key in keys if key != "reward/skipped" and key not in against]


def _peak(rows: Sequence[Row], key: str) -> float:
    """The batch about which a metric was highest: in the middle of the best run of logged batches."""
    having = [row for row in rows if key in row]
    count = max(2, round(SHARE * len(having)))
    best = max(range(len(having) - count + 1), key=lambda i: fmean(row[key] for row in having[i : i + count]))
    return having[best + count // 2]["batch"]
