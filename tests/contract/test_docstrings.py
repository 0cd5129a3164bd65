"""Docstrings speak of what there is: each argument that they explain, and each name that they refer to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tables import each

import async_rlhf

PACKAGE = Path(async_rlhf.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "recipes" not in path.parts]
REFERENCE = re.compile(r":(?:func|class|meth|attr|mod|data):`~?([\w.]+)`")


def documented(text: str) -> Iterator[str]:
    """The arguments under "Args:"."""
    rows = text.partition("Args:\n")[2].split("\n\n")[0].split("\n")
    for row in rows:
        if row[:4].isspace() and not row[4:5].isspace():
            yield from (name.strip(" *") for name in row.partition(":")[0].split(","))


def arguments(node: ast.AST, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Of a function, or of what makes a class, or one that it is derived from in the same file."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    body = node.body if isinstance(node, ast.ClassDef) else []
    fields = {str(each.target.id) for each in body if isinstance(each, ast.AnnAssign) and hasattr(each.target, "id")}
    made_by = [each for each in body if getattr(each, "name", "") in ("__init__", "__new__")]
    bases = [classes[base.id] for base in getattr(node, "bases", []) if getattr(base, "id", "") in classes]
    return fields.union(*(arguments(each, classes) for each in made_by + bases))


def missing(tree: ast.Module) -> list[tuple[str, str]]:
    """What is explained and is no argument, with the name of the function or class. What inherits all is left out."""
    nodes = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    pairs = [(each, name) for each in nodes for name in documented(ast.get_docstring(each) or "")]
    classes = {each.name: each for each in nodes if isinstance(each, ast.ClassDef)}
    known = {id(each): arguments(each, classes) for each in nodes}
    return [(each.name, name) for each, name in pairs if known[id(each)] and name not in known[id(each)]]


def test_an_argument_that_is_none_is_seen():
    fault = (
        'class A:\n    """Does.\n\n    Args:\n        a: b.\n        c, *d: e\n            f: g.\n    """\n    a: int\n'
    )
    assert missing(ast.parse(fault)) == [("A", "c"), ("A", "d")]


@each(FILES)
def test_arguments_that_are_explained_are_there(path):
    assert missing(ast.parse(path.read_text(encoding="utf-8"))) == []


def exists(name: str) -> bool:
    """Whether a module, or what is in one, has that name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("async_rlhf"):
                pytest.skip(f"needs {error.name}")
            continue
        for part in parts[length:]:
            known = part in getattr(found, "__annotations__", {})  # a field without a default
            if not known and not hasattr(found, part):
                return False
            found = getattr(found, part, None)
        return True
    return False


@each(FILES)
def test_names_that_are_referred_to_are_there(path):
    names = {name for name in REFERENCE.findall(path.read_text(encoding="utf-8")) if name.startswith("async_rlhf")}
    assert {name for name in names if not exists(name)} == set()
