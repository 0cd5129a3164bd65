"""The output head in chunks: against the formula in float64, for every kind of head, and how much memory it takes."""

from __future__ import annotations

import copy
import logging
from typing import NamedTuple

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from tiny import LLAMA_SIZES, PROMPTS, byte_tokenizer, count_letters, new_args
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_rlhf import KLConfig, LoRAConfig
from async_rlhf.learner.learner import Learner
from async_rlhf.models import head as head_module
from async_rlhf.models.forward import over_response_logits, response_logprobs
from async_rlhf.models.head import LogprobsAndEntropies, selected_logprobs
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.types import Batch, Group, Prompt, Sample, ScoredBatch

VOCABULARY = 258
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257, **LLAMA_SIZES}
T = 0.7


class InPlace(hf.LlamaForCausalLM):
    """Changes some of the logits where they are, as Chameleon does."""

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits[..., 5:9] -= 3
        return output


class Standardised(hf.LlamaForCausalLM):
    """Does something to logits that no key of its configuration names."""

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = output.logits / output.logits.std(dim=-1, keepdim=True)
        return output


MAKE = {
    "plain": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "bias": lambda: hf.PhiForCausalLM(hf.PhiConfig(**SIZES)),
    "softcap, tied": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.5)),
    "multiplied, tied": lambda: hf.CohereForCausalLM(hf.CohereConfig(**SIZES, logit_scale=0.3)),
    "divided": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SIZES, logits_scaling=0.4)),
    "in place": lambda: InPlace(hf.LlamaConfig(**SIZES)),
    "unknown": lambda: Standardised(hf.LlamaConfig(**SIZES)),
}
UNKNOWN = ("in place", "unknown")


def make(kind):
    torch.manual_seed(0)
    model = MAKE[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=["one chunk", "many chunks", "two kept"])
def chunks(request, monkeypatch):
    if request.param != "one chunk":
        in_chunks(monkeypatch, kept={"many chunks": 0, "two kept": 2}[request.param])


def in_chunks(monkeypatch, rows=7, kept=0):
    chunk = rows * 4 * VOCABULARY
    for name, value in (("CHUNK_BYTES", chunk), ("LEAST_ROWS", 1), ("KEPT_BYTES", kept * chunk)):
        monkeypatch.setattr(head_module, name, value)


def rows_of_tokens(rows=5, longest=13):
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(VOCABULARY, (rows, longest), generator=generator)
    mask_BT = torch.zeros(rows, longest)
    for row in range(rows):
        mask_BT[row, 2 + row : longest - row] = 1  # the responses: 11, 9, 7, 5 and 3 tokens
    return tokens_BT, mask_BT


def by_the_formula(model, tokens_BT, mask_BT):
    """Log-probabilities and entropies (N,) in float64, from the model's own logits of every position."""
    slow = copy.deepcopy(model).double()
    logits_BTV = slow(input_ids=tokens_BT).logits / T
    logs_BTV = logits_BTV - logits_BTV.exp().sum(dim=-1, keepdim=True).log()
    places = [(b, t) for b in range(len(tokens_BT)) for t in range(tokens_BT.shape[1]) if mask_BT[b, t]]
    logprobs = [logs_BTV[b, t - 1, tokens_BT[b, t]] for b, t in places]
    spread = [-(logs_BTV[b, t - 1].exp() * logs_BTV[b, t - 1]).sum() for b, t in places]
    return slow, torch.stack(logprobs), torch.stack(spread).detach()


