"""Two processes of vLLM's share the model of one generator, as two GPUs would."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PARAMS, descendants, new_policy, processes, prompts_of

import async_rlhf
from async_rlhf.config import VLLMConfig
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import GeneratorError
from async_rlhf.models.weights import named_weights
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch

pytestmark = pytest.mark.vllm
LONG = replace(PARAMS, response_length=16, stop_token_ids=(256,))
SHARDED = VLLMConfig(kv_cache_gb=0.05, block_size=32, tensor_parallel_size=2)


def ranks(generator: ProcessGenerator) -> set[int]:
    """vLLM's own processes below the generator's."""
    living, (worker,) = processes(), generator.workers
    return {pid for pid in descendants(worker.process.pid) if "VLLM::Worker" in living.get(pid, (0, 0, ""))[2]}


def collected(generator: ProcessGenerator, policy: torch.nn.Module, index: int, version: int) -> Batch:
    generator.publish(policy, version)
    generator.submit(index, version, prompts_of(8, first=8 * version))
    return generator.collect(index)


def same_but_for_rounding(batch: Batch, engine: object, policy: torch.nn.Module, version: int) -> bool:
    """As one process samples it that has the whole model."""
    engine.load(named_weights(policy), version)
    expected = engine.generate(prompts_of(8, first=8 * version))
    found = [group.samples for group in batch.groups]
    for ours, theirs in zip(chain.from_iterable(found), chain.from_iterable(expected), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.versions.tolist() == theirs.versions.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)
    return True


def test_two_processes_sample_what_one_does_and_end_together(engine, make_args, caplog):
    """Weights come from the shared snapshots; each process proves them, and the probe and the draws agree."""
    caplog.set_level("INFO", "async_rlhf")
    args = make_args(
        generation={
            "placement": "process",
            "vllm": SHARDED,
            "probe_steps": 1,
            "mismatch_samples": 16,
            "max_restarts": 0,
        }
    )
    engine.params = LONG
    with closing(ProcessGenerator(args, new_policy(), LONG, Trace())) as generator:
        for version in range(2):
            policy = new_policy(version)
            batch = collected(generator, policy, version + 1, version)
            assert same_but_for_rounding(batch, engine, policy, version)
            assert 0 <= batch.metrics["weights/probe_difference"] < 1e-5
            assert 0 < batch.metrics["engine/logprob_difference"] < 1e-5
        said = [record.message for record in caplog.records if record.message.startswith("generator 0")]
        assert said[0].startswith("generator 0: vLLM is starting")
        assert re.fullmatch(r"generator 0 is ready after \d+ s", said[1])
        both = ranks(generator)
        assert len(both) == 2
        os.kill(max(both), signal.SIGKILL)
        with pytest.raises(GeneratorError, match=r"generator process 0 lost a process of vLLM's: .* after 0 restarts"):
            collected(generator, policy, 3, 2)
        assert not both & processes().keys()


def test_every_variable_of_vllms_that_is_set_exists():
    """A name of one's own would be ignored: on a GPU, where vLLM forks unless it is told not to."""
    from vllm import envs

    texts = [path.read_text(encoding="utf-8") for path in Path(async_rlhf.__file__).parent.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'"(VLLM_[A-Z0-9_]+)"', text)}
    assert "VLLM_WORKER_MULTIPROC_METHOD" in named
    assert named <= set(envs.environment_variables)
