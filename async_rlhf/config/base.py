"""What every configuration shares: type checks and errors that name the key, the value and what would be right."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from async_rlhf.config.secrets import HIDDEN, is_secret, masked


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the key, the value unless it is secret, and what is right."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


_SHOWN = 300
_LARGEST = 10**12
"""No count of anything in a run is larger, and what multiplies a few of them stays a number that programs can hold."""


def require(condition: bool, key: str, value: object, right: str) -> None:
    """Raise :class:`ConfigError` for ``key`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{key}: got {HIDDEN if is_secret(key) else shown(value)}; {right}")


def shown(value: object) -> str:
    """A value as messages have it: on one line, and not without end."""
    try:
        text = repr(value)
    except Exception as error:  # of every kind: an integer of more digits than Python writes, the user's own class
        text = f"a {type(value).__name__} ({error})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def problem_of_text(text: str) -> str | None:
    """What is wrong with a text wherever it stands; None where nothing is."""
    if "\0" in text:
        return "must be without NUL characters, which no path or name can hold"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "must be Unicode text, without half characters (surrogates)"
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return any(value is option or (type(value) is type(option) and value == option) for option in get_args(kind))
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(kind))
    if origin in (list, tuple):
        inner = get_args(kind)[0]
        return isinstance(value, (list, tuple)) and all(_fits(item, inner) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is type(None):
        return value is None
    if kind is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and (math.isfinite(value) if isinstance(value, float) else abs(value) <= 10**300)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _spell(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(repr(option) for option in get_args(kind))
    if origin in (Union, types.UnionType):
        return " or ".join(_spell(option) for option in get_args(kind))
    if origin in (list, tuple):
        return f"a list of {_spell(get_args(kind)[0])}"
    if kind is type(None):
        return "null"
    return {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"seed": 0}} as {"train.seed": 0}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


class Checked:
    """Base of the frozen configs: checks the type of every field; subclasses add what the types cannot say."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, item.name)
            require(_fits(value, hints[item.name]), item.name, value, f"must be {_spell(hints[item.name])}")
            counts = not isinstance(value, int) or abs(value) <= _LARGEST
            require(counts, item.name, value, f"must be at most {_LARGEST:,} in size: nothing that is counted is more")
            problem = next(filter(None, map(problem_of_text, _texts(value))), None)
            require(problem is None, item.name, value, str(problem))
        self.check()

    def check(self) -> None:
        """Checks beyond types. Raises :class:`ConfigError`."""

    def at_least(self, minimum: float, *keys: str) -> None:
        """Every given field is None or at least ``minimum``."""
        for key in keys:
            value = getattr(self, key)
            require(value is None or value >= minimum, key, value, f"must be at least {minimum}")

    def at_most(self, maximum: float, why: str, *keys: str) -> None:
        """Every given field is None or at most ``maximum``; ``why`` is for the error."""
        for key in keys:
            value = getattr(self, key)
            require(value is None or value <= maximum, key, value, f"must be at most {maximum:,}: {why}")

    def is_folder(self, key: str) -> None:
        """The field is None, or names a folder, there or to be made."""
        value = getattr(self, key)
        if value is None:
            return
        try:
            place = Path(value).expanduser()
            other = place.exists() and not place.is_dir()
        except (OSError, RuntimeError) as error:  # a name that is too long, links that go round in circles
            require(False, key, value, f"must name a folder: {error}")
        require(not other, key, value, "is there and is no folder; must name a folder")

    def is_device(self, key: str) -> None:
        """The field is None or the name of a device."""
        value = getattr(self, key)
        right = 'must be "cpu", "cuda", "cuda:1" or the like, "mps" or "xpu"'
        require(value is None or re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d+)?", value) is not None, key, value, right)

    def above(self, bound: float, *keys: str) -> None:
        """Every given field is None or above ``bound``."""
        for key in keys:
            value = getattr(self, key)
            require(value is None or value > bound, key, value, f"must be above {bound}")
