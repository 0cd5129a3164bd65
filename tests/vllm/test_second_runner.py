"""On GPUs vLLM runs its Model Runner V2 by default, here V1: what this package asks of the model runner, V2 has too.

V2 computes in Triton kernels. Where Triton has a backend for CPUs, the last test fails: run all tests here with V2 then
(VLLM_USE_V2_MODEL_RUNNER=1), and drop this file.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec

import numpy as np
import pytest

pytestmark = pytest.mark.vllm


def test_it_hands_out_its_model_and_forgets_adapters():
    """What loading a snapshot calls, with nothing to give (vllm_weights.py)."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    for name in ("get_model", "reset_lora_state"):
        given = inspect.signature(getattr(GPUModelRunner, name)).parameters.values()
        assert [one.name for one in given if one.default is one.empty] == ["self"], name


def test_each_request_has_its_own_seed_and_temperature(monkeypatch):
    """A seed of a request is drawn with; one without gets some other."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample import states

    class InMemory:
        def __init__(self, size, dtype):
            self.np = np.zeros(size, str(dtype).removeprefix("torch."))

        def copy_to_uva(self) -> None: ...

    monkeypatch.setattr(states, "UvaBackedTensor", InMemory)  # the real one needs a GPU
    found = states.SamplingStates(3, vocab_size=7)
    found.add_request(0, SamplingParams(seed=11, temperature=0.5, logprobs=0))
    found.add_request(2, SamplingParams(temperature=1.0))
    assert (found.seeds.np[0], found.temperature.np[0], found.num_logprobs[0]) == (11, 0.5, 0)
    assert found.seeds_set.tolist() == [True, False, False]
    assert found.seeds.np[2] != 0


def test_it_returns_the_log_probabilities_that_are_asked_for():
    """Those of what is sampled from, at the temperature: "processed_logprobs" (vllm_engine.py)."""
    from vllm.v1.worker.gpu.sample import sampler

    assert "logprobs_mode" in inspect.signature(sampler.Sampler.__init__).parameters
    assert "processed_logprobs" in sampler.PROCESSED_LOGPROBS_MODES


def test_it_cannot_run_here():
    assert find_spec("triton") is None or find_spec("triton.backends.cpu") is None
