"""How rows and other values get from rank 0 to the ranks that compute them, and back."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.messages import packed, unpacked
from async_rlhf.models.rows import ScatteredBatches
from async_rlhf.types import Experience, Sample


class Wires:
    """Between ranks that are threads: what was sent and has not been received, and the most of it at a time."""

    def __init__(self) -> None:
        self.told: dict[int, queue.Queue[Any]] = defaultdict(queue.Queue)
        self.sent: dict[int, queue.Queue[tuple[torch.Tensor, threading.Event]]] = defaultdict(queue.Queue)
        self.bytes: dict[int, int] = defaultdict(int)
        self.under_way, self.most = 0, 0
        self.lock = threading.Lock()

    def add(self, size: int) -> None:
        with self.lock:
            self.under_way += size
            self.most = max(self.most, self.under_way)


class ThreadRanks(Ranks):
    """A rank whose collectives are queues."""

    def __init__(self, rank: int, count: int, wires: Wires) -> None:
        super().__init__(rank, count)
        self.wires = wires

    def broadcast(self, place: str, compute: Callable[[], Any]) -> Any:
        if not self.is_main:
            return self.wires.told[self.rank].get(timeout=20)
        value = compute()
        for rank in range(1, self.count):
            self.wires.told[rank].put(value)
        return value

    def start_sending(self, tensor: torch.Tensor, rank: int) -> Callable[[], object]:
        gone = threading.Event()
        self.wires.sent[rank].put((tensor, gone))
        self.wires.add(tensor.nbytes)
        return lambda: gone.wait(20)

    def start_receiving(self, tensor: torch.Tensor, rank: int) -> Callable[[], object]:
        def wait() -> None:
            found, gone = self.wires.sent[self.rank].get(timeout=20)
            self.wires.add(-tensor.nbytes)
            self.wires.bytes[self.rank] += tensor.nbytes
            tensor.copy_(found)
            gone.set()

        return wait


def on_ranks(count: int, work: Callable[[Ranks], Any]) -> tuple[list[Any], Wires]:
    """What each rank returns."""
    wires, found = Wires(), [None] * count

    def one(rank: int) -> None:
        found[rank] = work(ThreadRanks(rank, count, wires))

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found, wires


def experience(lengths: list[int]) -> Experience:
    generator, lengths_B = torch.Generator().manual_seed(0), torch.tensor(lengths)
    shape = len(lengths), max(lengths)
    mask_BT = (torch.arange(shape[1]) < lengths_B[:, None]).float()
    return Experience(
        tokens_BT=torch.randint(1, 9, shape, generator=generator) * mask_BT.long(),
        lengths_B=lengths_B,
        sampled_BT=mask_BT,
        behaviour_logprobs_BT=torch.rand(shape, generator=generator),
        rewards_BT=torch.zeros(shape),
        scores_B=torch.rand(len(lengths), generator=generator),
        loss_weights_U=torch.rand(len(lengths), generator=generator),
        truncated_B=lengths_B % 2 == 0,
        has_gradient_U=lengths_B % 3 > 0,
    )


def deal(ranks: Ranks, whole: Experience, parts: list[torch.Tensor], sharing: int = 1) -> ScatteredBatches:
    """On other ranks from nothing at all."""
    if not ranks.is_main:
        return ScatteredBatches(ranks, "here", 0, lambda n: {}, lambda n: {}, "nothing", sharing)
    return ScatteredBatches(
        ranks, "here", len(parts), lambda n: whole.sizes(parts[n]), lambda n: whole.part(parts[n]), "all", sharing
    )


def test_ranks_that_share_rows_get_the_same_passes():
    whole, parts = experience([5] * 5), list(torch.arange(5).split(1))
    found, _ = on_ranks(6, lambda ranks: [(each.number, each.counts) for each in deal(ranks, whole, parts, 3)])
    assert found == [[(0, True), (2, True), (4, True)]] * 3 + [[(1, True), (3, True), (0, False)]] * 3


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=14), count=st.integers(1, 4), size=st.integers(1, 3))
def test_each_rank_gets_the_rows_that_it_computes_and_no_others(lengths, count, size):
    whole, parts = experience(lengths), list(torch.arange(len(lengths)).split(size))

    def work(ranks: Ranks) -> Any:
        mine = deal(ranks, whole, parts)
        again = [list(mine) for _ in range(2)]  # it can be iterated over again
        return mine, again

    found, wires = on_ranks(count, work)
    assert {mine.header for mine, _ in found} == {"all"}
    assert {len(mine) for mine, _ in found} == {-(-len(parts) // count)}
    for rank, (mine, again) in enumerate(found):
        for passes in again:
            assert len(passes) == len(mine)
            for turn, (number, rows, counts) in enumerate(passes):
                right = turn * count + rank
                assert (number, counts) == ((right, True) if right < len(parts) else (0, False))
                for name, tensor in whole.part(parts[number]).items():
                    assert rows[name].dtype == tensor.dtype
                    assert torch.equal(rows[name], tensor), name
        if rank:
            sent = [x for passes in again for each in passes for x in each.rows.values()]
            assert wires.bytes[rank] == sum(x.numel() * min(x.element_size(), 4) for x in sent)


def test_no_more_than_two_rounds_are_under_way():
    whole, parts = experience([5] * 24), list(torch.arange(24).split(1))
    one = sum(tensor.nbytes for tensor in whole.part(parts[0]).values())
    _, wires = on_ranks(3, lambda ranks: [None for _ in deal(ranks, whole, parts)])
    assert 0 < wires.most <= 2 * 2 * one


def test_a_rank_alone_copies_nothing_but_its_passes():
    asked: list[int] = []
    rows = {"tokens_BT": torch.ones(2, 3)}
    alone = ScatteredBatches(Ranks(), "here", 3, pytest.fail, lambda n: [asked.append(n), rows][1])
    for turn, each in enumerate(alone):
        assert asked == list(range(turn + 1))
        assert each.rows is rows
        assert each.counts


def test_no_passes_are_dealt_to_nobody():
    found, _ = on_ranks(2, lambda ranks: list(deal(ranks, experience([1]), [])))
    assert found == [[], []]


def test_what_is_sent_comes_back_to_the_bit_and_arrays_are_views_of_the_message():
    sample = Sample.answer((7, 8), (1, 2), (-0.5, -1.0), (4, 4), "stop")
    value = {
        "sample": sample,
        "arrays": [np.zeros(0), np.arange(3), np.ones((2, 2), bool)[:, ::2]],
        "tensors": (torch.tensor([1.5, float("nan")]), torch.zeros(0, 3), torch.tensor([[True, False]])),
        "rest": SimpleNamespace(name="b", number=2),
    }
    message = packed(value)
    assert message.dtype == torch.uint8
    found = unpacked(message)
    assert found["sample"] == sample
    for mine, theirs in zip(found["arrays"], value["arrays"], strict=True):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)
    for mine, theirs in zip(found["tensors"], value["tensors"], strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))
    assert found["rest"] == value["rest"]
    start = message.data_ptr()
    assert start <= found["sample"].logprobs.ctypes.data < start + len(message)
    assert start <= found["tensors"][0].data_ptr() < start + len(message)


def test_large_arrays_are_not_in_what_is_pickled():
    large = np.zeros(100_000, np.float32)
    assert large.nbytes <= len(packed([large, torch.from_numpy(large)])) - large.nbytes < large.nbytes + 2_000
