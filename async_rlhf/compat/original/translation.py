"""The translation of a file of the original: our keys and values, and an explanation for each of its keys."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from async_rlhf.compat.original.keys import KEYS
from async_rlhf.config.base import Checked, ConfigError, require

MAPPED = "mapped"
IDLE_THERE = "no effect there"
IDLE_HERE = "no effect here"
DEFAULT = "original's default"
ALGORITHM = "algorithm"


@dataclass(frozen=True)
class Row:
    """The translation of one key.

    Args:
        key: of the original; in brackets for behaviour without a key.
        value: the value it had.
        targets: our dotted keys and their values.
        note: how they are related.
        given: whether the file or the command line set it.
    """

    key: str
    value: Any
    targets: Mapping[str, Any]
    note: str
    given: bool


@dataclass
class Translation:
    """A translation in progress.

    Args:
        command: ``train`` or another.
        kind: our configuration of that command (for ``train``: of the algorithm).
        given: keys of the original and their values, of the right types.
        overrides: our own dotted keys that were also given.
        values: our dotted keys and values so far.
        rows: the explanations so far.
        environment: variables to export.
    """

    command: str
    kind: type[Checked]
    given: Mapping[str, Any]
    overrides: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """The value that the original would use for a key: as given, else its default."""
        return self.given.get(key, KEYS[self.command][key].default)

    def needed(self, key: str) -> Any:
        """The same, for a key that the original requires."""
        value = self[key]
        require(value not in (None, ""), key, value, f"must be given: the original's {self.command} needs it as well")
        return value

    def maps(self, key: str, targets: Mapping[str, Any], note: str = MAPPED) -> None:
        """Translate a key to some of ours. If it is absent, set those for which the original's default differs."""
        if key in self.given:
            self.values |= targets
            self.rows.append(Row(key, self.given[key], targets, note, given=True))
            return
        note = DEFAULT if note == MAPPED else f"{DEFAULT}; {note}"
        self._differing(key, self[key], targets, note)

    def does(self, what: str, targets: Mapping[str, Any], note: str) -> None:
        """Record something that the original does without having a key for it."""
        self._differing(f"({what})", None, targets, note)

    def same(self, pairs: Mapping[str, str]) -> None:
        """Translate keys of the original to one of ours each, with the same value."""
        for key, target in pairs.items():
            self.maps(key, {target: self[key]})

    def idle(self, note: str, *keys: str) -> None:
        """Record keys without effect that were given and are not explained yet."""
        done = {row.key for row in self.rows}
        for key in keys:
            if key in self.given and key not in done:
                self.rows.append(Row(key, self.given[key], {}, note, given=True))

    def _differing(self, key: str, value: Any, targets: Mapping[str, Any], note: str) -> None:
        differing = {name: each for name, each in targets.items() if our_default(self.kind, name) != each}
        self.values |= differing
        if differing:
            self.rows.append(Row(key, value, differing, note, given=False))

    def finish(self) -> None:
        """Order the rows as in the file, then the defaults; every given key must have one."""
        explained = {row.key for row in self.rows}
        missing = [key for key in self.given if key not in explained]
        if missing:
            raise AssertionError(f"no word about {', '.join(missing)}")
        order = {f"({ALGORITHM})": -1} | {key: number for number, key in enumerate(self.given)}
        self.rows.sort(key=lambda row: order.get(row.key, len(order)))


def our_default(kind: type[Checked], name: str) -> Any:
    """The default of a dotted key of ours; ``dataclasses.MISSING`` where it must be given."""
    first, _, rest = name.partition(".")
    item = {each.name: each for each in dataclasses.fields(typing.cast(Any, kind))}[first]
    # Not by making a run: its defaults are not valid for every number of ranks.
    if rest and isinstance(item.default_factory, type):
        return our_default(item.default_factory, rest)
    if rest and item.default_factory is dataclasses.MISSING:
        return our_default(_hints(typing.cast(Any, kind))[first], rest)
    value = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    for part in rest.split(".") if rest else ():
        value = getattr(value, part)
    return value


@lru_cache(maxsize=32)
def _hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def one_of(key: str, value: Any, *options: str) -> Any:
    """The value, which must be one of those."""
    require(value in options, key, value, f"must be {' or '.join(map(repr, options))}")
    return value


def share_of(key: str, value: float, total: int) -> int:
    """Steps as transformers counts them: below 1 a share of all, rounded up."""
    if value < 0 or (value > 1 and value != int(value)):
        raise ConfigError(f"{key}: got {value!r}; must be an integer, or a share of all batches below 1")
    if value >= 1:
        return int(value)
    # 0.2 x 15 is 3.0000000000000004 in floating point, and must not become 4.
    return max(1, math.ceil(round(total * value, 9))) if value > 0 else 0
