"""What an engine and a generator are. The loop knows these, never a concrete one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from async_rlhf.types import Batch, Prompt, Sample

Completions = list[tuple[Sample, ...]]
"""For each prompt, its K completions."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn."""

    samples_per_prompt: int
    temperature: float
    response_length: int
    stop_token_ids: tuple[int, ...]
    seed: int
    batch_size: int = 512
    """Most completions decoded together."""


Version = int | tuple[int, ...] | None
"""A version of the weights, or one for each worker, or the newest that there is when a worker starts."""


class GeneratorError(RuntimeError):
    """A generator failed. The message holds its own error."""


class Sampler(Protocol):
    """Samples with the weights as they are."""

    def generate(self, prompts: Sequence[Prompt]) -> Completions:
        """K completions for each prompt. Equal (seed, draw, sample, position) give equal random numbers."""


class Engine(Sampler, Protocol):
    """Samples with one set of weights at a time."""

    version: int
    """Of the weights that it holds."""
    refresh: Callable[[], None] | None
    """Called between two tokens; may load newer weights, which the tokens after it come from."""

    def heartbeat_with(self, heartbeat: Callable[[], None]) -> None:
        """Call ``heartbeat`` often while generating: a sign of life."""

    def load(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, str]:
        """Take new weights, and return the digest of each tensor it now holds, read back from the model."""

    def probe(self) -> list[float]:
        """Log-probabilities of the fixed sequences of :mod:`~async_rlhf.generation.probe`, by the weights it holds."""


class Resumable(Protocol):
    """What has gathered something over the batches that a resumed run must not lose."""

    def state(self) -> dict[str, Any]:
        """What another one needs to go on as this one, for JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""


class Generator(Protocol):
    """Engines and their weights, wherever they run. Every rank of the learner has one, and makes the same calls of it;
    those of the others only take part where rank 0's needs all ranks.
    """

    @property
    def agreement(self) -> Resumable:
        """What the comparisons of the batches so far have found."""

    def publish(self, policy: nn.Module, version: int) -> None:
        """Make the policy's weights available under a number. They may change again as soon as this returns."""

    def submit(self, index: int, version: Version, prompts: Sequence[Prompt]) -> None:
        """Ask for the completions of batch ``index`` by the weights ``version``. Returns at once."""

    def collect(self, index: int) -> Batch:
        """The completions of batch ``index``, on every rank. Blocks until they are there; raises what went wrong."""

    def close(self) -> None:
        """End every process and free what is held. Safe to call twice."""
