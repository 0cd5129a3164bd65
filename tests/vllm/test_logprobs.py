"""What vLLM says of its completions is what transformers computes, token by token; and it draws by that."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from conftest import PARAMS, SIZES, STOPS, by_transformers, new_policy, prompts_of, sampled, start_engine, widen
from tiny import LLAMA_SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from async_rlhf.generation import vllm_engine
from async_rlhf.generation.audit import differences, probe_logprobs
from async_rlhf.generation.sampling import Distribution, truncated

pytestmark = pytest.mark.vllm

COLD = 0.3
"""Some tokens are then likely enough to be counted."""


def llama(tied: bool, kv_heads: int) -> LlamaForCausalLM:
    torch.manual_seed(3)
    changes = {"vocab_size": 258, "num_attention_heads": 2, "num_key_value_heads": kv_heads}
    return widen(LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES | SIZES | changes, tie_word_embeddings=tied)))


MODELS = {
    "neox": new_policy,
    "neox_tied": lambda: new_policy(tie_word_embeddings=True),
    "llama_untied": lambda: llama(tied=False, kv_heads=2),
    "llama_tied": lambda: llama(tied=True, kv_heads=1),
}


@pytest.fixture(params=MODELS)
def pair(request):
    """An engine, and the model whose weights it has."""
    model = MODELS[request.param]()
    return (request.getfixturevalue("engine") if request.param == "neox" else start_engine(model)), model


def test_logprobs_are_those_of_transformers(pair):
    engine, model = pair
    prompts = prompts_of(24)
    engine.params = replace(PARAMS, temperature=0.7)
    groups = sampled(engine, prompts)
    seen = Counter()
    for prompt, group in zip(prompts, groups, strict=True):
        assert len(group) == 2
        for rollout in group:
            expected = by_transformers(model, prompt, rollout.tokens, 0.7)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=1e-4)
            assert rollout.versions == (0,) * len(rollout.tokens)
            stopped = [token in STOPS for token in rollout.tokens]
            assert not any(stopped[:-1])
            assert stopped[-1] == (rollout.finish_reason == "stop")
            assert rollout.finish_reason == "stop" or len(rollout.tokens) == PARAMS.response_length
            seen[rollout.finish_reason] += 1
    assert min(seen["stop"], seen["length"]) > 2
    assert sum(first.tokens != second.tokens for first, second in groups) > 20
    assert differences(engine.probe(), probe_logprobs(model)).mean() < 1e-5


def test_no_object_is_made_for_a_token(engine, monkeypatch):
    """There would be a Logprob in a dict for each: five times the time that numbers in lists take."""
    import vllm.logprobs

    def made(*given, **options):
        raise AssertionError("a Logprob was made")

    monkeypatch.setattr(vllm.logprobs, "Logprob", made)
    assert len(sampled(engine, prompts_of(2))) == 2


def test_log_probabilities_of_other_tokens_are_refused():
    flat = SimpleNamespace(token_ids=[5, 6], logprobs=[-1.0, -2.0])
    answer = SimpleNamespace(token_ids=(5, 7), logprobs=flat, weight_versions=[], finish_reason="stop")
    with pytest.raises(RuntimeError, match="of other tokens than those that it drew"):
        vllm_engine._sample([9], answer)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.0])
def test_logprobs_are_of_the_scaled_distribution(engine, temperature):
    prompts, model = prompts_of(8), new_policy()
    engine.params = replace(PARAMS, temperature=temperature)
    for prompt, group in zip(prompts, sampled(engine, prompts), strict=True):
        for rollout in group:
            expected = by_transformers(model, prompt, rollout.tokens, temperature)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 7}, {"top_p": 0.9, "top_k": 30}])
def test_logprobs_are_of_what_top_p_and_top_k_keep(engine, cut):
    """And nothing else is drawn; see test_truncation.py for the engine on transformers."""
    prompts, model = prompts_of(12), new_policy()
    engine.params = replace(PARAMS, temperature=0.7, **cut)
    left_out = 0.0
    for prompt, group in zip(prompts, sampled(engine, prompts), strict=True):
        for rollout in group:
            row = torch.tensor([[*prompt.tokens, *rollout.tokens]])
            logits_TV = model(row).logits[0, len(prompt.tokens) - 1 : -1]
            logits_TV = truncated(logits_TV, Distribution(0.7, **cut)) / 0.7
            expected = torch.log_softmax(logits_TV, -1)[torch.arange(len(rollout.tokens)), torch.tensor(rollout.tokens)]
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=1e-4)
            left_out += logits_TV.isinf().float().mean().item()
    assert left_out > 1


def test_a_completion_depends_on_seed_and_draw_alone(engine):
    """Not on what else is in the batch, nor on the order, nor on what was sampled before: bit for bit."""
    prompts = prompts_of(12)
    first = sampled(engine, prompts)
    assert sampled(engine, prompts) == first
    assert sampled(engine, prompts[::-1])[::-1] == first
    assert sampled(engine, prompts[5:6]) == first[5:6]
    assert [sampled(engine, [prompt])[0] for prompt in prompts[:3]] == first[:3]
    assert sampled(engine, [*prompts_of(40, first=100), *prompts])[40:] == first
    other_draws = sampled(engine, [replace(prompt, draw=prompt.draw + 50) for prompt in prompts])
    engine.params = replace(PARAMS, seed=1)
    for others in (other_draws, sampled(engine, prompts)):
        pairs = zip(chain(*first), chain(*others), strict=True)
        assert sum(ours.tokens != theirs.tokens for ours, theirs in pairs) > 20
    engine.params = replace(PARAMS, samples_per_prompt=5)
    assert [group[:2] for group in sampled(engine, prompts)] == first  # more samples leave the others alone


def test_samples_follow_the_distribution(engine):
    """Pearson's chi-squared of first and second tokens; with these fixed seeds the outcome is always the same."""
    (prompt,), model, count = prompts_of(1), new_policy(), 4000
    engine.params = replace(PARAMS, samples_per_prompt=count, temperature=COLD, response_length=2, stop_token_ids=())
    (group,) = sampled(engine, [prompt])
    first = Counter(rollout.tokens[0] for rollout in group)
    assert chi_squared_z(first, distribution(model, prompt.tokens, COLD)) < 4
    assert chi_squared_z(first, distribution(model, prompt.tokens, 1.1 * COLD)) > 4  # and it would notice
    likeliest, times = first.most_common(1)[0]
    second = Counter(rollout.tokens[1] for rollout in group if rollout.tokens[0] == likeliest)
    assert times > 500
    assert chi_squared_z(second, distribution(model, (*prompt.tokens, likeliest), COLD)) < 4


