"""Rewards that are Python functions: finding them, calling them, and checking what they return."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from async_rlhf.config import ConfigError

RewardFunction = Callable[..., Sequence[float]]
"""Called as f(prompts=[...], completions=[...], **columns); returns one number per completion."""


class RewardError(RuntimeError):
    """A reward that cannot be trained on. The message names the reward and the row."""


def load_reward_functions(names: Sequence[str]) -> list[RewardFunction]:
    """Functions by name: "package.module:function" or "path/to/file.py:function".

    Raises:
        ConfigError: there is no such module, file or function.
    """
    return [load_object(name, "reward_funcs") for name in names]


def load_object(name: str, key: str) -> Any:
    """Something callable by name, for the given configuration key."""
    place, _, attribute = name.rpartition(":")
    if "" not in sys.path:
        sys.path.append("")  # an installed command does not look into the current folder; python -m does
    try:
        module = _module_from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, FileNotFoundError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f'{key}: got {name!r}: {error}; must be "module:function" or "path/to/file.py:function"'
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{key}: got {name!r}; {place} has no function {attribute!r}")
    return function


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def call_reward_function(
    function: RewardFunction, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> list[float]:
    """The function's rewards, one finite number for each completion.

    Args:
        function: see :data:`RewardFunction`.
        prompts: the prompt of each completion.
        completions: texts without the stop token.
        columns: the data set's columns, one value for each completion.

    Raises:
        RewardError: it raised, or returned another count, or something that is no finite number.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        rewards = list(function(prompts=list(prompts), completions=list(completions), **columns))
    except Exception as error:
        raise RewardError(f"reward function {name} raised {type(error).__name__}: {error}") from error
    if len(rewards) != len(completions):
        raise RewardError(f"reward function {name} returned {len(rewards)} rewards for {len(completions)} completions")
    for prompt, completion, reward in zip(prompts, completions, rewards, strict=True):
        if isinstance(reward, (str, bytes)) or reward is None or not math.isfinite(reward):
            raise RewardError(
                f"reward function {name} returned {reward!r}; must be a finite number. "
                f"Prompt: {prompt[-200:]!r}. Completion: {completion[:200]!r}"
            )
    return [float(reward) for reward in rewards]
