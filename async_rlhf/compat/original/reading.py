"""Tells the original's files from ours, and reads them with their overrides from the command line."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from async_rlhf.compat.original.keys import ENVIRONMENT, KEYS, Key
from async_rlhf.config.base import Checked, ConfigError, require, shown
from async_rlhf.config.parallel import launched_rank
from async_rlhf.config.secrets import HIDDEN, is_secret, masked
from async_rlhf.config.yaml_text import Repeated, parse_yaml, read_yaml, reads_as_number

_NULLABLE = {"eval_split"}  # for these, null is not the same as leaving the key out


def field_names(kind: type[Checked]) -> set[str]:
    """Top-level keys of one of our configurations."""
    return {item.name for item in dataclasses.fields(typing.cast(Any, kind))}


def read_file(path: str, command: str, kind: type[Checked]) -> dict[str, Any] | None:
    """The keys of a file of the original; None if it is not one.

    A key may be there again, as its YAML reader allows: the last value counts, with a warning.

    Raises:
        ConfigError: it has keys of both formats, or keys of the original and keys that neither format knows.
    """
    repeated: list[Repeated] = []
    values = read_yaml(path, "--config", repeated)
    if not isinstance(values, dict):
        return None  # the parser's own message is more helpful
    ours = field_names(kind)
    theirs = [key for key in values if key in KEYS[command] and key not in ours]
    if not theirs:
        return None
    check_known(values, command, ours)
    for each in repeated if launched_rank() == 0 else ():
        print(f"warning: {path!r}, line {each.lines[1]}: {_told(each, command)}", file=sys.stderr)
    return values


def _told(each: Repeated, command: str) -> str:
    hidden = is_secret(each.key) or each.key not in KEYS[command]  # such as a variable to export
    before, last = (HIDDEN if hidden else masked(shown(value)) for value in each.values)
    same = each.values[0] == each.values[1]
    values = f"with the same value {last}" if same else f"with {before} before and {last} now; the last one counts"
    return f"the key {shown(each.key)} is there again (line {each.lines[0]}), {values}"


def check_known(values: Mapping[str, Any], command: str, ours: set[str]) -> None:
    """Require every key to be the original's. Raises :class:`ConfigError` with the first other key and the nearest."""
    theirs = [key for key in values if key in KEYS[command] and key not in ours]
    for key in values:
        if key in KEYS[command] or key == ENVIRONMENT:
            continue
        if key in ours:
            raise ConfigError(
                f"{key}: is a key of async-rlhf {command}, but {theirs[0]!r} one of the original's files; must be all "
                f"of one format (async-rlhf config migrate turns the original's into ours)"
            )
        other = [name for name, keys in KEYS.items() if key in keys]
        nearest = difflib.get_close_matches(key, KEYS[command], 1)
        hint = f"files for async-rlhf {' or '.join(other)} have it" if other else "the original has no such key"
        hint += f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"{key}: got {shown(values[key])}; {hint}")


def take_overrides(words: Sequence[str], command: str, kind: type[Checked]) -> tuple[dict[str, Any], list[str]]:
    """Options in the original's style, such as ``--learning_rate 1e-5`` or ``--vllm``, and the other words.

    Raises:
        ConfigError: an option that is neither the original's nor ours.
    """
    keys, ours = KEYS[command], field_names(kind) | {"algorithm"}
    found: dict[str, Any] = {}
    rest: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        name, equals, value = word.removeprefix("--").partition("=")
        negated = name.removeprefix("no_")
        if not word.startswith("--") or name == "help":
            rest.append(word)
        elif name in keys:
            following: list[str] = [value] if equals else []
            while not equals and position < len(words) and not words[position].startswith("--"):
                following.append(words[position])
                position += 1
                if keys[name].kind != "list":
                    break
            found[name] = _option(name, keys[name], following)
        elif negated != name and negated in keys and keys[negated].kind == "bool":
            found[negated] = False
        elif name.partition(".")[0] in ours:
            rest.append(word)
        else:
            nearest = difflib.get_close_matches(name, keys, 1)
            hint = f"; did you mean --{nearest[0]}?" if nearest else ""
            raise ConfigError(f"--{name}: is neither an option of the original nor of async-rlhf {command}{hint}")
    return found, rest


def _option(name: str, key: Key, words: list[str]) -> Any:
    if key.kind == "list":
        inline = len(words) == 1 and words[0].startswith("[")
        return parse_yaml(words[0], name) if inline else words
    if not words:
        require(key.kind in ("bool", "any"), name, None, "must be followed by its value")
        return True
    return words[0]


def typed(values: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Values converted to their keys' types: "1e-5" is a number there too. Null is left out, as it means the same."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if key == ENVIRONMENT:
            require(isinstance(value, dict), key, value, "must be a mapping of names to values")
            result[key] = value
        elif value is not None or key in _NULLABLE:
            result[key] = _typed(key, KEYS[command][key].kind, value)
    return result


def _typed(key: str, kind: str, value: Any) -> Any:
    if value is None or kind == "any":
        return value
    if kind == "bool":
        spelt = {"true": True, "yes": True, "t": True, "y": True, "1": True}
        spelt |= {"false": False, "no": False, "f": False, "n": False, "0": False}
        found = spelt.get(str(value).lower())
        if found is None:
            raise ConfigError(f"{key}: got {shown(value)}; must be true or false")
        return found
    if kind == "list":
        return list(value) if isinstance(value, (list, tuple)) else [str(value)]
    if kind == "str":
        require(not isinstance(value, (list, dict)), key, value, "must be a string")
        return str(value)
    return _number(key, kind, value)


def _number(key: str, kind: str, value: Any) -> int | float:
    try:
        plain = reads_as_number(value) if isinstance(value, str) else not isinstance(value, bool)
        number = float(value) if plain else float("nan")
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    require(abs(number) < float("inf"), key, value, "must be a number")
    require(kind != "int" or number == int(number), key, value, "must be an integer")
    return int(number) if kind == "int" or (kind == "steps" and number == int(number)) else number
