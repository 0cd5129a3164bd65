"""Runs the notebook of the documentation and stores what its cells print and draw.

python scripts/notebook.py    # in a minute; needs matplotlib
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"


def outputs_of(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as a kernel does: what it and its child processes print, its figures, the value of its last line."""
    from matplotlib import pyplot

    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    with tempfile.TemporaryFile() as printed:
        sys.stdout.flush()
        screen = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            exec(compile(tree, str(NOTEBOOK), "exec"), names)
            value = None if last is None else eval(compile(last, str(NOTEBOOK), "eval"), names)
            sys.stdout.flush()
        finally:
            os.dup2(screen, 1)
            os.close(screen)
        printed.seek(0)
        text = printed.read().decode()
    found: list[dict[str, Any]] = []
    if text:
        found.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, format="png", dpi=80)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        found.append({"output_type": "display_data", "metadata": {}, "data": data})
    pyplot.close("all")
    if value is not None:
        data = {"text/plain": [repr(value)]}
        found.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return found


def main() -> None:
    """Run all cells in a folder that is thrown away, and write the notebook."""
    matplotlib.use("Agg")
    os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed, where it is installed, says that it has found none
    notebook, names = json.loads(NOTEBOOK.read_text("utf-8")), {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
            cell["outputs"] = outputs_of("".join(cell["source"]), names)
            cell["execution_count"] = number
            for one in cell["outputs"]:
                if "execution_count" in one:
                    one["execution_count"] = number
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
