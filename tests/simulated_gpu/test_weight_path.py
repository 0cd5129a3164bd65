"""The bytes of each step by which weights reach generators on the same host."""

from __future__ import annotations

import os

from simulated_runs import path_of_weights

STEPS = {"to the host": 2, "the learner's checksums": 2, "to the generator's GPU": 2, "the generator's checksums": 2}
"""Bytes of each parameter, in bfloat16 of float32."""
THREADS = 8


def test_each_step_touches_two_bytes_a_parameter_and_the_copy_is_from_pinned_memory(on_gpu):
    found = on_gpu(path_of_weights)
    assert found.bytes == STEPS
    assert found.threads == min(THREADS, os.cpu_count() or 1)
    assert found.pinned
