"""``async-rlhf config migrate``: rewrites a file of the original in our format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.compat.original import as_yaml, translate
from async_rlhf.config.base import FILE, Checked, ConfigError, configuration, key, require
from async_rlhf.config.yaml_text import read_yaml

_SIGNS = {
    "train": ("sft_model_path", "reward_model_path", "total_episodes"),
    "evaluate": ("gold_model_name",),
    "relabel": ("output_name",),
    "sft": ("task_type", "max_seq_length", "packing"),
    "generate": ("model_paths", "max_new_tokens", "base_model_name"),
}


@configuration
class MigrateConfig(Checked):
    """A YAML file of the original, written in our format: ``async-rlhf config migrate FILE``.

    Writes only keys that the file has or whose default differs there, each with a comment on its origin.
    """

    file: str
    """The original's file."""
    command: Literal["train", "sft", "reward", "relabel", "generate", "evaluate"] | None = None
    """Our command that the file is for; null finds out from its keys."""
    algorithm: Literal["online_dpo", "best_of_k", "rloo", "ppo"] | None = None
    """Algorithm of a file for ``train``; null finds out from its keys and names."""
    output: str | None = key(None, *FILE, role="place")
    """The file to write; null for standard output."""
    ranks: int | None = key(None, ge=1)
    """Ranks of the learner, for computing the shares of the batches (save_steps, num_sample_generations) and for
    train.parallel.ranks; null for one."""

    def check(self) -> None:
        require(Path(self.file).is_file(), "file", self.file, "there is no such file")
        rule = "is there already: it is not replaced"
        require(self.output is None or not Path(self.output).exists(), "output", self.output, rule)


def run_config(config: MigrateConfig) -> None:
    """Write the file, or print it."""
    text = migrate(config)
    if config.output is None:
        sys.stdout.write(text)
        return
    with Path(config.output).open("x", encoding="utf-8") as file:
        file.write(text)
    print(f"wrote {config.output}", file=sys.stderr)


def migrate(config: MigrateConfig) -> str:
    """The file in our format.

    Raises:
        ConfigError: it is not a file of the original, or cannot be translated.
    """
    command = config.command or _command(config.file)
    asked = {"--algorithm": config.algorithm, "--train.parallel.ranks": config.ranks}
    words = [word for name, value in asked.items() if value is not None for word in (name, str(value))]
    rule = "must be left out: only files for train have it"
    require(command == "train" or not words, "algorithm" if config.algorithm else "ranks", words[-1:], rule)
    t, _ = translate(import_attribute(COMMANDS[command].config), command, config.file, words)
    rule = f"must be a YAML file with keys of the original for async-rlhf {command}"
    if t is None:
        raise ConfigError(f"file: got {config.file!r}; {rule}")
    if config.ranks is not None:
        t.does("ranks", {"train.parallel.ranks": config.ranks}, "as asked for")
    return as_yaml(t, Path(config.file).name)


def _command(file: str) -> str:
    values = read_yaml(file, "file", repeated=[])  # the translation warns of them
    keys = set(values) if isinstance(values, dict) else set()
    return next((command for command, signs in _SIGNS.items() if keys & set(signs)), "reward")
