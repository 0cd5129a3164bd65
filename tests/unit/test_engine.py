"""Sampling against published vectors and slow inversion; the engine against a loop without cache, row by row."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from families import doubled, in_float64
from tiny import LLAMA_SIZES, all_drawn
from transformers.pytorch_utils import Conv1D

from async_rlhf.config import ConfigError, GenerationConfig, LoRAConfig
from async_rlhf.generation import sampling as sampling_module
from async_rlhf.generation import transformers_engine
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.sampling import draw_tokens, philox, row_uniforms
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models import packing
from async_rlhf.models.adapters import add_adapters
from async_rlhf.models.forward import head_in_float32, response_logprobs
from async_rlhf.models.loading import stop_token_ids
from async_rlhf.types import Prompt, Sample, Turn

EOS, PAD = 256, 257
STOPS = (EOS, *range(0, 40))  # enough of the 258 tokens that many rows stop, and many do not
BELOW_ONE = 1 - 2.0**-53


# Random numbers


KNOWN_ANSWERS = [  # Random123's kat_vectors, philox4x32 10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, answer):
    arrays = [np.array([word], dtype=np.uint64) for word in words(counter)]
    ours = philox(arrays, tuple(words(key)))
    assert [int(word[0]) for word in ours] == words(answer)


def drawn(*draws: int) -> list[Prompt]:
    return [Prompt(draw, draw, (1, 2)) for draw in draws]


def test_uniforms_are_uniform_and_uncorrelated():
    uniforms_PKT = row_uniforms(11, drawn(*range(64)), 4, 256)
    assert uniforms_PKT.shape == (64, 4, 256)
    assert uniforms_PKT.dtype == np.float64
    n = uniforms_PKT.size
    assert uniforms_PKT.min() >= 0
    assert uniforms_PKT.max() < 1
    assert uniforms_PKT.mean() == pytest.approx(0.5, abs=4 / math.sqrt(12 * n))
    assert uniforms_PKT.var() == pytest.approx(1 / 12, abs=4 / math.sqrt(180 * n))
    counts = np.histogram(uniforms_PKT, bins=128, range=(0, 1))[0]
    chi_square = ((counts - n / 128) ** 2 / (n / 128)).sum()
    assert abs(chi_square - 127) < 4 * math.sqrt(2 * 127)
    for axis in range(3):  # neighbouring draws, samples and positions
        here, there = (np.take(uniforms_PKT, range(*ends), axis).ravel() for ends in ends_of(uniforms_PKT.shape[axis]))
        assert abs(np.corrcoef(here, there)[0, 1]) < 4 / math.sqrt(here.size)
    # More than 32 bits: a grid of 2**32 values would make the low bits zero.
    assert len(set((uniforms_PKT.ravel() * 2.0**32 % 1).tolist())) > n / 2
    assert len(np.unique(uniforms_PKT)) == n


def ends_of(size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (0, size - 1), (1, size)


def test_uniforms_depend_on_seed_draw_sample_and_position_only():
    prompts = drawn(5, 2**32 + 5, 17, 3)
    uniforms_PKT = row_uniforms(3, prompts, 4, 9)
    order = [2, 0, 3, 1]
    assert np.array_equal(row_uniforms(3, [prompts[p] for p in order], 4, 9), uniforms_PKT[order])
    assert np.array_equal(row_uniforms(3, prompts, 2, 5), uniforms_PKT[:, :2, :5])
    assert np.array_equal(row_uniforms(3, prompts[1:2], 4, 9), uniforms_PKT[1:2])
    disguised = [Prompt(p.draw, 99, (7,) * 20, {"query": "x"}) for p in prompts]
    assert np.array_equal(row_uniforms(3, disguised, 4, 9), uniforms_PKT)
    assert not (uniforms_PKT[0] == uniforms_PKT[1]).any()  # draws that differ above the 32nd bit
    for seed in (4, 3 + 2**32, 3 + 2**33):
        assert not (row_uniforms(seed, prompts, 4, 9) == uniforms_PKT).any()


# Drawing tokens


def slow_softmax(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def slow_draw(logits: list[float], uniform: float, temperature: float) -> tuple[int, float]:
    """The first token whose cumulative probability exceeds ``uniform``, and its log-probability."""
    probabilities, total = slow_softmax(logits, temperature), 0.0
    possible = [v for v, p in enumerate(probabilities) if p > 0]
    token = possible[-1]
    for v in possible:
        total += probabilities[v]
        if uniform < total:
            token = v
            break
    top = max(logits)
    log_total = math.log(math.fsum(math.exp((x - top) / temperature) for x in logits))
    return token, (logits[token] - top) / temperature - log_total


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.5])
def test_draw_tokens_inverts_the_distribution_function(temperature):
    torch.manual_seed(0)
    logits_BV = torch.randn(300, 23) * 2
    logits_BV[torch.rand(300, 23) < 0.2] = -math.inf
    logits_BV[:, 11] = 0.5
    uniforms_B = torch.rand(300, dtype=torch.float64)
    tokens_B, logprobs_B = draw_tokens(logits_BV, uniforms_B, temperature)
    with in_float64():
        exact_B = draw_tokens(logits_BV, uniforms_B, temperature)[1]
    expected = [slow_draw(row, u, temperature) for row, u in zip(logits_BV.tolist(), uniforms_B.tolist(), strict=True)]
    assert tokens_B.tolist() == [token for token, _ in expected]
    assert exact_B.tolist() == pytest.approx([logprob for _, logprob in expected], rel=1e-12, abs=1e-12)
    largest = max(-logprob for _, logprob in expected)
    assert (logprobs_B - exact_B).abs().max() < 8 * torch.finfo(torch.float32).eps * largest
    assert len(set(tokens_B.tolist())) > 10


def test_tokens_without_probability_are_never_drawn():
    none = -math.inf
    rows = [
        [none, none, 1.0, 2.0, none, none],
        [none, 0.0, none, 0.0, none, none],
        [none, none, none, none, none, 3.0],
        [3.0, none, none, none, none, none],
        [none, -200.0, 0.0, 0.1, none, none],
        [-5000.0, 0.0, 1.0, 0.0, 0.0, -5000.0],  # exp gives 0 in float64 too
    ]
    uniforms = [0.0, 2.0**-53, 2.0**-33, 0.5, 1 - 2.0**-24, 1 - 2.0**-25, 1 - 2.0**-33, 1 - 2.0**-52, BELOW_ONE]
    for temperature in (0.7, 1.0):
        for row in rows:
            tokens_B, logprobs_B = draw_tokens(
                torch.tensor(row).expand(len(uniforms), -1), torch.tensor(uniforms, dtype=torch.float64), temperature
            )
            possible = [v for v, p in enumerate(slow_softmax(row, temperature)) if p > 0]
            assert set(tokens_B.tolist()) <= set(possible)
            assert tokens_B[-1] == possible[-1]
            assert tokens_B.tolist() == sorted(tokens_B.tolist())
            assert torch.isfinite(logprobs_B).all()


def test_draws_at_the_ends_hold_for_large_vocabularies():
    """Sums over 50,000 tokens round; the last possible token is still the last that may come."""
    torch.manual_seed(1)
    logits_BV = torch.randn(40, 50_000)
    logits_BV[:, :100] = logits_BV[:, -100:] = -math.inf
    for uniform, bounds in ((0.0, range(100, 200)), (BELOW_ONE, range(49_800, 49_900))):
        tokens_B, _ = draw_tokens(logits_BV, torch.full((40,), uniform, dtype=torch.float64), 0.9)
        assert all(token in bounds for token in tokens_B.tolist())


# The engine


def widened(model, seed: int):
    """Weights wide enough that samples differ, and that a wrong position or mask shows."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.eval()


