"""How often the host may wait for the device, and what may cross the bus."""

from __future__ import annotations

import pytest
from simulated_runs import decode_waits, published_bytes, update
from test_golden import RUNS
from test_simulated_runs import algorithm_of

ASKED_BY_TRANSFORMERS = "transformers/masking_utils.py"
"""transformers asks in every forward pass whether its mask or its rows are plain ones; nothing can stop it."""


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["SnapshotRing", "DeviceRing", "folder"])
def test_publishing_moves_two_bytes_a_parameter(on_gpu, tmp_path, kind, lora):
    moved, parameters = on_gpu(published_bytes, kind, tmp_path, lora)
    assert moved == 2 * parameters


@pytest.mark.parametrize("name", RUNS)
def test_a_micro_batch_waits_for_the_device_twice_at_most(on_gpu, tmp_path, name):
    """By the difference of two runs that have the same mini-batches in more and in fewer micro-batches."""
    options = {"algorithm": algorithm_of(name), **RUNS[name]}
    few, many = (
        on_gpu(
            update,
            tmp_path,
            name=f"by {size}",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=4 // size,
            **options,
        )
        for size in (4, 1)
    )
    more = many.micro_batches - few.micro_batches
    assert more >= 4
    waits = {place: (many.waits[place] - few.waits.get(place, 0)) / more for place in many.waits}
    assert sum(waits.values()) <= 2, waits
    ours = {place: count for place, count in waits.items() if ASKED_BY_TRANSFORMERS not in place and count != 0}
    assert ours == {}
    assert max(few.most_float64 / few.cells, many.most_float64 / many.cells) <= 1, "float64 belongs to sums, not logits"


def test_a_step_of_decoding_waits_once(on_gpu):
    """By the difference of two runs; that rows end on the way costs nothing more."""
    (few, short), (many, long) = (on_gpu(decode_waits, length) for length in (8, 24))
    assert len(set(long)) > 6
    steps = max(long) - max(short)
    assert steps > 8
    waits = {place: many[place] - few.get(place, 0) for place in many}
    ours = {place: count for place, count in waits.items() if ASKED_BY_TRANSFORMERS not in place and count != 0}
    assert ours == {"async_rlhf/generation/transformers_engine.py _decode": steps}
    assert sum(waits.values()) <= 2 * steps
