"""Names in the package are words that say what a thing is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import async_rlhf

PACKAGE = Path(async_rlhf.__file__).parent
REFUSED = {"beside", "told", "dealt", "parting", "given"}
"""Words that say nothing of a thing without the sentence that they come from."""


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Of functions, classes, arguments, variables and attributes, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def refused(source: str) -> list[tuple[str, int]]:
    return [(name, line) for name, line in names(ast.parse(source)) if REFUSED & set(name.lower().split("_"))]


def test_no_name_is_a_word_that_says_nothing():
    found = {str(path): refused(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


def test_such_a_name_is_found():
    source = "def f(given, own):\n    self._told = 1\n    all_beside: int = 2\n    return x.given, told()"
    assert refused(source) == [("given", 1), ("_told", 2), ("all_beside", 3)]
