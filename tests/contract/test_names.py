"""docs/names.md: each of our names exists, and its examples run as they are printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tables import each
from test_docs import ROOT, names_of
from tiny import PROMPTS

import async_rlhf
from async_rlhf.commands.table import COMMANDS
from async_rlhf.models.saving import write_model

PAGE = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[2] for line in PAGE.splitlines() if re.match(r"\| (?!original|TRL \||---)", line)]
OURS = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row)})
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
OPTIONS = {option for command in ("train", "sft") for option in names_of(command)}
RESULTS = (ROOT / "docs" / "commands" / "evaluate.md").read_text(encoding="utf-8")
FOREIGN = {"loss_type", "epsilon_high"}
"""TRL's, explained beside ours."""


def exists(name: str) -> bool:
    """A public class or its method, a command, a module or something in it, a file, an option, or a result."""
    first, _, rest = name.partition(".")
    if first in async_rlhf.__all__:
        kind = getattr(async_rlhf, first)
        return not rest or hasattr(kind, rest)
    if name.startswith("async-rlhf "):
        return name.split()[1] in COMMANDS
    if name.startswith("async_rlhf."):
        module, _, attribute = name.partition(":")
        return (ROOT / f"{module.replace('.', '/')}.py").is_file() or hasattr(import_module(module), attribute)
    if name.endswith(".sh"):
        return (ROOT / name).is_file()
    if name.endswith(".jsonl"):
        return name in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    in_python = name in async_rlhf.OnlineTrainer.__init__.__code__.co_varnames
    return name in OPTIONS or in_python or f"`{name}`" in RESULTS or name == "ppl_original"


@each([name for name in OURS if name not in FOREIGN])
def test_our_names_exist(name):
    assert exists(name)


@pytest.mark.rare
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs_as_it_is_printed(number, tmp_path, make_policy, tokenizer):
    write_model(make_policy(), tokenizer, tmp_path / "policy")
    rows = [{"prompt": row["query"]} for row in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = EXAMPLES[number]
    assert "8 * 60" in program
    (tmp_path / "example.py").write_text(program.replace("8 * 60", "8 * 20"))  # a third of it, for time
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(async_rlhf.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"reward \[(.*)\]", done.stdout)
    assert found is not None, done.stdout
    assert len(found.group(1).split(",")) == 2


def test_an_earlier_name_works_and_warns(monkeypatch):
    monkeypatch.setitem(async_rlhf._RENAMED, "OldConfig", "GRPOConfig")
    with pytest.warns(FutureWarning, match="OldConfig is now GRPOConfig; the next") as told:
        from async_rlhf import OldConfig
    assert OldConfig is async_rlhf.GRPOConfig
    assert {one.filename for one in told} == {__file__}
