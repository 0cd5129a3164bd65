"""What texts have in common at their beginning is computed once, and nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers as hf
from families import KINDS, WINDOW, gradients, in_float64, made
from hypothesis import given
from hypothesis import strategies as st
from planted import Fault, planted
from torch import Tensor, nn

from async_rlhf import GRPOConfig, LoRAConfig
from async_rlhf.models import forest as forest_module
from async_rlhf.models import head, packing
from async_rlhf.models.adapters import add_adapters
from async_rlhf.models.forest import Forest, _seen, grown, size_of, walk
from async_rlhf.models.forward import end_values, response_logprobs, response_values, reward_scores
from async_rlhf.models.kernels import recompute
from async_rlhf.models.packing import choose, shares
from async_rlhf.models.routing import replay_routes

TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)
P = 9


def arrays(texts: list[list[int]]) -> list[np.ndarray]:
    return [np.array(text, dtype=">i4") for text in texts]


def forest_of(texts: list[list[int]], least: int = 1) -> tuple[Forest, list[int], list[list[int]]]:
    """A forest, the order of its texts, and the places of each text's tokens in the sequence."""
    order, alike = walk(arrays(texts), least)
    branches, paths = grown((len(texts[i]) for i in order), alike)
    places = [[n for start, stop in path for n in range(start, stop)] for path in paths]
    return Forest(branches, torch.device("cpu")), order, places


@given(texts=TEXTS, least=st.integers(1, 4))
def test_each_text_is_found_in_the_sequence_which_has_each_beginning_once(texts, least):
    _, order, places = forest_of(texts, least)
    found = dict[int, int]()
    for number, path in zip(order, places, strict=True):
        assert len(path) == len(texts[number])
        for place, token in zip(path, texts[number], strict=True):
            assert found.setdefault(place, token) == token
    beginnings = {tuple(text[: n + 1]) for text in texts for n in range(len(text))}
    assert len(found) == len(set(range(len(found))) | set(found))
    assert len(found) >= len(beginnings)
    if least == 1:
        assert len(found) == len(beginnings)
    assert size_of(arrays(texts)) >= len(beginnings)


def seen_by_calls(forest: Forest, tokens: int, window: int | None) -> Tensor:
    """(N, N): which tokens each attends to, put together from the calls."""
    whole_NN = torch.zeros(tokens, tokens, dtype=torch.bool)
    for call in forest.calls:
        start = call.branches[0].start
        keys = [n for a, b in (*call.outside, (start, start + call.length)) for n in range(a, b)]
        cuts = forest.cuts
        assert [n for i in forest.pieces(call) for n in range(cuts[i], cuts[i + 1])] == keys[: len(keys) - call.length]
        seen = _seen(call, window)
        seen = torch.ones(call.length, call.length).tril().bool() if seen is None else seen
        whole_NN[torch.arange(start, start + call.length)[:, None], torch.tensor(keys)] = seen
    return whole_NN


@given(texts=TEXTS, least=st.integers(1, 4), window=st.one_of(st.none(), st.integers(1, 5)), dear=st.booleans())
def test_a_token_attends_to_the_tokens_before_it_in_its_text_alone(texts, least, window, dear):
    """In calls that branches share or not, and in the kernel's lists."""
    forest, _, places = forest_of(texts, least)
    tokens = 1 + max(n for path in places for n in path)
    right_NN = torch.zeros(tokens, tokens, dtype=torch.bool)
    for path in places:
        for n, place in enumerate(path):
            right_NN[place, path[max(0, n + 1 - (window or len(path))) : n + 1]] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest_module, "CALL", 1e6 if dear else 0)
        assert torch.equal(seen_by_calls(forest, tokens, window), right_NN)
    if window is None:
        keys = torch.arange(tokens) if forest.keys is None else forest.keys
        for number, branch in enumerate(forest.branches):
            mine = keys[forest.key_starts[number] : forest.key_starts[number + 1]].tolist()
            last = branch.start + branch.length - 1
            assert sorted(mine) == right_NN[last].nonzero().flatten().tolist()
            assert mine[len(mine) - branch.length :] == list(range(branch.start, last + 1))


