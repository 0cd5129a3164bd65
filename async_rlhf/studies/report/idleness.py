"""Who worked and who waited, from the spans of a run's traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from async_rlhf.studies.report.reading import Span
from async_rlhf.system.trace import LEARNER

Interval = tuple[float, float]
GENERATES = ("generate", "load", "evaluate")
"""What a generator does."""


class Idleness(NamedTuple):
    """Shares of time, of all starts of a run together.

    Args:
        learner: name of a span, "wait" or "other" -> share of the learner's time, from its first span to its last.
            "wait" is what is left of it without what the learner did meanwhile.
        generators: the share of their time, each from its first span to its last, in which they did nothing; None if
            none has a track of its own, because the learner samples itself.
        number: how many generators.
    """

    learner: Mapping[str, float]
    generators: float | None
    number: int

    @property
    def text(self) -> str:
        """In words."""
        waited = f"The learner waited {self.learner.get('wait', 0.0):.0%} of the time"
        if self.generators is None:
            sampling = self.learner.get("generate", 0.0)
            return f"{waited} and sampled itself for {sampling:.0%} of it: both sides took turns."
        who = "its generator" if self.number == 1 else f"its {self.number} generators"
        return f"{waited}, {who} {self.generators:.0%}."


def idleness(traces: Iterable[Sequence[Span]]) -> Idleness | None:
    """Who waited how long; None if no trace has a span of the learner."""
    spent: defaultdict[str, float] = defaultdict(float)
    whole = there = busy = 0.0
    names: set[str] = set()
    for spans in traces:
        learner, generators = defaultdict[str, list[Interval]](list), defaultdict[str, list[Interval]](list)
        for span in spans:
            if span.why:  # a fault is no work
                continue
            if span.track == LEARNER:
                learner[span.name].append((span.start, span.end))
            elif span.name in GENERATES:  # one that has several batches under way has several tracks
                generators[span.track.partition(", ")[0]].append((span.start, span.end))
        names |= generators.keys()
        whole += _lasted([interval for intervals in learner.values() for interval in intervals])
        there += sum(map(_lasted, generators.values()))
        busy += sum(length(union(intervals)) for intervals in generators.values())
        # Each moment counts once, and from what is inside to what is around it: an evaluation waits, and while it
        # waits the learner may sample or compare.
        taken: list[Interval] = []
        for name in sorted(learner, key=lambda name: {"wait": 1, "evaluate": 2}.get(name, 0)):
            before, taken = length(taken), union([*taken, *learner[name]])
            spent[name] += length(taken) - before
    if whole <= 0:
        return None
    shares = {name: seconds / whole for name, seconds in spent.items()}
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    return Idleness(shares, 1 - busy / there if there > 0 else None, len(names))


def _lasted(intervals: Sequence[Interval]) -> float:
    """From the first to the last moment."""
    return max((end for _, end in intervals), default=0.0) - min((start for start, _ in intervals), default=0.0)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments, as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
