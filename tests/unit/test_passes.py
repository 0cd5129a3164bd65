"""Which rows share a pass."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from heapq import heappush
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from planted import Fault, planted
from tiny import new_args, new_policy
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from async_rlhf.algorithms.online_dpo import OnlineDPOConfig
from async_rlhf.config import ConfigError, GenerationConfig, OnlineConfig
from async_rlhf.distributed.collectives import ContextGroup
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.models import budget
from async_rlhf.models import memory as memory_module
from async_rlhf.models.forest import grown, size_of, walk
from async_rlhf.models.kernels import use_attention
from async_rlhf.models.memory import Pass
from async_rlhf.models.passes import Passes
from async_rlhf.models.rows import by_length, share_of

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(
    lengths=LENGTHS,
    units=st.one_of(st.none(), st.integers(1, 12)),
    tokens=st.integers(1, 2000),
    packed=st.booleans(),
    ranks=st.integers(1, 4),
    rows=st.integers(1, 3),
)
def test_every_unit_is_in_one_pass_and_no_pass_is_over_its_limits(lengths, units, tokens, packed, ranks, rows):
    lengths_B = torch.tensor(lengths[: max(1, len(lengths) // rows) * rows] * (rows if len(lengths) < rows else 1))
    lengths_B = lengths_B[: len(lengths_B) // rows * rows]
    lengths_UR = lengths_B.view(-1, rows)
    parts = Passes(units, tokens, packed, 8).split(lengths_B, rows, ranks)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths_UR)))
    for part in parts:
        mine_UR = lengths_UR[part]
        computed = mine_UR.sum() if packed else mine_UR.numel() * mine_UR.max()
        assert units is None or len(part) <= units
        assert computed <= tokens or len(part) == 1
    shares = [list(share_of(parts, rank, ranks)) for rank in range(ranks)]
    assert len({len(hand) for hand in shares}) == 1
    assert sum(counts for hand in shares for _, counts in hand) == len(parts)


@given(lengths=LENGTHS, units=st.integers(1, 12), ranks=st.integers(1, 4))
def test_without_a_limit_on_tokens_rows_are_split_by_their_number(lengths, units, ranks):
    lengths_B = torch.tensor(lengths)
    parts, right = Passes(units).split(lengths_B, ranks=ranks), list(by_length(lengths_B, units))
    assert [part.tolist() for part in parts] == [part.tolist() for part in right]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [2048, 2500, 3000])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_round_costs_all_ranks_about_the_same(packed, tokens, ranks):
    """64 lognormal rows a rank; the cost counts attention, by an independent sum."""
    generator = torch.Generator().manual_seed(0)
    lengths_B = (90 * torch.randn(64 * ranks, generator=generator).mul(0.9).exp()).long().clamp(10, 460)
    passes = Passes(None, tokens, packed, 64)
    parts = passes.split(lengths_B, ranks=ranks)
    assert len(parts) % ranks == 0
    rows = [lengths_B[part] if packed else lengths_B[part].amax().repeat(len(part)) for part in parts]
    costs = [float((12 * 64 * each + each**2).sum()) for each in rows]
    for start in range(0, len(parts), ranks):
        last = not packed and start + ranks == len(parts)  # its last pass has what is left of padded rows
        round_costs = costs[start : start + ranks - last] or [1.0]
        assert max(round_costs) < 1.25 * min(round_costs)


@pytest.mark.parametrize(
    ("passes", "lengths", "expected"),
    [
        (Passes(None, 6), [3, 3, 3, 3], [[0, 1], [2, 3]]),
        (Passes(2, 100), [3, 3, 3, 3], [[0, 1], [2, 3]]),
        (Passes(None, 10), [6, 3], [[0], [1]]),  # padded, if nothing is said
        (Passes(None, 10, True), [6, 3], [[0, 1]]),
        (Passes(None, 40, True), [27, 26, 4, 1], [[1, 2, 3], [0]]),  # 12 * 27 + 27^2 is 1 above 12 * 30 + 26^2 + 4^2
    ],
)
def test_passes_are_filled_up_to_their_limits(passes, lengths, expected):
    found = [sorted(part.tolist()) for part in passes.split(torch.tensor(lengths))]
    assert sorted(found) == sorted(expected)


def by_the_rule(lengths_UR: list[list[int]], units: int, limit: int, ranks: int, width: int) -> list[list[int]]:
    """Packed passes by the rule, in loops: each unit, the largest first, joins the cheapest pass with room for it."""
    order = sorted(range(len(lengths_UR)), key=lambda i: -sum(lengths_UR[i]))
    cost = {i: sum(n * (12 * width + n) for n in lengths_UR[i]) for i in order}
    tokens = {i: sum(lengths_UR[i]) for i in order}
    for count in range(ranks, len(order), ranks):
        parts: list[list[int]] = [[] for _ in range(count)]
        for i in order:
            room = [p for p in parts if not p or (len(p) < units and sum(tokens[j] for j in p) + tokens[i] <= limit)]
            if not room:
                break
            min(room, key=lambda p: sum(cost[j] for j in p)).append(i)
        else:
            return parts
    return [[i] for i in order]


@given(lengths=LENGTHS, units=st.integers(1, 12), tokens=st.integers(1, 900), ranks=st.integers(1, 4), rows=st.just(2))
def test_packed_passes_are_those_of_the_rule(lengths, units, tokens, ranks, rows):
    lengths_UR = [lengths[i : i + rows] for i in range(0, len(lengths) - rows + 1, rows)]
    found = Passes(units, tokens, True, 8).split(torch.tensor(lengths_UR).flatten(), rows, ranks)
    right = by_the_rule(lengths_UR, units, tokens, ranks, 8)
    assert sorted(part.tolist() for part in found) == sorted(part for part in right if part)


def passes_over_their_limits(texts, units, tokens, ranks, rows) -> list[list[int]]:
    """Passes whose forests have more tokens than they may, or more units."""
    texts = [[np.array(text, dtype=">i4")] for text in texts[: len(texts) // rows * rows]]
    lengths_B = torch.tensor([len(text) for (text,) in texts])
    parts = Passes(units, tokens, True, 8, shared=True).split(lengths_B, rows, ranks, texts)
    assert sorted(n for part in parts for n in part.tolist()) == list(range(len(texts) // rows))
    shares = [list(share_of(parts, rank, ranks)) for rank in range(ranks)]
    assert len({len(hand) for hand in shares}) == 1
    found = [[n * rows + row for n in part.tolist() for row in range(rows)] for part in parts]
    sizes = [size_of([text for n in part for text in texts[n]]) for part in found]
    many = [
        len(part) > rows and (size > tokens or len(part) > units * rows)
        for part, size in zip(found, sizes, strict=True)
    ]
    return [part for part, over in zip(found, many, strict=True) if over]


TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=2, max_size=12)
SHARED = {"texts": TEXTS, "units": st.integers(1, 12), "ranks": st.integers(1, 4), "rows": st.integers(1, 2)}


@given(tokens=st.integers(1, 60), **SHARED)
def test_what_rows_share_counts_once_in_the_limit_of_a_pass(texts, units, tokens, ranks, rows):
    assert passes_over_their_limits(texts, units, tokens, ranks, rows) == []


@given(tokens=st.integers(1, 60), keys=st.integers(1, 4), **SHARED)
@example(texts=[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], tokens=6, keys=1, units=9, ranks=1, rows=1)
@example(texts=[[n % 2, 1, 1, 1, n // 2] for n in range(4)], tokens=12, keys=1, units=9, ranks=1, rows=1)
def test_no_pass_has_more_keys_than_its_limit_has_room_for(texts, tokens, keys, units, ranks, rows):
    """Of all branches, whose keys the kernel copies; a unit that has more by itself is alone."""
    texts = [[np.array(text, dtype=">i4")] for text in texts[: len(texts) // rows * rows]]
    lengths_B = torch.tensor([len(text) for (text,) in texts])
    parts = Passes(units, tokens, True, 8, True, keys).split(lengths_B, rows, ranks, texts)
    assert sorted(n for part in parts for n in part.tolist()) == list(range(len(texts) // rows))
    for part in parts:
        mine = [texts[n * rows + row][0] for n in part.tolist() for row in range(rows)]
        order, alike = walk(mine)
        branches, _ = grown((len(mine[i]) for i in order), alike)
        found = sum(branch.position + branch.length for branch in branches)
        assert len(part) == 1 or found <= keys * tokens


def test_64_samples_of_a_long_prompt_share_passes_of_8_keys_a_token():
    """A prompt of 8,100 tokens and answers of 128, in passes of 16,384: 16 samples have 131,648 keys, 15 fit."""
    texts = [[np.array([*range(8100), *[9000 + k] * 128], dtype=">i4")] for k in range(64)]
    lengths_B = torch.tensor([8228] * 64)
    sizes = [
        sorted(len(part) for part in Passes(None, 16_384, True, 4096, True, keys).split(lengths_B, 1, 1, texts))
        for keys in (math.inf, memory_module.KEYS)
    ]
    assert sizes == [[64], [4, 15, 15, 15, 15]]


def test_keys_limit_passes_only_where_a_kernel_copies_them(monkeypatch):
    policy, limits = new_policy(), OnlineConfig(max_tokens_per_pass=64).training_limits
    assert budget.passes_through([policy], limits, torch.device("cpu")).keys == math.inf
    monkeypatch.setattr(budget, "runs_kernel", lambda device: device.type == "cuda")
    assert budget.passes_through([policy], limits, torch.device("cuda")).keys == memory_module.KEYS


def test_bytes_of_copied_keys_worked_by_hand():
    """Llama 8B, 526,592 keys of 16,292 tokens: 2.16 GB of copies; as much of gradients, and 8.63 of all query heads."""
    shape = memory_module.Shape(8.03e9, 32, 4096, 128_256, 1024, 14_336)
    one = Pass(16_292, 8192, 526_592)
    held = memory_module.LearnerMemory(shape, 0.0, 8, True, True, True, one, one)
    assert held.copied_keys(one) == 2 * 526_592 * 1024 * 2
    assert held.key_gradients() == held.copied_keys(one) + 2 * 526_592 * 4096 * 2
    assert replace(held, shape=replace(shape, kv_width=4096)).key_gradients() == 2 * 526_592 * 4096 * 2
    without = replace(held, update=replace(one, keys=0.0))
    more = held.updating()["block"] - without.updating()["block"]
    # In place of two gradients within the feed-forward layer, which has given up its 8 bytes a number by then.
    right = held.copied_keys(one) + held.key_gradients() - (8 + 2 * 2) * 16_292 * 14_336
    assert more == pytest.approx(right)


def test_auto_leaves_room_for_the_keys_that_a_pass_may_have(monkeypatch):
    """In 16 bits alone; here they are far more than all else."""
    whole, half = memory(new_policy()), memory(new_policy(), bf16=True)
    config = OnlineDPOConfig(bf16=True)
    sizes = [budget.bytes_of_update(config, [new_policy()], [], Parallel(), 2, False), whole.bytes(100)]
    monkeypatch.setattr(memory_module, "KEYS", 10**5)
    (one,) = half.models
    each = one.with_passes(1, 1)
    assert half.bytes(100) == pytest.approx(100 * (each.copied_keys(each.update) + each.key_gradients()), rel=0.01)
    assert budget.bytes_of_update(config, [new_policy()], [], Parallel(), 2, False) > 100 * sizes[0]
    assert whole.bytes(100) == sizes[1]


def test_a_tree_is_cut_between_branches_where_it_is_larger_than_a_pass_or_ranks_would_wait():
    """20 tokens and 4 answers of 5."""
    texts = [[np.array([*range(20), *[30 + n] * 5], dtype=">i4")] for n in (0, 1, 2, 3)]

    def found(tokens: int, ranks: int) -> list[list[int]]:
        parts = Passes(None, tokens, True, 8, shared=True).split(torch.tensor([25] * 4), 1, ranks, texts)
        return [sorted(part.tolist()) for part in parts]

    assert found(40, 1) == [[0, 1, 2, 3]]
    assert found(35, 1) == [[0, 1, 2], [3]]
    assert sorted(map(len, found(40, 2))) == [2, 2]
    assert sorted(map(len, found(40, 4))) == [1, 1, 1, 1]
    with planted(Fault("models.passes:Passes._cut", "[unit.number], unit.tokens, ", "[unit.number], unit.more, ")):
        assert found(25, 1) != [[0], [1], [2], [3]]
    assert found(25, 1) == [[0], [1], [2], [3]]


def test_a_beginning_that_all_rows_share_leaves_passes_full():
    """A system message of 30 tokens, before 64 prompts of 10 with 4 answers of 10."""
    texts = [
        [np.array([*range(30), *[99 + p] * 10, *[999 + k] * 10], dtype=">i4")] for p in range(64) for k in range(4)
    ]
    parts = Passes(None, 512, True, 64, shared=True).split(torch.tensor([50] * 256), 1, 1, texts)
    sizes = [size_of([texts[n][0] for n in part.tolist()]) for part in parts]
    assert sum(sizes) < 1.15 * (30 + 64 * 50)
    assert len(parts) <= 8


def test_8192_ragged_rows_are_packed_without_asking_each_pass(monkeypatch):
    """Each number of passes that is tried takes a few operations a row, not one for each pass that is full."""
    operations = []
    monkeypatch.setattr(
        "async_rlhf.models.passes.heappush", lambda heap, item: operations.append(item) or heappush(heap, item)
    )
    lengths_B = torch.randint(1, 16_001, (8192,), generator=torch.Generator().manual_seed(0))
    parts = Passes(None, 16_384, True, 4096).split(lengths_B, ranks=8)
    assert len(operations) < 8 * 8192
    assert len(parts) == 4064


def test_no_rows_make_no_pass():
    for tokens in (None, 10):
        assert Passes(4, tokens).split(torch.zeros(0, dtype=torch.long)) == []


def test_without_any_limit_there_is_one_pass():
    assert [part.tolist() for part in Passes(None).split(torch.tensor([1, 3, 2]))] == [[1, 2, 0]]


def test_sizes_that_are_not_given_do_not_limit_a_pass_that_tokens_limit(tmp_path):
    plain = new_args(tmp_path, per_device_train_batch_size=None, total_episodes=64)
    assert (plain.training_limits.units, plain.annotation_limits.units, plain.batch_size) == (8, 64, 16)
    tokens = new_args(
        tmp_path, per_device_train_batch_size=None, total_episodes=64, max_tokens_per_pass=512, annotate_max_tokens=2048
    )
    assert (tokens.training_limits.units, tokens.annotation_limits.units, tokens.batch_size) == (None, None, 16)
    given_too = new_args(tmp_path, max_tokens_per_pass=512, annotate_max_tokens=2048, annotate_batch_size=16)
    assert (given_too.training_limits.units, given_too.annotation_limits.units) == (4, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens_per_pass": 0}, 'max_tokens_per_pass: got 0; must be "auto", "on_gpu", or at least 1'),
        (
            {"annotate_max_tokens": "all"},
            "annotate_max_tokens: got 'all'; must be an integer or one of 'auto', 'on_gpu' or null",
        ),
        ({"packing": "always"}, "packing: got 'always'; must be "),
        ({"deterministic": True, "max_tokens_per_pass": "auto"}, "max_tokens_per_pass: got 'auto'; must be a number"),
    ],
)
def test_limits_that_mean_nothing_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        new_args(tmp_path, **changes)
    assert message in str(caught.value)


def memory(model, sharing: int = 1, **changes) -> budget.PassMemory:
    config, parallel = replace(OnlineConfig(), **{"gradient_checkpointing": False, **changes}), Parallel()
    parallel.context = ContextGroup(sharing)
    return budget.PassMemory.of([model], config, parallel, with_gradient=True)


def test_a_reward_model_that_shares_rows_holds_less_of_a_pass(make_reward_model):
    alone, shared = (memory(make_reward_model(), sharing) for sharing in (1, 4))
    assert alone.tokens(1e9) == shared.of_whole_rows().tokens(1e9) < shared.tokens(1e9) / 2


def test_on_a_cpu_auto_is_what_is_of_use_there_and_the_log_says_so(caplog):
    config = replace(OnlineConfig(), max_tokens_per_pass="auto", annotate_max_tokens=7)
    with caplog.at_level(logging.INFO):
        found = budget.with_sizes(config, [new_policy()], [], Parallel(), torch.device("cpu"), 1)
    assert (found.max_tokens_per_pass, found.annotate_max_tokens) == (budget.CPU_TOKENS, 7)
    assert found.gradient_checkpointing is False
    assert caplog.messages == [
        f"max_tokens_per_pass: {budget.CPU_TOKENS} tokens a pass, as many as are of use on a CPU"
    ]


def test_on_a_gpu_auto_is_what_fits_beside_weights_moments_and_frozen_models(monkeypatch, caplog, make_reward_model):
    """With gradient, and without through every model that reads such passes."""
    gpu, judge = torch.device("cuda:0"), make_reward_model()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1e9, 1e9))
    config = replace(OnlineConfig(), max_tokens_per_pass="auto", annotate_max_tokens="auto")
    policies = [new_policy(), new_policy()]
    for judged in ([], [judge]):
        frozen = [policies[0], *judged]
        given = config, policies, frozen, Parallel(), gpu, 1, 0.1
        with caplog.at_level(logging.INFO):
            found = budget.with_sizes(*given, judge=judged[0] if judged else None)
        held = 16.0 * sum(p.num_parameters() for p in policies) + 4.0 * sum(p.num_parameters() for p in frozen)
        room = 0.8 * 0.9 * 1e9 - held
        update, annotate, its_own = (
            budget.PassMemory.of(models, found, Parallel(), with_gradient)
            for models, with_gradient in ((policies, True), (policies, False), ([judge], False))
        )
        tokens = found.max_tokens_per_pass
        assert update.bytes(tokens) <= room < update.bytes(tokens + 1)
        tokens = found.annotate_max_tokens
        reads = [annotate, its_own] if judged else [annotate]
        assert max(one.bytes(tokens) for one in reads) <= room < max(one.bytes(tokens + 1) for one in reads)
        assert found.gradient_checkpointing is False
        assert f"annotate_max_tokens: {tokens} tokens a pass, which takes" in caplog.text
    assert budget.with_sizes(found, policies, [], Parallel(), gpu, 1) is found


def test_a_model_on_a_gpu_of_its_own_limits_passes_by_what_is_free_there(monkeypatch):
    gpu, apart = torch.device("cuda:0"), SimpleNamespace(device="cuda:1")
    free = {gpu: 1e9, "cuda:1": 1e8}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], free[device]))
    monkeypatch.setattr(budget, "_judged", lambda model, *_: memory(new_policy()))
    config = replace(OnlineConfig(), annotate_max_tokens="auto", gradient_checkpointing=False)
    found = budget.with_sizes(config, [new_policy()], [], Parallel(), gpu, 1, apart=[apart])
    assert found.annotate_max_tokens == memory(new_policy()).tokens(0.8 * 1e8)


def test_a_run_that_goes_on_takes_the_numbers_of_its_checkpoint():
    asked = replace(OnlineConfig(), max_tokens_per_pass="auto", annotate_max_tokens=5)
    known = {"max_tokens_per_pass": 77, "annotate_max_tokens": 6, "gradient_checkpointing": True}
    found = budget.with_recorded(asked, known)
    assert (found.max_tokens_per_pass, found.annotate_max_tokens, found.gradient_checkpointing) == (77, 5, True)
    for unknown in ({}, {"max_tokens_per_pass": "auto"}, {"max_tokens_per_pass": None}):  # of older versions, of others
        assert budget.with_recorded(asked, unknown) == asked


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "gpt_neox, eager", "llama, eager", "gemma2", "gemma2, eager"])
def test_what_a_token_takes_is_about_what_the_backward_pass_is_seen_to_keep(kind, checkpointing):
    """Against the tensors that autograd saves, each storage once, without the logits. Rows are as long as they can be:
    where attention keeps their scores, these are the most.
    """
    kind, _, attention = kind.partition(", ")
    longest = 512 if attention or kind == "gemma2" else 96
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = CONFIG_MAPPING[kind](**sizes, vocab_size=258, head_dim=32)
    model, kept = AutoModelForCausalLM.from_config(config), {}
    args = OnlineConfig(max_prompt_length=longest - 12, generation=GenerationConfig(response_length=12))
    use_attention(model, replace(args, attn_implementation=attention or None), "model")
    counted = budget.memory_of(model, args, Parallel(), checkpointing)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        model.train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.ones(4, longest, dtype=torch.long), use_cache=False)
    seen = sum(storage.nbytes() for storage in kept.values()) / (4 * longest)
    saved = replace(counted, update=Pass(1, 1)).saved()
    assert 0.75 * saved <= seen <= 1.15 * saved


@pytest.mark.parametrize(("how", "kept", "again"), [(False, 4, -4), (True, 0, 4), ("selective", 4, 0)])
def test_scores_that_attention_holds_are_in_the_peak_of_every_pass(how, kept, again):
    """Here they are far more numbers than all others, in float32: ``kept`` bytes each in every layer, and ``again`` in
    the one that a backward pass is in.
    """
    one, scores = Pass(10, 10), 10**6
    without = replace(budget.memory_of(new_policy(), OnlineConfig(), Parallel(), how), update=one, annotate=one)
    held = replace(without, shape=replace(without.shape, scores=scores))
    layers = without.shape.layers
    assert held.annotating()["last block"] == pytest.approx(3 * 4 * 10 * scores, rel=0.01)
    assert held.saved() - without.saved() == layers * kept * 10 * scores
    assert held.updating()["block"] == pytest.approx((layers * kept + again + 2 * 4) * 10 * scores, rel=0.01)


def test_as_many_tokens_are_taken_as_fit_and_one_at_least():
    passes = memory(new_policy())
    for room in (5e6, 5e7, 5e8, 5e9):
        tokens = passes.tokens(room)
        assert passes.bytes(tokens) <= room < passes.bytes(tokens + 1)
    assert passes.tokens(-5.0) == 1
    assert memory(new_policy(), sharing=4).bytes(4 * 100) == passes.bytes(100)  # a part of each row on each rank
    both = budget.PassMemory(passes.models * 2, with_gradient=True)
    assert both.bytes(100) == 2 * passes.bytes(100)
    assert both.tokens(2 * 5e7) == passes.tokens(5e7)
    assert budget.PassMemory(passes.models, with_gradient=False).bytes(1000) < passes.bytes(1000)


def test_what_an_update_holds_counts_weights_moments_frozen_models_and_the_largest_pass():
    """With 1,000 more parameters frozen and trained, and with passes of twice as many rows."""
    policy, config = new_policy(), OnlineDPOConfig(per_device_train_batch_size=2)
    held = 16.0 * policy.num_parameters()
    alone = budget.bytes_of_update(config, [policy], [], Parallel(), 2, False)
    assert budget.bytes_of_update(config, [policy], [policy], Parallel(), 2, False) == alone + held / 4
    parallel = Parallel()
    parallel.ranks = SimpleNamespace(count=2)  # with DDP's buckets
    assert budget.bytes_of_update(config, [policy], [], parallel, 2, False) == alone + held / 4
    more = replace(config, per_device_train_batch_size=4)
    rows = tuple(one.training_limits.rows(config.max_length, 2) for one in (config, more))
    assert rows == (4, 8)
    passes = [memory(policy).bytes(number * config.max_length) for number in rows]
    assert alone <= held + passes[0]
    assert budget.bytes_of_update(more, [policy], [], Parallel(), 2, False) - alone > 0.5 * (passes[1] - passes[0]) > 0


@pytest.mark.parametrize(
    ("kept", "share", "expected"),
    [(False, 1.01, False), (False, 0.99, "selective"), ("selective", 1.01, "selective"), ("selective", 0.99, True)],
)
def test_a_gpu_computes_activations_again_only_where_they_would_not_fit(monkeypatch, caplog, kept, share, expected):
    """With so much of the memory that all activations need, or those that "selective" keeps."""
    needed = budget.bytes_of_update(OnlineDPOConfig(), [new_policy()], [], Parallel(), 2, kept)
    memory = share * needed / 0.8
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory, memory))
    config, gpu = OnlineDPOConfig(), torch.device("cuda:0")
    with caplog.at_level(logging.INFO):
        decided = budget.with_sizes(config, [new_policy()], [], Parallel(), gpu, 2)
    assert decided.gradient_checkpointing is expected
    said = {False: "off", True: "on"}.get(expected, expected)
    assert f"gradient_checkpointing: {said}: the learner takes" in caplog.text
    # What others have, or will take, is no room.
    assert budget.with_sizes(config, [new_policy()], [], Parallel(), gpu, 2, taken=0.3).gradient_checkpointing
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0.7 * memory, memory))
    assert budget.with_sizes(config, [new_policy()], [], Parallel(), gpu, 2).gradient_checkpointing
    for said in (True, False):
        asked = replace(config, gradient_checkpointing=said)
        assert budget.with_sizes(asked, [new_policy()], [], Parallel(), gpu, 2) is asked
    assert budget.with_sizes(config, [], [], Parallel(), torch.device("cpu"), 2).gradient_checkpointing is False
