"""Whole runs on a simulated GPU: nothing mixes devices, and their numbers are the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated_runs import benchmark_of_kernels, by_itself, is_deterministic, judges, leaves, tokens_in_flight, train
from test_golden import KEYS, RUNS
from tiny import rare_unless

from async_rlhf import KLConfig, LoRAConfig
from async_rlhf.algorithms.table import BUILT_IN

BATCHES = 3
"""Fewer than the golden runs have; with staleness 1 the third is sampled by weights that have been trained."""


def algorithm_of(name: str) -> str:
    return next((algorithm for algorithm in BUILT_IN if name.startswith(algorithm)), "online_dpo")


def require_cpus(on_gpu, folder: Path, name: str, staleness: int, batches: int = BATCHES, **options: Any) -> None:
    """Require a golden run's losses of the same run on a simulated GPU and on this machine's CPU."""
    options = {"algorithm": algorithm_of(name), "staleness": staleness, **RUNS[name], **options}
    found = on_gpu(train, folder, batches, name="gpu", **options)
    cpu = train(folder, batches, "cpu", name="cpu", **options | {"resume": False, "generation": {}})
    for key in [key for key in KEYS if key in cpu[0]]:
        assert [row[key] for row in found] == pytest.approx([row[key] for row in cpu], rel=1e-5, abs=1e-5), key


def test_every_algorithm_has_a_golden_run():
    assert {algorithm_of(name) for name in RUNS} == set(BUILT_IN)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.rare] * (i % 4 > 0)) for i, name in enumerate(RUNS)]
)
def test_inline_runs_have_the_cpus_losses(on_gpu, tmp_path, name):
    require_cpus(on_gpu, tmp_path, name, 0)


@pytest.mark.parametrize(
    ("name", "device"), rare_unless(lambda i: i % 4 == 2, [(name, f"cuda:{i // 2 % 2}") for i, name in enumerate(RUNS)])
)
def test_runs_with_a_worker_have_the_cpus_losses(on_gpu, tmp_path, name, device):
    """A worker on the learner's GPU reads the weights there, one on the other GPU reads them from the host."""
    require_cpus(on_gpu, tmp_path, name, 1, generation={"device": device})


@pytest.mark.parametrize("name", ["online_dpo_lora", "ppo_shared_trunk", "grpo"])
def test_synchronous_runs_with_a_worker_have_the_cpus_losses(on_gpu, tmp_path, name):
    require_cpus(on_gpu, tmp_path, name, 0, generation={"placement": "process"})


@pytest.mark.parametrize(("name", "staleness"), [("online_dpo_lora", 0), ("ppo", 1)])
def test_a_resumed_run_goes_on_with_the_cpus_losses(on_gpu, tmp_path, name, staleness):
    options = {"algorithm": algorithm_of(name), "staleness": staleness, "save_steps": 2, **RUNS[name]}
    assert len(on_gpu(train, tmp_path, 2, name="gpu", **options)) == 2
    require_cpus(on_gpu, tmp_path, name, staleness, 4, resume=True, save_steps=2)


OTHERS = {
    "bf16": {"algorithm": "grpo", "bf16": True, "gradient_checkpointing": True, "head_float32": True},
    "values_of_whole_texts": {"algorithm": "ppo", "bootstrap_truncated": True},
    "values_of_whole_texts_by_a_head": {"algorithm": "ppo", "bootstrap_truncated": True, "shared_trunk": True},
    "adapters_on_the_value_model": {"algorithm": "ppo", "lora": LoRAConfig(rank=4)},
    "corrected_kl": {"algorithm": "grpo", "kl": KLConfig(coef=0.1, where="loss", estimator="k3", corrected=True)},
    "evaluation": {"evaluates": True, "eval_steps": 1},
    "frozen_models_on_the_host": {"offload_frozen": True, "bf16": True},
    "bfloat16_snapshots": {"generation": {"placement": "process", "dtype": "bfloat16"}},
}
"""What no golden run has."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_runs_have_the_losses_of_the_same_run_on_the_cpu(on_gpu, tmp_path, name):
    gpu = on_gpu(train, tmp_path, 2, name="gpu", **OTHERS[name])
    cpu = train(tmp_path, 2, "cpu", name="cpu", **OTHERS[name])
    compared = [
        [[key for key in line if key in KEYS or (key.startswith("eval_") and "time" not in key)] for line in run]
        for run in (gpu, cpu)
    ]
    assert compared[0] == compared[1]
    assert len(compared[0]) == (4 if name == "evaluation" else 2)
    for keys, one, other in zip(compared[0], gpu, cpu, strict=True):
        assert [one[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-5, abs=1e-6)


def test_a_run_that_says_nothing_computes_in_16_bits_and_packs(on_gpu, tmp_path):
    found, packed = on_gpu(by_itself, tmp_path)
    limits = {"max_tokens_per_pass": 4 * (32 + 12), "annotate_max_tokens": 64 * (32 + 12)}
    assert found == {"bf16": True, "dtype": "bfloat16", **limits}
    assert packed == [True, True, True]


def test_a_deterministic_run_uses_no_kernel_that_is_not(on_gpu, tmp_path):
    """The simulation refuses such a kernel as CUDA does."""
    deterministic, gpu = on_gpu(is_deterministic, tmp_path)
    assert deterministic
    cpu = train(tmp_path, 2, "cpu", name="cpu", deterministic=True, generation={"top_p": 0.9})
    for one, other in zip(gpu, cpu, strict=True):
        keys = [key for key in KEYS if key in other]
        assert [one[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-5, abs=1e-6)


def test_weights_that_come_in_flight_sample_what_they_sample_on_the_cpu(on_gpu):
    found = on_gpu(tokens_in_flight, "cuda:0")
    assert found == tokens_in_flight("cpu")
    assert len({version for _, versions in found for version in versions}) > 3


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_weights_leave_the_gpu_that_they_are_on(on_gpu, device):
    assert on_gpu(leaves, device) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_benchmark_of_kernels_computes_on_the_gpu(on_gpu):
    found = on_gpu(benchmark_of_kernels)
    assert (found["tokens"], found["forest"]) == (44, 28)


def test_a_judge_leaves_the_gpu_to_the_engine_until_all_is_sampled(on_gpu, tmp_path):
    """An engine such as vLLM takes nine tenths of the memory, and has to find them free."""
    places = on_gpu(judges, tmp_path)
    assert places[0] == "cpu"
    assert places[-1] == "cuda:0"
