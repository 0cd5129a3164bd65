"""The benchmarks on a GPU, at their smallest size: what they write is possible."""

from __future__ import annotations

import json

import pytest
from gpus import GPU, needs_gpus, needs_vllm
from printed import by_itself

pytestmark = [pytest.mark.gpu, needs_gpus(1), needs_vllm]


def test_figures_are_written_under_the_name_of_the_device(tmp_path):
    by_itself("gpu.py", "--folder", str(tmp_path))
    (file,) = tmp_path.iterdir()
    figures = json.loads(file.read_text())
    assert [name for name, found in figures.items() if "skipped" in found] == ([] if GPU else ["memory"])
    assert figures["overlap"]["staleness"].keys() == {"0", "1", "2"}
    assert figures["vllm"]["full length"]["vLLM"] > 0
    assert 0 <= figures["vllm"]["idle"]["vLLM"] <= 1
    for way in figures["weights"]["ways"].values():
        assert 0 < way["gb_per_second"] < 10_000
