"""The data of the built-in docstring task, as files that any stage can read."""

from __future__ import annotations

import random
from pathlib import Path

from async_rlhf.commands.stage import Stage
from async_rlhf.config import ConfigError
from async_rlhf.tasks.docstrings.config import DocstringsConfig
from async_rlhf.tasks.docstrings.harvest import harvest, split, write_splits


def run_data(config: DocstringsConfig) -> dict[str, float]:
    """Harvest functions, split them, and write the files of each split. Returns the number of functions in each."""
    stage = Stage(Path(config.out), "data", config, inputs={})
    if (results := stage.done()) is not None:
        return results
    functions = harvest(config.source or None)
    if config.max_functions is not None and len(functions) > config.max_functions:
        chosen = set(random.Random(config.seed).sample(range(len(functions)), config.max_functions))
        functions = [function for i, function in enumerate(functions) if i in chosen]
    splits = split(functions, seed=config.seed)
    for name, part in splits.items():
        if not part:
            raise ConfigError(
                f"source: got {config.source}, with {len(functions)} functions that have a one-line summary; must have "
                f"enough for every split, and {name} has none"
            )
    write_splits(splits, Path(config.out))
    results = {name: float(len(part)) for name, part in splits.items()}
    stage.publish_files({}, results)
    return results
