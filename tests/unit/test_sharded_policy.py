"""A policy that FSDP has sharded is of another class, which no generator could build: they get the model's own."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from tiny import all_drawn
from transformers import GPTNeoXForCausalLM

from async_rlhf.config import ParallelConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.generation.worker import make_engine
from async_rlhf.learner.strategies.fsdp import FullyShardedDataParallel
from async_rlhf.models.weights import collected_weights, digests
from async_rlhf.types import Prompt

PARAMS = SamplingParams(2, 0.7, 8, (256,), seed=0)
PROMPTS = [Prompt(i, i, tuple(range(40, 45 + i))) for i in range(3)]


@pytest.fixture
def parallel(make_args):
    """FSDP2 on a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield FullyShardedDataParallel(Ranks(), ParallelConfig("fsdp"), torch.device("cpu"), make_args())
    finally:
        dist.destroy_process_group()


def test_workers_get_the_models_own_class(parallel, make_policy, make_args):
    policy = parallel.frozen(make_policy())
    assert type(policy).__name__ == "FSDPGPTNeoXForCausalLM"
    spec = pickle.loads(pickle.dumps(ModelSpec.for_workers(make_args(), policy, parallel, "cpu", 1)))
    assert spec.model_class is GPTNeoXForCausalLM
    engine = make_engine(spec, PARAMS)
    weights = collected_weights(policy, parallel=parallel)
    assert engine.load(weights, 0) == digests(weights)
    assert all_drawn(engine.generate(PROMPTS)) == all_drawn(TransformersEngine(make_policy(), PARAMS).generate(PROMPTS))
