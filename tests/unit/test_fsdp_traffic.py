"""What FSDP2 sends and when: read from the collectives of one rank of four, whose partners do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, MixtralConfig

from async_rlhf import ParallelConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.learner.strategies.fsdp import FullyShardedDataParallel
from async_rlhf.models.forward import head_in_float32
from async_rlhf.run.shards import own_state

RANKS, PASSES = 4, 3


@contextmanager
def first_of(count: int) -> Iterator[Ranks]:
    """Rank 0 of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield Ranks(rank=0, count=count)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def four_ranks():
    with first_of(RANKS) as ranks:
        yield ranks


def step(ranks, policy, args, **options) -> tuple[FullyShardedDataParallel, list[dict[str, int]], list[torch.dtype]]:
    """Collectives of each pass of an optimiser step, and the types of what is gathered."""
    parallel = FullyShardedDataParallel(
        ranks, ParallelConfig("fsdp", ranks=RANKS, **options), torch.device("cpu"), args
    )
    parallel.prepare(policy, [policy], lambda: torch.optim.SGD(policy.parameters(), lr=0.1))
    gathered: list[torch.dtype] = []
    for module in policy.modules():
        module.register_forward_pre_hook(lambda m, _: gathered.extend(p.dtype for p in m.parameters(recurse=False)))
    found = []
    for number in range(1, PASSES + 1):
        with CommDebugMode() as said, parallel.accumulating(last=number == PASSES):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.in_bfloat16):
                logits_BTV = parallel.forward(torch.ones(1, 6, dtype=torch.long)).logits
            parallel.backward(logits_BTV.float().sum())
        found.append({str(name).rpartition(".")[2]: count for name, count in said.get_comm_counts().items()})
    return parallel, found, gathered


def counts(found: list[dict[str, int]], kind: str) -> list[int]:
    return [sum(count for name, count in each.items() if kind in name.replace("_", "")) for each in found]


def test_gradients_are_summed_after_each_pass_or_once(four_ranks, make_policy, make_args):
    groups = len(make_policy().gpt_neox.layers) + 3  # embedding, head, and the last norm
    for reduce, expected in {"every_pass": [groups] * PASSES, "once": [0, 0, groups]}.items():
        _, found, _ = step(four_ranks, make_policy(), make_args(), reduce=reduce)
        assert counts(found, "reducescatter") == expected
        assert counts(found, "allreduce") == [0] * PASSES


def test_copies_are_shared_by_so_many_ranks_and_meet_once_a_step(four_ranks, make_policy, make_args):
    groups = len(make_policy().gpt_neox.layers) + 3  # embedding, head, and the last norm
    for size in (2, 4):
        policy = make_policy()
        rows = policy.gpt_neox.embed_in.weight.shape[0]
        _, found, _ = step(four_ranks, policy, make_args(), shard_size=size)
        assert policy.gpt_neox.embed_in.weight.to_local().shape[0] == -(-rows // size)
        assert counts(found, "reducescatter") == [groups] * PASSES
        assert counts(found, "allreduce") == ([0, 0, groups] if size == 2 else [0] * PASSES)


@pytest.mark.parametrize("head_float32", [False, True])
def test_weights_are_cast_before_they_are_gathered(four_ranks, make_policy, make_args, head_float32):
    args = make_args(bf16=True, head_float32=head_float32)
    policy = make_policy()
    if head_float32:
        head_in_float32(policy)
    _, _, gathered = step(four_ranks, policy, args)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}  # the shards
    assert set(gathered) == ({torch.bfloat16, torch.float32} if head_float32 else {torch.bfloat16})


def test_what_a_forward_pass_has_left_whole_goes_to_a_checkpoint_in_shards(four_ranks, make_policy, make_args):
    policy = make_policy()
    parallel, _, _ = step(four_ranks, policy, make_args(), reshard_after_forward=False)
    parallel.forward(torch.ones(1, 6, dtype=torch.long))
    assert not all(isinstance(parameter, DTensor) for parameter in policy.parameters())
    state = own_state(SimpleNamespace(model=policy, parallel=parallel, ranks=four_ranks))
    assert len(state) == len(list(policy.parameters()))
    assert all(isinstance(tensor, DTensor) for tensor in state.values())


@pytest.mark.parametrize("tied", [False, True])
def test_while_a_block_computes_nothing_else_is_whole(four_ranks, make_policy, make_args, tied):
    """But for one tensor that is embedding and head."""
    policy = make_policy(tie_word_embeddings=tied)
    whole: list[set[str]] = []

    def see(*_: object) -> None:
        names = {id(p): name for name, p in policy.named_parameters() if not isinstance(p, DTensor) and p.dim() > 1}
        whole.append({name for name in names.values() if ".layers." not in name})

    for block in policy.gpt_neox.layers:
        block.register_forward_hook(see)
        block.register_full_backward_hook(see)
    step(four_ranks, policy, make_args())
    assert len(whole) == 2 * PASSES * len(policy.gpt_neox.layers)
    assert set().union(*whole) == ({"gpt_neox.embed_in.weight"} if tied else set())


@pytest.mark.parametrize("count", [3, 16, 32])
def test_ranks_hold_even_shares_of_experts_whatever_their_number(make_args, count):
    sizes = {"num_hidden_layers": 1, "hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, num_local_experts=8, vocab_size=96))
    experts = {name: p.nbytes for name, p in model.named_parameters() if p.dim() == 3}
    with first_of(count) as ranks:
        parallel = FullyShardedDataParallel(
            ranks, ParallelConfig("fsdp", ranks=count), torch.device("cpu"), make_args()
        )
        parallel.frozen(model)
        held = {name: p.to_local().untyped_storage().nbytes() for name, p in model.named_parameters()}
    assert len(experts) == 2
    assert {name: held[name] * count for name in experts} == experts
