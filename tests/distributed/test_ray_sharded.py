"""Ray's generators sample for a policy that FSDP has sharded: they get the model's own class."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from tiny import all_drawn, new_args, new_policy

from async_rlhf.config import ParallelConfig, RayConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.learner.strategies.fsdp import FullyShardedDataParallel
from async_rlhf.system.trace import Trace
from async_rlhf.types import Prompt

pytestmark = pytest.mark.distributed
ray = pytest.importorskip("ray")

PARAMS = SamplingParams(2, 0.7, 8, (256,), seed=0)


def test_an_actor_samples_what_the_whole_policy_samples(tmp_path, monkeypatch):
    from async_rlhf.distributed.ray import connect
    from async_rlhf.generation.ray import RayGenerator

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    prompts = [Prompt(i, i, tuple(range(40, 45 + i))) for i in range(4)]
    args = new_args(tmp_path, launch="ray", staleness=1, ray=RayConfig(address="local"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        connect(args)
        parallel = FullyShardedDataParallel(Ranks(), ParallelConfig("fsdp"), torch.device("cpu"), args)
        policy = parallel.frozen(new_policy())
        with closing(RayGenerator(args, policy, PARAMS, Trace(), parallel)) as generator:
            generator.publish(policy, 0)
            generator.submit(1, 0, prompts)
            found = [group.samples for group in generator.collect(1).groups]
            name_of_class = ray.remote(lambda spec, *_: spec.model_class.__qualname__)
            # As an actor gets it: Ray would also pass on a class that exists in this process only.
            assert ray.get(name_of_class.remote(*generator.workers[0]._arguments)) == "GPTNeoXForCausalLM"
    finally:
        dist.destroy_process_group()
        ray.shutdown()
    assert all_drawn(found) == all_drawn(TransformersEngine(new_policy(), PARAMS).generate(prompts))
