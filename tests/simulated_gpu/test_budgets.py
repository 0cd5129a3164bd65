"""How often the host may wait for the device, and what may cross the bus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from simulated_runs import Published, Update, decode_waits, publish, publish_float32, update
from test_golden import RUNS
from test_simulated_runs import algorithm_of
from tiny import rare_unless

from async_rlhf.models import head

ASKED_BY_TRANSFORMERS = "transformers/masking_utils.py"
"""transformers asks in every forward pass whether its mask or its rows are plain ones; nothing can stop it."""


CHECKSUM = 16
"""Bytes of a tensor's."""


def require_publishing(found: Published, kind: str = "SnapshotRing") -> None:
    assert found.right, "other weights than those of the moment were published"
    checksums = CHECKSUM * found.tensors if kind in ("SnapshotRing", "DeviceRing") else 0  # else of the copy, later
    assert found.moved == checksums + (0 if kind == "DeviceRing" else found.bytes_each * found.parameters)
    assert (found.waits, found.moved_meanwhile) == ({}, 0)


def update_twice(folder: Path, **options: Any) -> tuple[Update, Update]:
    """Two trainings on the same mini-batches, in fewer and in more micro-batches."""
    few, many = (
        update(
            folder,
            name=f"by {size}",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=4 // size,
            **options,
        )
        for size in (4, 1)
    )
    return few, many


def update_in_chunks(folder: Path, kept: int) -> tuple[Update, Update]:
    """The same with the head in chunks of five tokens, of which so many are kept for the backward pass."""
    before = head.CHUNK_BYTES, head.LEAST_ROWS_ON_GPU, head.KEPT_BYTES
    head.CHUNK_BYTES, head.LEAST_ROWS_ON_GPU, head.KEPT_BYTES = 1, 5, kept * 5 * 4 * 258
    try:
        return update_twice(folder, algorithm="grpo", samples_per_prompt=4)
    finally:
        head.CHUNK_BYTES, head.LEAST_ROWS_ON_GPU, head.KEPT_BYTES = before


def require_update(few: Update, many: Update) -> None:
    more = many.micro_batches - few.micro_batches
    assert more >= 4
    waits = {place: (many.waits[place] - few.waits.get(place, 0)) / more for place in many.waits}
    assert sum(waits.values()) <= 2, waits
    ours = {place: count for place, count in waits.items() if ASKED_BY_TRANSFORMERS not in place and count != 0}
    assert ours == {}
    # What the loss reads arrives by one copy, and what the model reads from pinned memory, too.
    assert many.copies["pinned async_rlhf/models/rows.py in_one_copy"] == many.micro_batches
    assert {place: count for place, count in many.copies.items() if place.startswith("pageable")} == {}
    assert max(few.most_float64 / few.cells, many.most_float64 / many.cells) <= 1, "float64 belongs to sums, not logits"


def decode_twice() -> tuple[tuple[Mapping[str, int], list[int]], ...]:
    """Sample up to two lengths; rows end on the way."""
    return decode_waits(8), decode_waits(24)


def require_decoding(few: tuple[Mapping[str, int], list[int]], many: tuple[Mapping[str, int], list[int]]) -> None:
    assert len(set(many[1])) > 6
    steps = max(many[1]) - max(few[1])
    assert steps > 8
    waits = {place: many[0][place] - few[0].get(place, 0) for place in many[0]}
    ours = {place: count for place, count in waits.items() if ASKED_BY_TRANSFORMERS not in place and count != 0}
    assert ours == {"async_rlhf/generation/transformers_engine.py _draw": steps}
    assert sum(waits.values()) <= 2 * steps


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["SnapshotRing", "DeviceRing", "folder", "object store"])
def test_publishing_moves_two_bytes_a_parameter_and_the_learner_waits_for_none(on_gpu, tmp_path, kind, lora):
    """Neither the copy nor the checksums: what is left to do is done beside it, and the weights change meanwhile. From
    a ring on the device only checksums leave.
    """
    if kind == "object store":
        pytest.importorskip("ray")
    found = on_gpu(publish, kind, tmp_path, lora)
    require_publishing(found, kind)
    assert (found.pinned >= 2 * 2 * found.parameters) == (kind == "SnapshotRing")


def test_weights_that_are_not_rounded_are_copied_as_well(on_gpu, tmp_path):
    require_publishing(on_gpu(publish_float32, "SnapshotRing", tmp_path))


@pytest.mark.parametrize("name", rare_unless(lambda i: i % 3 == 0, [(name,) for name in RUNS]))
def test_a_micro_batch_waits_for_the_device_twice_at_most(on_gpu, tmp_path, name):
    """By the difference of two runs; what an optimiser step or a batch waits for is in both."""
    require_update(*on_gpu(update_twice, tmp_path, algorithm=algorithm_of(name), **RUNS[name]))


@pytest.mark.parametrize("name", ["online_dpo", "ppo", "ppo_shared_trunk"])
def test_packed_rows_add_no_wait(on_gpu, tmp_path, name):
    """Lengths, places and positions are computed on the host."""
    require_update(*on_gpu(update_twice, tmp_path, algorithm=algorithm_of(name), packing=True, **RUNS[name]))


@pytest.mark.parametrize("kept", [0, 2])
def test_the_head_in_chunks_waits_for_nothing_more(on_gpu, tmp_path, kept):
    require_update(*on_gpu(update_in_chunks, tmp_path, kept))


def test_a_step_of_decoding_waits_once(on_gpu):
    """By the difference of two runs; that rows end on the way costs nothing more."""
    require_decoding(*on_gpu(decode_twice))
