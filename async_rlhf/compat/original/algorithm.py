"""Finds which of the original's trainers a file is for: the program that reads it decides, not the file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from async_rlhf.config.base import ConfigError, require

_OF_DPO = ("single", "loss_type", "beta", "save_generations", "sync")
_OF_PPO = ("vf_coef", "lam", "gamma", "cliprange_value", "whiten_rewards")
_NAMES = {"online_?dpo": "online_dpo", "rloo": "rloo", "ppo": "ppo", r"bo(\d|k|n|_|$)": "best_of_k"}
PROGRAMS = {"online_dpo": "online_dpo.py", "rloo": "rloo.py", "ppo": "ppov2.py", "best_of_k": "rloo.py with bok"}
"""The original's program for each algorithm."""


def find_algorithm(given: Mapping[str, Any], chosen: str | None, file: str) -> tuple[str, str]:
    """The algorithm, and the reason.

    Args:
        given: keys of the original and their values.
        chosen: what the command line or the environment asks for.
        file: the file's name.

    Raises:
        ConfigError: nothing tells the algorithm, or two hints contradict each other.
    """
    if chosen is not None:
        right = (
            f"must be one of {', '.join(PROGRAMS)}: the original has no other (for another one, migrate the file first)"
        )
        require(chosen in PROGRAMS, "algorithm", chosen, right)
    if given.get("bok"):
        require(chosen in (None, "best_of_k"), "algorithm", chosen, "must be best_of_k with bok: true")
        return "best_of_k", "bok is true"
    if chosen is not None:
        return chosen, "asked for"
    dpo = [key for key in _OF_DPO if key in given] + (["vllm"] if given.get("vllm") else [])
    ppo = [key for key in _OF_PPO if key in given]
    if bool(dpo) != bool(ppo):
        return ("online_dpo" if dpo else "ppo"), f"only its trainer reads {(dpo or ppo)[0]}"
    names = {"output_dir": given.get("output_dir"), "run_name": given.get("run_name"), "the file's name": file}
    for source, name in names.items():
        last = os.path.basename(str(name or "").rstrip("/"))
        for pattern, algorithm in _NAMES.items():
            if found := re.match(pattern, last):
                return algorithm, f"{source} begins with {found.group()!r}"
    raise ConfigError(
        "algorithm: the file does not tell which of the original's programs it is for; give --algorithm "
        f"{', '.join(list(PROGRAMS)[:-1])} or {list(PROGRAMS)[-1]}"
    )
