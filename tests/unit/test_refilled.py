"""Places that completions leave are taken by the next prompts: the same samples, whatever shares a step with them."""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import test_engine
import torch
from tiny import all_drawn

from async_rlhf.generation import decode_cache, transformers_engine
from async_rlhf.generation.decode_cache import RoomyLayer
from async_rlhf.generation.protocol import Occupancy
from async_rlhf.generation.sampling import row_uniforms
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.types import Turn


@pytest.fixture(params=[False, True], ids=["repeated", "shared"], autouse=True)
def shared(request, monkeypatch):
    """Whether the rows of a prompt share its keys and values, however short it is."""
    monkeypatch.setattr(decode_cache, "SHARED", 1 if request.param else 10**9)
    return request.param


def streamed(engine, prompts, offered=lambda free: free):
    """The completions of each prompt, if ``offered`` decides how many of the free places get a prompt now."""
    left, found = deque(prompts), {}

    def more(free):
        return [left.popleft() for _ in range(min(offered(free), len(left)))]

    while left:  # a source that gave nothing is asked again once all have ended
        first = len(prompts) - len(left)
        found |= {first + number: samples for number, samples in engine.stream(more)}
    return all_drawn([found[i] for i in range(len(prompts))])


@pytest.mark.parametrize("batch_size", [3, 7, 12, 100])
@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama", "mixtral", "mistral_sliding", "qwen2_half_sliding"])
def test_samples_are_those_of_the_loop_without_cache(make_policy, kind, batch_size):
    prompts, sampling = test_engine.ragged_prompts(13), test_engine.params(batch_size=batch_size)
    model = test_engine.make_model(kind, make_policy)
    ours = streamed(TransformersEngine(model, sampling, version=4), prompts)
    for our, their in zip(ours, test_engine.slow_generate(model, prompts, sampling), strict=True):
        assert [sample.tokens for sample in our] == [tokens for tokens, _, _ in their]
        assert [sample.finish_reason for sample in our] == [finish for _, _, finish in their]
        assert {version for sample in our for version in sample.versions} == {4}
        for sample, (_, logprobs, _) in zip(our, their, strict=True):
            assert sample.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama", "mixtral"])
def test_rows_share_the_keys_and_values_of_their_prompt(make_policy, kind, shared, monkeypatch):
    """As long as they are there, whatever order rows leave in; and turns go on from them."""
    prompts, sampling = test_engine.ragged_prompts(9), test_engine.params(batch_size=9)
    seen, of_rows = list[int](), decode_cache.Prefixes.of_rows
    monkeypatch.setattr(decode_cache.Prefixes, "of_rows", lambda *given: seen.append(1) or of_rows(*given))
    engine = TransformersEngine(test_engine.make_model(kind, make_policy), sampling)
    engine.generate(prompts)
    assert bool(seen) == shared
    turns = [Turn(p.draw, p.row, p.tokens, limit=10) for p in prompts[:3]]
    again = []
    for turn, answers in zip(turns, engine.generate(turns), strict=True):
        for number, answer in enumerate(answers):
            tokens, more = (*answer.tokens.tolist(), 3, 4), {"offset": len(answer.drawn), "past": answer.past}
            again.append(replace(turn, tokens=tokens, sample=number, **more))
    alone = replace(sampling, samples_per_prompt=1)
    found = TransformersEngine(engine.model, alone).generate(again)
    right = TransformersEngine(engine.model, alone).generate([replace(turn, past=None) for turn in again])
    test_engine.assert_same_completions(all_drawn(found), all_drawn(right))


def test_a_model_that_cannot_read_shared_keys_repeats_them(make_policy, shared, monkeypatch, caplog):
    def attend(*_):
        raise TypeError("there are no keys")

    monkeypatch.setattr(decode_cache.Prefixes, "attend", attend)
    prompts, sampling = test_engine.ragged_prompts(4), test_engine.params(batch_size=6)
    engine = TransformersEngine(make_policy(0).eval(), sampling)
    with caplog.at_level("INFO"):
        assert len(engine.generate(prompts)) == 4
    assert ("do not share their prompt's keys and values: there are no keys" in caplog.text) == shared


