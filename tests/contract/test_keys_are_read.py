"""Every key of every configuration is read by code that does something with it, not only checked and printed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import async_rlhf
from async_rlhf.algorithms.table import built_in
from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.config.base import Checked

PACKAGE = Path(async_rlhf.__file__).parent
ALIKE = ("config/base.py", "config/parsing.py", "system/names.py", "compat/original")
"""Treat all keys alike, or name those that they translate."""


def names_read(tree: ast.Module) -> Iterator[str]:
    """Attributes that are read, and texts that name some, but for those in ``check`` and ``summary`` of a class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [each for each in node.body if getattr(each, "name", "") not in ("check", "summary")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def kinds() -> list[type[Checked]]:
    """Every class of configurations that a command has, its groups included."""
    found: dict[type[Checked], None] = {}

    def add(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, Checked) and kind not in found:
            found[kind] = None
            for hint in get_type_hints(kind).values():
                add(hint)

    for kind in [
        *(import_attribute(command.config) for command in COMMANDS.values()),
        *(algorithm.config for algorithm in built_in()),
    ]:
        add(kind)
    return list(found)


def test_every_key_is_read():
    paths = [path for path in PACKAGE.rglob("*.py") if not str(path.relative_to(PACKAGE)).startswith(ALIKE)]
    read = {name for path in paths for name in names_read(ast.parse(path.read_text(encoding="utf-8")))}
    unread = {kind.__name__: [item.name for item in fields(kind) if item.name not in read] for kind in kinds()}
    assert {kind: names for kind, names in unread.items() if names} == {}


def test_what_is_checked_and_printed_alone_is_not_read():
    source = (
        "class A:\n    nothing = 0\n    def check(self):\n        assert self.nothing > 0\n\nprint(config.something)"
    )
    assert "nothing" not in set(names_read(ast.parse(source)))
    assert "something" in set(names_read(ast.parse(source)))
