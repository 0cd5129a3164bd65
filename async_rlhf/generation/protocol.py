"""The protocols of engines and generators, and the messages between the learner and its workers.

The loop uses only these, never a concrete class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from async_rlhf.generation.episodes.spec import EpisodeSpec
from async_rlhf.models.truncation import Distribution
from async_rlhf.types import Batch, Group, Prompt, RouteShape, Sample

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
    top_p: float = 1.0
    """See :class:`~async_rlhf.models.truncation.Distribution`."""
    top_k: int = 0
    episodes: EpisodeSpec | None = None
    """How an environment answers the policy, if there is one."""
    seed_per_request: bool = True
    """Whether an engine with random numbers of its own takes a seed for each prompt; without, a run cannot be
    repeated."""
    routes: RouteShape | None = None
    """The sizes of the routes that every sample has to come with; None for none."""

    @property
    def distribution(self) -> Distribution:
        """The distribution that tokens are drawn from."""
        return Distribution(self.temperature, self.top_p, self.top_k)


@dataclass
class Occupancy:
    """How full the places for completions were. A step of decoding with 30 of 32 places taken adds 30 and 32."""

    taken: int = 0
    places: int = 0


class GeneratorError(RuntimeError):
    """A generator failed. The message contains its own error."""


class EngineLostError(RuntimeError):
    """An engine has lost a process that it needs. A new engine may succeed."""


class Sampler(Protocol):
    """Samples with the current weights."""

    params: SamplingParams
    """How completions are drawn from now on."""

    def generate(self, prompts: Sequence[Prompt]) -> Completions:
        """K completions for each prompt. Equal (seed, draw, sample, position) give equal random numbers."""


@contextmanager
def drawing(engine: Sampler, params: SamplingParams | None) -> Iterator[None]:
    """Within, an engine draws in another way; None changes nothing. Only what an engine takes with every call may
    differ: temperature, top_p, top_k, samples for each prompt, and a response that is not longer.
    """
    own, engine.params = engine.params, params or engine.params
    try:
        yield
    finally:
        engine.params = own


class Engine(Sampler, Protocol):
    """Samples with one set of weights at a time."""

    version: int
    """Version of the weights that it holds."""
    refresh: Callable[[], None] | None
    """Called between two tokens; may load newer weights, which draw the tokens that follow."""

    occupancy: Occupancy
    """Of all steps of decoding so far; may be replaced to begin anew. An engine that cannot tell leaves it as it is."""

    def stream(self, more: Callable[[int], Sequence[Prompt]]) -> Iterator[tuple[int, tuple[Sample, ...]]]:
        """Sample without an end to wait for: as completions end, further prompts take their places.

        Args:
            more: given for how many prompts there are places, returns at most as many; none if there are none now.

        Yields:
            Each prompt's number, in the order in which they were taken, and its K completions once all have ended. It
            ends when all have ended and there is nothing more.
        """

    def heartbeat_with(self, heartbeat: Callable[[], None]) -> None:
        """Call ``heartbeat`` often while generating: a sign of life."""

    def load(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, str]:
        """Take new weights, and return the digest of each tensor it now holds, read back from the model."""

    def probe(self) -> list[float]:
        """Log-probabilities of :func:`~async_rlhf.generation.audit.probe_tokens`, by its weights."""

    def close(self) -> None:
        """Free what is held."""


class Resumable(Protocol):
    """Has gathered state over the batches that a resumed run must not lose."""

    def state(self) -> dict[str, Any]:
        """What a successor needs to continue from here, for JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""


class Generator(Protocol):
    """Engines and their weights, wherever they run. Every rank of the learner has one and makes the same calls;
    on other ranks than 0 it only takes part in what needs all ranks.
    """

    on_arrival: Callable[[int, int, Sequence[Group]], None] | None
    """Called with a batch (or minus the version that is evaluated), the number of a prompt in it, and that prompt and
    some after it, as soon as all their
    completions are here, in any thread, and maybe long before the batch is collected. One that samples in this process
    never calls it."""

    at_once: bool
    """Whether a batch is sampled, and compared with the learner, before :meth:`submit` returns."""

    @property
    def agreement(self) -> Resumable:
        """Results of comparing engine and learner on the batches so far."""

    def publish(self, policy: nn.Module, version: int) -> None:
        """Make the policy's weights available under a number. They may change again as soon as this returns."""

    def submit(self, index: int, version: int | None, prompts: Sequence[Prompt]) -> None:
        """Ask for the completions of batch ``index`` by the weights ``version``; None for the newest when a worker
        starts. Returns at once, unless :attr:`at_once`.
        """

    def collect(self, index: int) -> Batch:
        """Batch ``index``, with its completions on rank 0. Blocks until they are there; raises any failure."""

    def submit_evaluation(self, version: int, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Ask for answers to held-out prompts by just the weights ``version``, which were published last, behind all
        batches that have been asked for. Returns at once. There may be one evaluation at a time.
        """

    def collect_evaluation(self, version: int) -> tuple[Group, ...]:
        """These answers, on rank 0, as :meth:`collect` gives those of a batch; they are measured by nobody."""

    def close(self) -> None:
        """End every process and free what is held. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class Request:
    """Some prompts of a batch, or of an evaluation, for one worker."""

    batch: int
    """Number of the batch; of an evaluation, minus the version that is evaluated."""
    number: int
    """Its number among the requests of all those prompts, from 0."""
    version: int | None
    """None for the newest when the worker starts."""
    prompts: tuple[Prompt, ...]
    probe: int = 0
    """Probe versions that this number divides; 0 for none."""
    in_flight: bool = False
    """Switch to newer weights as soon as there are any."""
    params: SamplingParams | None = None
    """How to sample in an evaluation; None for a batch, which is sampled as the worker was told at its start."""
    behind: int = 0
    """The batch behind which an evaluation is sampled."""
    after: int = 0
    """Begin when this version is there, or a newer one; it may still be on its way."""

    @property
    def turn(self) -> tuple[int, bool, int]:
        """Requests are sampled in this order."""
        evaluates = self.params is not None
        return self.behind if evaluates else self.batch, evaluates, self.number


def work(batch: int) -> str:
    """What a request is for, in words, by its number."""
    return f"batch {batch}" if batch >= 0 else f"the evaluation of version {-batch}"


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built: the worker can take requests."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The completions of a request, and proof of the weights that they come from."""

    batch: int
    version: int
    """Version of the weights that drew the first tokens."""
    digests: dict[int, dict[str, str]]
    """By version: the digest of each tensor, as read back from the engine after it loaded them."""
    asked: str
    """Fingerprint of the prompts that were sampled for; see :func:`~async_rlhf.generation.validate_response`."""
    completions: Completions
    started: float
    """Monotonic clock."""
    ended: float
    load_seconds: float
    probe: tuple[int, list[float]] | None = None
    """Version, and its log-probabilities of the probe's sequences, if the request asked for them."""
    number: int = 0
    """Of the batch, as in the request."""
    occupancy: tuple[int, int] = (0, 0)
    """Places that were taken, and places that there were, in all steps of decoding since the worker's last reply."""
    environment_seconds: float = 0.0
    """That environments took since then, those of all episodes added."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine raised; the learner raises it again."""

    message: str
    traceback: str
    is_config: bool = False
    """It is a ConfigError, whose message is enough."""
    is_lost: bool = False
    """It is an EngineLostError, or there was no memory; a new process may succeed."""
