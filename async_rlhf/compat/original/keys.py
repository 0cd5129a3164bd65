"""The keys that the original's files may have, command by command, from ``keys.yml``; and values of their types."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from async_rlhf.config.base import require
from async_rlhf.config.yaml_text import reads_as_number

MAPPED = "mapped"
THERE = "no effect there"
HERE = "no effect here"
ENVIRONMENT = "env"
"""The top-level key whose mapping is exported to the environment."""
_TRUE, _FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")


class Key(NamedTuple):
    """A key of the original."""

    kind: str
    """bool, int, float, str, list, "steps" for an integer or a share of all steps, "any" if nothing depends on it."""
    default: Any
    """Its value if it is absent; None also if there is none."""
    note: str
    """Why it has no effect, if nothing else is said of it."""


def typed(key: str, kind: str, value: Any) -> Any:
    """A value of a key's type: "1e-5" is a number there too. Raises :class:`ConfigError` if it is of another."""
    if kind == "mapping":
        require(isinstance(value, dict), key, value, "must be a mapping of names to values")
    if value is None or kind in ("any", "mapping"):
        return value
    if kind == "bool":
        text = str(value).lower()
        require(text in _TRUE + _FALSE, key, value, "must be true or false")
        return text in _TRUE
    if kind == "list":
        return list(value) if isinstance(value, (list, tuple)) else [str(value)]
    if kind == "str":
        require(not isinstance(value, (list, dict)), key, value, "must be a string")
        return str(value)
    try:
        plain = reads_as_number(value) if isinstance(value, str) else not isinstance(value, bool)
        number = float(value) if plain else float("nan")
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    require(abs(number) < float("inf"), key, value, "must be a number")
    require(kind != "int" or number == int(number), key, value, "must be an integer")
    return int(number) if kind == "int" or (kind == "steps" and number == int(number)) else number


_LISTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))


def _keys(name: str) -> dict[str, Key]:
    """The keys of one of the lists, with those of the list that it includes."""
    notes = dict(_LISTS[name])
    keys = _keys(notes.pop("include")) if "include" in notes else {}
    for note, text in notes.items():
        for word in text.split():
            key, _, kind = word.partition(":")
            kind, _, default = kind.partition("=")
            new = Key(kind or "any", typed(key, kind, default) if default else None, note)
            keys[key] = keys[key]._replace(note=note) if key in keys and not kind else new
    return keys


KEYS = {command: _keys(command) for command in ("train", "sft", "reward", "relabel", "generate", "evaluate")}
"""Every key that the original knows, by our corresponding command."""
EXPORTED = frozenset(_LISTS["exported"].split())
"""Variables that a file may set."""