def make_model(kind: str, make_policy, seed: int = 0):
    tokens = {"vocab_size": 258, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD}
    sizes = tokens | LLAMA_SIZES
    if kind == "gpt_neox":
        return make_policy(seed).eval()
    if kind == "gpt2":
        config = hf.GPT2Config(**tokens, n_embd=32, n_layer=2, n_head=4, n_positions=96)
        return widened(hf.GPT2LMHeadModel(config), seed)
    if kind == "llama":
        return widened(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)), seed)
    if kind == "mistral_sliding":
        return widened(hf.MistralForCausalLM(hf.MistralConfig(**sizes, sliding_window=5)), seed)
    if kind == "qwen2_half_sliding":
        layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
        return widened(hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, **layers, use_sliding_window=True)), seed)
    return widened(hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)), seed)


KINDS = ("gpt_neox", "gpt2", "llama", "mistral_sliding", "qwen2_half_sliding", "mixtral")


def ragged_prompts(count: int = 5, seed: int = 0) -> list[Prompt]:
    """Prompts of 1 to 13 tokens; stop and padding tokens are inside, at the start and at the end of some."""
    rng = random.Random(seed)
    prompts = []
    for draw in range(count):
        tokens = [rng.randrange(256) for _ in range((1, 13, 4, 8, 6)[draw % 5])]
        if draw % 5 in (1, 3):
            tokens[0], tokens[3], tokens[-1] = PAD, EOS, (PAD, EOS)[draw % 2]
        prompts.append(Prompt(draw * 3, draw, tuple(tokens)))
    return prompts


