"""Configuration of a certificate: what a staleness costs, decided pair by pair."""

from __future__ import annotations

from async_rlhf.config.base import REQUIRED, configuration, key, require
from async_rlhf.config.common import SeededConfig
from async_rlhf.studies.sweep.config import ManyRunsConfig


@configuration(kw_only=True)
class CertifyConfig(SeededConfig, ManyRunsConfig):
    """Whether staleness costs reward: pairs of runs until that is decided: ``async-rlhf certify``.

    Pairs that are done are not done again, so an interrupted certificate continues where it stopped.
    """

    staleness: int = key(REQUIRED, ge=1, main="test")
    """The staleness k that is compared with 0. Both replace what base says in train.staleness."""
    margin: float = key(REQUIRED, gt=0, main="test")
    """How much mean gold reward may be lost and still count as none. Choose it before the first pair; it stays."""
    error: float = key(0.05, gt=0, lt=0.5, main="test")
    """A wrong "non-inferior" has at most this chance. So has a wrong "inferior"."""
    min_pairs: int = key(5, ge=2, main="test")
    """Pairs before which nothing is decided. More of them show rare runs that break down."""
    bound: float | None = key(None, gt=0)
    """A pair that loses more than this is a breakdown, and counts as a loss of this in the mean; a gain counts as this
    at most. null for ten times the margin."""
    of_gain: bool = False
    """margin and bound are shares of what training gains: the gold reward of a run at S = 0 with the first seed, less
    that of the model it starts from. That run is in no pair; pairs begin with the next seed."""
    breakdown_rate: float = key(0.1, gt=0, lt=1)
    """Non-inferior is only what breaks down in fewer pairs than this share. A smaller one takes more pairs."""
    max_pairs: int = key(60, ge=2, le=10_000, why="a pair is two runs", role="speed", main="test")
    """Pairs after which the certificate ends undecided. It may be raised later: the error rates hold for any number."""
    seed = key(0, main="test")
    """Of the first pair; the next has the next number. It decides prompts and sampling of both runs, and is added to
    held_out.seed, with which both answer the held-out prompts."""

    def check(self) -> None:
        super().check()
        rule = f"must be at least min_pairs, which is {self.min_pairs}"
        require(self.max_pairs >= self.min_pairs, "max_pairs", self.max_pairs, rule)
        rule = f"must be above the margin, which is {self.margin:g}"
        require(self.bound is None or self.bound > self.margin, "bound", self.bound, rule)
        judged = self.held_out.get("seed", 0)
        require(type(judged) is int, "held_out.seed", judged, "must be a whole number")
        last = self.seed + self.of_gain + self.max_pairs - 1 + judged
        rule = f"must be smaller: max_pairs {self.max_pairs} and held_out.seed lead beyond 2^32 - 1"
        require(last < 2**32, "seed", self.seed, rule)
