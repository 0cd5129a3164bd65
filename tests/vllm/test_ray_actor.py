"""vLLM in a Ray actor, in a cluster of this host alone that the run starts itself."""

from __future__ import annotations

import pytest
from conftest import SHORT, SHORT_BATCHES, run, same_metrics
from tiny import PROMPTS

from async_rlhf.config import RayConfig

pytestmark = pytest.mark.vllm
ray = pytest.importorskip("ray", reason="pip install 'async-rlhf[ray]'")


def test_vllm_in_an_actor_is_bitwise_vllm_in_a_process(undisturbed, make_args, tokenizer):
    args = make_args(launch="ray", ray=RayConfig(address="local"), **SHORT)
    try:
        assert same_metrics(run(args, tokenizer, PROMPTS), undisturbed[:SHORT_BATCHES])
    finally:
        ray.shutdown()
