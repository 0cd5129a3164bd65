"""The protocols of engines and generators, and the messages between the learner and its workers.

The loop uses only these, never a concrete class. A response is checked: as many completions as were requested, each
complete, and none that cannot have been drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from torch import Tensor, nn

from async_rlhf.generation.episodes.spec import EpisodeSpec
from async_rlhf.generation.sampling import Distribution
from async_rlhf.models.weights import differing
from async_rlhf.types import Batch, FinishReason, Group, Prompt, RouteShape, Sample, drawn_versions

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
    """See :class:`~async_rlhf.generation.sampling.Distribution`."""
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
    previous, engine.params = engine.params, params or engine.params
    try:
        yield
    finally:
        engine.params = previous


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

    @property
    def agreement(self) -> Resumable:
        """Results of comparing engine and learner on the batches so far."""

    def publish(self, policy: nn.Module, version: int) -> None:
        """Make the policy's weights available under a number. They may change again as soon as this returns."""

    def digests(self, version: int) -> Mapping[str, str]:
        """Of each tensor of a version that was published, once: asked for again, it has none, nor on other ranks than
        0, nor where engines sample from the policy itself.
        """

    def submit(self, index: int, version: int | None, prompts: Sequence[Prompt]) -> None:
        """Ask for the completions of batch ``index`` by the weights ``version``; None for the newest when a worker
        starts. Returns at once, unless this process has to sample before its weights change.
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
    """Fingerprint of the prompts that were sampled for; see :func:`~async_rlhf.generation.protocol`."""
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


_ROUNDING = 1e-3
"""How far a log-probability may be above 0."""


class _Limits(NamedTuple):
    longest: int
    stops: list[int]
    vocabulary: int


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Fingerprint of the prompts that an engine was given, for the sender of the request."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(np.array([prompt.draw, len(prompt.tokens), *prompt.tokens], dtype=np.int64).tobytes())
    return digest.hexdigest()


def check_completions(
    who: str, prompts: Sequence[Prompt], completions: Completions, params: SamplingParams, vocabulary: int
) -> None:
    """Require that an answer fits its request.

    Args:
        who: the beginning of the error message: who answered what.
        prompts: of the request.
        completions: the answer.
        params: how to sample.
        vocabulary: token ids are below it.

    Raises:
        GeneratorError: says which completion is wrong, what was found and what would be right.
    """
    if len(completions) != len(prompts):
        raise GeneratorError(f"{who} with completions of {len(completions)} prompts; {len(prompts)} were asked for")
    limits = _Limits(params.response_length, sorted(params.stop_token_ids), vocabulary)
    for prompt, samples in zip(prompts, completions, strict=True):
        if len(samples) != params.samples_per_prompt:
            raise GeneratorError(
                f"{who} with {len(samples)} completions of the prompt of draw {prompt.draw}; "
                f"samples_per_prompt is {params.samples_per_prompt}"
            )
        asked = np.array(prompt.tokens, dtype=np.int64)
        for number, sample in enumerate(samples):
            if params.episodes is not None:
                length = params.episodes.generation.longest_episode
                wrong = _wrong_sizes(sample, 0) or _wrong_episode(sample, length, limits)
            else:
                tokens, logprobs = sample.tokens[len(asked) :], sample.logprobs[len(asked) :]
                wrong = _wrong_form(sample, asked) or _wrong_tokens(tokens, logprobs, sample.finish_reason, limits)
            wrong = wrong or _wrong_routes(sample, params.routes)
            if wrong:
                raise GeneratorError(f"{who} wrongly: of sample {number} of the prompt of draw {prompt.draw}, {wrong}")


def require_answer(
    who: str,
    request: Request,
    reply: Reply,
    params: SamplingParams,
    vocabulary: int,
    published: Mapping[int, Mapping[str, str]],
) -> None:
    """Require the complete weights that a request names, and completions that are possible.

    Args:
        who: answered.
        request: what was asked.
        reply: the answer.
        params: how batches are sampled.
        vocabulary: token ids are below it.
        published: by version, the digest of each tensor.

    Raises:
        GeneratorError: says what is wrong.
    """
    answered = f"{who} answered {work(reply.batch)}"
    if reply.batch != request.batch or (request.version is not None and reply.version != request.version):
        raise GeneratorError(
            f"{answered} with weights of version {reply.version}; {work(request.batch)} needs version {request.version}"
        )
    if reply.asked != fingerprint(request.prompts):
        raise GeneratorError(f"{answered} with completions of other prompts than it was asked for")
    drawn = replace(request.params or params, episodes=params.episodes)
    check_completions(answered, request.prompts, reply.completions, drawn, vocabulary)
    versions = drawn_versions(sample for samples in reply.completions for sample in samples)
    for version in (reply.version, *sorted(versions - {reply.version})):
        sampled, expected = reply.digests.get(version, {}), published.get(version)
        if sampled != expected:
            raise GeneratorError(
                f"{who} sampled {work(reply.batch)} with weights that are not those of version {version}: "
                f"{'there is none' if expected is None else differing(sampled, expected)}"
            )


def _wrong_episode(sample: Sample, length: int, limits: _Limits) -> str:
    """What is wrong with the answers of an episode, each of which begins behind a prompt or an observation."""
    unknown = (sample.tokens < 0) | (sample.tokens >= limits.vocabulary)
    if unknown.any():
        return f"a token is {sample.tokens[unknown][0]}; it must be from 0 to {limits.vocabulary - 1}"
    bounds = [0, *sample.starts, len(sample)]
    if any(start >= end for start, end in pairwise(bounds)):
        return f"its conversations begin at {bounds[:-1]}; must be rising places of its {len(sample)} tokens"
    wrong = (_wrong_answers(sample, begin, stop, length, limits) for begin, stop in pairwise(bounds))
    return next(filter(None, wrong), "")


def _wrong_answers(sample: Sample, begin: int, stop: int, length: int, limits: _Limits) -> str:
    """The same of one conversation, the tokens from ``begin`` to before ``stop``."""
    sampled = sample.sampled[begin:stop]
    starts, ends = (begin + np.nonzero(sampled & ~np.roll(sampled, by))[0] for by in (1, -1))
    if not len(starts) or sampled[0] or not sampled[-1]:
        return "it must have a prompt, and end with an answer"
    if stop - starts[0] > length:
        return f"there are {stop - starts[0]} tokens after the prompt; must be at most {length} (episode_length)"
    for start, end in zip(starts, ends + 1, strict=True):
        answer, last = sample.tokens[start:end], end == stop
        finish: FinishReason = "stop" if answer[-1] in limits.stops else "length"
        if finish == "length" and (not last or (end == len(sample) and sample.finish_reason == "stop")):
            return f"the answer before token {end} ends with {answer[-1]}; stop tokens are {limits.stops}"
        # The last answer may be shorter: there is room for so many tokens in the whole conversation.
        if wrong := _wrong_tokens(answer, sample.logprobs[start:end], finish, limits, cut=last):
            return wrong
    return ""


def _wrong_sizes(sample: Sample, before: int) -> str:
    """What is wrong with the sizes of a sample's arrays, the first ``before`` tokens of which are the prompt's."""
    sizes = [len(array) for array in (sample.tokens, sample.sampled, sample.logprobs, sample.versions)]
    if len(set(sizes)) > 1:
        after = [max(0, size - before) for size in sizes]
        return (
            f"there are {after[0]} tokens, {after[2]} log-probabilities and {after[3]} versions; "
            "each token must have one of each"
        )
    return ""


def _wrong_routes(sample: Sample, shape: RouteShape | None) -> str:
    """What is wrong with the experts that came with a sample; any will do if none were asked for."""
    if shape is None:
        return ""
    routes_TLE, expected = sample.routes_TLE, (len(sample), shape.layers, shape.per_token)
    if routes_TLE is None or routes_TLE.shape != expected or routes_TLE.dtype != shape.dtype:
        said = "there are none" if routes_TLE is None else f"they are {routes_TLE.shape} {routes_TLE.dtype}"
        return f"the routes are wrong: {said}; they must be {expected} {shape.dtype} (router_replay)"
    read_TLE = np.delete(routes_TLE, [end - 1 for end in (*sample.starts, len(sample))], axis=0)
    if read_TLE.max(initial=0) >= shape.experts:
        return f"a route is to expert {read_TLE.max()}; it must be below {shape.experts} (router_replay)"
    return ""


def _wrong_form(sample: Sample, asked: np.ndarray) -> str:
    """What is wrong with a sample's arrays or prompt; "" if nothing is."""
    if wrong := _wrong_sizes(sample, len(asked)):
        return wrong
    if not np.array_equal(sample.tokens[: len(asked)], asked):
        return f"the prompt is {sample.tokens[: len(asked)].tolist()}; it must be as asked, {asked.tolist()}"
    if sample.sampled[: len(asked)].any() or not sample.sampled[len(asked) :].all():
        return "the tokens marked as sampled are not those behind the prompt; they must be exactly these"
    return ""


