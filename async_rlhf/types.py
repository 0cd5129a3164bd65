"""The vocabulary: what flows from the prompts to the loss.

Dimension letters that end the names of tensors and arrays:

    P  prompts of a batch          K  samples per prompt       R  rows, one per sample (R = P x K)
    B  rows of an experience       T  tokens of a row          V  vocabulary
    U  units, rows that belong together (see Experience)

A *row* is one sample, padded on the right. ``X_BT[i, t]`` always speaks of token ``t`` itself: ``logprobs_BT[i, t]``
is the log-probability of token ``t`` given the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as drawn from the endless stream."""

    draw: int
    """How many prompts were drawn before this one. The random numbers of its samples depend on it."""
    row: int
    """Index of the row in the data set."""
    tokens: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's columns, for reward functions."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence: the prompt, what the policy drew after it, and what it was told in between.

    Every array is (T,), with one element a token. The last token is the stop token when ``finish_reason`` is "stop".
    """

    tokens: np.ndarray
    """int64."""
    sampled: np.ndarray
    """bool: whether the policy drew the token. The prompt, and observations after it, it did not."""
    logprobs: np.ndarray
    """float32: behaviour log-probability, of the temperature-scaled distribution that the token was drawn from; 0 where
    it was not drawn."""
    versions: np.ndarray
    """int64: of the weights that drew the token; -1 where it was not drawn."""
    finish_reason: FinishReason
    rewards: np.ndarray | None = None
    """float32: what an environment gave at the token. None: nothing anywhere."""

    @classmethod
    def answer(
        cls,
        prompt: Sequence[int],
        tokens: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        versions: Sequence[int] | np.ndarray,
        finish_reason: FinishReason,
    ) -> Sample:
        """A prompt and one answer to it; tokens, log-probabilities and versions are the answer's."""
        before, after = len(prompt), len(tokens)
        return cls(
            tokens=np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(tokens, dtype=np.int64)]),
            sampled=np.repeat([False, True], [before, after]),
            logprobs=np.concatenate([np.zeros(before, np.float32), np.asarray(logprobs, dtype=np.float32)]),
            versions=np.concatenate([np.full(before, -1), np.asarray(versions, dtype=np.int64)]),
            finish_reason=finish_reason,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return all(np.array_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

    __hash__ = None  # type: ignore[assignment]

    @property
    def drawn(self) -> np.ndarray:
        """The tokens that the policy drew, int64."""
        return self.tokens[self.sampled]

    @property
    def positions(self) -> np.ndarray:
        """How many tokens after the prompt each drawn token stands, observations counted: int64, from 0."""
        (places,) = np.nonzero(self.sampled)
        return places - places[:1]


def drawn_versions(samples: Iterable[Sample]) -> set[int]:
    """The versions that drew any of their tokens."""
    return {version for sample in samples for version in np.unique(sample.versions[sample.sampled]).tolist()}


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its K samples."""

    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything sampled for one batch. ``index`` counts from 1, as in the schedule."""

    index: int
    version: int
    groups: tuple[Group, ...]
    generation_seconds: float
    """From the start of the first worker to the end of the last."""
    shares: tuple[int, ...] = ()
    """Version that sampled each worker's share of the prompts; ``version`` is the oldest of them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the generator has measured."""

    @property
    def samples(self) -> list[Sample]:
        """All of them, K neighbours for each prompt."""
        return [sample for group in self.groups for sample in group.samples]


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """A batch with a score for every sample."""

    batch: Batch
    scores_PK: Tensor
    """float32, on the CPU. Penalties are in it. NaN where ``reward_errors`` left a sample without one."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Experience:
    """Rows ready for training, on the CPU, padded on the right to the longest row.

    Rows that belong together (the chosen and the rejected sample of a pair) are neighbours and make a *unit*;
    a unit is never split over micro-batches.
    """

    tokens_BT: Tensor
    lengths_B: Tensor
    """Tokens of each row; from the sampler, never from token values."""
    sampled_BT: Tensor
    """1.0 at tokens that the policy drew (the stop token too), 0.0 at prompts, observations and padding."""
    behaviour_logprobs_BT: Tensor
    """By the weights that sampled, from the generator."""
    rewards_BT: Tensor
    """What an environment gave at each token."""
    scores_B: Tensor
    """The whole reward of each row: what it was scored, and its ``rewards_BT``."""
    weights_U: Tensor
    """What each unit adds to the normaliser of the loss; 0 for a unit that carries no signal (a tie)."""
    rows_per_unit: int = 1
    truncated_B: Tensor | None = None
    """True for rows that did not end by themselves, where the objective asks."""

    reference_logprobs_BT: Tensor | None = None
    """By the reference policy, where the objective needs one."""
    old_logprobs_BT: Tensor | None = None
    """By the policy before the update, where a pass was made for them."""
    values_BT: Tensor | None = None
    """The value model's, of the text before each sampled token, before the update (PPO)."""
    end_values_B: Tensor | None = None
    """The value model's, of the whole text, where the objective needs them (PPO)."""
    advantages_BT: Tensor | None = None
    """One for each sampled token, 0 elsewhere (RLOO, GRPO, PPO)."""
    returns_BT: Tensor | None = None
    """What the value model learns to predict (PPO)."""
    teaches_U: Tensor | None = None
    """False for units whose loss has no gradient although they count in the normaliser; None where all have one."""

    def __len__(self) -> int:
        return self.tokens_BT.shape[0]

    @property
    def weight(self) -> float:
        """What the loss is divided by; 0 where no unit teaches anything, so that no step may be made."""
        if self.teaches_U is not None and not self.teaches_U.any():
            return 0.0
        return float(self.weights_U.sum())

    @property
    def units(self) -> int:
        return len(self) // self.rows_per_unit

    def select(self, units: Tensor | Sequence[int]) -> Experience:
        """The given units, in the given order, trimmed to the longest of their rows."""
        import torch

        units_U = torch.as_tensor(units, dtype=torch.long)
        rows_B = (units_U[:, None] * self.rows_per_unit + torch.arange(self.rows_per_unit)).flatten()
        longest = int(self.lengths_B[rows_B].max()) if len(rows_B) else 0

        def part(name: str, tensor: Tensor) -> Tensor:
            if name.endswith("_U"):
                return tensor[units_U]
            return tensor[rows_B, :longest] if name.endswith("_BT") else tensor[rows_B]

        return self.map(part)

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Experience:
        """The same with every tensor replaced by ``function(name, tensor)``."""
        from torch import Tensor

        values = {item.name: getattr(self, item.name) for item in fields(self)}
        mapped: dict[str, Any] = {n: function(n, x) for n, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **mapped)


class PolicyOutput(NamedTuple):
    """What one forward pass of the model being trained gives, 0 where no token was sampled.

    A tuple, because what spreads a model over ranks finds the tensors only in those that torch knows.
    """

    logprobs_BT: Tensor
    entropies_BT: Tensor
    """In nats; carries no gradient."""
    values_BT: Tensor | None = None
    """Where there is a value model or head: the value of the text before each sampled token."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What an objective returns: sums over the rows it was given. The learner divides by the global weight."""

    loss_sum: Tensor
    """Scalar, differentiable."""
    metrics: dict[str, Tensor]
    """Detached sums over the same units that ``weights_U`` counts."""
