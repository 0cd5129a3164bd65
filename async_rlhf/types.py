"""The data types that flow from the prompts to the loss.

Dimension letters that end the names of tensors and arrays:

    P  prompts of a batch          K  samples per prompt       R  rows, one per sample (R = P x K)
    B  rows of an experience       T  tokens of a row          V  vocabulary
    U  units, rows that belong together (see Experience)
    N  tokens of several rows, one after the other
    L  layers of a mixture of experts         E  experts of a token in a layer

A *row* is one sample, padded on the right. ``X_BT[i, t]`` always refers to token ``t`` itself: ``logprobs_BT[i, t]``
is the log-probability of token ``t`` given the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
CONVERSATION = 1 << 20
"""Positions of random numbers from the beginning of one conversation of a sample to that of the next."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as drawn from the endless stream."""

    draw: int
    """How many prompts were drawn before this one. The random numbers of its samples depend on it."""
    row: int
    """Index of the row in the data set."""
    tokens: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's columns, for reward functions and environments."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The chat that the tokens spell; None if the row has a text."""
    column: str | None = None
    """The data's name of the column with the prompt, if `columns` has it under another."""


@dataclass(frozen=True, slots=True)
class Turn(Prompt):
    """Where one sample of a prompt goes on: ``tokens`` are all that it has so far. Engines answer it like a prompt."""

    sample: int = 0
    """Its number among the prompt's K samples."""
    offset: int = 0
    """As :attr:`Sample.positions`: the positions of random numbers go on from here."""
    limit: int = 0
    """Most new tokens."""
    past: Any = None
    """See :attr:`SampleWithPast.past`: of the answer before this turn."""


