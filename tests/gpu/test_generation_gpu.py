"""Generators on GPUs: weights that stay on one, vLLM beside the learner and in turn with it, low precision."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from gpus import (
    BF16_TOLERANCE,
    DEVICE,
    FLOAT32_TOLERANCE,
    GPU,
    device,
    largest,
    needs_gpus,
    needs_vllm,
    train,
    with_vllm,
)

from async_rlhf.generation import process
from async_rlhf.models.publish import DeviceRing, SnapshotRing

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent


@needs_gpus(1)
def test_weights_for_a_worker_on_the_same_gpu_never_leave_it(tmp_path, monkeypatch):
    kind, made = (DeviceRing, []) if GPU else (SnapshotRing, [])
    for_model = kind.for_model

    def noted(*given, **options):
        made.append(for_model(*given, **options))
        return made[-1]

    monkeypatch.setattr(kind, "for_model", noted)
    rows = train(tmp_path, "same", {"placement": "process", "device": DEVICE}, staleness=1)
    assert [type(ring) for ring in made] == [kind]
    assert made[0].views(0)[made[0].specs[0].name].is_cuda == GPU
    assert [row["schedule/lag"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert largest(rows, "engine/logprob_difference") < FLOAT32_TOLERANCE


@needs_gpus(2)
def test_a_worker_takes_the_gpu_that_the_learner_does_not_use(tmp_path, monkeypatch):
    devices, worker_devices = [], process.worker_devices

    def noted(*given, **named):
        devices.append(worker_devices(*given, **named))
        return devices[-1]

    monkeypatch.setattr(process, "worker_devices", noted)
    rows = train(tmp_path, "other", {"placement": "process"}, staleness=1)
    assert len(set(devices)) == 1
    assert (devices[0] != (DEVICE,)) == GPU
    assert largest(rows, "engine/logprob_difference") < FLOAT32_TOLERANCE


@needs_gpus(1)
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_in_bfloat16_engine_and_learner_differ_by_less_than_the_tolerance(tmp_path, engine):
    """In every batch, with the weights that sampled it."""
    generation = with_vllm(engine=engine, placement="process", device=DEVICE, mismatch_samples=16)
    rows = train(tmp_path, engine, generation, staleness=1, bf16=True)
    assert [row["schedule/lag"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert 0 < largest(rows, "engine/logprob_difference") < BF16_TOLERANCE
    print(f"{engine}: {largest(rows, 'engine/logprob_difference'):.4f} nats per token, at most {BF16_TOLERANCE}")


@needs_gpus(1)
@needs_vllm
def test_vllm_sleeps_while_the_learner_trains_and_wakes_with_its_weights(tmp_path):
    """In a program of its own: the end of vLLM in a process takes along what others of it share."""
    done = subprocess.run(
        [sys.executable, HERE / "in_turn.py", tmp_path], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@needs_gpus(1)
@needs_vllm
def test_vllm_loads_new_weights_in_flight(tmp_path):
    generation = with_vllm(placement="process", device=DEVICE, in_flight=True, response_length=40)
    rows = train(tmp_path, "flight", generation, staleness=2, bf16=True)
    assert largest(rows, "engine/logprob_difference") < BF16_TOLERANCE


def run(program: str, *words: object) -> None:
    """In a process of its own."""
    words = [sys.executable, HERE / program, *words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.skipif(GPU and find_spec("flash_attn") is None, reason="needs flash-attn, which is not installed")
@needs_gpus(1)
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=needs_gpus(2))])
def test_workers_use_a_gpu_where_flash_attn_is_installed(tmp_path, number):
    """With it, importing transformers asks for GPUs, before workers are forked. In a program, whose fork server is new.

    Without a GPU, something takes its place that looks like it.
    """
    run("with_flash_attn.py", tmp_path, device(number))


@needs_gpus(1)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_deterministic_run_is_repeated_and_resumed_bit_for_bit(tmp_path, staleness):
    """In a program of its own: what makes torch deterministic is set for good."""
    run("deterministic.py", tmp_path, str(staleness))
