"""Where a run's measures part from its score, which is what a policy looks like that exploits its reward.

The run looks after logged batches, and the page about it at its end: by the same rules, with the same thresholds.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scipy.special import stdtr

logger = logging.getLogger(__name__)

PART = 0.1
"""Share of the logged batches that "the start" and "the end" are."""
LEAST = 8
"""Logged batches that these are at least, but for runs of fewer than three times as many."""
FEWEST = 6
"""Logged batches from which start and end are compared."""
CHANCE = 1e-4
"""How likely a difference may be where there is none: so small because a run looks so often."""
EACH = 100
"""Logged batches that a run looks after one by one; later it looks each time that there is one in so many more."""
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

_READ = {"batch", "objective/scores", "objective/kl", "policy/entropy_avg", "val/response_length"}

Row = Mapping[str, float]
"""A line of metrics.jsonl."""


class Part:
    """Some values: their mean, which is NaN without any, and its standard error."""

    def __init__(self, values: Sequence[float]) -> None:
        self.mean = fmean(values) if values else math.nan
        self.count = len(values)
        # Of a very large or small value the square is no number.
        largest = max((abs(value - self.mean) for value in values), default=0.0) or 1.0
        squares = sum(((value - self.mean) / largest) ** 2 for value in values)
        one = self.count < 2
        self.error = 0.0 * self.mean if one else largest * math.sqrt(squares / (self.count - 1) / self.count)

    def __format__(self, form: str) -> str:
        return format(self.mean, form)

    def rises_to(self, other: Part) -> float:
        """By how many standard errors the other mean is above this one."""
        error, difference = math.hypot(self.error, other.error), other.mean - self.mean
        return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0

    def surely_below(self, other: Part) -> bool:
        """Whether the other mean is so far above this one that chance is no explanation: Welch's t-test."""
        t = self.rises_to(other)
        if not t > 0 or math.isinf(t):  # values that are all the same say little if they are few
            return t > 0 and min(self.count, other.count) >= LEAST
        largest = max(self.error, other.error)
        squares = [(part.error / largest) ** 2 for part in (self, other)]
        parts = zip(squares, (self, other), strict=True)
        freedom = sum(squares) ** 2 / sum(square**2 / (part.count - 1) for square, part in parts if square)
        return float(stdtr(freedom, -t)) < CHANCE