class PlainEngine(TransformersEngine):
    """Answers in plain numbers."""

    def generate(self, prompts, progress=None):
        completions = super().generate(prompts, progress)
        for prompt, samples in zip(prompts, completions, strict=True):
            for sample in samples:
                start = len(prompt.tokens)
                assert sample.tokens[:start].tolist() == list(prompt.tokens)
                assert sample.sampled.tolist() == [False] * start + [True] * (len(sample) - start)
                assert set(sample.logprobs[:start]) == {0.0}
                assert set(sample.versions[:start]) == {-1}
        return all_drawn(completions)


def params(**changes) -> SamplingParams:
    values = {
        "samples_per_prompt": 3,
        "temperature": 0.7,
        "response_length": 10,
        "stop_token_ids": STOPS,
        "seed": 5,
        "batch_size": 512,
    }
    return SamplingParams(**values | changes)


@torch.no_grad()
def slow_generate(model, prompts, sampling: SamplingParams):
    """One row at a time, a whole forward pass for every token, no cache and no padding."""
    uniforms = row_uniforms(sampling.seed, prompts, sampling.samples_per_prompt, sampling.response_length)
    groups = []
    for p, prompt in enumerate(prompts):
        group = []
        for k in range(sampling.samples_per_prompt):
            tokens, logprobs, finish = [], [], "length"
            for t in range(sampling.response_length):
                row = torch.tensor([[*prompt.tokens, *tokens]])
                logits = model(input_ids=row, use_cache=False).logits[0, -1].tolist()
                token, logprob = slow_draw(logits, float(uniforms[p, k, t]), sampling.temperature)
                tokens.append(token)
                logprobs.append(logprob)
                if token in sampling.stop_token_ids:
                    finish = "stop"
                    break
            group.append((tuple(tokens), logprobs, finish))
        groups.append(group)
    return groups


def tokens_of(completions) -> list[list[tuple[int, ...]]]:
    return [[rollout.tokens for rollout in group] for group in completions]


def assert_same_completions(ours, theirs, tolerance: float = 1e-4) -> None:
    assert tokens_of(ours) == tokens_of(theirs)
    for our_group, their_group in zip(ours, theirs, strict=True):
        for our, their in zip(our_group, their_group, strict=True):
            assert our.logprobs == pytest.approx(their.logprobs, abs=tolerance)
            assert (our.finish_reason, our.versions) == (their.finish_reason, their.versions)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_samples_what_the_loop_without_cache_samples(make_policy, kind):
    model, prompts, sampling = make_model(kind, make_policy), ragged_prompts(), params()
    ours = PlainEngine(model, sampling, version=4).generate(prompts)
    expected = slow_generate(model, prompts, sampling)
    reasons, distinct = set(), set()
    assert [len(group) for group in ours] == [3] * 5
    for group, expected_group in zip(ours, expected, strict=True):
        for rollout, (tokens, logprobs, finish) in zip(group, expected_group, strict=True):
            assert rollout.tokens == tokens
            assert rollout.logprobs == pytest.approx(logprobs, abs=1e-4)
            assert rollout.finish_reason == finish
            assert rollout.versions == (4,) * len(tokens)
            reasons.add(finish)
            distinct.add(tokens)
    assert reasons == {"stop", "length"}
    assert len(distinct) > 10


