"""vLLM in a Ray actor, in a cluster of this host alone that the run starts itself."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from conftest import PARAMS, SHORT, SHORT_BATCHES, new_policy, prompts_of, run, same_metrics, sampled
from tiny import PROMPTS, all_drawn

from async_rlhf.config import ParallelConfig, RayConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.learner.strategies.fsdp import FullyShardedDataParallel
from async_rlhf.system.trace import Trace

pytestmark = pytest.mark.vllm
ray = pytest.importorskip("ray", reason="pip install 'async-rlhf[ray]'")


def test_vllm_in_an_actor_is_bitwise_vllm_in_a_process(undisturbed, make_args, tokenizer):
    args = make_args(launch="ray", ray=RayConfig(address="local"), **SHORT)
    try:
        assert same_metrics(run(args, tokenizer, PROMPTS), undisturbed[:SHORT_BATCHES])
    finally:
        ray.shutdown()


def test_vllm_in_an_actor_knows_a_policy_that_fsdp_has_sharded(engine, make_args):
    """FSDP gives the policy another class, which is no architecture of vLLM's."""
    from async_rlhf.distributed.ray import connect
    from async_rlhf.generation.ray import RayGenerator

    args = make_args(launch="ray", ray=RayConfig(address="local"))
    assert dist.get_world_size() == 1  # the engine in this process has made the group
    try:
        connect(args)
        parallel = FullyShardedDataParallel(Ranks(), ParallelConfig("fsdp"), torch.device("cpu"), args)
        policy = parallel.frozen(new_policy())
        with closing(RayGenerator(args, policy, PARAMS, Trace(), parallel)) as generator:
            generator.publish(policy, 0)
            generator.submit(1, 0, prompts_of(4))
            groups = generator.collect(1).groups
    finally:
        ray.shutdown()
    assert all_drawn([group.samples for group in groups]) == sampled(engine, prompts_of(4))
