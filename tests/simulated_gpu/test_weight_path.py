"""What the way of weights from one GPU to a generator on another one of the same host touches."""

from __future__ import annotations

import pytest
from planted import Fault
from simulated_runs import path_of_weights, with_fault

CHECKSUM = 16
"""Bytes of a tensor's."""


def test_a_version_crosses_the_bus_once_each_way_and_is_loaded_within_the_gpu(on_gpu):
    found = on_gpu(path_of_weights)
    assert (found.pinned, found.later) == (True, 0)
    assert found.bytes["to the host"] == found.bytes["a version"] + CHECKSUM * found.tensors
    assert "checksums on the host" not in found.bytes
    assert (found.copies, found.waits) == ({"pinned async_rlhf/generation/staging.py stage": 1}, {})
    assert found.bytes["loaded"] == 0


def test_without_room_it_is_loaded_over_the_bus(on_gpu):
    found = on_gpu(path_of_weights, room=1 << 30)
    assert found.copies == {}
    assert found.bytes["loaded"] == found.bytes["a version"]


def test_what_is_staged_is_waited_for(on_gpu):
    """Else the engine would load what is not there yet, which its checksums show."""
    fault = Fault("generation.staging:StagedWeights.views", ".wait_event(self._ready)", "")
    with pytest.raises(AssertionError, match="other weights"):
        on_gpu(with_fault, fault, path_of_weights)
