"""What vLLM answers becomes a sample only if every token is accounted for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tiny import drawn

from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.sampling import request_seeds
from async_rlhf.generation.vllm_requests import OtherWeightsError, own_seed, request_fields, seeds_of, to_sample
from async_rlhf.types import Prompt


def test_each_token_has_the_version_of_its_span():
    sample = to_sample([9, 9], [5, 6, 7], [-1.0, -2.0, -0.5], [("run:3", 0, 1), ("run:4", 1, 3)], "stop", "run:")
    assert sample.tokens.tolist() == [9, 9, 5, 6, 7]
    assert drawn(sample) == ((5, 6, 7), (-1.0, -2.0, -0.5), (3, 4, 4), "stop")


@pytest.mark.parametrize(
    "spans",
    [
        [("default", 0, 3)],
        [("other:3", 0, 3)],
        [("run:loading", 0, 3)],
        [("3", 0, 3)],  # a number without the run is of somebody else
        [("run:3", 0, 2)],  # one token is left over
        [("run:3", 0, 2), ("other:3", 2, 3)],
        [],
    ],
)
def test_other_weights_are_refused(spans):
    with pytest.raises(OtherWeightsError):
        to_sample([9], [5, 6, 7], [-1.0, -2.0, -0.5], spans, "length", "run:")


def test_what_is_no_completion_is_an_error():
    with pytest.raises(RuntimeError, match="another reason: abort"):
        to_sample([9], [5], [-1.0], [("3", 0, 1)], "abort")
    with pytest.raises(FloatingPointError, match="weights version 3 are not finite"):
        to_sample([9], [5], [float("nan")], [("3", 0, 1)], "stop")


def test_seeds_depend_on_the_seed_and_the_draw_alone():
    prompts = [Prompt(draw, 0, (1,)) for draw in (0, 1, 7, 2**40)]
    seeds = request_seeds(0, prompts)
    assert seeds == [seed for prompt in prompts for seed in request_seeds(0, [prompt])]
    assert request_seeds(0, [Prompt(7, 3, (9, 9))]) == [seeds[2]]
    others = request_seeds(1, prompts)
    every = request_seeds(0, [Prompt(draw, 0, (1,)) for draw in range(10_000)])
    assert len({*every, *others}) == 10_000 + len(others)
    assert all(0 <= seed < 2**62 for seed in every)
    # vLLM adds the number of the sample to the seed: neighbours must not meet.
    ordered = sorted(every)
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 1000


def test_without_seeds_each_engine_draws_from_a_generator_of_its_own():
    prompts = [Prompt(draw, 0, (1,)) for draw in range(3)]
    params = SamplingParams(2, 0.7, 8, (3,), 0)
    assert seeds_of(params, prompts) == request_seeds(0, prompts)
    unseeded = seeds_of(replace(params, seed_per_request=False), prompts)
    assert [request_fields(params, seed)["seed"] for seed in unseeded] == [None] * 3
    assert len({own_seed() for _ in range(100)}) == 100


def test_the_distribution_is_the_policys_own():
    fields = request_fields(SamplingParams(4, 0.7, 32, (2, 5), seed=0), seed=11)
    assert (fields["n"], fields["seed"]) == (4, 11)
    assert (fields["temperature"], fields["max_tokens"], fields["stop_token_ids"]) == (0.7, 32, [2, 5])
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    assert {name: fields[name] for name in neutral} == neutral
    cut = request_fields(SamplingParams(4, 0.7, 32, (2, 5), seed=0, top_p=0.9, top_k=50), seed=11)
    assert cut == fields | {"top_p": 0.9, "top_k": 50}
