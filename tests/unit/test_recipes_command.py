"""The recipes come with the package, and a reader of their list may stop early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from async_rlhf.commands.recipes import RecipesConfig, run_recipes
from async_rlhf.config import ConfigError

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("name", ["docstrings/online_dpo.yml", "gsm8k"])
def test_a_copy_is_as_the_recipe_and_is_never_overwritten(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_recipes(RecipesConfig(name=name))
    paths = [p for p in (RECIPES / name, *(RECIPES / name).glob("*")) if p.is_file()]
    assert paths
    for path in paths:
        assert (tmp_path / "recipes" / path.relative_to(RECIPES)).read_bytes() == path.read_bytes()
    with pytest.raises(ConfigError, match="is here already"):
        run_recipes(RecipesConfig(name=name))


@pytest.mark.parametrize("name", ["gsm9k", "..", "../cli.py", ""])
def test_other_names_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="must be one that async-rlhf recipes lists"):
        run_recipes(RecipesConfig(name=name))
    assert not list(tmp_path.iterdir())


def test_each_recipe_says_what_it_is(capsys):
    run_recipes(RecipesConfig())
    lines = capsys.readouterr().out.splitlines()
    assert "docstrings/dr_grpo.yml" in [line.split()[0] for line in lines]
    assert [line for line in lines if len(line.split()) < 3] == []


def test_a_reader_that_stops_early_is_no_error():
    program = "from async_rlhf.cli import main; main(['recipes'])"
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    started.stdout.close()
    assert started.stderr.read() == b""
    assert started.wait() == 0
