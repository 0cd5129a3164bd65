"""Names in the package are words that say what a thing is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import async_rlhf

PACKAGE = Path(async_rlhf.__file__).parent
REFUSED = {"beside", "told", "dealt", "parting", "given"}
"""Words that say nothing of a thing without the sentence that they come from."""
FILLERS, MOST = {"found", "right", "one", "own", "place"}, 60
"""Words in the place of a noun, and how often the package may bind them."""


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


def bound(tree: ast.Module) -> int:
    """How often a filler is bound: once for each function, and for each attribute."""
    seen: set[tuple[ast.AST, str]] = set()

    def visit(node: ast.AST, scope: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            is_scope = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            inner = child if is_scope else scope
            if isinstance(child, (ast.Name, ast.Attribute)) and isinstance(child.ctx, ast.Store):
                seen.add((scope, child.id if isinstance(child, ast.Name) else f".{child.attr}"))
            elif isinstance(child, ast.arg):
                seen.add((scope, child.arg))
            visit(child, inner)

    visit(tree, tree)
    return sum(name.removeprefix(".") in FILLERS for _, name in seen)


def test_nouns_stand_where_they_can():
    counts = {path: bound(ast.parse(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")}
    assert sum(counts.values()) <= MOST, {str(path): count for path, count in counts.items() if count}
    text = "def f(one, x):\n    found = x\n    found = 1\n    return lambda own: own"
    assert bound(ast.parse(text)) == 3


def test_such_a_name_is_found():
    source = "def f(given, own):\n    self._told = 1\n    all_beside: int = 2\n    return x.given, told()"
    assert refused(source) == [("given", 1), ("_told", 2), ("all_beside", 3)]
