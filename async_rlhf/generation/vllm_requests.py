"""Requests to vLLM and the meaning of its answers, whether it runs in this process or behind a URL."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.sampling import request_seeds
from async_rlhf.types import Prompt, Sample, Turn


class OtherWeightsError(RuntimeError):
    """Tokens were drawn by weights whose label is not from this run."""


def seeds_of(params: SamplingParams, prompts: Sequence[Prompt]) -> Sequence[int | None]:
    """The seed of each prompt's request; None where vLLM shall draw from the one generator that all requests share."""
    return request_seeds(params.seed, prompts) if params.seed_per_request else [None] * len(prompts)


def own_seed() -> int:
    """A seed for that one generator. No two engines may have the same: they would draw the same random numbers for
    different prompts.
    """
    return secrets.randbits(31)


def request_fields(params: SamplingParams, seed: int | None, prompt: Prompt | None = None) -> dict[str, Any]:
    """Fields of vLLM's sampling parameters; all defaults that would change the distribution are off."""
    return {
        "n": params.samples_per_prompt,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": prompt.limit if isinstance(prompt, Turn) else params.response_length,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,  # the stop tokens are the run's own, not those of the model's configuration
        "logprobs": 0,
        "seed": seed,
    }


def to_sample(
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    spans: Iterable[tuple[str, int, int]],
    finish_reason: Any,
    prefix: str = "",
    routes_TLE: np.ndarray | None = None,
) -> Sample:
    """A prompt with one answer.

    Args:
        prompt: its tokens, as requested.
        tokens: as drawn.
        logprobs: of each token.
        spans: labels of weights, with the first token that each drew and the one after the last.
        finish_reason: vLLM's.
        prefix: start of a label, before the version.
        routes_TLE: see :attr:`~async_rlhf.types.Sample.routes_TLE`.

    Raises:
        OtherWeightsError: a token has no label, or one of another form.
        FloatingPointError: a log-probability is not finite.
    """
    versions = [-1] * len(tokens)
    for label, start, end in spans:
        number = label.removeprefix(prefix)
        if not (label.startswith(prefix) and number.isdecimal()):
            raise OtherWeightsError(f"tokens were drawn by weights labelled {label!r}")
        versions[start:end] = [int(number)] * (end - start)
    if -1 in versions:
        raise OtherWeightsError("tokens were drawn by weights without a label")
    if finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion for another reason: {finish_reason}")
    if not np.isfinite(logprobs).all():
        raise FloatingPointError(f"the logits of weights version {versions[0]} are not finite")
    return Sample.answer(prompt, tokens, logprobs, versions, finish_reason, routes_TLE)
