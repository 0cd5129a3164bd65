"""The algorithms there are, and how a configuration names one: a name from the table, or a record of the user's own.

Neither this nor the records load torch: their functions do, so that a configuration can be read without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from async_rlhf.algorithms.record import Algorithm
from async_rlhf.config.base import ConfigError, require
from async_rlhf.config.online import OnlineConfig
from async_rlhf.system.named import load_attribute

BUILT_IN = {
    "online_dpo": "online_dpo:ONLINE_DPO",
    "best_of_k": "best_of_k:BEST_OF_K",
    "rloo": "reinforce:RLOO",
    "reinforce_pp": "reinforce:REINFORCE_PP",
    "ppo": "ppo:PPO",
    "grpo": "grpo:GRPO",
    "dr_grpo": "grpo:DR_GRPO",
    "gspo": "grpo:GSPO",
    "cispo": "grpo:CISPO",
}
"""Where each record is, by its name."""


def find(name: str) -> Algorithm:
    """The record of an algorithm.

    Args:
        name: from the table, or "module:RECORD" or "path/to/file.py:RECORD".

    Raises:
        ConfigError: there is none.
    """
    if isinstance(name, str) and name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(import_module(f"async_rlhf.algorithms.{module}"), attribute)
    right = f'must be one of {", ".join(BUILT_IN)}, or a record of your own as "module:RECORD" or "file.py:RECORD"'
    place, colon, attribute = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    require(bool(place and colon and attribute), "algorithm", name, right)
    found = _load(place, attribute, _state_of(place))
    if not isinstance(found, Algorithm):
        raise ConfigError(f"algorithm: got {name!r}, which is {found!r:.100}; {right}")
    require(found.name not in BUILT_IN, "algorithm", name, f"its record must have another name than {found.name!r}")
    return found


@cache  # a file that is read again makes other classes: a configuration of the first is none of the second
def _load(place: str, attribute: str, state: tuple[str, int]) -> Any:
    return load_attribute(place, attribute, "algorithm", "RECORD")


def _state_of(place: str) -> tuple[str, int]:
    """Which file it is, and when it was written."""
    file = Path(place).resolve()
    return (str(file), file.stat().st_mtime_ns) if place.endswith(".py") and file.is_file() else ("", 0)


def built_in() -> Iterator[Algorithm]:
    """All of the table."""
    return map(find, BUILT_IN)


def of_config(config: OnlineConfig) -> Algorithm:
    """The built-in algorithm that a configuration is of.

    Raises:
        ConfigError: it is of none.
    """
    for algorithm in built_in():
        if type(config) is algorithm.config:
            return algorithm
    names = ", ".join(algorithm.config.__name__ for algorithm in built_in())
    kind = type(config).__name__
    raise ConfigError(f"args: got {kind}; must be one of {names}, or of the record that is given as algorithm")
