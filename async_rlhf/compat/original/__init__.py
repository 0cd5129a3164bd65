"""The YAML files of the original: the code of "Asynchronous RLHF" (Noukhovitch et al., arXiv 2410.18252).

Its flat keys are recognised and translated to ours before parsing. Imports neither torch nor transformers.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from async_rlhf.compat.original.algorithm import find_algorithm
from async_rlhf.compat.original.evaluation import translate_evaluate, translate_generate
from async_rlhf.compat.original.keys import KEYS
from async_rlhf.compat.original.reading import check_known, field_names, read_file, take_overrides, typed
from async_rlhf.compat.original.show import as_yaml, print_table
from async_rlhf.compat.original.stages import translate_relabel, translate_reward, translate_sft
from async_rlhf.compat.original.train import translate_train
from async_rlhf.compat.original.translation import Translation
from async_rlhf.config.base import Checked
from async_rlhf.config.parallel import launched_rank
from async_rlhf.config.parsing import ENVIRONMENT_PREFIX, parse, take_config_file
from async_rlhf.run.config import RunConfig

__all__ = ["as_yaml", "parse_either", "print_table", "translate"]

Config = TypeVar("Config", bound=Checked)
_TRANSLATORS: dict[str, Callable[[Translation], None]] = {
    "sft": translate_sft,
    "reward": translate_reward,
    "relabel": translate_relabel,
    "generate": translate_generate,
    "evaluate": translate_evaluate,
}


def parse_either(kind: type[Config], command: str, words: Sequence[str], export: bool = True) -> tuple[Config, str]:
    """Like :func:`~async_rlhf.config.parsing.parse`, for files of either format.

    For a file of the original, prints a table of how its keys were translated to standard error. With ``export``, sets
    the file's variables in the environment, after the whole file has been checked.
    """
    file, rest = take_config_file(words)
    if file is None or command not in KEYS or {"-h", "--help", "--help-all"} & set(words):
        return parse(kind, command, words, export=export)
    t, rest = translate(kind, command, file, rest)
    if t is None:
        return parse(kind, command, words, export=export)
    if launched_rank() == 0:
        print_table(t, Path(file).name)
    with tempfile.TemporaryDirectory() as folder:  # the parser reads only files
        translated = Path(folder) / "config.yml"
        translated.write_text(as_yaml(t, Path(file).name), encoding="utf-8")
        parsed = parse(kind, command, ["--config", str(translated), *rest], translated=True)
    if export:
        os.environ.update(t.environment)
    return parsed


def translate(
    kind: type[Checked], command: str, file: str, words: Sequence[str] = ()
) -> tuple[Translation | None, list[str]]:
    """Translate a file of the original with its overrides, and return our own options too; None for another format.

    Args:
        kind: our configuration of the command.
        command: the command.
        file: the YAML file.
        words: the command line without ``--config``.

    Raises:
        ConfigError: an unknown key, a value of a wrong type, or one that is not supported here.
    """
    values = read_file(file, command, kind)
    if values is None:
        return None, list(words)
    given, rest = take_overrides(words, command, kind)
    check_known(given, command, field_names(kind))
    merged = typed(values | given, command)
    overrides = _options(rest)
    if command != "train":
        t = Translation(command, kind, merged, overrides)
        _TRANSLATORS[command](t)
    else:
        chosen = overrides.get("algorithm", os.environ.get(f"{ENVIRONMENT_PREFIX}_ALGORITHM"))
        algorithm, why = find_algorithm(merged, chosen, Path(file).name)
        t = Translation(command, RunConfig.of(algorithm), merged, overrides)
        translate_train(t, algorithm, why)
    t.finish()
    return t, rest


def _options(words: Sequence[str]) -> dict[str, str]:
    """Our own options on the command line; the last of equal ones wins."""
    found = {}
    for word, after in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            found[name[2:]] = value if equals else after
    return found
