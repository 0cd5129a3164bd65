"""The notebook of the documentation runs, and shows what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from forked import be_script, start_forked

ROOT = Path(__file__).parents[2]


@pytest.mark.rare
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its cells in one namespace, as a kernel has them."""
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text("utf-8"))["cells"]
    source = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text(source, "utf-8")
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    code = start_forked(be_script, tmp_path / "cells.py", log=log, MPLBACKEND="Agg", TMPDIR=str(tmp_path)).wait()
    assert code == 0, log.read_text()
    said = re.findall(r"^batch +(\d+), weights +(\d+): The ", log.read_text(), re.MULTILINE)
    assert said == [("1", "0")] * 3 + [("16", "14")] * 3
