"""Runs of mixtures with router replay: exact as all others, and nearer to the engine than without."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import test_episodes
import torch
from environments import Echo
from test_laws import assert_same_run, metrics_of, run_trainer, sequential_oracle
from tiny import mixture

from async_rlhf.config.episodes import World
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.episodes.spec import episodes_of
from async_rlhf.generation.protocol import SamplingParams, check_completions
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.routing import recorded_routes, route_shape

ON = {"router_replay": True, "total_episodes": 32}


@pytest.mark.parametrize(("kind", "passes"), [("mixtral", {}), ("qwen3_moe", {"packing": True})])
def test_asynchronous_and_resumed_it_equals_its_sequential_oracle_bitwise(tokenizer, prompts, make_args, kind, passes):
    """At S = 1, stopped after batch 2: the completions of batch 3 are in the checkpoint, with their routes."""
    if passes:
        passes = {**passes, "max_tokens_per_pass": 120, "annotate_max_tokens": 240}
    args, policy = make_args(staleness=1, **ON, **passes), partial(mixture, kind)
    run_trainer(policy, tokenizer, prompts, args, stop_after=2)
    ours = run_trainer(policy, tokenizer, prompts, replace(args, resume=True))
    (held,) = (Path(args.output_dir) / "checkpoint-2" / "resume" / "rollouts.jsonl").read_text().splitlines()
    assert all("routes_TLE" in sample for group in json.loads(held)["groups"] for sample in group["samples"])
    oracle = partial(sequential_oracle, policy, tokenizer, prompts, routes=route_shape(policy().config))
    assert_same_run(ours, oracle(args))
    assert ours[1][-1]["grad_norm"] > 0
    other_lag = oracle(replace(args, staleness=2))
    assert any(not torch.equal(tensor, other_lag[0][name]) for name, tensor in ours[0].items())


def test_synchronous_in_a_process_it_equals_inline_bitwise(tokenizer, prompts, make_args):
    inline, process = make_args("inline", **ON), make_args("process", {"placement": "process"}, **ON)
    ours = run_trainer(partial(mixture, "mixtral"), tokenizer, prompts, inline)
    assert_same_run(run_trainer(partial(mixture, "mixtral"), tokenizer, prompts, process), ours)


def test_episodes_have_the_routes_of_every_turn(tokenizer, prompts, tmp_path, monkeypatch):
    """Of prompt, answers and observations those of one pass over the whole; and such runs are exact, too."""
    policy = partial(mixture, "mixtral")
    monkeypatch.setattr(test_episodes, "policy_of", policy)
    args = test_episodes.episode_args(tmp_path, staleness=1, **ON)
    ours = test_episodes.run_trainer(tokenizer, prompts, args)
    more = {"stop_token_ids": (256, *test_episodes.STOPS), "routes": route_shape(policy().config)}
    more["episodes"] = episodes_of(args, World(Echo), ChatTemplate(tokenizer))
    assert_same_run(ours, sequential_oracle(policy, tokenizer, prompts, args, rewards=(), **more))
    params = SamplingParams(2, 0.7, args.generation.response_length, seed=0, **more)
    drawn = [PromptStream(prompts, tokenizer).prompt(n) for n in range(8)]
    groups = EpisodeSampler(TransformersEngine(policy(), params)).generate(drawn)
    check_completions("the engine answered", drawn, groups, params, 258)
    samples = [sample for group in groups for sample in group]
    assert sum(sample.metrics["turns"] > 1 for sample in samples) > 4
    for sample in samples:
        with torch.no_grad(), recorded_routes(model := policy(), params.routes) as found:
            model(torch.tensor(sample.tokens[None]))
        right_TLE, given_TLE = found[0].numpy()[:-1], sample.routes_TLE[:-1]
        assert (np.sort(given_TLE, axis=-1) == np.sort(right_TLE, axis=-1)).all()


def test_the_log_says_that_the_engine_is_nearer(tokenizer, prompts, make_args):
    """An engine in bfloat16 and a learner in float32."""
    policy, found = partial(mixture, "qwen3_moe", layers=4, experts=16), []
    generation = {"placement": "process", "dtype": "bfloat16", "mismatch_steps": 1, "mismatch_samples": 16}
    for replay in (False, True):
        args = make_args(f"replay-{replay}", generation, staleness=1, total_episodes=32, router_replay=replay)
        run_trainer(policy, tokenizer, prompts, args)
        found.append([row["engine/logprob_difference"] for row in metrics_of(args)])
    without, replayed = found
    print(f"without replay {without}, with it {replayed}")
    assert all(after < 0.7 * before for before, after in zip(without, replayed, strict=True))


def test_a_model_without_experts_is_refused_before_anything_is_written(make_policy, tokenizer, prompts, make_args):
    args = make_args(router_replay=True)
    with pytest.raises(ValueError, match=r"router_replay: got True; must be false: the model is of type 'gpt_neox'"):
        run_trainer(make_policy, tokenizer, prompts, args)
    assert not Path(args.output_dir).exists()