class RouteShape(NamedTuple):
    """The sizes of what a mixture's routers choose."""

    layers: int
    """L, with those that have no experts."""
    per_token: int
    """E."""
    experts: int
    """Of a layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type whose largest number names no expert: uint8 or uint16."""
        return np.dtype(np.uint8 if self.experts < 256 else np.uint16)

    def whole(self, routes_TLE: np.ndarray, tokens: int) -> np.ndarray:
        """(tokens, L, E): these routes, and behind them those of tokens that nobody has read; see
        :attr:`Sample.routes_TLE`.
        """
        whole_TLE = np.full((tokens, self.layers, self.per_token), np.iinfo(self.dtype).max, self.dtype)
        whole_TLE[: len(routes_TLE)] = routes_TLE
        return whole_TLE


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence: the prompt, the tokens that the policy drew after it, and any observations in between.

    Every array but the routes is (T,), with one element per token. The last token is the stop token when
    ``finish_reason`` is "stop".
    """

    tokens: np.ndarray
    """int32."""
    sampled: np.ndarray
    """bool: whether the policy drew the token; False for the prompt and for observations."""
    logprobs: np.ndarray
    """float32: behaviour log-probability under the temperature-scaled distribution that the token was drawn from; 0 for
    tokens that were not drawn."""
    versions: np.ndarray
    """int32: version of the weights that drew the token; -1 for tokens that were not drawn."""
    finish_reason: FinishReason
    rewards: np.ndarray | None = None
    """float32: reward from an environment at each token; None if there is none at all."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The conversation after the prompt, of an episode with an environment."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of that episode."""
    starts: Sequence[int] = ()
    """Where each conversation of an agent's episode but the first begins: a token sees only those of its own."""
    routes_TLE: np.ndarray | None = None
    """uint8, or uint16 with 256 experts or more: the experts to which the sampler's routers sent each token, of the
    prompt, of observations, and drawn, when it was first read; None without ``router_replay``. The last token of a
    conversation is drawn and never read: there the largest number of the type stands for none. In layers without
    experts the numbers mean nothing."""

    @classmethod
    def answer(
        cls,
        prompt: Sequence[int],
        tokens: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        versions: Sequence[int] | np.ndarray,
        finish_reason: FinishReason,
        routes_TLE: np.ndarray | None = None,
    ) -> Self:
        """A sample made of a prompt and one answer; all arguments but ``prompt`` and the routes, which are of both,
        describe the answer.
        """
        before, after = len(prompt), len(tokens)
        return cls(
            tokens=np.concatenate([np.asarray(prompt, dtype=np.int32), np.asarray(tokens, dtype=np.int32)]),
            sampled=np.repeat([False, True], [before, after]),
            logprobs=np.concatenate([np.zeros(before, np.float32), np.asarray(logprobs, dtype=np.float32)]),
            versions=np.concatenate([np.full(before, -1, np.int32), np.asarray(versions, dtype=np.int32)]),
            finish_reason=finish_reason,
            routes_TLE=routes_TLE,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        pairs = ((getattr(self, item.name), getattr(other, item.name)) for item in fields(self))
        return all(
            np.array_equal(a, b) if isinstance(a, np.ndarray) else b is None if a is None else a == b for a, b in pairs
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def drawn(self) -> np.ndarray:
        """The tokens that the policy drew, int32."""
        return self.tokens[self.sampled]

    @property
    def episode(self) -> dict[str, Any]:
        """What a row of a file says of an episode: its messages, the reward at the end of each answer (None where the
        environment failed), its metrics. Empty for a sample without an environment.
        """
        if self.messages is None or self.rewards is None:
            return {}
        ends = self.sampled & ~np.append(self.sampled[1:], False)
        rewards = [None if np.isnan(reward) else reward for reward in self.rewards[ends].tolist()]
        return {"messages": list(self.messages), "rewards": rewards, "metrics": dict(self.metrics)}

    @property
    def positions(self) -> np.ndarray:
        """Offset of each drawn token from the first one of its conversation, observations counted: int64. Each further
        conversation begins at a multiple of ``CONVERSATION``.
        """
        (places,) = np.nonzero(self.sampled)
        first = np.append(places, 0)[np.searchsorted(places, (0, *self.starts))]
        number = np.searchsorted(self.starts, places, side="right")
        return places - first[number] + CONVERSATION * number

    @property
    def places(self) -> np.ndarray:
        """Place of each token in its conversation: int64, from 0."""
        return np.arange(len(self)) - np.repeat((0, *self.starts), np.diff((0, *self.starts, len(self))))


@dataclass(frozen=True, slots=True, eq=False)
class SampleWithPast(Sample):
    """An answer to a turn."""

    past: Any = None
    """What the engine goes on from if it gets the next turn; None to compute all of that."""


def drawn_versions(samples: Iterable[Sample]) -> set[int]:
    """All versions of the weights that drew tokens of the samples."""
    all_versions: set[int] = set()
    for sample in samples:
        versions = sample.versions[sample.sampled]
        # Almost always it is one version, and nothing need be sorted.
        single = len(versions) > 0 and versions[0] == versions.min() == versions.max()
        all_versions.update(versions[:1].tolist() if single else np.unique(versions).tolist())
    return all_versions


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
    """On rank 0; the learner's other ranks have none; they get the rows to train on."""
    generation_seconds: float
    """From the start of the first worker to the end of the last."""
    shares: tuple[int, ...] = ()
    """Version of the weights that sampled each request, some of the prompts that one worker took; ``version`` is the
    oldest of them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Measurements of the generator."""

    @property
    def samples(self) -> list[Sample]:
        """All samples; the K samples of a prompt are adjacent."""
        return [sample for group in self.groups for sample in group.samples]


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """A batch with a score for every sample."""

    batch: Batch
    scores_PK: Tensor
    """float32, on the CPU, penalties included. NaN where ``reward_errors`` left a sample without a score. On rank 0, as
    the groups are."""
    metrics: dict[str, float]
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """What the reward model and each reward function said, (R,) float64: neither weighted nor penalised. NaN where one
    does not apply, or failed."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """How many samples have no score, by the cause."""


@dataclass(frozen=True, slots=True)
class Experience:
    """Rows ready for training, on the CPU, padded on the right to the longest row.

    Rows that belong together (the chosen and the rejected sample of a pair) are adjacent and form a *unit*;
    a unit is never split across micro-batches.
    """

    tokens_BT: Tensor
    lengths_B: Tensor
    """Number of tokens in each row: reported by the sampler, never inferred from token values."""
    sampled_BT: Tensor
    """1.0 at tokens that the policy drew (the stop token too), 0.0 at prompt, observations and padding."""
    behaviour_logprobs_BT: Tensor
    """Log-probabilities under the weights that sampled, from the generator."""
    rewards_BT: Tensor
    """Reward from an environment at each token."""
    scores_B: Tensor
    """Total reward of each row: its score plus its ``rewards_BT``."""
    loss_weights_U: Tensor
    """What each unit adds to the normaliser of the loss; 0 for a unit that carries no signal (a tie)."""
    rows_per_unit: int = 1
    positions_BT: Tensor | None = None
    """Place of each token in what the model sees, which begins anew with each conversation of an agent's episode.
    None if each row is one text."""
    routes_BTLE: Tensor | None = None
    """Experts that the sampler's routers chose, as :attr:`Sample.routes_TLE`: uint8, or int16 in place of uint16, whose
    largest number is then -1. The same number stands for none at padding, where the learner's router chooses. None
    without ``router_replay``."""
    truncated_B: Tensor | None = None
    """True for rows that did not end by themselves, if the objective asks for this."""

    reference_logprobs_BT: Tensor | None = None
    """Log-probabilities under the reference policy, if the objective needs one."""
    old_logprobs_BT: Tensor | None = None
    """Log-probabilities under the policy before the update, if a forward pass computed them."""
    values_BT: Tensor | None = None
    """Value of the text before each sampled token, by the value model before the update (PPO)."""
    end_values_B: Tensor | None = None
    """Value of the whole text, by the value model, if the objective needs it (PPO)."""
    advantages_BT: Tensor | None = None
    """Advantage of each sampled token, 0 elsewhere (RLOO, GRPO, PPO)."""
    returns_BT: Tensor | None = None
    """Targets of the value model (PPO)."""
    has_gradient_U: Tensor | None = None
    """False for units whose loss has no gradient although they count in the normaliser; None if all have one."""

    def __len__(self) -> int:
        return self.tokens_BT.shape[0]

    def weight_of(self, units_U: Tensor) -> float:
        """The normaliser of the loss of the given units; 0 if none has a gradient, and then no optimiser step may be
        taken.
        """
        if self.has_gradient_U is not None and not self.has_gradient_U[units_U].any():
            return 0.0
        return float(self.loss_weights_U[units_U].sum())

    @property
    def units(self) -> int:
        return len(self) // self.rows_per_unit

    def rows_of(self, units_U: Tensor) -> Tensor:
        """Indices (B,) of the rows of the given units, in the given order."""
        import torch

        return (units_U[:, None] * self.rows_per_unit + torch.arange(self.rows_per_unit)).flatten()

    def select(self, units: Tensor | Sequence[int]) -> Experience:
        """The given units, in the given order, trimmed to the longest of their rows."""
        import torch

        units_U = torch.as_tensor(units, dtype=torch.long)
        rows_B = self.rows_of(units_U)
        longest = int(self.lengths_B[rows_B].max()) if len(rows_B) else 0

        def part(name: str, tensor: Tensor) -> Tensor:
            if name.endswith(("_BT", "_BTLE")):
                return tensor[:, :longest].index_select(0, rows_B)
            return tensor.index_select(0, units_U if name.endswith("_U") else rows_B)

        return self.map(part)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        from torch import Tensor

        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Experience:
        """A copy with every tensor replaced by ``function(name, tensor)``."""
        mapped: dict[str, Any] = {name: function(name, tensor) for name, tensor in self.tensors().items()}
        return replace(self, **mapped)


class PolicyOutput(NamedTuple):
    """Result of one forward pass of the model being trained; 0 where no token was sampled.

    A tuple, because the wrappers that shard a model over ranks find tensors only in containers that torch knows.
    """

    logprobs_BT: Tensor
    entropies_BT: Tensor
    """In nats; carries no gradient."""
    values_BT: Tensor | None = None
    """Value of the text before each sampled token, if there is a value model or head."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What an objective returns: sums over the rows it was given. The learner divides by the global weight."""

    loss_sum: Tensor
    """Scalar, differentiable."""
    metrics: dict[str, Tensor]
    """Detached sums over the same units that ``loss_weights_U`` counts."""
