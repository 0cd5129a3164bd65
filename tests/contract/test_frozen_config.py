"""Four hundred files and command lines, and what became of each: the keys that it changes, or the error.

However configurations are read, none of this may move by itself. `python tests/contract/test_frozen_config.py` writes
frozen_config.json again, after a change that was wanted: look at what git says of it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Union, get_args, get_origin

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import yaml
from test_fuzz import ORIGINAL, SEEDS, VALUES, with_key

from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.compat.original import parse_either
from async_rlhf.config import ConfigError
from async_rlhf.config.parsing import options_of
from async_rlhf.config.spelling import dotted
from async_rlhf.run.config import RunConfig

FROZEN = Path(__file__).with_name("frozen_config.json")
NUMBER = 400
LONGEST = 100
ALGORITHMS = ("online_dpo", "grpo", "rloo", "ppo", "best_of_k")


def fitting(draw: random.Random, hint: Any) -> str:
    """A value of a key's type, as YAML."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = draw.choice([one for one in get_args(hint) if one is not type(None)])
    if get_origin(hint) is Literal:
        return json.dumps(draw.choice(get_args(hint)))
    if get_origin(hint) in (list, tuple):
        return f"[{fitting(draw, get_args(hint)[0])}]"
    if get_origin(hint) is dict:
        return "{a: b}"
    values = {
        int: ["1", "2", "8", "256"],
        float: ["0.25", "1", "1e-5"],
        bool: ["true", "false"],
        str: ["a", "b:c", "cpu"],
    }
    return draw.choice(values.get(hint, ["null"]))


def cases() -> list[list[Any]]:
    """Commands, files and words: most values are of the right type."""
    draw, found = random.Random(0), []
    hints = {name: {o.key: o.hint for o in options_of(import_attribute(COMMANDS[name].config))} for name in SEEDS}
    odd = [value for value in VALUES if len(value) <= LONGEST and "\0" not in value]
    commands = [name for name in SEEDS for _ in range(1 + len(hints[name]) // 20)]
    while len(found) < NUMBER:
        command = draw.choice(commands)
        text, words = SEEDS[command], list[str]()
        known = hints[command]
        if command == "train":
            text = ORIGINAL if draw.random() < 0.1 else text
            algorithm = draw.choice(ALGORITHMS)
            words = [] if text == ORIGINAL else [f"--algorithm={algorithm}"]
            known = {option.key: option.hint for option in options_of(RunConfig.of(algorithm))}
        for _ in range(draw.choice([1, 1, 2, 3])):
            key = draw.choice(list(known))
            value = fitting(draw, known[key]) if draw.random() < 0.8 else draw.choice(odd)
            if draw.random() < 0.5:
                text = with_key(text, key, value)
            else:
                words += draw.choice([[f"--{key}={value}"], [f"--{key}", value]])
        found.append([command, text, words])
    return found


def outcome(command: str, text: str, words: list[str]) -> Any:
    """Keys that have other values than in the file of that command alone, or the error."""

    def values(*words: str) -> dict[str, Any]:
        _, resolved = parse_either(
            import_attribute(COMMANDS[command].config), command, ["--config", "case.yml", *words]
        )
        return dotted(yaml.safe_load(resolved))

    Path("case.yml").write_text(text)
    try:
        found = values(*words)
    except ConfigError as error:
        return str(error)
    except SystemExit as ended:
        return f"exit code {ended.code or 0}"
    Path("case.yml").write_text(SEEDS[command])
    usual = values(*[word for word in words if word.startswith("--algorithm=")])
    return {key: value for key, value in found.items() if usual.get(key, "") != value}


def outcomes(cases: list[list[Any]]) -> list[Any]:
    """Of all cases, where no file of theirs is."""
    here = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return json.loads(json.dumps([outcome(*case) for case in cases]))
        finally:
            os.chdir(here)


def test_what_becomes_of_files_and_command_lines_is_what_it_was(monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("ASYNC_RLHF")]:
        monkeypatch.delenv(name)
    frozen = json.loads(FROZEN.read_text())
    assert len(frozen) == NUMBER
    now = outcomes([case for case, _ in frozen])
    moved = [(case, before, after) for (case, before), after in zip(frozen, now, strict=True) if before != after]
    told = "\n".join(f"{case}: {before!s:.300}, now {after!s:.300}" for case, before, after in moved)
    assert not moved, f"{len(moved)} of {NUMBER} cases:\n{told}"


if __name__ == "__main__":
    made = cases()
    rows = [json.dumps(row, ensure_ascii=False) for row in zip(made, outcomes(made), strict=True)]
    FROZEN.write_text("[\n" + ",\n".join(rows) + "\n]\n")
