"""What the way of weights from one GPU to a generator on another one of the same host touches."""

from __future__ import annotations

import pytest
from planted import Fault
from simulated_runs import path_of_weights, server_takes_what_was_published, staged_beside_a_faster_learner, with_fault

CHECKSUM = 16
"""Bytes of a tensor's."""


def test_a_version_crosses_the_bus_once_each_way_and_is_loaded_within_the_gpu(on_gpu):
    found = on_gpu(path_of_weights)
    assert (found.pinned, found.later) == (True, 0)
    assert found.bytes["to the host"] == found.bytes["a version"] + CHECKSUM * found.tensors
    assert "checksums on the host" not in found.bytes
    assert (found.copies, found.waits) == ({"pinned async_rlhf/generation/staging.py stage": 1}, {})
    assert found.bytes["loaded"] == 0


@pytest.mark.parametrize(("room", "unheld"), [(1 << 30, 0), (3 << 30, 2 << 30)])
def test_without_room_it_is_loaded_over_the_bus(on_gpu, room, unheld):
    """What vLLM's steps take is free while none is under way, and vLLM needs it."""
    found = on_gpu(path_of_weights, room=room, unheld=unheld)
    assert found.copies == {}
    assert found.bytes["loaded"] == found.bytes["a version"]


def test_what_is_staged_is_waited_for(on_gpu):
    """Else the engine would load what is not there yet, which its checksums show."""
    fault = Fault("generation.staging:StagedWeights.views", ".wait_event(self._ready)", "")
    with pytest.raises(AssertionError, match="other weights"):
        on_gpu(with_fault, fault, path_of_weights)


def test_it_is_staged_on_the_gpu_that_the_process_sees(on_gpu):
    """Whatever number that GPU has for the learner: CUDA_VISIBLE_DEVICES makes it the first."""
    fault = Fault("generation.worker:build_handler", 'torch.device("cuda", torch.cuda.current_device())',
                  "torch.device(spec.device)")  # fmt: skip
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        on_gpu(with_fault, fault, path_of_weights)


def test_what_is_staged_is_what_is_asked_for_next(on_gpu):
    """Not the newest, which at S = 2 is one further where the generator is the slower side."""
    assert on_gpu(staged_beside_a_faster_learner) == [(1, {}), (2, {}), (3, {})]
    fault = Fault("generation.staging:StagedWeights.stage", "min(self.newest, held + 1)", "self.newest")
    found = on_gpu(with_fault, fault, staged_beside_a_faster_learner)
    assert [waiting for waiting, _ in found] == [2, 3, 4]
    assert all(over_the_bus for _, over_the_bus in found)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_over_the_network_answers_with_the_checksums_that_the_learner_has(on_gpu, processes):
    """Each of its processes computes those of its share of the tensors, on its GPU."""
    counts = on_gpu(server_takes_what_was_published, processes)
    assert sum(count for count, _ in counts) == counts[0][1]
    assert max(count for count, _ in counts) <= -(-counts[0][1] // processes)
