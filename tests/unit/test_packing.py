"""Rows that reach a model packed, and passes that tokens limit."""

from __future__ import annotations

import itertools
import logging
from functools import partialmethod

import pytest
import torch
import transformers as hf
from families import KINDS, WINDOW, gradients, in_float64, made, sizes
from tiny import new_policy
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from async_rlhf.algorithms.supervised import SFT
from async_rlhf.config import ConfigError, OnlineConfig, SFTConfig
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.learner.learner import Learner
from async_rlhf.models import packing
from async_rlhf.models.forward import (
    end_values,
    over_response_logits,
    response_logprobs,
    response_values,
    reward_scores,
)
from async_rlhf.models.gpu_defaults import packs_rows
from async_rlhf.models.kernels import compile_blocks, use_attention
from async_rlhf.models.loading import load_policy
from async_rlhf.models.packing import (
    CAPPED,
    WINDOWED,
    choose,
    holds_scores,
    is_packed,
    keep_soft_cap,
    obstacle,
    require_shared,
)
from async_rlhf.types import Prompt

LENGTHS_B = torch.tensor([30, 7, 19, 3, 12])
PROMPTS_B = torch.tensor([10, 3, 18, 1, 12])
"""The last row has no response."""


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    places_T = torch.arange(int(LENGTHS_B.max()))
    mask_BT = (places_T >= PROMPTS_B[:, None]) & (places_T < LENGTHS_B[:, None])
    return torch.randint(1, 64, mask_BT.shape), mask_BT.float()


def packed(model: hf.PreTrainedModel, wanted: bool = True) -> None:
    choose(wanted, False, {"model": model}, False)
    assert is_packed(model) is wanted


NEAR = 1e-10
"""Of float64."""


def require_same(model: hf.PreTrainedModel, compute, *heads: nn.Module) -> None:
    """Numbers and gradients, packed and padded."""
    found = []
    for wanted in (False, True):
        with in_float64(model, *heads):
            packed(model, wanted)
            numbers = compute()
            weights = torch.linspace(-1, 1, numbers.numel()).view(numbers.shape)
            found.append((numbers.detach(), gradients(model, (numbers * weights).sum())))
    (padded_numbers, padded_gradients), (numbers, of_packed) = found
    torch.testing.assert_close(numbers, padded_numbers, rtol=NEAR, atol=NEAR)
    require_near(of_packed, padded_gradients)


def require_near(mine: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert mine.keys() == right.keys()
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    assert largest > 1e-3
    for name, gradient in right.items():
        torch.testing.assert_close(mine[name], gradient, rtol=NEAR, atol=NEAR * largest, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_give_the_padded_rows_log_probabilities_and_gradients(kind):
    """Also with a window that is shorter than the rows."""
    model, (tokens_BT, mask_BT) = made(kind), rows()
    if kind in WINDOWED:
        assert model.config.sliding_window == WINDOW
    require_same(model, lambda: response_logprobs(model, tokens_BT, mask_BT, 0.7).logprobs_BT)


@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "qwen2", "qwen3", "mistral", "mixtral"])
def test_packed_rows_give_the_padded_rows_scores_and_values(kind):
    model, (tokens_BT, mask_BT) = made(kind, values=True), rows()
    require_same(model, lambda: response_values(model, tokens_BT, mask_BT))
    require_same(model, lambda: reward_scores(model, tokens_BT, LENGTHS_B))


def test_the_last_token_of_a_row_that_is_one_longer_than_the_window_does_not_see_the_first():
    model, lengths_B = made("mistral", values=True), torch.tensor([WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2])
    torch.manual_seed(2)
    tokens_BT = torch.randint(1, 64, (4, WINDOW + 2))
    require_same(model, lambda: reward_scores(model, tokens_BT, lengths_B))