@pytest.mark.parametrize("kind", MAKE)
def test_log_probabilities_entropies_and_gradients_are_those_of_the_formula(kind, chunks):
    model, (tokens_BT, mask_BT) = make(kind), rows_of_tokens()
    slow, right_N, spread_N = by_the_formula(model, tokens_BT, mask_BT)
    gradient_N = torch.randn(len(right_N), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (right_N * gradient_N).sum().backward()
    for _ in range(2):  # what comes after the head is recognised in the first pass
        model.zero_grad()
        output = response_logprobs(model, tokens_BT, mask_BT, T)
        logprobs_N, entropies_N = output.logprobs_BT[mask_BT > 0], output.entropies_BT[mask_BT > 0]
        torch.testing.assert_close(logprobs_N.double(), right_N, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(entropies_N.double(), spread_N, rtol=1e-5, atol=2e-5)
        assert not output.entropies_BT.requires_grad
        (logprobs_N * gradient_N.float()).sum().backward()
        for (name, ours), theirs in zip(model.named_parameters(), slow.parameters(), strict=True):
            largest = theirs.grad.abs().max().item()
            assert largest > 0, name
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4 * largest, msg=name)


@pytest.mark.parametrize("kind", MAKE)
def test_only_a_model_that_does_something_unknown_after_its_head_is_warned_of(kind, caplog, monkeypatch):
    in_chunks(monkeypatch)
    model, (tokens_BT, mask_BT) = make(kind), rows_of_tokens()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for _ in range(2):
            response_logprobs(model, tokens_BT, mask_BT, T)
    named = [record.getMessage() for record in caplog.records if "after its head" in record.getMessage()]
    assert [text.split()[0] for text in named] == ([type(model).__name__] if kind in UNKNOWN else [])
    assert (largest_tensor(response_logprobs, model, tokens_BT, mask_BT, T) >= 35 * VOCABULARY) == (kind in UNKNOWN)


@pytest.mark.parametrize("kind", ["lora", "frozen", "normalised", "set from outside", "float64"])
def test_a_head_that_is_no_plain_matrix_is_called_chunk_by_chunk(kind, monkeypatch):
    """Gradients are those without chunks, and no larger tensor exists."""
    model, (tokens_BT, mask_BT) = make("plain"), rows_of_tokens()
    if kind == "lora":
        config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model)
    elif kind == "frozen":
        model.lm_head.requires_grad_(False)
    elif kind == "normalised":
        model.lm_head = Normalised(32, VOCABULARY, bias=False)
    elif kind == "set from outside":
        own = model.lm_head.forward
        model.lm_head.forward = lambda states: own(states) * 2
    else:
        model.double()
    found = []
    for _ in range(2):
        model.zero_grad()
        logprobs_BT = response_logprobs(model, tokens_BT, mask_BT, T).logprobs_BT
        (logprobs_BT * torch.arange(13)).sum().backward()
        found.append([logprobs_BT.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        in_chunks(monkeypatch)
    assert len(found[0]) > 3
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-4, atol=1e-5 * max(1, whole.abs().max().item()))
    assert largest_tensor(response_logprobs, model, tokens_BT, mask_BT, T) < 35 * VOCABULARY


class Normalised(nn.Linear):
    """Normalises its weights, as Baichuan's head does."""

    def forward(self, states):
        return nn.functional.linear(states, nn.functional.normalize(self.weight))


def test_a_row_without_response_tokens_gives_gradients_of_zero(chunks):
    model, (tokens_BT, mask_BT) = make("plain"), rows_of_tokens()
    logprobs_BT = response_logprobs(model, tokens_BT, torch.zeros_like(mask_BT), T).logprobs_BT
    assert logprobs_BT.abs().max() == 0
    logprobs_BT.sum().backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


def test_the_head_is_as_it_was_also_after_an_error(monkeypatch):
    model, (tokens_BT, mask_BT) = make("plain"), rows_of_tokens()
    before = model(input_ids=tokens_BT).logits

    def fail(logits_CV, part):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        over_response_logits(model, tokens_BT, mask_BT, fail)
    assert torch.equal(model(input_ids=tokens_BT).logits, before)
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize(("vocabulary", "chunks"), [(128_256, (32, 4)), (50_304, (32, 4)), (256, (1, 1))])
def test_chunks_are_larger_on_a_gpu(vocabulary, chunks):
    parts = [head_module._parts(8192, vocabulary, torch.device(kind)) for kind in ("cpu", "cuda")]
    assert tuple(map(len, parts)) == chunks


# Precision


def whole_logits(states_NH, head, targets_N):
    """Log-probabilities from all logits at once, by operations that torch differentiates."""
    return selected_logprobs(head(states_NH).float() / T, targets_N)


def in_many_chunks(states_NH, head, targets_N):
    reduce, parts = LogprobsAndEntropies(targets_N, T, True), [slice(i, i + 100) for i in range(0, len(states_NH), 100)]
    return head_module._Chunks.apply(
        states_NH, head.weight, head.bias, reduce, head_module.After(), parts, 5 * 100 * 3000
    )[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("frozen", [False, True])
def test_errors_are_not_above_those_of_whole_logits(dtype, frozen):
    """Root mean square against float64, of log-probabilities and gradients. Trained weights are float32 and computed
    with under autocast, frozen ones have the type itself.
    """
    generator = torch.Generator().manual_seed(0)
    states_NH = torch.randn(800, 64, generator=generator).requires_grad_()
    targets_N, gradient_N = torch.randint(3000, (800,), generator=generator), torch.randn(800, generator=generator)
    torch.manual_seed(3)
    head = nn.Linear(64, 3000)
    if frozen:
        head.to(dtype).requires_grad_(False)
    exact_head = copy.deepcopy(head).double()
    exact_states_NH = states_NH.detach().double().requires_grad_()
    exact_N = (exact_head(exact_states_NH) / T).log_softmax(dim=-1)[torch.arange(800), targets_N]
    (exact_N * gradient_N).sum().backward()
    trained = [] if frozen else list(exact_head.parameters())
    right = [exact_N.detach(), *(x.grad for x in (exact_states_NH, *trained))]
    errors = []
    for compute in (whole_logits, in_many_chunks):
        head.zero_grad()
        states_NH.grad = None
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logprobs_N = compute(states_NH, head, targets_N)
        (logprobs_N * gradient_N).sum().backward()
        trained = [] if frozen else list(head.parameters())
        found = [logprobs_N.detach(), *(x.grad for x in (states_NH, *trained))]
        errors.append([(x.double() - y).square().mean().sqrt().item() for x, y in zip(found, right, strict=True)])
    names = ("log-probabilities", "states", "weight", "bias")
    for name, whole, chunked in zip(names, *errors, strict=False):
        print(f"{dtype} frozen {frozen} {name}: {whole:.3e} whole, {chunked:.3e} in chunks")
        assert 0 < chunked <= 1.02 * whole, name


# Memory


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def largest_tensor(function, *args):
    with Largest() as found:
        function(*args)
    return found.elements


class Step(NamedTuple):
    """A learner, and a batch for it."""

    learner: Learner
    scored: ScoredBatch


def step_of(folder, vocabulary, length, lora=0):
    """Eight completions of ``length`` tokens, by a Llama with that vocabulary."""
    config = hf.LlamaConfig(**SIZES | {"vocab_size": vocabulary, "max_position_embeddings": 4096})
    options = {"samples_per_prompt": 8, "num_mini_batches": 1, "per_device_train_batch_size": 8, "num_epochs": 2}
    options |= {"total_episodes": 8, "annotate_batch_size": 8, "kl": KLConfig(coef=0.1), "lora": LoRAConfig(rank=lora)}
    args = new_args(folder, f"{vocabulary} {length} {lora}", algorithm="grpo", **options)
    parts = {"reward_funcs": count_letters, "processing_class": byte_tokenizer()}
    learner = OnlineTrainer(hf.LlamaForCausalLM(config), args, PROMPTS, **parts).learner
    tokens = torch.randint(vocabulary, (8, length), generator=torch.Generator().manual_seed(0)).numpy()
    logprobs, versions = np.full(length, -5, np.float32), np.zeros(length, np.int64)
    samples = tuple(Sample.answer((1, 2, 3), row, logprobs, versions, "length") for row in tokens)
    batch = Batch(1, 0, (Group(Prompt(0, 0, (1, 2, 3)), samples),), 0.0)
    return Step(learner, ScoredBatch(batch, torch.arange(8.0)[None], {}))


def largest_of_a_step(folder, vocabulary, length, lora=0):
    """Elements of the largest tensor while annotating, and while training on, the batch."""
    step = step_of(folder, vocabulary, length, lora)
    with Largest() as annotating:
        experience, _ = step.learner.annotate(step.scored)
    with Largest() as training:
        step.learner.update(experience, 1)
    return annotating.elements, training.elements


CHUNK = 40_000
"""Elements of the logits of a chunk in the test below, which has 800 to 3200 tokens and is without entropies."""


@pytest.mark.parametrize("lora", [0, 2])
def test_memory_grows_neither_with_the_tokens_nor_with_tokens_times_vocabulary(tmp_path, monkeypatch, lora):
    """All else is at most as large as the weights or the states; 800 tokens x 1000 would be 800,000 numbers."""
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 4 * CHUNK)
    monkeypatch.setattr(head_module, "LEAST_ROWS", 1)
    for vocabulary, length in ((1000, 100), (1000, 400), (4000, 100)):
        weights, states = 32 * vocabulary, 8 * (length + 3) * 48
        bound = max(CHUNK, weights, states)
        assert bound < 8 * length * vocabulary / 4
        assert max(largest_of_a_step(tmp_path, vocabulary, length, lora)) <= bound
