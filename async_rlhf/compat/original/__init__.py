"""The YAML files of the original: the code of "Asynchronous RLHF" (Noukhovitch et al., arXiv 2410.18252).

Its flat keys are recognised and translated to ours before parsing. Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from async_rlhf.commands.table import import_attribute
from async_rlhf.compat.original import common
from async_rlhf.compat.original.common import Translation, as_yaml, print_table
from async_rlhf.compat.original.keys import ENVIRONMENT, KEYS, typed
from async_rlhf.compat.original.train import find_algorithm, translate_train
from async_rlhf.config.base import Checked, ConfigError, require, shown
from async_rlhf.config.parallel import launched_rank
from async_rlhf.config.parsing import FLAGS, parse, take_config_file, variable_of
from async_rlhf.config.secrets import HIDDEN, is_secret, masked
from async_rlhf.config.yaml_text import Repeated, parse_yaml, read_yaml
from async_rlhf.run.config import RunConfig

__all__ = ["as_yaml", "parse_either", "print_table", "translate"]

Config = TypeVar("Config", bound=Checked)
_NULLABLE = {"eval_split", ENVIRONMENT}  # for these, null is not the same as leaving the key out


def parse_either(kind: type[Config], command: str, words: Sequence[str], export: bool = True) -> tuple[Config, str]:
    """Like :func:`~async_rlhf.config.parsing.parse`, for files of either format.

    For a file of the original, prints a table of how its keys were translated to standard error. With ``export``, sets
    the file's variables in the environment, after the whole file has been checked.
    """
    file, rest = take_config_file(words)
    known = file is not None and command in KEYS and not {"-h", *FLAGS} & set(words)
    t, rest = translate(kind, command, file, rest) if file is not None and known else (None, rest)
    if file is None or t is None:
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
    ours = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = _read(file, command, ours)
    if values is None:
        return None, list(words)
    overridden, rest = _take_overrides(words, command, ours | {"algorithm"})
    merged = _typed(values | overridden, command)
    overrides = {  # the last of equal ones wins
        word[2:].partition("=")[0]: word.partition("=")[2] if "=" in word else after
        for word, after in itertools.pairwise([*rest, ""])
        if word.startswith("--")
    }
    if command == "train":
        chosen = overrides.get("algorithm", os.environ.get(variable_of("algorithm")))
        algorithm, why = find_algorithm(merged, chosen, Path(file).name)
        t = Translation(command, RunConfig.of(algorithm), merged, overrides)
        common.environment(t)
        translate_train(t, algorithm, why)
    else:
        t = Translation(command, kind, merged, overrides)
        common.environment(t)
        import_attribute(f"compat.original.stages:translate_{command}")(t)
    t.finish()
    return t, rest


def _read(path: str, command: str, ours: set[str]) -> dict[str, Any] | None:
    """The keys of a file of the original; None if it is not one.

    A key may be there again, as its YAML reader allows: the last value counts, with a warning.

    Raises:
        ConfigError: it has keys of both formats, or keys of the original and keys that neither format knows.
    """
    repeated: list[Repeated] = []
    values = read_yaml(path, "--config", repeated)
    if not isinstance(values, dict):
        return None  # the parser's own message is more helpful
    theirs = [key for key in values if key in KEYS[command] and key not in ours]
    if not theirs:
        return None
    for key in (key for key in values if key not in KEYS[command] and key != ENVIRONMENT):
        if key in ours:
            raise ConfigError(
                f"{key}: is a key of async-rlhf {command}, but {theirs[0]!r} one of the original's files; must be all "
                f"of one format (async-rlhf config migrate turns the original's into ours)"
            )
        other = [name for name, keys in KEYS.items() if key in keys]
        nearest = difflib.get_close_matches(key, KEYS[command], 1)
        hint = f"files for async-rlhf {' or '.join(other)} have it" if other else "the original has no such key"
        hint += f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"{key}: got {shown(values[key])}; {hint}")
    for each in repeated if launched_rank() == 0 else ():
        print(f"warning: {path!r}, line {each.lines[1]}: {_repeated_as_text(each, command)}", file=sys.stderr)
    return values


def _repeated_as_text(each: Repeated, command: str) -> str:
    hidden = is_secret(each.key) or each.key not in KEYS[command]  # such as a variable to export
    before, last = (HIDDEN if hidden else masked(shown(value)) for value in each.values)
    same = each.values[0] == each.values[1]
    values = f"with the same value {last}" if same else f"with {before} before and {last} now; the last one counts"
    return f"the key {shown(each.key)} is there again (line {each.lines[0]}), {values}"


def _take_overrides(words: Sequence[str], command: str, ours: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Options in the original's style, such as ``--learning_rate 1e-5`` or ``--vllm``, and the other words.

    Raises:
        ConfigError: an option that is neither the original's nor ours.
    """
    keys, queue = KEYS[command], deque(words)
    overrides: dict[str, Any] = {}
    rest: list[str] = []
    while queue:
        word = queue.popleft()
        name, equals, value = word.removeprefix("--").partition("=")
        negated = name.removeprefix("no_")
        if not word.startswith("--") or name == "help":
            rest.append(word)
        elif name in keys:
            following = [value] if equals else []
            most = 0 if equals else len(queue) if keys[name].kind == "list" else 1
            while queue and not queue[0].startswith("--") and len(following) < most:
                following.append(queue.popleft())
            overrides[name] = _option(name, keys[name].kind, following)
        elif negated != name and negated in keys and keys[negated].kind == "bool":
            overrides[negated] = False
        elif name.partition(".")[0] in ours:
            rest.append(word)
        else:
            nearest = difflib.get_close_matches(name, keys, 1)
            hint = f"; did you mean --{nearest[0]}?" if nearest else ""
            raise ConfigError(f"--{name}: is neither an option of the original nor of async-rlhf {command}{hint}")
    return overrides, rest


def _option(name: str, kind: str, words: list[str]) -> Any:
    if kind == "list":
        return parse_yaml(words[0], name) if len(words) == 1 and words[0].startswith("[") else words
    require(bool(words) or kind in ("bool", "any"), name, None, "must be followed by its value")
    return words[0] if words else True


def _typed(values: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Values converted to their keys' types. Null is left out, as it means the same."""
    kinds = {key: each.kind for key, each in KEYS[command].items()} | {ENVIRONMENT: "mapping"}
    return {
        key: typed(key, kinds[key], value) for key, value in values.items() if value is not None or key in _NULLABLE
    }