def test_the_moments_at_which_prompts_come_change_no_sample(make_policy):
    prompts, sampling = test_engine.ragged_prompts(17), test_engine.params(batch_size=9)
    engine = TransformersEngine(make_policy(0).eval(), sampling)
    whole = streamed(engine, prompts)
    draw = random.Random(1)
    for _ in range(4):
        test_engine.assert_same_completions(streamed(engine, prompts, lambda free: draw.randint(0, free)), whole)
    test_engine.assert_same_completions(all_drawn(engine.generate(prompts)), whole)


def test_places_are_taken_as_soon_as_completions_leave_them(make_policy):
    """One long answer holds up nobody; with a barrier it would."""
    prompts = test_engine.ragged_prompts(60)
    sampling = test_engine.params(samples_per_prompt=1, batch_size=6, response_length=40)
    engine = TransformersEngine(make_policy(0).eval(), sampling)
    lengths = [len(samples[0].tokens) for samples in streamed(engine, prompts)]
    assert max(lengths) > 3 * np.mean(lengths)
    occupancy, engine.occupancy = engine.occupancy, Occupancy()
    for first in range(0, 60, 6):
        engine.generate(prompts[first : first + 6])
    barrier = engine.occupancy
    assert occupancy.taken == barrier.taken == sum(lengths) - 60, "the first token comes from the prompt's own pass"
    assert occupancy.taken / occupancy.places > 0.8
    assert barrier.taken / barrier.places < 0.5


def test_the_cache_does_not_grow_with_what_has_been_decoded(make_policy, monkeypatch):
    columns, update = [], RoomyLayer.update
    monkeypatch.setattr(
        RoomyLayer,
        "update",
        lambda layer, *args, **kwargs: columns.append(layer._filled) or update(layer, *args, **kwargs),
    )
    prompts, sampling = test_engine.ragged_prompts(200), test_engine.params(batch_size=6)
    streamed(TransformersEngine(make_policy(0).eval(), sampling), prompts)
    longest = 13 + sampling.response_length
    assert max(columns) < longest + transformers_engine._SPARE


@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "mistral_sliding"])
def test_new_weights_draw_the_tokens_after_them(make_policy, kind):
    prompts, sampling = (
        test_engine.ragged_prompts(7),
        test_engine.params(stop_token_ids=test_engine.STOPS[:20], batch_size=6),
    )
    old, new = test_engine.make_model(kind, make_policy, seed=0), test_engine.make_model(kind, make_policy, seed=9)
    engine = TransformersEngine(copy.deepcopy(old), sampling, version=3)
    calls = 0

    def refresh() -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            engine.load({name: tensor.clone() for name, tensor in new.state_dict().items()}, 5)

    engine.refresh = refresh
    found = streamed(engine, prompts)
    uniforms = row_uniforms(sampling.seed, prompts, 3, 10)
    kinds = set()
    for p, prompt in enumerate(prompts):
        for k, sample in enumerate(found[p]):
            steps = sample.versions.count(3)
            assert sample.versions == (3,) * steps + (5,) * (len(sample.tokens) - steps)
            tokens, logprobs = test_engine.slow_generate_with_switch(old, new, prompt, uniforms[p, k], steps, 0.7)
            assert sample.tokens == tuple(tokens[: len(sample.tokens)])
            assert sample.logprobs == pytest.approx(logprobs[: len(sample.tokens)], abs=1e-4)
            kinds.add(frozenset(sample.versions))
    assert kinds == {frozenset({3}), frozenset({5}), frozenset({3, 5})}


def test_logits_that_are_not_finite_are_an_error_with_the_version(make_policy):
    model = make_policy(0).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="version 8"):
        streamed(TransformersEngine(model, test_engine.params(), version=8), test_engine.ragged_prompts(3))
