"""The figures of the documentation are what scripts/figures.py draws."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


def test_the_figures_are_as_the_script_draws_them():
    drawn = dict(runpy.run_path(str(ROOT / "scripts" / "figures.py"))["drawn"]())
    files = {path.name: path.read_bytes().decode() for path in (ROOT / "docs" / "figures").iterdir()}
    assert drawn == files
    for content in drawn.values():
        assert ElementTree.fromstring(content).find("{*}title").text