def test_a_row_ends_with_its_first_stop_token_or_at_the_response_length(make_policy):
    model, prompts = make_model("gpt_neox", make_policy), ragged_prompts(10)
    endless = PlainEngine(model, params(stop_token_ids=())).generate(prompts)
    assert {len(rollout.tokens) for group in endless for rollout in group} == {10}
    assert {rollout.finish_reason for group in endless for rollout in group} == {"length"}
    ours = PlainEngine(model, params()).generate(prompts)
    last_is_stop = 0
    for group, whole_group in zip(ours, endless, strict=True):
        for rollout, whole in zip(group, whole_group, strict=True):
            stops = [t for t, token in enumerate(whole.tokens) if token in STOPS]
            length = stops[0] + 1 if stops else 10
            assert rollout.tokens == whole.tokens[:length]
            assert rollout.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
            assert rollout.finish_reason == ("stop" if stops else "length")
            last_is_stop += length == 10 and bool(stops)
    # A stop token in the very last place ends the row by itself, too.
    first = PlainEngine(model, params(response_length=1)).generate(prompts)
    for group, whole_group in zip(first, endless, strict=True):
        for rollout, whole in zip(group, whole_group, strict=True):
            assert rollout.tokens == whole.tokens[:1]
            assert rollout.finish_reason == ("stop" if whole.tokens[0] in STOPS else "length")
            last_is_stop += whole.tokens[0] in STOPS
    assert last_is_stop > 0


@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "mistral_sliding"])
def test_prompts_that_pass_the_model_apart_are_sampled_as_together(make_policy, monkeypatch, kind):
    model, prompts = make_model(kind, make_policy), ragged_prompts(9)
    whole = PlainEngine(model, params()).generate(prompts)
    passes = []
    monkeypatch.setitem(transformers_engine.PREFILL_TOKENS, "cpu", 27)
    engine = PlainEngine(model, params())
    engine.generate(prompts[:1])  # the first pass of a model with other caches tries them
    model.register_forward_pre_hook(lambda _, __, inputs: passes.append(inputs["input_ids"].shape), with_kwargs=True)
    assert_same_completions(engine.generate(prompts), whole)
    # Two prompts at once, the longest has 13 tokens. A sliding window needs them all padded alike.
    widths = [13] if kind == "mistral_sliding" else [1, 4, 8, 13, 13]
    assert [shape[1] for shape in passes[: len(widths)]] == widths
    assert passes[len(widths)][1] == 1


def test_a_large_vocabulary_is_drawn_from_in_blocks(monkeypatch):
    logits_BV, uniforms_B = torch.randn(7, 50), torch.rand(7, dtype=torch.float64)
    whole = draw_tokens(logits_BV, uniforms_B, 0.7)
    for block in (1, 100, 349):
        monkeypatch.setattr(sampling_module, "CPU_BLOCK", block)
        for ours, theirs in zip(draw_tokens(logits_BV, uniforms_B, 0.7), whole, strict=True):
            assert torch.equal(ours, theirs)


# New weights while sampling


@torch.no_grad()
def slow_generate_with_switch(old, new, prompt: Prompt, uniforms, steps: int, temperature: float):
    """One row, each token from a pass over all before it: by the old model for so many steps, then by the new one."""
    tokens, logprobs = [], []
    for t, uniform in enumerate(uniforms):
        model = old if t < steps else new
        logits = model(input_ids=torch.tensor([[*prompt.tokens, *tokens]]), use_cache=False).logits[0, -1].tolist()
        token, logprob = slow_draw(logits, float(uniform), temperature)
        tokens.append(token)
        logprobs.append(logprob)
    return tokens, logprobs


