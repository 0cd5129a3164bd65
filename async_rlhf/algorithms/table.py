"""The table of built-in algorithms. A configuration names one of them, or a record of the user's own.

Neither this module nor the records import torch, only their functions do: a configuration can be read without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from async_rlhf.algorithms.record import Algorithm
from async_rlhf.config.base import ConfigError, require
from async_rlhf.config.import_by_name import load_attribute
from async_rlhf.config.online import OnlineConfig
from async_rlhf.config.spelling import meant

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
"""Where to find each record, by name."""


def find(name: str) -> Algorithm:
    """The record of an algorithm.

    Args:
        name: from the table, or "module:RECORD" or "path/to/file.py:RECORD".

    Raises:
        ConfigError: there is no such algorithm.
    """
    if isinstance(name, str) and name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(import_module(f"async_rlhf.algorithms.{module}"), attribute)
    rule = f'must be one of {", ".join(BUILT_IN)}, or a record of your own as "module:RECORD" or "file.py:RECORD"'
    source, colon, attribute = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    like = meant(name, BUILT_IN, "") if isinstance(name, str) else ""
    require(bool(source and colon and attribute), "algorithm", name, f"{rule}{like}")
    record = _load(source, attribute, _state_of(source))
    if not isinstance(record, Algorithm):
        raise ConfigError(f"algorithm: got {name!r}, which is {record!r:.100}; {rule}")
    require(record.name not in BUILT_IN, "algorithm", name, f"its record must have another name than {record.name!r}")
    return record


@cache  # loading a file twice would make two classes: a configuration of one is not one of the other
def _load(source: str, attribute: str, state: tuple[str, int]) -> Any:
    return load_attribute(source, attribute, "algorithm", "RECORD")


def _state_of(source: str) -> tuple[str, int]:
    """The path of the file, and when it was written."""
    file = Path(source).resolve()
    return (str(file), file.stat().st_mtime_ns) if source.endswith(".py") and file.is_file() else ("", 0)


def built_in() -> Iterator[Algorithm]:
    """All algorithms of the table."""
    return map(find, BUILT_IN)


def of_config(config: OnlineConfig) -> Algorithm:
    """The built-in algorithm that a configuration belongs to.

    Raises:
        ConfigError: it belongs to none.
    """
    for algorithm in built_in():
        if type(config) is algorithm.config:
            return algorithm
    names = ", ".join(algorithm.config.__name__ for algorithm in built_in())
    kind = type(config).__name__
    raise ConfigError(f"args: got {kind}; must be one of {names}, or of the record that is given as algorithm")
