"""What every configuration shares: type checks and errors that name the key, the value and what would be right."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from async_rlhf.config.secrets import HIDDEN, is_secret, masked


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the key, the value unless it is secret, and what is right."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


def require(condition: bool, key: str, value: object, right: str) -> None:
    """Raise :class:`ConfigError` for ``key`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{key}: got {HIDDEN if is_secret(key) else repr(value)}; {right}")


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return value in get_args(kind)
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
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
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
        self.check()

    def check(self) -> None:
        """Checks beyond types. Raises :class:`ConfigError`."""

    def at_least(self, minimum: float, *keys: str) -> None:
        """Every given field is None or at least ``minimum``."""
        for key in keys:
            value = getattr(self, key)
            require(value is None or value >= minimum, key, value, f"must be at least {minimum}")

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
