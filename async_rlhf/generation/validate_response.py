"""Checks an answer: as many completions as were requested, each complete, and none that cannot have been drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from async_rlhf.generation.protocol import Completions, GeneratorError, SamplingParams
from async_rlhf.types import FinishReason, Prompt, RouteShape, Sample

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
                drawn = sample.tokens[len(asked) :], sample.logprobs[len(asked) :]
                wrong = _wrong_form(sample, asked) or _wrong_tokens(*drawn, sample.finish_reason, limits)
            wrong = wrong or _wrong_routes(sample, params.routes)
            if wrong:
                raise GeneratorError(f"{who} wrongly: of sample {number} of the prompt of draw {prompt.draw}, {wrong}")


def _wrong_episode(sample: Sample, length: int, limits: _Limits) -> str:
    """What is wrong with the answers of an episode, each of which begins behind a prompt or an observation."""
    unknown = (sample.tokens < 0) | (sample.tokens >= limits.vocabulary)
    if unknown.any():
        return f"a token is {sample.tokens[unknown][0]}; it must be from 0 to {limits.vocabulary - 1}"
    bounds = [0, *sample.starts, len(sample)]
    if any(start >= end for start, end in pairwise(bounds)):
        return f"its conversations begin at {bounds[:-1]}; must be rising places of its {len(sample)} tokens"
    return next(filter(None, (_wrong_answers(sample, *own, length, limits) for own in pairwise(bounds))), "")


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
    found, right = sample.routes_TLE, (len(sample), shape.layers, shape.per_token)
    if found is None or found.shape != right or found.dtype != shape.dtype:
        said = "there are none" if found is None else f"they are {found.shape} {found.dtype}"
        return f"the routes are wrong: {said}; they must be {right} {shape.dtype} (router_replay)"
    read_TLE = np.delete(found, [end - 1 for end in (*sample.starts, len(sample))], axis=0)
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
        place = int(ends[0])
        return f"token {place} is the stop token {tokens[place]}, and {len(tokens) - place - 1} follow it"
    if (finish_reason == "stop") != (len(ends) > 0):
        return f"finish_reason is {finish_reason!r} and the last token {tokens[-1]}; stop tokens are {stops}"
    if finish_reason == "length" and len(tokens) < longest and not cut:
        return f"finish_reason is 'length' after {len(tokens)} tokens; response_length is {longest}"
    return ""
