"""Whether an answer is one: as many completions as were asked for, each whole, and none that cannot be drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import xxhash

from async_rlhf.generation.protocol import Completions, GeneratorError, SamplingParams
from async_rlhf.types import Prompt, Rollout

_ROUNDING = 1e-3
"""How far a log-probability may lie above 0."""


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Of the prompts that an engine was given, for whoever has asked it."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(np.array([prompt.draw, len(prompt.tokens), *prompt.tokens], dtype=np.int64).tobytes())
    return digest.hexdigest()


def check_completions(
    who: str, prompts: Sequence[Prompt], completions: Completions, params: SamplingParams, vocabulary: int
) -> None:
    """Require an answer to be what was asked for.

    Args:
        who: the beginning of the error message: who has answered what.
        prompts: as asked.
        completions: the answer.
        params: how to sample.
        vocabulary: token ids are below it.

    Raises:
        GeneratorError: says which completion is wrong, what was found and what would be right.
    """
    if len(completions) != len(prompts):
        raise GeneratorError(f"{who} with completions of {len(completions)} prompts; {len(prompts)} were asked for")
    stops = frozenset(params.stop_token_ids)
    for prompt, rollouts in zip(prompts, completions, strict=True):
        if len(rollouts) != params.samples_per_prompt:
            raise GeneratorError(
                f"{who} with {len(rollouts)} completions of the prompt of draw {prompt.draw}; "
                f"samples_per_prompt is {params.samples_per_prompt}"
            )
        for sample, rollout in enumerate(rollouts):
            wrong = _wrong(rollout, params.response_length, stops, vocabulary)
            if wrong:
                raise GeneratorError(f"{who} wrongly: of sample {sample} of the prompt of draw {prompt.draw}, {wrong}")


def _wrong(rollout: Rollout, longest: int, stops: frozenset[int], vocabulary: int) -> str:
    """What is wrong with a completion; nothing where it is right."""
    tokens, logprobs = rollout.tokens, rollout.logprobs
    if not 1 <= len(tokens) <= longest:
        return f"the number of tokens is {len(tokens)}; it must be from 1 to response_length, {longest}"
    if not len(logprobs) == len(rollout.versions) == len(tokens):
        return (
            f"there are {len(tokens)} tokens, {len(logprobs)} log-probabilities and {len(rollout.versions)} versions; "
            "each token must have one of each"
        )
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        outside = next(token for token in tokens if not 0 <= token < vocabulary)
        return f"a token is {outside}; it must be from 0 to {vocabulary - 1}"
    if not (math.isfinite(sum(logprobs)) and max(logprobs) <= _ROUNDING):
        bad = next(x for x in logprobs if not (math.isfinite(x) and x <= _ROUNDING))
        return f"a log-probability is {bad}; it must be finite, and at most 0"
    if not stops.isdisjoint(tokens[:-1]):
        place = next(i for i, token in enumerate(tokens) if token in stops)
        return f"token {place} is the stop token {tokens[place]}, and {len(tokens) - place - 1} follow it"
    if (rollout.finish_reason == "stop") != (tokens[-1] in stops):
        found = f"finish_reason is {rollout.finish_reason!r} and the last token {tokens[-1]}"
        return f"{found}; stop tokens are {sorted(stops)}"
    if rollout.finish_reason == "length" and len(tokens) < longest:
        return f"finish_reason is 'length' after {len(tokens)} tokens; response_length is {longest}"
    return ""