class Ends:
    """The start, the middle and the end of one metric. What it has not is NaN, which is beyond no threshold.

    Args:
        values: of the logged batches.
        least: of how many of them each is the mean, if there are so many.
    """

    def __init__(self, values: Sequence[float], least: int = LEAST) -> None:
        count = max(2, min(least, len(values) // 3), round(PART * len(values)))
        middle, quarter = len(values) // 2, max(1, len(values) // 4)
        self.enough = len(values) >= FEWEST
        self.start, self.end = Part(values[:count]), Part(values[-count:])
        self.middle = Part(values[max(0, middle - count // 2 - 1) : middle + count // 2 + 1])
        self.third_quarter, self.last_quarter = Part(values[-2 * quarter : -quarter]), Part(values[-quarter:])

    @property
    def rises(self) -> bool:
        """From start to end."""
        return self.enough and self.start.surely_below(self.end)

    @property
    def falls(self) -> bool:
        """From start to end."""
        return self.enough and self.end.surely_below(self.start)


class Parting(NamedTuple):
    """A measure that has parted from the score."""

    metric: str
    title: str
    text: str


def values_of(rows: Sequence[Row], key: str) -> list[float]:
    """Of the lines that have it."""
    return [row[key] for row in rows if isinstance(row.get(key), (int, float))]


def partings(rows: Sequence[Row], weights: Sequence[float] = (), said: Collection[str] = ()) -> Iterator[Parting]:
    """What has parted by now.

    Args:
        rows: lines of metrics.jsonl, those of training.
        weights: ``reward_weights``; one below 0 is of a penalty, which is to fall.
        said: rewards that nothing more is to be said of.
    """
    score, kl, entropy, length = (
        Ends(values_of(rows, key))
        for key in ("objective/scores", "objective/kl", "policy/entropy_avg", "val/response_length")
    )
    up = f"training score rose from {score.start:.3g} to {score.end:.3g}"
    far = length.end.mean > 0 and kl.end.mean / length.end.mean >= KL_PER_TOKEN
    grows = kl.enough and far and kl.middle.mean > 0 and kl.end.mean / kl.middle.mean >= KL_RISE
    if grows and kl.middle.surely_below(kl.end) and score.third_quarter.rises_to(score.last_quarter) < 1:
        yield Parting(
            "objective/kl",
            "KL grows without a gain",
            f"Over the second half KL went from {kl.middle:.3g} to {kl.end:.3g} nats, the score from "
            f"{score.third_quarter:.3g} to {score.last_quarter:.3g}. An earlier checkpoint is as good and closer to "
            "the reference; stop_at ends a run there.",
        )
    if entropy.enough and entropy.start.mean > 0 and entropy.end.mean <= ENTROPY * entropy.start.mean:
        yield Parting(
            "policy/entropy_avg",
            "The policy has become narrow",
            f"Entropy per token fell from {entropy.start:.3g} to {entropy.end:.3g} nats"
            f"{f'; the {up}' if score.rises else ''}. Read samples: it may have found one phrase that the reward "
            "likes. A larger beta or KL penalty, or a lower learning rate, keeps it open.",
        )
    if not score.rises:
        return
    for key in rewards_of(rows, weights):
        if key in said:
            continue
        part, name = Ends(values_of(rows, key)), key.removeprefix("reward/")
        if key.endswith(DEVIATES):
            if part.rises and part.end.mean >= DEVIATION * part.start.mean:
                yield Parting(
                    key,
                    "The reward models disagree more and more",
                    f"The {up}, and {name} from {part.start:.3g} to {part.end:.3g}. The policy finds what only some "
                    "of them like: take their minimum or mean_less_deviation, or use an earlier checkpoint.",
                )
        elif part.falls:
            yield Parting(
                key,
                "The rewards part",
                f"The {up}, but {name} fell from {part.start:.3g} to {part.end:.3g}; it was highest about batch "
                f"{_peak(rows, key):.0f}. If it says what you want, the policy exploits the others: use an earlier "
                "checkpoint, give it a larger weight (reward_weights), or stop_at its held-out peak.",
            )
    if length.enough and length.start.mean > 0 and length.end.mean >= LENGTH * length.start.mean:
        yield Parting(
            "val/response_length",
            "Answers grow with the score",
            f"The {up}, the length from {length.start:.3g} to {length.end:.3g} tokens. The reward may pay for length: "
            "compare at equal length (async-rlhf evaluate), or set length_penalty.",
        )


def rewards_of(rows: Sequence[Row], weights: Sequence[float] = ()) -> list[str]:
    """The metrics of a run's rewards, but for those that count against the score."""
    found = list(dict.fromkeys(key for row in rows for key in row if key.startswith("reward/")))
    functions = [key for key in found if key not in ("reward/model", "reward/skipped")]
    against = {key for key, weight in zip(functions, weights or [1.0] * len(functions), strict=False) if weight < 0}
    return [key for key in found if key != "reward/skipped" and key not in against]


def _peak(rows: Sequence[Row], key: str) -> float:
    """The batch about which a metric was highest: in the middle of the best run of logged batches."""
    having = [row for row in rows if key in row]
    count = max(2, round(PART * len(having)))
    best = max(range(len(having) - count + 1), key=lambda i: fmean(row[key] for row in having[i : i + count]))
    return having[best + count // 2]["batch"]


class Watch:
    """Logs one warning for each measure that parts from the score, when it does.

    Args:
        weights: ``reward_weights``.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._rows: list[Row] = []
        self.said: set[str] = set()
        """Metrics that have been warned of."""

    def resume(self, path: Path | None, said: Sequence[str]) -> None:
        """Go on behind the lines of a metrics.jsonl, if there is one, and what has been warned of."""
        lines = map(json.loads, [] if path is None else path.read_text(encoding="utf-8").splitlines())
        self._rows = [row for row in lines if "completions" in row]
        self.said = set(said)

    def look(self, row: Mapping[str, Any]) -> None:
        """See the metrics of one more batch."""
        self._rows.append({key: x for key, x in row.items() if key in _READ or key.startswith("reward/")})
        count = len(self._rows)
        if count % max(1, count // EACH):  # it reads all of them: so all looks together take time linear in the run
            return
        with suppress(ArithmeticError):  # of numbers that are too large: no reason to end a run
            for parting in partings(self._rows, self._weights, self.said):
                if parting.metric not in self.said:
                    self.said.add(parting.metric)
                    logger.warning("WARNING: batch %d: %s. %s", row["batch"], parting.title.lower(), parting.text)
