"""Each rank of the learner has a GPU of its own."""

from __future__ import annotations

import os

import pytest
import torch

from async_rlhf import OnlineDPOConfig
from async_rlhf.config import ConfigError, ParallelConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.learner.launch import check_own_gpus, rank_device, start_ranks


@pytest.mark.parametrize(("visible", "index"), [(1, 0), (2, 1), (8, 1)])
def test_a_rank_that_sees_one_gpu_takes_it_and_else_that_of_its_number(visible, index, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    config = OnlineDPOConfig(parallel=ParallelConfig(ranks=2), device="cuda")
    assert rank_device(config, Ranks(1, 2, local_rank=1, local_count=2)) == torch.device("cuda", index)


@pytest.mark.parametrize(("device", "taken"), [("cuda:1", [1]), ("cuda:0", []), ("cuda", []), ("cpu", [])])
def test_a_learner_alone_leaves_the_gpus_before_its_own_alone(device, taken, monkeypatch):
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: found.append(torch.device(gpu).index))
    start_ranks(OnlineDPOConfig(device=device))
    assert found == taken


def test_two_ranks_on_one_gpu_are_an_error():
    check_own_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")])
    with pytest.raises(ConfigError, match=r"device: got 'the same GPU of host b for ranks 1 and 2'; must be a GPU for"):
        check_own_gpus([("a", "GPU-1"), ("b", "GPU-1"), ("b", "GPU-1")])


def test_no_test_sees_a_gpu_but_those_for_one():
    """A run takes a GPU by itself where it sees one, and the numbers of tests are a CPU's."""
    assert torch.cuda.device_count() == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
