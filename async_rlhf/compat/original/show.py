"""Shows a translation as a table, and as a YAML file in our format with comments."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, cast

import yaml
from rich.console import Console
from rich.table import Table

from async_rlhf.compat.original.keys import ENVIRONMENT
from async_rlhf.compat.original.translation import ALGORITHM, MAPPED, Row, Translation

_WIDTH = 160
_SECRET = ("hub_token", "push_to_hub_token")


def spelt(value: Any) -> str:
    """A value as YAML, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("\n...\n").strip()
    return json.dumps(value) if "\n" in text else text  # YAML reads JSON's escapes


def _shown(row: Row) -> str:
    """The value of a row, without anything that must not appear in a log."""
    if row.key in _SECRET:
        return "(not shown)"
    return ", ".join(map(str, row.value)) if row.key == ENVIRONMENT else spelt(row.value)


def print_table(t: Translation, source: str) -> None:
    """Print how every key was translated, to standard error."""
    table = Table(title=f"{source}: keys of the original, and what they are here", title_justify="left")
    for name in ("original", "value", f"async-rlhf {t.command}", "note"):
        table.add_column(name, overflow="fold", no_wrap=False)
    for row in t.rows:
        became = "\n".join(f"{name} = {spelt(value)}" for name, value in row.targets.items())
        table.add_row(row.key, "" if row.key.startswith("(") else _shown(row), became, row.note)
    console = Console(file=sys.stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(file=sys.stderr, highlight=False, markup=False, width=_WIDTH)
    console.print(table)


def as_yaml(t: Translation, source: str) -> str:
    """Our configuration file, with the origin of each value."""
    comments: dict[str, str] = {}
    for row in t.rows:
        for name in row.targets:
            same = row.note == MAPPED and name.rpartition(".")[2] == row.key
            comments[name] = "; ".join(filter(None, (comments.get(name), "" if same else _comment(row))))
    lines = [
        f"# From {source}, a file of the original's format, by async-rlhf config migrate.",
        f"#   async-rlhf {t.command} --config THIS_FILE",
        *_lines(_nested(_in_order(t)), comments),
    ]
    lines += [f"# environment: export {name}={_on_one_line(value)}" for name, value in t.environment.items()]
    lines += [f"# {_comment(row)}" for row in t.rows if not row.targets]
    return "\n".join(lines) + "\n"


def _on_one_line(text: str) -> str:
    """A text without line breaks, which could otherwise begin a line that is read as a key."""
    return text if text.isprintable() else json.dumps(text)


def _comment(row: Row) -> str:
    return _on_one_line(_said(row))


def _said(row: Row) -> str:
    if row.note == MAPPED and row.targets:
        return row.key
    return f"{row.key}: {row.note}" if row.key.startswith("(") else f"{row.key}: {_shown(row)} ({row.note})"


def _in_order(t: Translation) -> dict[str, Any]:
    """Values in the order of our configuration's fields, but the algorithm first and single keys before groups."""
    fields = [ALGORITHM, *(item.name for item in dataclasses.fields(cast(Any, t.kind)))]
    names = sorted(t.values, key=lambda name: (fields.index(name.partition(".")[0]), name.count(".")))
    return {name: t.values[name] for name in names}


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        place = result
        for part in path:
            place = place.setdefault(part, _Group())
        place[last] = value
    return result


class _Group(dict[str, Any]):
    """A group of keys, as opposed to a mapping that is a value."""


def _lines(values: Mapping[str, Any], comments: Mapping[str, str], prefix: str = "", indent: str = "") -> list[str]:
    lines = []
    for name, value in values.items():
        if isinstance(value, _Group):
            lines += [f"{indent}{name}:", *_lines(value, comments, f"{prefix}{name}.", f"{indent}  ")]
        else:
            comment = comments[prefix + name]
            lines.append(f"{indent}{name}: {spelt(value)}{f'  # {comment}' if comment else ''}")
    return lines
