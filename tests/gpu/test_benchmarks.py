"""The benchmarks on a GPU, at their smallest size: what they write is possible."""

from __future__ import annotations

import json

import pytest
from gpus import needs_gpus
from printed import by_itself

pytestmark = [pytest.mark.gpu, needs_gpus(1)]


def test_figures_are_written_under_the_name_of_the_device(tmp_path):
    by_itself("gpu.py", "--folder", str(tmp_path))
    (file,) = tmp_path.iterdir()
    figures = json.loads(file.read_text())
    assert figures.keys() == {"machine", "overlap", "generation", "publish"}
    assert figures["overlap"]["staleness"].keys() == {"0, both cores", "0", "1", "2"}
    for kind in ("full length", "ends at random"):
        assert all(speed > 0 for speed in figures["generation"][kind].values())
    for way in figures["publish"]["ways"].values():
        assert 0 < way["gb_per_second"] < 10_000