@pytest.mark.parametrize("steps", [1, 4, 9])
@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "mistral_sliding"])
def test_weights_that_arrive_while_sampling_draw_the_tokens_after_them(make_policy, kind, steps):
    prompts, sampling = ragged_prompts(), params(stop_token_ids=())
    old, new = make_model(kind, make_policy, seed=0), make_model(kind, make_policy, seed=9)
    engine = PlainEngine(copy.deepcopy(old), sampling, version=3)
    calls = 0

    def refresh() -> None:
        nonlocal calls
        calls += 1
        if calls == steps:
            engine.load({name: tensor.clone() for name, tensor in new.state_dict().items()}, 5)

    engine.refresh = refresh
    switched = engine.generate(prompts)
    assert calls == sampling.response_length - 1  # between any two tokens
    uniforms = row_uniforms(sampling.seed, prompts, 3, 10)
    by_old = PlainEngine(old, sampling, version=3).generate(prompts)
    for p, prompt in enumerate(prompts):
        for k, rollout in enumerate(switched[p]):
            tokens, logprobs = slow_generate_with_switch(old, new, prompt, uniforms[p, k], steps, 0.7)
            assert rollout.tokens == tuple(tokens)
            assert rollout.logprobs == pytest.approx(logprobs, abs=1e-4)
            assert rollout.versions == (3,) * steps + (5,) * (10 - steps)
            assert rollout.tokens[:steps] == by_old[p][k].tokens[:steps]
            assert rollout.logprobs[steps] != pytest.approx(by_old[p][k].logprobs[steps], abs=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "llama_tied", "llama_lora", "head_in_float32"])
def test_weights_are_rounded_once_and_the_samples_are_those_of_autocast_alone(make_policy, kind, monkeypatch):
    rounded, casts = transformers_engine.rounded_linear, []
    monkeypatch.setattr(transformers_engine, "rounded_linear", lambda *given: casts.append(0) or rounded(*given))
    found, other = {}, make_model("llama", make_policy, seed=9)
    for rounds in (True, False):
        model = make_model("llama" if "llama" in kind or "head" in kind else kind, make_policy)
        if kind == "llama_tied":
            model.config.tie_word_embeddings = True
            model.tie_weights()
        if kind == "llama_lora":
            add_adapters(model, LoRAConfig(rank=2), seed=0)
        if kind == "head_in_float32":
            head_in_float32(model)
        parameters = dict(model.named_parameters())
        before = {name: p.detach().clone() for name, p in parameters.items()}
        engine = PlainEngine(model, params(), version=3, autocast=torch.bfloat16)
        engine.rounds, engine.head_float32 = rounds, kind == "head_in_float32"
        types = set()
        model.get_input_embeddings().register_forward_hook(lambda *_, m=model, t=types: t.add(kinds_of(m)))
        found[rounds] = [engine.generate(ragged_prompts()) for _ in range(2)]
        assert casts == [0, 0]  # one for each call, none without
        assert types == {("float32", "bfloat16") if rounds else ("float32", "float32")}
        assert dict(model.named_parameters()) == parameters
        assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in parameters.items() if "lora" in name)
        if kind == "llama":  # weights that come while it samples, which are rounded again
            steps = iter(range(99))
            weights = {name: tensor.clone() for name, tensor in other.state_dict().items()}
            engine.refresh = lambda e=engine, s=steps, w=weights: e.load(w, 5) if next(s) == 4 else None
            found[rounds].append(engine.generate(ragged_prompts()))
            assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
            assert len(casts) == (4 if rounds else 2)
            del casts[2:]
    assert found[True] == found[False]


@pytest.mark.parametrize("kind", ["llama", "mistral_sliding"])
def test_a_token_copies_no_keys_for_each_of_the_heads_that_share_them(make_policy, kind, monkeypatch):
    lengths, attention = [], packing.sdpa_attention_forward
    monkeypatch.setattr(
        packing,
        "sdpa_attention_forward",
        lambda module, query, *given, **options: (
            lengths.append(query.shape[2]) or attention(module, query, *given, **options)
        ),
    )
    engine = PlainEngine(make_model(kind, make_policy), params(stop_token_ids=()))
    engine.generate(ragged_prompts())
    assert len(lengths) >= 2  # of the prompts, in each of two layers
    assert min(lengths) > 1


def kinds_of(model: hf.PreTrainedModel) -> tuple[str, str]:
    """Types of the embedding and of the last linear layer of a block."""
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D)]
    names = (str(m.weight.dtype).removeprefix("torch.") for m in (model.get_input_embeddings(), linear[0]))
    return tuple(names)


# Log-probabilities for training


