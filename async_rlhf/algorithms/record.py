"""What an algorithm is: one record, which says all that the rest of the package knows of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from async_rlhf.config.base import require
from async_rlhf.config.online import OnlineConfig
from async_rlhf.types import Experience, LossOutput, PolicyOutput

Credit: TypeAlias = Callable[[Experience, Any], Experience]
Loss: TypeAlias = Callable[[PolicyOutput, Experience, Any], LossOutput]


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm has to know of a batch before it assigns credit."""

    reference: bool = False
    """Log-probabilities by the reference policy, and so a reference policy."""
    old_logprobs: bool = False
    """Log-probabilities by the policy before the update."""
    values: bool = False
    """Values of the text before each sampled token, and so a value model or head, which is trained too."""
    end_values: bool = False
    """Values of whole texts."""
    shared_trunk: bool = False
    """Whether values come from a head on the policy, and not from a model of their own."""
    value_learning_rate: float | None = None
    """Of what gives values; None for the policy's."""


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
    """By which configurations and checkpoints know it."""
    config: type[OnlineConfig]
    """Its configuration; the keys of ``train`` are its fields."""
    credit: Credit
    """(experience, config) -> experience to train on.

    It gets all samples, K neighbouring rows a prompt and one row a unit, with what the algorithm needs. It returns the
    rows to train on, with what their loss needs and with what each unit weighs.
    """
    loss: Loss
    """(output of the policy, experience of the same rows, config) -> sums over these rows.

    The learner calls it for a few rows at a time and divides by what all units of the mini-batch weigh together.
    """
    needs: Callable[[Any], Needs] = nothing
    """config -> what it has to know."""
    rows_per_prompt: Callable[[Any], int] = every_sample
    """config -> how many samples of a prompt are trained on at most; for the planner."""

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", self.name) is not None
        require(named, "Algorithm.name", self.name, "must be lower-case letters, digits and underscores")
        known = isinstance(self.config, type) and issubclass(self.config, OnlineConfig)
        right = "must be a class that is derived from OnlineConfig and is a frozen dataclass"
        require(known and self.config.__dataclass_params__.frozen, "Algorithm.config", self.config, right)  # type: ignore