def _wrong_tokens(
    tokens: np.ndarray, logprobs: np.ndarray, finish_reason: FinishReason, limits: _Limits, cut: bool = False
) -> str:
    """What is wrong with the drawn tokens; "" if nothing is. With ``cut`` there may have been room for fewer."""
    longest, stops, vocabulary = limits
    if not 1 <= len(tokens) <= longest:
        return f"the number of tokens is {len(tokens)}; it must be from 1 to response_length, {longest}"
    if not (tokens.min() >= 0 and tokens.max() < vocabulary):
        outside = (tokens < 0) | (tokens >= vocabulary)
        return f"a token is {tokens[outside][0]}; it must be from 0 to {vocabulary - 1}"
    if not (logprobs.min() > -np.inf and logprobs.max() <= _ROUNDING):  # False for NaN
        possible = (logprobs <= _ROUNDING) & np.isfinite(logprobs)
        return f"a log-probability is {logprobs[~possible][0]}; it must be finite, and at most 0"
    stopped = np.zeros(len(tokens), dtype=bool)
    for stop in stops:  # there are few
        stopped |= tokens == stop
    (ends,) = np.nonzero(stopped)
    if len(ends) and ends[0] < len(tokens) - 1:
        position = int(ends[0])
        return f"token {position} is the stop token {tokens[position]}, and {len(tokens) - position - 1} follow it"
    if (finish_reason == "stop") != (len(ends) > 0):
        return f"finish_reason is {finish_reason!r} and the last token {tokens[-1]}; stop tokens are {stops}"
    if finish_reason == "length" and len(tokens) < longest and not cut:
        return f"finish_reason is 'length' after {len(tokens)} tokens; response_length is {longest}"
    return ""
