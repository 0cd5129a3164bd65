"""Engine against learner: differences are found with the weights that sampled, token by token; how often is asked."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tiny import LLAMA_SIZES, count_letters, drawn
from transformers import LlamaConfig, LlamaForCausalLM

from async_rlhf.config import GenerationConfig, LoRAConfig
from async_rlhf.generation import audit
from async_rlhf.generation.audit import Agreement, Comparisons, Noise, rows_of_batch
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.adapters import add_adapters
from async_rlhf.models.publish import SnapshotRing
from async_rlhf.models.weights import iterate_weights, named_weights
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.types import Group, Prompt

PROMPTS = [Prompt(i, i, tuple(range(1, 3 + i))) for i in range(5)]
METRICS = {
    "engine/logprob_difference",
    "engine/logprob_difference_max",
    "engine/kl",
    "engine/redraw_ties",
    "engine/sampling_evidence",
}


def sampled(model, version: int = 0) -> list[Group]:
    completions = TransformersEngine(copy.deepcopy(model).eval(), PARAMS, version).generate(PROMPTS)
    return [Group(prompt, samples) for prompt, samples in zip(PROMPTS, completions, strict=True)]


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(model).items()}


PARAMS = SamplingParams(2, 0.7, 8, (256,), seed=0)


def agreement(engine: str = "transformers", params: SamplingParams = PARAMS, **changes) -> Agreement:
    config = GenerationConfig(**{"mismatch_samples": 100, "engine": engine, **changes})
    return Agreement(config, params, torch.float32, None)


def changed(groups: list[Group], by) -> list[Group]:
    """With ``by(row, token)`` added to each log-probability."""
    count = iter(range(1000))

    def other(sample):
        row, logprobs = next(count), sample.logprobs.copy()
        logprobs[sample.sampled] += [by(row, t) for t in range(sample.sampled.sum())]
        return replace(sample, logprobs=logprobs)

    return [replace(group, samples=tuple(map(other, group.samples))) for group in groups]


def test_a_policy_that_has_moved_on_is_compared_by_the_weights_that_sampled(make_policy):
    policy = make_policy()
    before, groups = snapshot(policy), sampled(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    now = snapshot(policy)
    found = agreement().measure(1, policy, lambda version: before, groups)
    assert found.keys() == METRICS
    assert found["engine/logprob_difference_max"] < 1e-5
    with pytest.raises(GeneratorError, match="computes other log-probabilities"):
        agreement().measure(1, policy, lambda version: now, groups)
    for name, tensor in named_weights(policy).items():
        assert torch.equal(tensor, now[name]), name  # measuring leaves the policy as it is


def test_the_numbers_are_those_of_the_definition(make_policy):
    policy = make_policy()
    differences = {(r, t): 1e-4 * ((r * 7 + t * 3) % 11 - 5) for r in range(10) for t in range(8)}
    groups = changed(sampled(policy), lambda r, t: differences[r, t])
    found = agreement().measure(1, policy, lambda version: {}, groups)
    rows = [sample for group in groups for sample in group.samples]
    log_ratios = [-differences[r, t] for r, sample in enumerate(rows) for t in range(len(sample.drawn))]
    assert found["engine/logprob_difference"] == pytest.approx(sum(map(abs, log_ratios)) / len(log_ratios), rel=0.02)
    assert found["engine/logprob_difference_max"] == pytest.approx(5e-4, rel=0.02)
    kl = sum(math.expm1(d) - d for d in log_ratios) / len(log_ratios)
    assert found["engine/kl"] == pytest.approx(kl, rel=0.1)


def test_each_token_is_compared_by_its_own_version(make_policy):
    old, new = make_policy(0), make_policy(5)
    params = SamplingParams(2, 0.7, 8, (), seed=0)
    engine, calls = TransformersEngine(copy.deepcopy(old).eval(), params, version=3), iter(range(100))
    engine.refresh = lambda: engine.load(snapshot(new), 4) if next(calls) == 2 else None
    groups = [Group(p, c) for p, c in zip(PROMPTS, engine.generate(PROMPTS), strict=True)]
    assert {drawn(sample).versions for group in groups for sample in group.samples} == {(3,) * 3 + (4,) * 5}
    weights = {3: snapshot(old), 4: snapshot(new)}
    found = agreement().measure(1, make_policy(9), weights.__getitem__, groups)
    assert found["engine/logprob_difference_max"] < 1e-5
    with pytest.raises(GeneratorError):
        agreement().measure(1, make_policy(9), lambda version: weights[7 - version], groups)


def test_every_completion_has_its_turn_and_none_if_none(make_policy):
    """As many as asked for a batch, other ones the next time, and not the first samples alone."""
    policy, looked_at = make_policy(), []
    groups = sampled(policy)
    for batch in range(1, 6):  # 2 of 10 each
        for row in range(10):
            spoilt = changed(groups, lambda r, t, row=row: 1e-3 if r == row else 0.0)
            found = agreement(mismatch_samples=2).measure(batch, policy, lambda version: {}, spoilt)
            if found["engine/logprob_difference_max"] > 5e-4:
                looked_at.append((batch, row))
    assert [batch for batch, _ in looked_at] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert {row for _, row in looked_at} == set(range(10))
    assert agreement(mismatch_samples=0).measure(1, policy, lambda version: {}, groups) == {}


@pytest.mark.parametrize(("rows", "samples"), [(128, 8), (64, 8), (512, 8), (12, 5), (9, 8), (8, 8), (7, 8), (1, 1)])
def test_compared_rows_are_spread_over_prompts_and_samples(rows, samples):
    batches = [rows_of_batch(batch, rows, samples) for batch in range(1, -(-rows // samples) + 1)]
    assert set().union(*batches) == set(range(rows))
    for chosen in batches:
        assert len(set(chosen)) == min(rows, samples)
        assert max(b - a for a, b in pairwise([*chosen, chosen[0] + rows])) <= max(1, 3 * rows / samples)
    if rows == 128:
        assert all({row % 4 for row in chosen} == {0, 1, 2, 3} for chosen in batches)


def test_the_noise_of_the_run_is_the_measure(make_policy):
    """Weights as stale as one step at the default learning rate makes them: a third of what rounding may do at most."""
    policy = make_policy()
    groups, before = sampled(policy), snapshot(policy)
    step = {name: 2e-5 * torch.randn_like(tensor) for name, tensor in before.items()}
    stale = {name: tensor + step[name] for name, tensor in before.items()}
    compared = agreement()
    found = compared.measure(1, policy, lambda version: before, groups)
    assert found["engine/logprob_difference"] < 1e-6
    with pytest.raises(GeneratorError, match=r"by 0\.000\d+ nats per token .* and the noise of this run is \d.*e-07"):
        compared.measure(2, policy, lambda version: stale, groups)
    resumed = agreement()
    resumed.restore(json.loads(json.dumps(compared.state())))
    with pytest.raises(GeneratorError, match="the noise of this run is"):
        resumed.measure(2, policy, lambda version: stale, groups)
    other = agreement(engine="vllm")  # whose noise may be another
    other.restore(compared.state())
    assert other.measure(2, policy, lambda version: stale, groups)["engine/logprob_difference"] > 1e-4


def test_noise_follows_the_run_and_outliers_are_not_faults():
    noise, generator = Noise(1e-6, 1e-3), torch.Generator().manual_seed(0)
    for batch in range(200):
        noise.require("it", (1 + batch / 50) * 1e-6 * torch.rand(100, generator=generator), "tokens")
        few = 1e-6 * torch.rand(100, generator=generator)
        few[:3] = 1e-2  # as where rounding has sent tokens another way
        noise.require("it", few, "tokens")
    assert 1e-6 < noise.level < 5e-6
    with pytest.raises(GeneratorError, match="5 of 100 tokens by more than"):
        noise.require("it", torch.tensor([1e-6] * 95 + [1e-2] * 5), "tokens")
    with pytest.raises(GeneratorError, match=r"0.00101 nats .* 0.001 is rounding"):
        noise.require("it", torch.full((100,), 1.01e-3), "tokens")


def test_a_single_token_is_far_off_only_where_rounding_can_jump(make_policy):
    """As where it sends a token to another expert, or across the border of a truncated distribution."""
    for params, experts in ((PARAMS, 0), (PARAMS, 4), (replace(PARAMS, top_k=250), 0), (replace(PARAMS, top_p=0.9), 0)):
        policy, compared = make_policy(), agreement(params=params)
        policy.config.num_experts_per_tok = experts
        engine = TransformersEngine(copy.deepcopy(policy).eval(), params, 0)

        def measure(batch, off, policy=policy, compared=compared, engine=engine):
            prompts = [replace(prompt, draw=prompt.draw + 5 * batch) for prompt in PROMPTS]
            groups = [Group(*answered) for answered in zip(prompts, engine.generate(prompts), strict=True)]
            groups = changed(groups, lambda r, t: off if (r, t) == (3, 0) else 0.0)
            return compared.measure(batch, policy, lambda version: {}, groups)["engine/logprob_difference_max"]

        measure(1, 1e-6)
        assert measure(2, 5e-4) > 4e-4
        if experts or params is not PARAMS:
            assert measure(3, 4e-3) > 3e-3
            continue
        with pytest.raises(
            GeneratorError, match=r"one token of \d+ on its completions differs by 0\.004, and the noise"
        ):
            measure(3, 4e-3)


@pytest.mark.parametrize("changes", [{"temperature": 0.75}, {"seed": 1}])
def test_tokens_that_the_random_numbers_do_not_give_are_found(make_policy, changes):
    policy = make_policy()
    groups = sampled(policy)
    assert agreement().measure(1, policy, lambda version: {}, groups)["engine/redraw_ties"] == 0
    honest = agreement(mismatch_samples=5, params=replace(PARAMS, **changes))
    with pytest.raises(GeneratorError, match=r"draws other tokens than|other log-probabilities"):
        honest.measure(1, policy, lambda version: {}, groups)
    if "seed" in changes:  # an engine with random numbers of its own
        agreement("vllm", replace(PARAMS, **changes)).measure(1, policy, lambda version: {}, groups)


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
    found = agreement().measure(1, policy, lambda version: kept, groups)
    assert found["engine/logprob_difference_max"] < 1e-4
    with pytest.raises(GeneratorError):
        agreement().measure(1, policy, lambda version: {}, groups)


def test_low_precision_may_differ_more():
    config = GenerationConfig()
    noises = [Agreement(config, PARAMS, dtype, None).noise for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    limits = [noise.most for noise in noises]
    assert limits == sorted(limits)
    assert noises[0].least < noises[1].least
    assert Agreement(config, PARAMS, torch.float32, torch.bfloat16).noise.most == limits[2]


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_first_batches_are_compared_and_then_every_nth(steps, staleness):
    compared = Comparisons(steps, staleness)
    batches = [batch for batch in range(1, 60) if compared.has(batch)]
    first = audit.FIRST + staleness
    assert batches[:first] == list(range(1, first + 1))
    assert batches[first:] == [batch for batch in range(first + 1, 60) if batch % steps == 0]
    assert [compared.number(batch) for batch in batches] == list(range(1, len(batches) + 1))
    looked_at = {row for batch in batches for row in rows_of_batch(compared.number(batch), 96, 8)}
    assert looked_at == set(range(96)) or len(batches) < 12


@pytest.mark.parametrize(("staleness", "dtype", "loads"), [(0, "float32", 0), (0, "bfloat16", 2), (1, "float32", 1)])
def test_weights_that_the_policy_still_has_are_not_loaded(
    make_policy, tokenizer, prompts, make_args, monkeypatch, staleness, dtype, loads
):
    """With staleness 1 only those of the first batch; rounded ones are others."""
    views, read = SnapshotRing.views, []
    monkeypatch.setattr(SnapshotRing, "views", lambda ring, version: read.append(version) or views(ring, version))
    generation = {"placement": "process", "mismatch_steps": 1, "dtype": dtype}
    args = make_args(generation=generation, staleness=staleness, total_episodes=16)
    OnlineTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer).train()
    published = 2 * 2 if staleness == 0 else 2 * 1  # versions, each written and read back for its digests
    assert len(read) == published + loads