def test_seeds_of_many_prompts_follow_the_distribution(engine):
    """One sample for each of many draws of one prompt: the seeds of different draws are independent, too."""
    (prompt,), model = prompts_of(1), new_policy()
    engine.params = replace(PARAMS, samples_per_prompt=1, response_length=1, temperature=COLD)
    groups = sampled(engine, [replace(prompt, draw=draw) for draw in range(1500)])
    found = Counter(group[0].tokens[0] for group in groups)
    assert chi_squared_z(found, distribution(model, prompt.tokens, COLD)) < 4


@torch.no_grad()
def distribution(model, tokens, temperature: float) -> list[float]:
    return torch.softmax(model(torch.tensor([tokens])).logits[0, -1] / temperature, dim=-1).tolist()


def chi_squared_z(counts: Counter, expected: list[float]) -> float:
    """Standard deviations above the mean, by Wilson and Hilferty. Tokens expected fewer than 5 times are one class."""
    total = sum(counts.values())
    common = [token for token, probability in enumerate(expected) if probability * total >= 5]
    rest = total * (1 - sum(expected[token] for token in common))
    classes = [(counts[token], expected[token] * total) for token in common]
    if rest >= 5:
        classes.append((total - sum(counts[token] for token in common), rest))
    freedom = len(classes) - 1
    assert freedom > 5, classes
    statistic = sum((found - mean) ** 2 / mean for found, mean in classes)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def test_models_of_the_same_class_work_as_ever_beside_the_engine(engine):
    """vLLM rewrites the class of a model that it runs by way of transformers; hooks must still be called."""
    model, calls = new_policy(), []
    model.gpt_neox.register_forward_hook(lambda *_: calls.append(1))
    model(torch.tensor([[1, 2, 3]]))
    assert calls == [1]


def test_an_engine_leaves_the_process_as_it_was(engine):
    """What vLLM would have every later child preload makes a server crash that preloads another OpenMP."""
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    assert "omp" not in os.environ.get("LD_PRELOAD", "")
