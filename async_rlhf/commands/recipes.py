"""Lists the recipes that come with the package, and copies them out."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from async_rlhf.config import ConfigError
from async_rlhf.config.base import Checked, configuration, require

_RECIPES = Path(__file__).parents[1] / "recipes"


@configuration
class RecipesConfig(Checked):
    """List the recipes, or copy one of them, or a folder of them: ``async-rlhf recipes [NAME]``."""

    name: str | None = None
    """A file or folder from the list, which is copied to recipes/NAME here; null lists them all."""


def run_recipes(config: RecipesConfig) -> None:
    """Print the names of all recipes and what each is, or copy what has the given name.

    Raises:
        ConfigError: there is no such recipe, or the place of the copy is taken.
    """
    names = sorted(p.relative_to(_RECIPES).as_posix() for p in _RECIPES.glob("*/*") if p.is_file())
    if config.name is None:
        return _print_all(f"{path:<36} {_first_words(_RECIPES / path)}".rstrip() for path in names)
    name = config.name.rstrip("/")
    if name not in {*names, *(path.split("/")[0] for path in names)}:
        raise ConfigError(f"name: got {config.name!r}; must be one that async-rlhf recipes lists, or a folder of those")
    source, copy = _RECIPES / name, Path("recipes") / name
    require(not copy.exists(), "name", config.name, f"{copy} is here already")
    copy.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, copy)
    print(copy)


def _first_words(path: Path) -> str:
    """What a file says of itself: the first sentence of its comment, title or docstring."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#!")]
    text = " ".join(
        line.lstrip("r").strip('#" ')
        for line in itertools.takewhile(lambda line: line[:1] in '#"r' and line[:1], lines)
    )
    return textwrap.shorten(re.split(r"(?<=\w{3}\.)\s|\s{2}", text)[0].rstrip("."), 80, placeholder=" ...")


def _print_all(lines: Iterable[str]) -> None:
    """Whoever reads them may stop early, as head does."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the flush at exit goes
