"""The notebook of the documentation runs, and shows what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_notebook_runs(tmp_path):
    """Its cells in one namespace, as a kernel has them."""
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text("utf-8"))["cells"]
    source = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = subprocess.run(
        [sys.executable, "-"],
        input=source,
        text=True,
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^batch +(\d+), weights +(\d+): The ", done.stdout, re.MULTILINE)
    assert said == [("1", "0")] * 3 + [("16", "14")] * 3
