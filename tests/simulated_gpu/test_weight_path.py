"""The bytes of each step by which weights reach generators on the same host; benchmarks/weight_path.py sums them up."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from simulated_runs import path_of_weights

FILE = Path(__file__).parents[2] / "benchmarks" / "weight_path.py"


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(FILE.parent))
    spec = importlib.util.spec_from_file_location("weight_path", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "weight_path", module)
    spec.loader.exec_module(module)
    return module


def test_each_step_touches_the_bytes_of_the_table(on_gpu, table):
    found = on_gpu(path_of_weights)
    expected = {step.name: step.bytes for step in table.STEPS if step.through != "HBM"}
    assert found.bytes == expected
    assert found.threads == min(table.THREADS, os.cpu_count() or 1)
    assert found.pinned


def test_a_version_of_8_billion_parameters_arrives_within_a_second_and_a_half(table):
    """By bandwidths. Before, the copy from memory that is not pinned was most of it, then one thread's checksums."""
    now, before = table.seconds(8e9), table.seconds(8e9, mended=False)
    assert now["all"] < 1.5
    assert before["all"] > 5
    steps = [step.name for step in table.STEPS]
    assert max(steps, key=before.get) == "to the generator's GPU"
    assert before["the learner's checksums"] > 1.2 > 0.2 > now["the learner's checksums"]