def test_a_value_head_entropies_and_end_values_are_those_of_padded_rows():
    policy, (tokens_BT, mask_BT), head = new_policy(), rows(), nn.Linear(32, 1)
    require_same(policy, lambda: response_logprobs(policy, tokens_BT, mask_BT, 1.0, True, head).values_BT, head)
    require_same(policy, lambda: end_values(policy, head, tokens_BT, LENGTHS_B), head)
    found = []
    for wanted in (False, True):
        with in_float64(policy):
            packed(policy, wanted)
            found.append(response_logprobs(policy, tokens_BT, mask_BT, 1.0).entropies_BT)
    assert found[0].abs().max() > 1
    torch.testing.assert_close(*found, rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize("wanted", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["gpt_neox", "mistral"])
def test_the_conversations_of_a_row_do_not_see_each_other(kind, wanted):
    """Each has the numbers and the gradients of a row of its own."""
    (tokens_BT, mask_BT), texts = rows(), [(0, 0, 5), (0, 5, 12), (0, 12, 20), (1, 0, 9), (1, 9, 12)]
    tokens_BT, mask_BT, lengths_B = tokens_BT[:2, :20], torch.zeros(2, 20), torch.tensor([20, 12])
    positions_BT = torch.zeros(2, 20, dtype=torch.long)
    for b, start, end in texts:
        positions_BT[b, start:end] = torch.arange(end - start)
        mask_BT[b, start + 2 : end] = 1
    policy, critic, head = made(kind), made(kind, values=True), nn.Linear(32, 1)

    def of_rows(model, rows_BT, rows_mask_BT, places_BT=None, rows_lengths_B=None):
        ends_B = rows_mask_BT.shape[1] * torch.ones(1).long() if rows_lengths_B is None else rows_lengths_B
        if model is critic:
            values_BT = response_values(critic, rows_BT, rows_mask_BT, places_BT)
            return values_BT, end_values(policy, critic, rows_BT, ends_B, places_BT)
        output = response_logprobs(policy, rows_BT, rows_mask_BT, 0.7, True, head, places_BT)
        numbers_BT = output.logprobs_BT + 2 * output.values_BT + 3 * output.entropies_BT
        return numbers_BT, end_values(policy, head, rows_BT, ends_B, places_BT)

    for model in (policy, critic):
        weights_BT = torch.linspace(-1, 1, 40).view(2, 20)
        with in_float64(policy, critic, head):
            packed(model, wanted)
            found_BT, ends_B = of_rows(model, tokens_BT, mask_BT, positions_BT, lengths_B)
            mine = gradients(model, (found_BT * weights_BT).sum())
            packed(model, False)
            alone = [of_rows(model, tokens_BT[b : b + 1, s:e], mask_BT[b : b + 1, s:e]) for b, s, e in texts]
            sums = [(right * weights_BT[b, s:e]).sum() for (b, s, e), (right, _) in zip(texts, alone, strict=True)]
            theirs = gradients(model, torch.stack(sums).sum())
        for (b, start, end), (right_BT, _) in zip(texts, alone, strict=True):
            torch.testing.assert_close(found_BT[b, start:end], right_BT[0], rtol=NEAR, atol=NEAR)
        torch.testing.assert_close(ends_B, torch.cat([alone[2][1], alone[4][1]]), rtol=NEAR, atol=NEAR)
        assert found_BT.abs().max() > 1e-2
        require_near(mine, theirs)


def test_layers_that_are_computed_again_see_the_same_rows():
    policy, (tokens_BT, mask_BT) = new_policy(), rows()
    policy.train()
    require_same(policy, lambda: response_logprobs(policy, tokens_BT, mask_BT, 1.0).logprobs_BT)
    with in_float64(policy):
        packed(policy)
        plain = gradients(policy, response_logprobs(policy, tokens_BT, mask_BT, 1.0).logprobs_BT.sum())
        policy.gradient_checkpointing_enable()
        again = gradients(policy, response_logprobs(policy, tokens_BT, mask_BT, 1.0).logprobs_BT.sum())
    require_near(again, plain)


def test_packed_rows_are_never_padded_and_logits_come_in_the_same_order():
    policy, (tokens_BT, mask_BT), seen = new_policy(), rows(), []

    def sums() -> Tensor:
        return over_response_logits(policy, tokens_BT, mask_BT, lambda logits_CV, _: logits_CV.sum(dim=1)[None])

    policy.double()
    padded = sums()
    packed(policy)
    policy.register_forward_pre_hook(lambda _m, _a, given: seen.append(given["input_ids"].shape), with_kwargs=True)
    torch.testing.assert_close(sums(), padded, rtol=NEAR, atol=NEAR)
    assert seen == [(1, int(LENGTHS_B.sum()) - 12 + 1)]  # of a row without response, one token


def jamba() -> hf.PretrainedConfig:
    return hf.JambaConfig(
        **sizes("llama") | {"num_hidden_layers": 8, "mamba_d_state": 4, "mamba_dt_rank": 2, "use_mamba_kernels": False}
    )


def eager() -> hf.PretrainedConfig:
    return hf.GPTNeoXConfig(**sizes("gpt_neox"), attn_implementation="eager")


REFUSED = {
    "a state-space model": (
        lambda: hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
        "MambaForCausalLM, whose state would run from one row into the next",
    ),
    "a hybrid": (jamba, "JambaForCausalLM, whose state would run from one row into the next"),
    "its own attention": (
        lambda: CONFIG_MAPPING["nemotron"](**sizes("llama")),
        "NemotronForCausalLM, which refuses packed rows",
    ),
    "positions from elsewhere": (
        lambda: CONFIG_MAPPING["roberta"](**sizes("gpt_neox"), is_decoder=True),
        "RobertaForCausalLM, which computes something else for packed rows",
    ),
    "no position ids": (
        lambda: CONFIG_MAPPING["bloom"](vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        "BloomForCausalLM, whose attention cannot be replaced",
    ),
    "a window that only the mask has": (
        lambda: hf.Qwen2MoeConfig(**sizes("mistral")),
        "Qwen2MoeForCausalLM, whose sliding window attention does not get to know",
    ),
    "eager attention": (eager, 'GPTNeoXForCausalLM, whose attention is "eager", not "sdpa"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_is_named_and_gets_padded_rows(case, caplog):
    config, message = REFUSED[case]
    torch.manual_seed(0)
    config = config()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation)
    with pytest.raises(ConfigError) as caught:
        choose(True, True, {"policy": model}, False)
    assert f'packing: got True; must be false or "auto": the policy is a {message}' in str(caught.value)
    with caplog.at_level(logging.INFO):
        choose("auto", True, {"policy": model}, False)
    assert f"the rows of the policy are padded: it is a {message}" in caplog.text
    assert not is_packed(model)


@pytest.mark.parametrize("case", ["a state-space model", "its own attention", "eager attention"])
def test_ranks_do_not_share_the_rows_of_a_model_that_cannot(case):
    config, message = REFUSED[case]
    config = config()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation)
    with pytest.raises(ConfigError) as caught:
        require_shared({"policy": model}, 2)
    assert f"parallel.context_parallel: got 2; must be 1: the policy is a {message}" in str(caught.value)
    require_shared({"policy": model}, 1)


def test_ranks_that_share_rows_divide_the_attention_heads():
    with pytest.raises(ConfigError, match="context_parallel: got 3; must divide the 4 attention heads of the policy"):
        require_shared({"policy": made("llama")}, 3)
    require_shared({"policy": made("llama")}, 4)


def test_sixteen_bits_leave_room_for_rounding_and_not_for_another_computation():
    assert obstacle(made("gpt_neox").bfloat16()) is None
    config = CONFIG_MAPPING["roberta"](**sizes("gpt_neox"), is_decoder=True)
    assert "computes something else" in obstacle(hf.AutoModelForCausalLM.from_config(config).bfloat16())


def test_a_short_window_is_no_obstacle_where_attention_gets_to_know_it():
    assert obstacle(hf.AutoModelForCausalLM.from_config(hf.Qwen2MoeConfig(**sizes("mistral")))) is not None
    assert obstacle(made("mistral")) is None
    assert obstacle(made("qwen2")) is None


def test_a_window_of_no_tokens_is_none():
    torch.manual_seed(0)
    model, (tokens_BT, mask_BT) = hf.AutoModelForCausalLM.from_config(hf.Qwen2MoeConfig(**sizes("llama"))), rows()
    assert model.config.sliding_window == 0
    require_same(model, lambda: response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT)


def with_soft_cap() -> hf.PretrainedConfig:
    options = {**sizes("llama"), "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5}
    return hf.Gemma2Config(**options, attn_logit_softcapping=0.3, initializer_range=0.5)


@pytest.mark.parametrize("name", [None, "sdpa"])
def test_a_soft_cap_on_the_scores_of_attention_is_kept(name):
    """As transformers' eager attention has it: padded, packed and sampled."""
    torch.manual_seed(0)
    model, (tokens_BT, mask_BT) = hf.AutoModelForCausalLM.from_config(with_soft_cap()), rows()
    with in_float64(model):
        found = {"its own": response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT}
        for wanted in ("eager", name):
            use_attention(model, OnlineConfig(attn_implementation=wanted), "model")
            found[wanted] = response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT
    require_same(model, lambda: response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT)
    for other in ("its own", name):
        torch.testing.assert_close(found[other], found["eager"], rtol=NEAR, atol=NEAR)
    params = SamplingParams(2, 1.0, 6, (-1,), 0, batch_size=8)
    ((first, second),) = TransformersEngine(model.float().eval(), params).generate([Prompt(0, 0, (5, 6, 7))])
    for sample in (first, second):
        tokens_BT, mask_BT = (
            torch.from_numpy(sample.tokens)[None].long(),
            torch.from_numpy(sample.sampled)[None].float(),
        )
        packed(model, False)
        model.set_attn_implementation("eager")
        expected_BT = response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT
        torch.testing.assert_close(torch.from_numpy(sample.logprobs)[None], expected_BT, rtol=0, atol=1e-4)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    without_BT = response_logprobs(model.double(), *rows(), 1.0).logprobs_BT
    assert (without_BT - found["eager"]).abs().max() > 0.01


def test_a_model_with_a_soft_cap_is_packed_however_it_is_loaded_unless_it_is_to_be_eager(tmp_path):
    """Newer versions of transformers give it eager attention by themselves, and refuse it "sdpa"."""
    hf.AutoModelForCausalLM.from_config(with_soft_cap()).save_pretrained(tmp_path)
    assert packs_rows(str(tmp_path), trust=False)
    model = load_policy(str(tmp_path))
    use_attention(model, OnlineConfig(), "model")
    assert holds_scores(model)
    assert obstacle(model) is None
    model.save_pretrained(tmp_path / "again")
    assert CAPPED not in (tmp_path / "again" / "config.json").read_text(encoding="utf-8")
    use_attention(model, OnlineConfig(attn_implementation="eager"), "model")
    assert obstacle(model) == 'whose attention is "eager", not "sdpa"'
    config = SFTConfig(train="rows.jsonl", output_dir=str(tmp_path / "sft"), max_tokens_per_pass=64)
    assert is_packed(Learner(load_policy(str(tmp_path)), None, SFT, config.for_learner(1, config.output_dir)).policy)
    for other, attention in (("llama", "eager"), ("llama", "sdpa")):
        model = made(other)
        model.set_attn_implementation(attention)
        keep_soft_cap(model)
        assert model.config._attn_implementation == attention
        assert holds_scores(model) is (attention == "eager")


def test_rows_are_packed_by_themselves_only_where_tokens_limit_a_pass():
    policy = new_policy()
    for how, budget, expected in (
        ("auto", False, False),
        ("auto", True, True),
        (False, True, False),
        (True, False, True),
    ):
        choose(how, budget, {"policy": policy}, False)
        assert is_packed(policy) is expected


@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "mistral"])
def test_under_autocast_the_kernel_for_packed_rows_gets_16_bits_in_every_layer(kind, monkeypatch):
    """Emulated: float32 weights make float32 queries and keys beside bfloat16 values."""
    model, (tokens_BT, mask_BT), calls = made(kind), rows(), list[torch.dtype]()

    def kernel(query, key, value, starts, _, longest, *rest, scale, window_size, enable_gqa):
        calls.extend(each.dtype for each in (query, key, value))
        found = []
        for begin, end in itertools.pairwise(starts.tolist()):
            q, k, v = (each[begin:end].transpose(0, 1) for each in (query, key, value))
            behind = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            mask = (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
            each = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
            found.append(each.transpose(0, 1))
            assert end - begin <= longest
        return torch.cat(found)

    monkeypatch.setattr(packing, "varlen_attn", kernel)
    found = []
    for capable in (False, True):
        monkeypatch.setattr(packing, "runs_kernel", lambda _, capable=capable: capable)
        with torch.autocast("cpu", torch.bfloat16):
            packed(model)
            calls.clear()
            found.append(response_logprobs(model, tokens_BT, mask_BT, 0.7).logprobs_BT)
        assert calls == [torch.bfloat16] * (3 * model.config.num_hidden_layers * capable)
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("capable", "graphs"), [(True, 1), (False, 5)], ids=["kernel", "row by row"])
def test_compiled_blocks_have_the_same_graphs_for_any_number_of_rows(capable, graphs, monkeypatch, make_args):
    """One with the kernel, which knows the rows by a tensor and a number; rows by themselves are left out of graphs."""
    counter, model, right = CompileCounter(), made("llama"), made("llama")
    monkeypatch.setattr(packing, "runs_kernel", lambda _: capable)
    monkeypatch.setattr(
        packing, "varlen_attn", lambda query, key, value, starts, _, longest, *rest, **__: query * longest
    )
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=counter))
    torch._dynamo.reset()
    compile_blocks(model, make_args(torch_compile=True))
    found = []
    for count in (2, 3, 5, 8, 12):
        (tokens_BT, mask_BT), logprobs = rows(), []
        repeated = torch.arange(count) % 4
        for each in (model, right):
            setattr(each, packing._MARK, True)
            with torch.autocast("cpu", torch.bfloat16, enabled=capable):
                output = response_logprobs(each, tokens_BT[repeated], mask_BT[repeated], 0.7)
            output.logprobs_BT.sum().backward()
            logprobs.append(output.logprobs_BT)
        torch.testing.assert_close(*logprobs, rtol=1e-5, atol=1e-5)
        found.append(counter.frame_count)
    assert found == [graphs] * 5
