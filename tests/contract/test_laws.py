"""The laws of the design: exact lag, asynchronous = its sequential oracle, micro-batching changes nothing."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import in_float64
from tiny import StopAfter, count_letters, json_rows, rare_unless

from async_rlhf import GRPOConfig, KLConfig, OffPolicyConfig, OnlineConfig
from async_rlhf.algorithms.table import BUILT_IN, find
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.learner.learner import Learner
from async_rlhf.models.values import new_value_model
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.run.schedule import batches_for, version_for
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.types import Batch, Group

LOSSES = ("loss/policy_avg", "loss/value_avg", "objective/scores", "objective/kl", "grad_norm", "rewards/margins")
SAMPLES = {name: {"best_of_k": 3, "ppo": 1, "grpo": 4}.get(name, 2) for name in BUILT_IN}
PASSES = {
    "rows": {},
    "padded": {"max_tokens_per_pass": 120, "annotate_max_tokens": 240, "packing": False},
    "packed": {"max_tokens_per_pass": 120, "annotate_max_tokens": 240, "packing": True},
}


def run_trainer(make_policy, tokenizer, prompts, args: OnlineConfig, stop_after: int | None = None):
    policy = make_policy()
    trainer = OnlineTrainer(
        policy,
        args,
        prompts,
        reward_funcs=count_letters,
        processing_class=tokenizer,
        callbacks=[] if stop_after is None else [StopAfter(stop_after)],
    )
    with nullcontext() if stop_after is None else pytest.raises(SystemExit, match=r"^0$"):
        trainer.train()
    return policy.state_dict(), metrics_of(args)


def metrics_of(args: OnlineConfig) -> list[dict[str, float]]:
    lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_same_run(ours, theirs) -> None:
    (our_weights, our_metrics), (their_weights, their_metrics) = ours, theirs
    assert [[m.get(name) for name in LOSSES] for m in our_metrics] == [
        [m.get(name) for name in LOSSES] for m in their_metrics
    ]
    for name, tensor in our_weights.items():
        assert torch.equal(tensor, their_weights[name]), name


def sequential_oracle(
    make_policy, tokenizer, prompts, args: OnlineConfig, algorithm: str = "online_dpo", rewards=(count_letters,), **more
):
    """One process, no schedule: keep every past policy, and sample batch b in turn from the one S + 1 batches back.
    ``more`` says how to sample, beyond what every run has.
    """
    policy = make_policy()
    value = new_value_model(policy) if algorithm == "ppo" else None
    learner = Learner(policy, None, find(algorithm), args, value)
    scorer = Scorer(tokenizer, args, None, rewards)
    stream = PromptStream(prompts, tokenizer, max_length=args.max_prompt_length, seed=args.seed)
    generation, more = args.generation, {"stop_token_ids": (256,), **more}
    sizes = (args.samples_per_prompt, generation.temperature, generation.response_length)
    params = SamplingParams(*sizes, seed=args.seed, **more)
    past, metrics = [copy.deepcopy(policy)], []
    for b in range(1, args.num_batches + 1):
        sampler, first = past[max(0, b - 1 - args.staleness)], (b - 1) * args.batch_size
        drawn = [stream.prompt(n) for n in range(first, first + args.batch_size)]
        completions = EpisodeSampler(TransformersEngine(sampler, params)).generate(drawn)
        groups = tuple(Group(p, c) for p, c in zip(drawn, completions, strict=True))
        scored = scorer(Batch(b, 0, groups, 0.0))
        experience, objective = learner.annotate(scored)
        metrics.append(objective | scored.metrics | learner.update(experience, b))
        past.append(copy.deepcopy(policy))
    return policy.state_dict(), metrics


@pytest.mark.parametrize("staleness", [1, 2])
def test_asynchronous_equals_its_sequential_oracle_bitwise(make_policy, tokenizer, prompts, make_args, staleness):
    args = make_args(staleness=staleness)
    assert args.placement == "process"
    ours = run_trainer(make_policy, tokenizer, prompts, args)
    oracle = sequential_oracle(make_policy, tokenizer, prompts, args)
    assert_same_run(ours, oracle)
    other_lag = sequential_oracle(make_policy, tokenizer, prompts, replace(args, staleness=staleness + 1))
    assert any(not torch.equal(tensor, other_lag[0][name]) for name, tensor in ours[0].items())


WAYS = [(0, "packed", "whole"), (1, "rows", "sharded"), (0, "padded", "sharded"), (2, "packed", "sharded"),
        (2, "rows", "whole")]  # fmt: skip
EVERY = [(algorithm, *way) for algorithm in SAMPLES for way in WAYS]


@pytest.mark.parametrize(
    ("algorithm", "staleness", "passes", "checkpoint"),
    rare_unless(lambda i: (i % len(WAYS) - 2 * (i // len(WAYS))) % len(WAYS) < 2, EVERY),  # two ways of each
)
def test_every_algorithm_is_as_exact(
    make_policy, tokenizer, prompts, make_args, algorithm, staleness, passes, checkpoint
):
    """Also when its run is stopped after batch 2 and resumed, from whole and from sharded checkpoints."""
    samples = SAMPLES[algorithm]
    args = make_args(
        algorithm=algorithm,
        staleness=staleness,
        samples_per_prompt=samples,
        completions_per_batch=8 * samples,
        per_device_train_batch_size=4 if passes == "rows" else None,
        total_episodes=32,
        num_epochs=2,
        checkpoint_format=checkpoint,
        **PASSES[passes],
    )
    run_trainer(make_policy, tokenizer, prompts, args, stop_after=2)
    assert len(metrics_of(args)) == 2
    ours = run_trainer(make_policy, tokenizer, prompts, replace(args, resume=True))
    assert len(ours[1]) == 4
    assert_same_run(ours, sequential_oracle(make_policy, tokenizer, prompts, args, algorithm))
    assert ours[1][-1]["grad_norm"] > 0


def test_choosing_prompts_by_their_signal_is_as_exact(make_policy, tokenizer, prompts, make_args):
    """Six of eight prompts of each batch are trained on, whoever samples them, and in a run that is resumed."""
    args = make_args(algorithm="grpo", staleness=2, samples_per_prompt=2, total_episodes=40, trained_prompts=6)
    run_trainer(make_policy, tokenizer, prompts, args, stop_after=2)
    ours = run_trainer(make_policy, tokenizer, prompts, replace(args, resume=True))
    assert_same_run(ours, sequential_oracle(make_policy, tokenizer, prompts, args, "grpo"))
    everything = sequential_oracle(make_policy, tokenizer, prompts, replace(args, trained_prompts=None), "grpo")
    assert any(not torch.equal(tensor, everything[0][name]) for name, tensor in ours[0].items())


def test_synchronous_in_a_process_equals_inline_bitwise(make_policy, tokenizer, prompts, make_args):
    inline = run_trainer(make_policy, tokenizer, prompts, make_args("inline"))
    process = run_trainer(make_policy, tokenizer, prompts, make_args("process", {"placement": "process"}))
    assert_same_run(process, inline)


@pytest.mark.parametrize("staleness", [1, 3])
def test_in_turn_with_training_stale_samples_are_the_same_bitwise(
    make_policy, tokenizer, prompts, make_args, staleness
):
    generation = {"placement": "inline", "mismatch_steps": 1}
    inline = make_args("inline", generation, staleness=staleness)
    ours = run_trainer(make_policy, tokenizer, prompts, inline)
    oracle = sequential_oracle(make_policy, tokenizer, prompts, inline)
    assert_same_run(ours, oracle)
    process = make_args("process", {"placement": "process"}, staleness=staleness)
    assert_same_run(run_trainer(make_policy, tokenizer, prompts, process), ours)
    assert max(m["engine/logprob_difference"] for m in metrics_of(inline)) < 1e-5  # measured before the weights change


def test_synchronous_in_a_process_equals_inline_under_bf16(make_policy, tokenizer, prompts, make_args):
    inline = run_trainer(make_policy, tokenizer, prompts, make_args("inline", bf16=True))
    args = make_args("process", {"placement": "process"}, bf16=True)
    assert_same_run(run_trainer(make_policy, tokenizer, prompts, args), inline)


def test_two_workers_draw_the_same_random_numbers_as_one(make_policy, tokenizer, prompts, make_args):
    """Another batch composition may round differently, so rewards agree closely, not bitwise."""
    one = run_trainer(make_policy, tokenizer, prompts, make_args("one", staleness=1))[1]
    two = run_trainer(make_policy, tokenizer, prompts, make_args("two", {"workers": 2}, staleness=1))[1]
    assert [m["objective/scores"] for m in one] == pytest.approx([m["objective/scores"] for m in two], rel=1e-2)
    assert one[0]["objective/scores"] == two[0]["objective/scores"]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_token_has_the_version_that_the_schedule_says(make_policy, tokenizer, prompts, make_args, staleness):
    args = make_args("run", {"placement": "process"}, staleness=staleness, num_samples_logged=100)
    run_trainer(make_policy, tokenizer, prompts, args)
    expected = {b: max(0, b - 1 - staleness) for b in range(1, 7)}
    assert [(m["batch"], m["schedule/version"]) for m in metrics_of(args)] == list(expected.items())
    samples = json_rows(Path(args.output_dir) / "samples.jsonl")
    assert {(s["batch"], s["version"]) for s in samples} == set(expected.items())
    assert len(samples) == 48 * 2
    assert [s["draw"] for s in samples] == [n for n in range(48) for _ in range(2)]  # none skipped, none repeated


def test_the_schedule_is_its_own_inverse_and_bounds_the_pipeline():
    for staleness in range(6):
        order = [b for v in range(40) for b in batches_for(v, staleness, 40)]
        assert order == list(range(1, 41))
        assert all(version_for(b, staleness) == v for v in range(40) for b in batches_for(v, staleness, 40))
        for trained in range(40):  # handed out once version `trained` is published, less those trained on
            handed_out = sum(len(batches_for(v, staleness, 40)) for v in range(trained + 1))
            assert handed_out - trained <= staleness + 1


def accumulated_gradients(make_policy, tokenizer, prompts, args: OnlineConfig, algorithm: str):
    """Of one optimiser step on eight prompts, one of them with equal scores; in float64, once they are sampled."""
    policy, reference, value = make_policy(), make_policy(7), new_value_model(make_policy(3))
    torch.nn.init.normal_(value.score.weight, generator=torch.Generator().manual_seed(0))
    sampling = SamplingParams(args.samples_per_prompt, 0.7, 12, (256,), 0)
    drawn = [PromptStream(prompts, tokenizer).prompt(n) for n in range(8)]
    completions = TransformersEngine(make_policy(5), sampling).generate(drawn)
    groups = tuple(Group(p, c) for p, c in zip(drawn, completions, strict=True))
    scored = Scorer(tokenizer, args, None, [count_letters])(Batch(1, 0, groups, 0.0))
    scored.scores_PK[3] = 1.0  # a tie, whose pair must not count
    captured = {}

    def capture(limit: float) -> list[float]:
        captured.update({n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None})
        return [0.0] * len(learner.optimizer.param_groups)

    with in_float64(policy, reference, value):
        learner = Learner(policy, reference, find(algorithm), args, value if algorithm == "ppo" else None)
        learner.parallel.step = capture
        learner.update(learner.annotate(scored)[0], 1)
    return captured


def require_same(split: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    """But for the last digits of float64."""
    assert max(g.abs().max() for g in whole.values()) > 1e-3
    for name, gradient in whole.items():
        assert gradient.dtype == torch.float64
        torch.testing.assert_close(split[name], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("per_device", "accumulation"), [(2, 4), (1, 8), (3, 3)])
@pytest.mark.parametrize("algorithm", SAMPLES)
def test_micro_batching_changes_no_gradient(
    make_policy, tokenizer, prompts, make_args, algorithm, per_device, accumulation
):
    def gradients(per_device: int, accumulation: int) -> dict[str, torch.Tensor]:
        args = make_args(
            algorithm=algorithm,
            samples_per_prompt=SAMPLES[algorithm],
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation,
            num_mini_batches=1,
            total_episodes=per_device * accumulation,
            max_grad_norm=0.0,
        )
        return accumulated_gradients(make_policy, tokenizer, prompts, args, algorithm)

    whole, split = gradients(8, 1), gradients(per_device, accumulation)
    require_same(split, whole)


@pytest.mark.parametrize(("packing", "tokens"), [(False, 120), (True, 120), (True, 1)])
@pytest.mark.parametrize("algorithm", SAMPLES)
def test_passes_that_tokens_limit_change_no_gradient(
    make_policy, tokenizer, prompts, make_args, algorithm, packing, tokens
):
    def gradients(**limits: object) -> dict[str, torch.Tensor]:
        args = make_args(
            algorithm=algorithm,
            samples_per_prompt=SAMPLES[algorithm],
            completions_per_batch=8 * SAMPLES[algorithm],
            num_mini_batches=1,
            max_grad_norm=0.0,
            total_episodes=8,
            **limits,
        )
        return accumulated_gradients(make_policy, tokenizer, prompts, args, algorithm)

    whole = gradients(per_device_train_batch_size=64)
    split = gradients(
        per_device_train_batch_size=None, max_tokens_per_pass=tokens, annotate_max_tokens=2 * tokens, packing=packing
    )
    require_same(split, whole)


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_micro_batching_changes_no_gradient_of_grpo(make_policy, tokenizer, prompts, make_args, normalization):
    found = []
    for per_device in (8, 3):
        args = make_args(
            algorithm="grpo",
            samples_per_prompt=2,
            per_device_train_batch_size=per_device,
            num_mini_batches=1,
            total_episodes=per_device,
            normalization=normalization,
            kl=KLConfig(coef=0.3, where="loss", estimator="k2"),
            off_policy=OffPolicyConfig(importance="masked", level="sequence", cap=1.5),
        )
        assert isinstance(args, GRPOConfig)
        found.append(accumulated_gradients(make_policy, tokenizer, prompts, args, "grpo"))
    require_same(found[1], found[0])
