"""How ranks share what is computed for a batch, and how other values get from rank 0 to them, and back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.messages import packed, unpacked
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.models.rows import in_shares
from async_rlhf.types import Sample


@pytest.mark.parametrize(("sharing", "sharded"), [(1, False), (1, True), (3, False)])
@pytest.mark.parametrize("batches", [0, 1, 5, 12])
def test_every_rank_gets_the_result_of_each_batch_in_order(batches, sharing, sharded):
    values, arrived = [None] * 6, Barrier(6)

    class ThreadRanks(Ranks):
        def gather(self, point: str, value: Any) -> list[Any]:
            values[self.rank] = value
            arrived.wait(20)
            return list(values)

    def work(rank: int) -> tuple[list[int], list[int]]:
        mine: list[int] = []
        compute = lambda number: [mine.append(number), 10 * number][1]  # noqa: E731
        parallel = Parallel(ThreadRanks(rank, 6))
        parallel.is_sharded = sharded
        return in_shares("here", range(batches), compute, parallel, sharing), mine

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(work, range(6)))
    groups = 6 // sharing
    for rank, (results, mine) in enumerate(found):
        assert results == [10 * number for number in range(batches)]
        rest = [0] if sharded and rank >= (batches % 6 or 6) else []
        assert mine == [*range(rank // sharing, batches, groups), *rest]


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
