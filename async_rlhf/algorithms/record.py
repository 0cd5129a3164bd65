"""The record that defines an algorithm: all that the rest of the package knows of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from async_rlhf.config.base import require
from async_rlhf.config.online import OnlineConfig
from async_rlhf.types import Experience, LossOutput

Credit: TypeAlias = Callable[[Experience, Any], Experience]
Loss: TypeAlias = Callable[[Any, Experience, Any], LossOutput]


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm must know about a batch before it assigns credit."""

    reference: bool = False
    """Log-probabilities by the reference policy, so the run loads one."""
    old_logprobs: bool = False
    """Log-probabilities by the policy before the update."""
    values: bool = False
    """Values of the text before each sampled token, so the run has a value model or head and trains it too."""
    end_values: bool = False
    """Values of whole texts."""
    shared_trunk: bool = False
    """Whether values come from a head on the policy, and not from a model of their own."""
    value_learning_rate: float | None = None
    """Learning rate of the value model or head; None for the policy's."""

    @property
    def copies_reward(self) -> bool:
        """Whether the value model starts as a copy of the reward model, unless one is given."""
        return self.values and not self.shared_trunk


def nothing(config: OnlineConfig) -> Needs:
    """For algorithms that need only scores."""
    return Needs()


def every_sample(config: OnlineConfig) -> int:
    """For algorithms that train on all K samples of a prompt."""
    return config.samples_per_prompt


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One objective. It knows no model, no optimiser and no schedule."""

    name: str
    """The name that configurations and checkpoints use."""
    config: type[OnlineConfig]
    """Its configuration; the keys of ``train`` are its fields."""
    credit: Credit
    """(experience, config) -> experience to train on.

    It gets all samples, K adjacent rows per prompt and one row per unit, with what the algorithm needs. It returns the
    rows to train on, with what their loss needs and with each unit's weight.
    """
    loss: Loss
    """(output of the policy, experience of the same rows, config) -> sums over these rows.

    The output is a PolicyOutput, or the scores of a reward model that is trained, (B,). The learner calls it for a few
    rows at a time and divides by the total weight of the mini-batch's units.
    """
    needs: Callable[[Any], Needs] = nothing
    """config -> what the algorithm needs."""
    rows_per_prompt: Callable[[Any], int] = every_sample
    """config -> most samples of a prompt that are trained on; for the planner."""
    rows_per_unit: int = 1
    """Rows that share a pass in any case, as the experience that ``credit`` returns says: 2 for objectives on pairs."""
    supervised: bool = False
    """Whether rows are given, and nothing is sampled whose log-probabilities could be compared."""

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", self.name) is not None
        require(named, "Algorithm.name", self.name, "must be lower-case letters, digits and underscores")
        known = isinstance(self.config, type) and issubclass(self.config, OnlineConfig)
        rule = "must be a class that is derived from OnlineConfig and is a frozen dataclass"
        require(known and self.config.__dataclass_params__.frozen, "Algorithm.config", self.config, rule)  # type: ignore