def right_padded(rows: list[tuple[list[int], int]], filler: int | None, extra: int = 3):
    """Rows of (tokens, prompt length), padded with one token or, for None, with random ones."""
    T = max(len(tokens) for tokens, _ in rows) + extra
    tokens_BT = torch.randint(0, 258, (len(rows), T), generator=torch.Generator().manual_seed(0))
    if filler is not None:
        tokens_BT.fill_(filler)
    mask_BT = torch.zeros(len(rows), T)
    for i, (tokens, start) in enumerate(rows):
        tokens_BT[i, : len(tokens)] = torch.tensor(tokens)
        mask_BT[i, start : len(tokens)] = 1
    return tokens_BT, mask_BT


def random_rows(seed: int = 0) -> list[tuple[list[int], int]]:
    """Prompts of 1 to 9 tokens with responses of 1 to 11; EOS and PAD are inside some."""
    rng = random.Random(seed)
    rows = []
    for prompt, response in ((1, 11), (9, 1), (4, 6), (6, 3), (2, 2)):
        tokens = [rng.randrange(256) for _ in range(prompt + response)]
        tokens[-1] = EOS
        tokens[len(tokens) // 2] = PAD
        rows.append((tokens, prompt))
    return rows


def slow_response_logprobs(model, tokens: list[int], start: int, temperature: float):
    """Lists of log-probabilities and entropies of the tokens from ``start`` on; differentiable, in float64."""
    logits_TV = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    assert logits_TV.dtype == torch.float64
    logprobs, all_entropies = [], []
    for t in range(start, len(tokens)):
        scaled_V = logits_TV[t - 1] / temperature
        logprobs_V = scaled_V - scaled_V.exp().sum().log()
        logprobs.append(logprobs_V[tokens[t]])
        all_entropies.append(-(logprobs_V.exp() * logprobs_V).sum())
    return logprobs, all_entropies


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filler", [PAD, EOS, None])
def test_response_logprobs_are_those_of_each_row_alone(make_policy, kind, filler):
    model, rows = make_model(kind, make_policy), random_rows()
    tokens_BT, mask_BT = right_padded(rows, filler)
    slow = doubled(copy.deepcopy(model))
    with torch.no_grad():
        for temperature in (0.7, 1.3):
            output = response_logprobs(model, tokens_BT, mask_BT, temperature)
            logprobs_BT, entropies_BT = output.logprobs_BT, output.entropies_BT
            assert logprobs_BT.shape == entropies_BT.shape == tokens_BT.shape
            assert logprobs_BT.dtype == torch.float32
            for i, (tokens, start) in enumerate(rows):
                slow_logprobs, slow_entropies = slow_response_logprobs(slow, tokens, start, temperature)
                inside = slice(start, len(tokens))
                assert logprobs_BT[i, inside].tolist() == pytest.approx([x.item() for x in slow_logprobs], abs=1e-4)
                assert entropies_BT[i, inside].tolist() == pytest.approx([x.item() for x in slow_entropies], abs=1e-4)


def test_gradient_of_response_logprobs_is_that_of_the_rows_alone(make_policy):
    model, rows = make_model("gpt_neox", make_policy), random_rows(1)
    tokens_BT, mask_BT = right_padded(rows, None)
    slow = doubled(copy.deepcopy(model))
    logprobs_BT = response_logprobs(model, tokens_BT, mask_BT, 0.7).logprobs_BT
    weights_BT = torch.randn(mask_BT.shape, generator=torch.Generator().manual_seed(2)) * mask_BT
    (logprobs_BT * weights_BT).sum().backward()
    total = torch.zeros((), dtype=torch.float64)
    for i, (tokens, start) in enumerate(rows):
        slow_logprobs, _ = slow_response_logprobs(slow, tokens, start, 0.7)
        total = total + sum(w * x for w, x in zip(weights_BT[i, start:].tolist(), slow_logprobs, strict=False))
    total.backward()
    assert max(p.grad.abs().max().item() for p in slow.parameters()) > 0.1
    for (name, ours), theirs in zip(model.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=2e-4, msg=name)


def test_bfloat16_weights_still_give_log_probabilities_in_float32(make_policy):
    """A log-probability near -80 in bfloat16 resolves to 0.5; reduce in float32 whatever the model's logits are."""
    model, rows = make_model("llama", make_policy).bfloat16(), random_rows(3)
    tokens_BT, mask_BT = right_padded(rows, PAD)
    with torch.no_grad():
        logprobs_BT = response_logprobs(model, tokens_BT, mask_BT, 0.7).logprobs_BT
        logits_BTV = model(input_ids=tokens_BT, attention_mask=torch.ones_like(tokens_BT)).logits
    assert logits_BTV.dtype == torch.bfloat16
    for i, (tokens, start) in enumerate(rows):
        for t in range(start, len(tokens)):
            expected = (logits_BTV[i, t - 1].double() / 0.7).log_softmax(0)[tokens[t]].item()
            assert logprobs_BT[i, t].item() == pytest.approx(expected, abs=1e-4)


def test_completions_also_end_at_tokens_given_by_their_texts_or_ids(make_policy, tokenizer):
    policy = make_policy()
    assert stop_token_ids(policy, tokenizer) == (EOS,)
    assert stop_token_ids(policy, tokenizer, ["a"], [3, 9, EOS]) == tuple(sorted({EOS, 3, 9, *tokenizer.encode("a")}))
    with pytest.raises(ConfigError, match=r"generation.stop_token_ids: got \[258\]; must be below 258"):
        stop_token_ids(policy, tokenizer, ids=[258])
    with pytest.raises(ConfigError, match=r"stop_token_ids: got \[-1\]; must be ids of tokens"):
        GenerationConfig(stop_token_ids=[-1])


def played(engine, prompts, turns, observed, goes_on):
    """Some turns of an episode for each prompt, with what is observed in between: every answer."""
    rows, asked, answers = [list(prompt) for prompt in prompts], [None] * len(prompts), []
    offset = 0
    for turn in range(turns):
        asking = [
            Turn(i, i, tuple(row), sample=0, offset=offset, limit=5 + i % 3, past=past if goes_on else None)
            for i, (row, past) in enumerate(zip(rows, asked, strict=True))
        ]
        found = [sample for (sample,) in engine.generate(asking)]
        answers.append(found)
        asked, offset = [sample.past for sample in found], offset + 100
        rows = [[*sample.tokens.tolist(), *observed[: 1 + (i + turn) % 4]] for i, sample in enumerate(found)]
    return answers


@pytest.mark.parametrize("between", ["nothing", "other weights", "one that is new"])
def test_a_turn_goes_on_from_what_was_computed_for_the_last_one(make_policy, between):
    """The same tokens and log-probabilities as from the beginning, by fewer tokens that are computed."""
    policy = make_policy(max_position_embeddings=200)
    engine, seen = TransformersEngine(policy, params(samples_per_prompt=1, batch_size=8, response_length=8)), []
    policy.register_forward_pre_hook(lambda _m, _a, given: seen.append(given["input_ids"].shape), with_kwargs=True)
    prompts = [list(range(60, 60 + n)) for n in (30, 51, 38, 30)]
    generate = engine.generate

    def disturbed(turns):
        if between == "other weights":
            engine.version += 1  # as if: what was computed must not be used
        if between == "one that is new":
            turns = [replace(turn, past=None) if turn.draw == 1 else turn for turn in turns]  # the longest
        return generate(turns)

    engine.generate = disturbed
    computed = []
    found = []
    for goes_on in (False, True):
        seen.clear()
        found.append(played(engine, prompts, 3, list(range(200, 204)), goes_on))
        computed.append(sum(columns for _, columns in seen if columns > 1))
    for mine, theirs in zip(*found, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
    assert computed[1] < 0.6 * computed[0] if between == "nothing" else computed[1] == computed[0]
    assert all(not sample.past.layers for answers in found[1][:-1] for sample in answers) or between != "nothing"


def test_what_was_computed_is_kept_only_for_turns_that_are_decoded_at_once(make_policy):
    policy = make_policy(max_position_embeddings=200)
    engine = TransformersEngine(policy, params(samples_per_prompt=1, batch_size=2))
    turns = [Turn(i, i, (60, 61), limit=3) for i in range(3)]
    assert {type(sample) for (sample,) in engine.generate(turns)} == {Sample}
    assert all(sample.past.layers for (sample,) in engine.generate(turns[:2]))
    assert {type(sample) for (sample,) in engine.generate([Prompt(0, 0, (60,))])} == {Sample}
