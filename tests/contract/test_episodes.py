"""The laws of episodes: what is trained on was sampled, and a run with environments is as exact as any other."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from environments import Echo, Greeting
from test_laws import SAMPLES, assert_same_run, metrics_of, sequential_oracle
from tiny import StopAfter, new_args, new_policy

from async_rlhf.generation.episodes.environment import Observation
from async_rlhf.generation.episodes.rendering import Renderer
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.episodes.spec import episodes_of
from async_rlhf.generation.sampling import request_seeds, sample_uniforms
from async_rlhf.run.trainer import OnlineTrainer

pytestmark = pytest.mark.quick
STOPS = list(range(60))
"""So many stop tokens that a tiny model ends most answers by itself."""


def policy_of(seed: int = 0):
    return new_policy(seed, max_position_embeddings=160)


def episode_args(folder, name="run", generation=None, **changes):
    generation = {
        "response_length": 8,
        "max_turns": 3,
        "episode_length": 40,
        "stop_token_ids": STOPS,
        **(generation or {}),
    }
    return new_args(folder, name, generation, **changes)


def run_trainer(tokenizer, prompts, args, environment=Echo, stop_after=None, **more):
    policy = policy_of()
    callbacks = [] if stop_after is None else [StopAfter(stop_after)]
    trainer = OnlineTrainer(
        policy, args, prompts, environment=environment, processing_class=tokenizer, callbacks=callbacks, **more
    )
    with nullcontext() if stop_after is None else pytest.raises(SystemExit, match=r"^0$"):
        trainer.train()
    return policy.state_dict(), metrics_of(args)


def oracle(tokenizer, prompts, args, algorithm, environment=Echo):
    episodes = episodes_of(args, environment, (), tokenizer)
    more = {"stop_token_ids": (256, *STOPS), "episodes": episodes}
    return sequential_oracle(policy_of, tokenizer, prompts, args, algorithm, rewards=(), **more)


def draw(policy, contexts, positions, limits, params, prompts):
    """Answers by the definition: all rows together, each token by inverting the cumulative distribution."""
    rows = [list(context) for context in contexts]
    out = [[] for _ in rows]
    alive = list(range(len(rows)))
    while alive:
        with torch.no_grad():
            for row in alive:
                logits = policy(torch.tensor([rows[row]])).logits[0, -1].double() / params.temperature
                probabilities = torch.softmax(logits, -1).cumsum(-1)
                prompt, number = prompts[row]
                place = positions[row] + len(out[row])
                uniform = sample_uniforms(params.seed, prompt.draw, number, np.array([place]))[0]
                token = int(torch.searchsorted(probabilities, uniform * probabilities[-1], right=True))
                rows[row].append(token)
                out[row].append(token)
        alive = [r for r in alive if out[r][-1] not in params.stop_token_ids and len(out[r]) < limits[r]]
    return out


def play_slowly(policy, tokenizer, params, prompts, args, environment):
    """Every episode by itself, token by token, without the engine, the player or the sampler."""
    found = []
    for prompt in prompts:
        samples = []
        for number in range(params.samples_per_prompt):
            world = environment()
            opened = world.reset(prompt.columns, request_seeds(params.seed, [prompt])[0])
            tokens = list(prompt.tokens) + tokenizer("".join(m["content"] for m in opened))["input_ids"]
            start, sampled, rewards, finish = len(tokens), [False] * len(tokens), [0.0] * len(tokens), "length"
            length = args.generation.longest_episode - (start - len(prompt.tokens))
            for turn in range(1, args.generation.max_turns + 1):
                limit = min(params.response_length, length - (len(tokens) - start))
                (answer,) = draw(policy, [tokens], [len(tokens) - start], [limit], params, [(prompt, number)])
                tokens, sampled = tokens + answer, sampled + [True] * len(answer)
                rewards += [0.0] * len(answer)
                if answer[-1] not in params.stop_token_ids:
                    break
                text = tokenizer.decode(answer[:-1])
                observed = asyncio.run(world.step({"role": "assistant", "content": text}))
                rewards[-1] = observed.reward
                if observed.done or turn == args.generation.max_turns:
                    finish = "stop" if observed.done else "length"
                    break
                more = tokenizer("".join(m["content"] for m in observed.messages))["input_ids"]
                if len(tokens) + len(more) - start >= length:
                    break
                tokens, sampled, rewards = tokens + more, sampled + [False] * len(more), rewards + [0.0] * len(more)
            samples.append((tokens, sampled, rewards, finish))
        found.append(samples)
    return found


@pytest.mark.parametrize("environment", [Echo, Greeting])
def test_episodes_are_what_playing_them_slowly_gives(tmp_path, tokenizer, prompts, environment):
    args = episode_args(tmp_path, samples_per_prompt=3)
    trainer = OnlineTrainer(policy_of(), args, prompts, environment=environment, processing_class=tokenizer)
    engine = trainer.run.engine
    stream = trainer.run.prompts.stream
    drawn = [stream.prompt(n) for n in range(12)]
    ours = EpisodeSampler(engine).generate(drawn)
    slow = play_slowly(engine.model, tokenizer, engine.params, drawn, args, environment)
    turns = [int(sample.metrics["turns"]) for samples in ours for sample in samples]
    assert len(set(turns)) > 1, turns
    for samples, expected in zip(ours, slow, strict=True):
        for sample, (tokens, sampled, rewards, finish) in zip(samples, expected, strict=True):
            assert sample.tokens.tolist() == tokens
            assert sample.sampled.tolist() == sampled
            assert sample.rewards.tolist() == pytest.approx(rewards)
            assert sample.finish_reason == finish


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("algorithm", SAMPLES)
def test_a_run_with_an_environment_is_its_sequential_oracle(tmp_path, tokenizer, prompts, algorithm, staleness):
    """Inline and in processes; also when it is stopped after batch 2 and resumed."""
    samples = SAMPLES[algorithm]
    args = episode_args(
        tmp_path,
        algorithm=algorithm,
        staleness=staleness,
        samples_per_prompt=samples,
        completions_per_batch=8 * samples,
        total_episodes=32,
    )
    run_trainer(tokenizer, prompts, args, stop_after=2)
    ours = run_trainer(tokenizer, prompts, replace(args, resume=True))
    assert len(ours[1]) == 4
    assert_same_run(ours, oracle(tokenizer, prompts, args, algorithm))
    assert ours[1][-1]["grad_norm"] > 0
    assert ours[1][-1]["episode/turns"] > 1


def test_an_answer_that_is_cut_off_is_the_last_message(tmp_path, tokenizer, prompts):
    """Reward functions and files of samples see all that the policy wrote."""
    args = episode_args(tmp_path, samples_per_prompt=3)
    trainer = OnlineTrainer(policy_of(), args, prompts, environment=Echo, processing_class=tokenizer)
    stream = trainer.run.prompts.stream
    found = EpisodeSampler(trainer.run.engine).generate([stream.prompt(n) for n in range(12)])
    cut = [s for group in found for s in group if s.tokens[-1] not in (256, *STOPS)]
    assert {len(sample.messages) for sample in cut} >= {1, 3}
    for sample in cut:
        answer = sample.tokens[len(sample) - int(sample.sampled[::-1].argmin()) :]
        assert sample.messages[-1] == {"role": "assistant", "content": tokenizer.decode(answer.tolist())}


def test_environments_do_not_account_for_the_time_of_others(tmp_path, tokenizer, prompts, monkeypatch):
    """A plain function is done long before its episode has its turn again."""

    class Plain:
        def reset(self, row, seed):
            pass

        def step(self, message):
            return Observation([{"role": "user", "content": "go on"}])

        def close(self):
            pass

    def slow_message(self, tokens, before):
        time.sleep(0.01)
        return {"role": "assistant", "content": "x"}

    monkeypatch.setattr(Renderer, "message", slow_message)
    args = episode_args(tmp_path, samples_per_prompt=3)
    trainer = OnlineTrainer(policy_of(), args, prompts, environment=Plain, processing_class=tokenizer)
    sampler = EpisodeSampler(trainer.run.engine)
    sampler.generate([trainer.run.prompts.stream.prompt(n) for n in range(12)])
    assert sampler.take_seconds() < 1.0
