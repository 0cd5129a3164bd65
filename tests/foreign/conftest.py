"""Environments of other libraries: the examples of docs/extend/environment.md as written, and packages to run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import new_policy

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "environment.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "async_rlhf_foreign"
"""Packages stay here from one time to the next."""
LINES = 20
"""Most lines of an example."""


def examples() -> dict[str, str]:
    """The Python of the page, by the file's name that it begins with."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return {re.match(r'"""(\S+)"""', block)[1]: block for block in blocks}


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Writes an example of the page into a folder, which is then the current one."""

    def write(name: str) -> str:
        (tmp_path / name).write_text(examples()[name], encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        return str(tmp_path / name)

    return write


def installed(folder: Path, python: str, requirements: Sequence[str], *options: str) -> None:
    """Install packages, unless that was done before; without, the test is skipped."""
    done = folder / ".done"
    if done.exists() and done.read_text() == " ".join(requirements):
        return
    pip = [python, "-m", "pip", "install", "--quiet", *options, *requirements]
    found = subprocess.run(pip, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"{' '.join(requirements)} cannot be installed: {found.stderr.strip()[-300:]}")
    done.write_text(" ".join(requirements))


@cache
def beside(name: str, *requirements: str) -> None:
    """Packages that fit those of this interpreter: in a folder of the cache, without what they need."""
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    installed(folder, sys.executable, requirements, "--no-deps", "--target", str(folder))
    sys.path.append(str(folder))


@cache
def apart(name: str, *requirements: str) -> str:
    """Packages that do not fit: in an environment of their own. Returns its interpreter."""
    folder = CACHE / name
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    installed(folder, str(python), requirements)
    return str(python)


def taught(tokenizer, texts: Sequence[str], steps: int = 200, positions: int = 512):
    """A tiny policy that writes such texts, each as often as it is among them."""
    policy = new_policy(hidden_size=64, intermediate_size=128, max_position_embeddings=positions)
    rows = [tokenizer(text)["input_ids"] for text in texts]
    longest = max(map(len, rows))
    tokens_BT = torch.tensor([row + [257] * (longest - len(row)) for row in rows])
    labels_BT = tokens_BT.masked_fill(tokens_BT == 257, -100)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        policy(tokens_BT, labels=labels_BT).loss.backward()
        optimizer.step()
    return policy.eval()