# ---------------------------------------------------------------- numbers of models


def drawn(count: int, seed: int = 0) -> list[int]:
    """Tokens."""
    return np.random.Generator(np.random.Philox(seed)).integers(1, 64, count).tolist()


def rows() -> tuple[Tensor, Tensor]:
    """Tokens and mask of samples of two prompts: answers that fork, equal ones, and one without an answer."""
    prompts, stem = (drawn(P), drawn(P + 4, 1)), drawn(6, 2)
    texts = [(p, a) for p in prompts for a in (stem, stem, [*stem, 5, 6, 7], [*stem[:4], 8, 9], [3] * 11, [])]
    texts.append(([9, 8], [7, 6, 5]))
    tokens_BT, mask_BT = torch.zeros(len(texts), P + 15, dtype=torch.long), torch.zeros(len(texts), P + 15)
    for row, (prompt, answer) in enumerate(texts):
        tokens_BT[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        mask_BT[row, len(prompt) : len(prompt) + len(answer)] = 1
    return tokens_BT, mask_BT


def as_it_is(model: hf.PreTrainedModel) -> None:
    """The model as it is."""


def with_checkpointing(model: hf.PreTrainedModel) -> None:
    recompute(model.train(), GRPOConfig(gradient_checkpointing=True))


def with_adapters(model: hf.PreTrainedModel) -> None:
    add_adapters(model, LoRAConfig(rank=2), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)


def compiled(model: hf.PreTrainedModel) -> None:
    torch._dynamo.reset()
    for layer in model.base_model.layers:
        layer.compile(backend="eager", dynamic=True)


def computed(
    kind: str,
    dtype: torch.dtype,
    sharing: bool,
    values: bool = False,
    prepare: Callable[[hf.PreTrainedModel], None] = as_it_is,
) -> dict[str, Tensor]:
    """Numbers and gradients of rows that share, or of each row alone."""
    model, (tokens_BT, mask_BT), numbers = made(kind, values), rows(), []
    prepare(model)
    lengths_B = mask_BT.shape[1] - mask_BT.flip(1).argmax(dim=1)
    with in_float64(model) if dtype == torch.float64 else nullcontext():
        choose(sharing, False, {"model": model}, False)
        assert shares(model) is sharing
        for part in [slice(None)] if sharing else [slice(n, n + 1) for n in range(len(tokens_BT))]:
            given = model, tokens_BT[part], mask_BT[part]
            if values:
                scores_B = reward_scores(model, tokens_BT[part], lengths_B[part])
                numbers.append(response_values(*given) + scores_B[:, None])
            else:
                output = response_logprobs(*given, 0.7)
                numbers.append(output.logprobs_BT + output.entropies_BT)
        numbers_BT = torch.cat(numbers)
        weights_BT = torch.linspace(-1, 1, numbers_BT.numel()).view(numbers_BT.shape)
        return gradients(model, (numbers_BT * weights_BT).sum()) | {"numbers": numbers_BT.detach()}


def difference(mine: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, float]:
    """Of numbers and of gradients, as parts of their norms, which the rounding of a single sum does not decide."""
    assert mine.keys() == right.keys()
    found = []
    for names in ({"numbers"}, right.keys() - {"numbers"}):
        size = norm(right[name] for name in names)
        assert size > 1e-3
        found.append(norm(mine[name] - right[name] for name in names) / size)
    return found[0], found[1]


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_tokens_give_the_numbers_and_gradients_of_rows_alone(kind, values):
    """To twelve digits, and in float32 to its rounding; also with a window that is shorter than the prompt."""
    if values and kind not in ("gpt_neox", "llama", "qwen2", "qwen3", "mistral", "mixtral"):
        pytest.skip("transformers gives scores of few families")
    assert P > WINDOW
    exact, right = (computed(kind, torch.float64, sharing, values) for sharing in (True, False))
    assert max(difference(exact, right)) < 1e-12
    mine, alone = (difference(computed(kind, torch.float32, sharing, values), right) for sharing in (True, False))
    assert mine[0] < max(1e-6, 2 * alone[0])
    assert mine[1] < max(1e-6, 2 * alone[1])


def kernel(query, key, value, starts, key_starts, longest, longest_keys, *, scale, window_size, enable_gqa):
    """PyTorch's for packed rows, in loops: the last query of each is at its last key."""
    found = []
    for bounds, of_keys in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        q, (k, v) = query[slice(*bounds)].transpose(0, 1), (x[slice(*of_keys)].transpose(0, 1) for x in (key, value))
        assert q.shape[1] <= longest
        assert k.shape[1] <= longest_keys
        behind = torch.arange(k.shape[1])[-q.shape[1] :, None] - torch.arange(k.shape[1])
        mask = (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
        each = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        found.append(each.transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "mistral"])
def test_the_kernel_gets_the_keys_of_each_beginning(kind, monkeypatch):
    """Emulated; also with a window."""
    right = computed(kind, torch.float64, False)
    monkeypatch.setattr(packing, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(packing, "varlen_attn", kernel)
    monkeypatch.setattr(packing, "_in_calls", None)
    assert max(difference(computed(kind, torch.float64, True), right)) < 1e-12


@pytest.mark.parametrize("prepare", [with_checkpointing, with_adapters, compiled])
def test_also_where_layers_are_computed_again_adapted_or_compiled(prepare):
    kind = "gpt_neox" if prepare is with_checkpointing else "llama"
    mine, right = (computed(kind, torch.float64, sharing, prepare=prepare) for sharing in (True, False))
    assert max(difference(mine, right)) < 1e-12
    if prepare is with_adapters:
        assert all("lora" in name for name in mine.keys() - {"numbers"})


def test_also_where_the_head_computes_a_few_tokens_at_a_time(monkeypatch):
    right = computed("llama", torch.float64, False)
    for name, value in (("CHUNK_BYTES", 4 * 64 * 5), ("LEAST_ROWS", 1), ("KEPT_BYTES", 4 * 64 * 5)):
        monkeypatch.setattr(head, name, value)
    assert max(difference(computed("llama", torch.float64, True), right)) < 1e-12


def test_in_sixteen_bits_the_errors_are_those_of_rows_alone():
    right = computed("llama", torch.float64, False)
    with torch.autocast("cpu", torch.bfloat16):
        mine, alone = (difference(computed("llama", torch.float32, sharing), right) for sharing in (True, False))
    assert 1e-4 < mine[0] < 2 * alone[0]
    assert 1e-4 < mine[1] < 2 * alone[1]


def test_keys_that_are_copied_for_the_kernel_are_not_kept_for_the_backward_pass(monkeypatch):
    model, (tokens_BT, mask_BT), copied, kept = made("llama"), rows(), set[int](), list[torch.Size]()

    def counted(query, key, *rest, **options):
        copied.add(len(key))
        return kernel(query, key, *rest, **options)

    choose(True, False, {"model": model}, False)
    monkeypatch.setattr(packing, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(packing, "varlen_attn", counted)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        logprobs_BT = response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT
        (number,) = copied
        assert not any(number in shape for shape in kept)
        logprobs_BT.sum().backward()


def test_attention_with_a_window_reads_no_keys_that_rows_share():
    heads = (torch.zeros(1, 2, 1, 8),) * 3
    with pytest.raises(
        NotImplementedError, match="with a window or a cap does not read keys and values that rows share"
    ):
        packing._attention(nn.Module(), *heads, None, prefixes=object(), sliding_window=8)


def test_end_values_of_a_head_and_of_a_model():
    policy, critic, linear, (tokens_BT, mask_BT) = made("llama"), made("llama", True), nn.Linear(32, 1), rows()
    lengths_B = (mask_BT.shape[1] - mask_BT.flip(1).argmax(dim=1)).clamp(max=tokens_BT.shape[1])
    for value in (linear, critic):
        found = []
        for sharing in (True, False):
            with in_float64(policy, critic, linear):
                choose(sharing, False, {"policy": policy, "value": critic}, False)
                found.append(end_values(policy, value, tokens_BT, lengths_B))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_conversations_that_fork_are_branches_of_one_tree():
    """Two conversations of a row, and a row that begins as the first of them."""
    model, text = made("gpt_neox"), drawn(20)
    row = [*text, *text[:12], 1, 2, 3]
    tokens_BT = torch.tensor([row, [*text[:14], 4, 5, 6, *[0] * 18]])
    positions_BT = torch.tensor([[*range(20), *range(15)], list(range(35))])
    mask_BT = torch.zeros(2, 35)
    mask_BT[0, 8:20], mask_BT[0, 32:], mask_BT[1, 12:17] = 1, 1, 1
    seen, found = list[int](), []
    model.register_forward_pre_hook(lambda _m, _a, given: seen.append(given["input_ids"].numel()), with_kwargs=True)
    for sharing in (True, False):
        with in_float64(model):
            choose(sharing, False, {"model": model}, False)
            seen.clear()
            found.append(response_logprobs(model, tokens_BT, mask_BT, 1.0, positions_BT=positions_BT).logprobs_BT)
        assert seen == [20 + 3 + 3 if sharing else 3 * 20]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_tokens_that_went_to_other_experts_are_not_shared():
    """Eight equal tokens, of which the sixth took other experts in the second row."""
    model, tokens_BT, mask_BT = made("mixtral"), torch.tensor([drawn(8)] * 2), torch.ones(2, 8)
    replay_routes(model)
    mask_BT[:, :3] = 0
    routes_BTLE = torch.tensor([[[[0, 1], [2, 3]]] * 8] * 2, dtype=torch.uint8)
    routes_BTLE[1, 5] = 3 - routes_BTLE[1, 5]
    seen, found = list[int](), []
    model.register_forward_pre_hook(lambda _m, _a, given: seen.append(given["input_ids"].numel()), with_kwargs=True)
    for sharing in (True, False):
        with in_float64(model):
            choose(sharing, False, {"model": model}, False)
            seen.clear()
            found.append(response_logprobs(model, tokens_BT, mask_BT, 1.0, routes_BTLE=routes_BTLE).logprobs_BT)
        assert seen == [5 + 3 + 3 if sharing else 16]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert not torch.equal(found[0][0], found[0][1])


def test_equal_rows_have_equal_numbers():
    model, (tokens_BT, mask_BT) = made("llama"), rows()
    choose(True, False, {"model": model}, False)
    logprobs_BT = response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT
    assert torch.equal(logprobs_BT[0], logprobs_BT[1])
    assert torch.equal(logprobs_BT[6], logprobs_BT[7])


# ---------------------------------------------------------------- planted faults

FAULTS = {
    "a branch sees its sibling": Fault("models.forest:Call.is_causal.fget", "len(self.branches) == 1", "True"),
    "a branch does not see its beginning": Fault(
        "models.forest:_seen", "for a, b in (*branch.before, ", "for a, b in (*branch.before[:-1], "
    ),
    "positions do not go on": Fault(
        "models.packing:_packed", "torch.arange(position, position + stop - start)", "torch.arange(stop - start)"
    ),
    "a prompt's gradient is counted once": Fault(
        "models.packing:_in_calls", "torch.cat([*(part[n] for", "torch.cat([*(part[n].detach() for"
    ),
    "a window of places": Fault(
        "models.forest:_seen", "torch.arange(position, position + b - a)", "own[0] - branch.start + torch.arange(a, b)"
    ),
    "a text ends too early": Fault("models.forest:_alike", "int(different[0])", "int(different[0]) + 1"),
    "equal states are taken for equal tokens": Fault("models.forward:_unequal", " + tokens_N.cpu()", ""),
}


@pytest.mark.parametrize("name", [name for name in FAULTS if "equal" not in name and "gradient" not in name])
def test_the_check_before_training_finds_it(name):
    kind = "mistral" if "window" in name else "llama"
    with planted(FAULTS[name]):
        model = made(kind)
        choose("auto", True, {"model": model}, False)
    assert not shares(model)
