"""How much an online run trains on: its batches, its length, and how large a pass may be."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from async_rlhf.config.base import configuration, key
from async_rlhf.config.common import TOKENS, TokensOnGPU, TrainingConfig

PROMPT_CAP = 512
"""Tokens of the longest prompt where nothing is said of it and the model has room."""
UNITS_PER_PASS = 8
ANNOTATED_ROWS = 64
EPOCHS = 3.0
"""Passes over the data where nothing says how long the run is, as in TRL."""
_ONCE_THE_DEFAULT = 131_072
"""Of total_episodes: in run.yml of earlier versions it stands beside batches and num_train_epochs, without meaning."""
_LONGER = "the run becomes longer"


@dataclass(frozen=True)
class PassLimits:
    """The most that one pass may hold."""

    units: int | None
    """Pairs or completions; None for any number."""
    tokens: int | None
    """None for any number."""

    def rows(self, longest: int, rows_per_unit: int = 1) -> int:
        """Rows of the largest pass, if each has the most tokens that it can have.

        Args:
            longest: the most tokens of a row.
            rows_per_unit: of the algorithm.
        """
        by_units = [] if self.units is None else [self.units * rows_per_unit]
        by_tokens = [] if self.tokens is None else [max(rows_per_unit, self.tokens // longest)]
        return min(by_units + by_tokens)


@configuration(kw_only=True)
class SizesConfig(TrainingConfig):
    """Sizes of an online run."""

    completions_per_batch: int | None = key(None, ge=1, main="sizes")
    """Completions sampled and scored for one batch, by all ranks together, whatever the algorithm trains on: a batch is
    completions_per_batch / samples_per_prompt prompts, a multiple of num_mini_batches. null takes the size from
    per_device_train_batch_size and gradient_accumulation_steps. With it, per_device_train_batch_size only bounds a
    pass, and an optimiser step has as many passes as that takes."""
    batches: int | None = key(None, ge=1, may_change=_LONGER, main="sizes")
    """Batches to train on in all; null for total_episodes or num_train_epochs."""
    total_episodes: int | None = key(None, ge=1, may_change=_LONGER)
    """Prompts to train on in all; a multiple of the batch. Another way to say batches."""
    num_train_epochs: float | None = key(None, gt=0, may_change=_LONGER)
    """Passes over the rows of the training data instead, rounded up to whole batches; null for batches or
    total_episodes, or for 3 without these."""
    samples_per_prompt: int = key(2, ge=1, main="sizes")
    """K, completions per prompt; more give clearer pairs and better baselines but cost more sampling."""
    per_device_train_batch_size: int | None = key(None, ge=1)
    """Size of one forward and backward pass: pairs of completions for DPO, else completions. null for 8; with
    max_tokens_per_pass it is then still 8 in the size of the batch, but a pass may have any number."""
    gradient_accumulation_steps = key(1)
    """Part of the batch size, see above, unless completions_per_batch says it. An optimiser step has this many passes;
    if every completion is trained on (all algorithms but online_dpo and best_of_k), samples_per_prompt times as
    many."""
    num_mini_batches: int = key(1, ge=1)
    """N, optimiser steps per epoch over a batch."""
    num_epochs: int = key(1, ge=1)
    """T, epochs over each batch."""
    trained_prompts: int | None = key(None, ge=1)
    """Prompts of each batch that are trained on, null for all. With fewer than are sampled, those whose completions all
    have the same reward, which teach nothing, are left out first (dynamic sampling: DAPO, arXiv 2503.14476), then the
    last ones of the batch. `signal/prompts` in the log is the share of prompts whose rewards differ."""
    annotate_batch_size: int | None = key(None, ge=1)
    """Rows per pass without gradient (reference, reward and value model, old policy). null for 64, or for any number
    with annotate_max_tokens."""
    annotate_max_tokens: TokensOnGPU = key("on_gpu", TOKENS, without_gpu=None)
    """Tokens of one such pass at most, like max_tokens_per_pass; "on_gpu" takes annotate_batch_size rows."""
    max_prompt_length: int | None = key(None, ge=1)
    """Prompts with more tokens are dropped, and counted; null for 512, or less if the model has not so many positions
    besides those of the response."""

    def check(self) -> None:
        self._check_sizes()
        self._check_trained()
        super().check()

    def _check_sizes(self) -> None:
        """Refuse sizes that do not divide, or that are said twice and differ."""
        completions, per_unit = self.completions_per_batch, self.samples_per_prompt * self.num_mini_batches
        factors = (
            f"per_device_train_batch_size {self.units_by_pass} x gradient_accumulation_steps "
            f"{self.gradient_accumulation_steps} x num_mini_batches {self.num_mini_batches} x {self.parallel.ranks} "
            "ranks"
        )
        if completions is not None:
            nearest = max(1, round(completions / per_unit)) * per_unit
            rule = (
                f"must be a multiple of samples_per_prompt {self.samples_per_prompt} x num_mini_batches "
                f"{self.num_mini_batches}, such as {nearest}"
            )
            self.require(completions % per_unit == 0, "completions_per_batch", rule)
            agree = self.gradient_accumulation_steps == 1 or self.prompts_by_passes == self.batch_size
            rule = (
                f"must be {self.prompts_by_passes * self.samples_per_prompt}, as {factors} x samples_per_prompt "
                f"{self.samples_per_prompt} say, or gradient_accumulation_steps be left out"
            )
            self.require(agree, "completions_per_batch", rule)
        said, size = factors if completions is None else f"completions_per_batch {completions}", self.batch_size
        for name, idle in (("batches", (None,)), ("total_episodes", (None, _ONCE_THE_DEFAULT))):
            rule = f"must be null with {name} {getattr(self, name)}: both say how long the run is"
            free = self.num_train_epochs is None or getattr(self, name) in idle
            self.require(free, "num_train_epochs", rule)
        prompts = self.total_episodes
        said_twice = self.batches is not None or self.num_train_epochs is not None
        if prompts is None or (said_twice and prompts == _ONCE_THE_DEFAULT):
            return
        if self.batches is not None:
            rule = (
                f"must be {prompts / size:g}, as total_episodes {prompts} of {size} prompts a batch says, or one of "
                "the two be left out"
            )
            self.require(prompts == self.batches * size, "batches", rule)
        nearest = max(1, round(prompts / size)) * size
        rule = f"must be a multiple of the batch of {size} prompts ({said}), such as {nearest}; or say batches instead"
        self.require(prompts % size == 0, "total_episodes", rule)

    def _check_trained(self) -> None:
        """Refuse to choose among prompts that cannot be told apart, or that are not there."""
        most, size, steps = self.trained_prompts, self.batch_size, self.num_mini_batches
        rule = f"must be at most {size}, the prompts of a batch; completions_per_batch says how many are sampled"
        self.require(most is None or most <= size, "trained_prompts", rule)
        rule = f"must be a multiple of num_mini_batches {steps}, which divides them"
        self.require(most is None or most % steps == 0, "trained_prompts", rule)
        rule = "must be null with samples_per_prompt 1: the rewards of a single completion cannot differ"
        self.require(most is None or self.samples_per_prompt > 1, "trained_prompts", rule)

    @property
    def units_by_pass(self) -> int:
        """What a pass adds to the size of the batch: per_device_train_batch_size, or its default."""
        return self.per_device_train_batch_size or UNITS_PER_PASS

    @property
    def prompts_by_passes(self) -> int:
        """Prompts of a batch, as passes, accumulation, mini-batches and ranks say."""
        per_rank = self.units_by_pass * self.gradient_accumulation_steps * self.num_mini_batches
        return per_rank * self.parallel.ranks

    @property
    def batch_size(self) -> int:
        """Prompts of one batch."""
        if self.completions_per_batch is None:
            return self.prompts_by_passes
        return self.completions_per_batch // self.samples_per_prompt

    @property
    def epochs(self) -> float | None:
        """Passes over the data, where these say how long the run is."""
        if self.num_train_epochs is None and self.batches is None and self.total_episodes is None:
            return EPOCHS
        return self.num_train_epochs

    def with_rows(self, rows: int) -> Self:
        """The configuration with total_episodes in place of epochs, for that many rows of training data."""
        if self.epochs is None:
            return self
        batches = max(1, math.ceil(round(self.epochs * rows / self.batch_size, 9)))
        return replace(self, num_train_epochs=None, total_episodes=batches * self.batch_size)

    @property
    def num_batches(self) -> int:
        """B, batches of the whole run."""
        if self.batches is not None:
            return self.batches
        rule = "says how long the run is only together with the data; use with_rows"
        self.require(self.epochs is None, "num_train_epochs", rule)
        return (self.total_episodes or 0) // self.batch_size

    @property
    def prompt_cap(self) -> int:
        """Most tokens of a prompt: ``max_prompt_length``, or what stands in for null while no model is known."""
        return PROMPT_CAP if self.max_prompt_length is None else self.max_prompt_length

    @property
    def num_optimizer_steps(self) -> int:
        """B x N x T."""
        return self.num_batches * self.num_mini_batches * self.num_epochs

    @property
    def training_limits(self) -> PassLimits:
        """The most that a forward and backward pass holds; a word is no limit, as a run puts a number in its place."""
        tokens = self.max_tokens_per_pass if isinstance(self.max_tokens_per_pass, int) else None
        return PassLimits(self.units_by_pass if tokens is None else self.per_device_train_batch_size, tokens)

    @property
    def annotation_limits(self) -> PassLimits:
        """The same of a pass without gradient, whose units are rows."""
        tokens = self.annotate_max_tokens if isinstance(self.annotate_max_tokens, int) else None
        return PassLimits(self.annotate_batch_size or (ANNOTATED_ROWS if tokens is None else None), tokens)

    @property
    def by_tokens(self) -> bool:
        """Whether tokens limit a pass."""
        return self.training_limits.tokens is not None or self.annotation_limits.tokens is not None
