"""Engine against learner: differences are found with the weights that sampled, token by token, and nothing else."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from tiny import LLAMA_SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from async_rlhf.config import GenerationConfig, LoRAConfig
from async_rlhf.generation.agreement import Agreement
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.lora import add_adapters
from async_rlhf.types import Prompt, RolloutGroup
from async_rlhf.weights import iterate_weights, named_weights

PROMPTS = [Prompt(i, i, tuple(range(1, 3 + i))) for i in range(5)]
METRICS = {"engine/logprob_difference", "engine/logprob_difference_max", "engine/kl"}


def sampled(model, version: int = 0) -> list[RolloutGroup]:
    params = SamplingParams(2, 0.7, 8, (256,), seed=0)
    completions = TransformersEngine(copy.deepcopy(model).eval(), params, version).generate(PROMPTS)
    return [RolloutGroup(prompt, rollouts) for prompt, rollouts in zip(PROMPTS, completions, strict=True)]


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(model).items()}


def agreement(**changes) -> Agreement:
    return Agreement(GenerationConfig(**{"mismatch_samples": 100, **changes}), torch.float32, None)


def changed(groups: list[RolloutGroup], by) -> list[RolloutGroup]:
    """With ``by(row, token)`` added to each log-probability."""
    count = iter(range(1000))

    def other(rollout):
        row = next(count)
        return replace(rollout, logprobs=tuple(x + by(row, t) for t, x in enumerate(rollout.logprobs)))

    return [replace(group, rollouts=tuple(map(other, group.rollouts))) for group in groups]


def test_a_policy_that_has_moved_on_is_compared_by_the_weights_that_sampled(make_policy):
    policy = make_policy()
    before, groups = snapshot(policy), sampled(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    now = snapshot(policy)
    found = agreement().measure(policy, lambda version: before, groups)
    assert found.keys() == METRICS
    assert found["engine/logprob_difference_max"] < 1e-5
    with pytest.raises(GeneratorError, match="computes other log-probabilities"):
        agreement().measure(policy, lambda version: now, groups)
    for name, tensor in named_weights(policy).items():
        assert torch.equal(tensor, now[name]), name  # measuring leaves the policy as it is


def test_the_numbers_are_those_of_the_definition(make_policy):
    policy = make_policy()
    differences = {(r, t): 1e-4 * ((r * 7 + t * 3) % 11 - 5) for r in range(10) for t in range(8)}
    groups = changed(sampled(policy), lambda r, t: differences[r, t])
    found = agreement().measure(policy, lambda version: {}, groups)
    rows = [rollout for group in groups for rollout in group.rollouts]
    log_ratios = [-differences[r, t] for r, rollout in enumerate(rows) for t in range(len(rollout.tokens))]
    assert found["engine/logprob_difference"] == pytest.approx(sum(map(abs, log_ratios)) / len(log_ratios), rel=0.02)
    assert found["engine/logprob_difference_max"] == pytest.approx(5e-4, rel=0.02)
    kl = sum(math.expm1(d) - d for d in log_ratios) / len(log_ratios)
    assert found["engine/kl"] == pytest.approx(kl, rel=0.1)


def test_each_token_is_compared_by_its_own_version(make_policy):
    old, new = make_policy(0), make_policy(5)
    params = SamplingParams(2, 0.7, 8, (), seed=0)
    engine, calls = TransformersEngine(copy.deepcopy(old).eval(), params, version=3), iter(range(100))
    engine.refresh = lambda: engine.load(snapshot(new), 4) if next(calls) == 2 else None
    groups = [RolloutGroup(p, c) for p, c in zip(PROMPTS, engine.generate(PROMPTS), strict=True)]
    assert {rollout.versions for group in groups for rollout in group.rollouts} == {(3,) * 3 + (4,) * 5}
    weights = {3: snapshot(old), 4: snapshot(new)}
    found = agreement().measure(make_policy(9), weights.__getitem__, groups)
    assert found["engine/logprob_difference_max"] < 1e-5
    with pytest.raises(GeneratorError):
        agreement().measure(make_policy(9), lambda version: weights[7 - version], groups)


def test_only_so_many_completions_are_looked_at_and_none_if_none(make_policy):
    policy = make_policy()
    spoilt = changed(sampled(policy), lambda r, t: 1e-3 if r == 5 else 0.0)
    for samples, looked_at in ((2, True), (1, False)):  # 2 of 10: the first and the sixth
        found = agreement(mismatch_samples=samples).measure(policy, lambda version: {}, spoilt)
        assert (found["engine/logprob_difference_max"] > 5e-4) == looked_at
    assert agreement(mismatch_samples=0).measure(policy, lambda version: {}, spoilt) == {}


@pytest.mark.parametrize("published", ["merged", "adapter"])
@pytest.mark.parametrize("kind", ["gpt_neox", "llama_tied"])
def test_adapters_count_once_merged_or_alone(make_policy, kind, published):
    torch.manual_seed(0)
    policy = make_policy()
    if kind == "llama_tied":
        policy = LlamaForCausalLM(LlamaConfig(vocab_size=258, tie_word_embeddings=True, **LLAMA_SIZES))
    add_adapters(policy, LoRAConfig(rank=4), seed=0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    groups = sampled(policy)
    kept = dict(named_weights(policy)) if published == "merged" else dict(iterate_weights(policy, adapters_only=True))
    kept = {name: tensor.clone() for name, tensor in kept.items()}
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.mul_(2)
    found = agreement().measure(policy, lambda version: kept, groups)
    assert found["engine/logprob_difference_max"] < 1e-4
    with pytest.raises(GeneratorError):
        agreement().measure(policy, lambda version: {}, groups)


def test_low_precision_may_differ_more(make_policy):
    config = GenerationConfig()
    limits = [Agreement(config, dtype, None).limit for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert limits == sorted(limits)
    assert Agreement(config, torch.float32, torch.bfloat16).limit == limits[2]
