"""Configurations from a YAML file, the environment and the command line; each overrides those before it."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from async_rlhf.config import environment
from async_rlhf.config.base import Checked, ConfigError, dotted, require
from async_rlhf.config.secrets import API_KEY_VARIABLE, HIDDEN, without_secrets
from async_rlhf.config.spelling import check_file, check_words, keys_of
from async_rlhf.config.yaml_text import key_lines, read_by_jsonargparse, read_yaml, reads_as_number

ENVIRONMENT_PREFIX = "ASYNC_RLHF"
Config = TypeVar("Config", bound=Checked)
_MESSAGE = 1500
"""Most characters of a jsonargparse error, which repeats the whole value for every type that it could have had."""

# The type fixes a configuration: keys of a group are separate options, and no option chooses a class. The
# explanations are the texts below the fields.
set_parsing_settings(
    subclasses_disabled=[lambda kind: isinstance(kind, type) and issubclass(kind, Checked)],
    docstring_parse_attribute_docstrings=True,
)


class _Parser(ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        told = " ".join(re.sub(r"<class '(\w+)'>", r"\1", message).split())
        raise ConfigError(told if len(told) <= _MESSAGE else f"{told[:_MESSAGE]}...")


def make_parser(kind: type[Checked], command: str, config_file: str | None = None) -> ArgumentParser:
    """The parser of one command's configuration.

    Args:
        kind: the dataclass.
        command: its name, for the help.
        config_file: a YAML file whose values replace the defaults.
    """
    parser = _Parser(
        prog=f"async-rlhf {command}",
        description=(kind.__doc__ or "").split("\n\n")[0].replace("``", ""),
        epilog=f"Every option can also be set by a YAML file (--config) or an environment variable: "
        f"{ENVIRONMENT_PREFIX}_TRAIN__SEED sets --train.seed. The command line wins over the environment, the "
        "environment over the file. An option marked [speed], [place] or [log] decides no result: what is finished is "
        "not done again for another value, and a run can be resumed with one.",
        default_config_files=[glob.escape(config_file)] if config_file else [],
        default_env=True,
        env_prefix=ENVIRONMENT_PREFIX,
        allow_abbrev=False,
    )
    parser.add_class_arguments(kind, as_group=False)
    parser.add_argument(f"--{environment.KEY}", type=dict | None, help=environment.EXPLAINED)
    more = dict(_rules_and_roles(kind))
    for action in parser._actions:
        action.help = f"{action.help or ''}{more.get(action.dest, '')}"
    return parser


def short_help(kind: type[Checked], command: str) -> str:
    """The help of the keys that matter most, in groups; of all keys where a command has few.

    A key is among them if its field says so: ``key(..., main="the group's title")``.
    """
    parser = make_parser(kind, command)
    main = dict(_main_keys(kind))
    if not main:
        return parser.format_help()
    actions: list[Any] = parser._actions
    told = {action.dest: action for action in actions if action.dest in main}
    more = dict(_rules_and_roles(kind))
    defaults = parser.get_defaults()
    width = min(100, shutil.get_terminal_size().columns)
    usage = f"usage: async-rlhf {command} [--config FILE.yml] [--key value ...] [--dry-run]"
    lines = [usage, "", str(parser.description)]
    for title in sorted(dict.fromkeys(main.values()), key=lambda title: title == "output"):
        lines += ["", f"{title}:"]
        for key in [key for key, one in main.items() if one == title]:
            text = told[key].help.removesuffix(more.get(key, "")) if more.get(key) else told[key].help
            first = re.split(r"(?<=\w\w[.:]) +(?=[A-Z])", " ".join(text.split()))[0]
            default = "required" if told[key].required else f"default: {json.dumps(defaults.get(key))}"
            shown = f"{first} ({default})"
            lines += [f"  --{key}", *textwrap.wrap(shown, width - 6, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    number = sum(1 for _ in keys_of(kind))
    lines += ["", f"async-rlhf {command} --help-all explains all {number} keys."]
    return "\n".join(lines)


def _main_keys(kind: type[Checked], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The keys of the short help, and the title that each stands under."""
    hints = get_type_hints(kind)
    for item in dataclasses.fields(typing.cast(Any, kind)):
        hint = hints[item.name]
        if isinstance(hint, type) and issubclass(hint, Checked):
            yield from _main_keys(hint, f"{prefix}{item.name}.")
        elif item.metadata.get("main"):
            yield f"{prefix}{item.name}", item.metadata["main"]


def _rules_and_roles(kind: type[Checked], prefix: str = "") -> Iterator[tuple[str, str]]:
    """What the help says about each key besides its explanation."""
    hints = get_type_hints(kind)
    for item in dataclasses.fields(typing.cast(Any, kind)):
        hint, known = hints[item.name], item.metadata
        if isinstance(hint, type) and issubclass(hint, Checked):
            yield from _rules_and_roles(hint, f"{prefix}{item.name}.")
        elif known:
            rules = [rule.right.partition(": ")[0] for rule in known["rules"] if rule.right.startswith("must be ")]
            text = f" Must be {' and '.join(rule.removeprefix('must be ') for rule in rules)}." if rules else ""
            text += f" [{known['role']}]" if known["role"] != "result" else ""
            text += f" [may change on resume: {known['may_change']}]" if known["may_change"] else ""
            text += f" [must stay on resume: {known['must_stay']}]" if known["must_stay"] else ""
            yield f"{prefix}{item.name}", text


def parse(
    kind: type[Config], command: str, arguments: Sequence[str], *, translated: bool = False, export: bool = False
) -> tuple[Config, str]:
    """A checked configuration, and the same as YAML.

    Args:
        kind: the configuration.
        command: its command.
        arguments: the command line.
        translated: the file is not the user's own, so errors do not say where in it a key stands.
        export: set the file's variables in the environment.

    Raises:
        ConfigError: an unknown key, a wrong type or an impossible value; names the key and what would be right.
    """
    config_file, arguments = take_config_file(arguments)
    read = {} if config_file is None else _mapping(read_yaml(config_file, "--config"), config_file)
    environment.checked_environment(read.get(environment.KEY))
    whole = kind.with_all_keys(lambda key: _early(key, arguments, read))
    arguments = _plain_lists(arguments, set(_list_keys(whole)))
    parser = make_parser(whole, command, config_file)
    if {"-h", "--help", "--help-all"} & set(arguments):
        print(parser.format_help() if "--help-all" in arguments else short_help(whole, command))
        sys.exit(0)
    places = {} if config_file is None or translated else _places(config_file)
    check_words(arguments, parser._option_string_actions, whole, command)
    keys = {key: value for key, value in read.items() if key != environment.KEY}
    check_file(keys, whole, command, lambda key: places.get(key, "the file"))
    _check_environment(parser)
    try:
        _check_numbers(whole, arguments, keys)
        with read_by_jsonargparse():
            values: Namespace = parser.parse_args(list(arguments))
            variables = environment.checked_environment(values.pop(environment.KEY))
            text = parser.dump(_shown(values), skip_unset=False)
            config = kind(**vars(parser.instantiate(values)))
    except ConfigError as error:
        raise _placed(error, places, arguments) from error.__cause__
    except (TypeError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if export:
        environment.export(variables)
    return config, text


def _check_numbers(kind: type[Checked], arguments: Sequence[str], read: Mapping[str, Any]) -> None:
    """Require text that stands for a number to look like one. Raises :class:`ConfigError`."""
    written = dotted(read)
    given = itertools.pairwise([*arguments, ""])
    words = [(word.partition("="), after) for word, after in given if word.startswith("--")]
    for key in _number_keys(kind):
        told = [value if equals else after for (name, equals, value), after in words if name == f"--{key}"]
        for text in (written.get(key), os.environ.get(_variable(key)), *told):
            wrong = isinstance(text, str) and any(map(str.isdigit, text)) and not reads_as_number(text)
            require(not wrong, key, text, "must be a number")


def _number_keys(kind: type[Checked], prefix: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        if isinstance(hint, type) and issubclass(hint, Checked):
            yield from _number_keys(hint, f"{prefix}{name}.")
        elif {int, float} & {hint, *get_args(hint)} and get_origin(hint) is not list:
            yield f"{prefix}{name}"


def _places(config_file: str) -> dict[str, str]:
    """File and line of every key of a file."""
    lines = key_lines(Path(config_file).read_text(encoding="utf-8-sig"))
    return {key: f"{config_file!r}, line {line}" for key, line in lines.items()}


def _placed(error: ConfigError, places: Mapping[str, str], arguments: Sequence[str]) -> ConfigError:
    """The error with the place of the key that it names, if that key's value is from the file."""
    told = re.match(r'(?:Parser key "([\w.]+)"|([\w.]+)): ', str(error))
    if told is None:
        return error
    name = told[1] or told[2]
    keys = [key for key in places if key == name or key.endswith(f".{name}")]
    given = {word.partition("=")[0] for word in arguments}
    above = len(keys) == 1 and (f"--{keys[0]}" in given or _variable(keys[0]) in os.environ)
    return error if len(keys) != 1 or above else ConfigError(f"{error} ({places[keys[0]]})")


def _variable(key: str) -> str:
    """The environment variable that sets a key."""
    return f"{ENVIRONMENT_PREFIX}_{key.replace('.', '__').upper()}"


def _shown(values: Namespace) -> Namespace:
    """The values that may be printed."""
    shown = values.clone()
    for key, value in values.items():
        shown[key] = without_secrets(value, HIDDEN, key)
    return shown


def take_config_file(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file after the last ``--config``, and all other words."""
    rest, found = [], None
    words = iter(arguments)
    for word in words:
        if word == "--config" or word.startswith("--config="):
            found = word.partition("=")[2] or next(words, "")
            if not Path(found).is_file():
                raise ConfigError(f"--config: got {found!r}; there is no such file")
        else:
            rest.append(word)
    return found, rest


def _mapping(values: Any, file: str) -> dict[str, Any]:
    """The content of a file; an empty file gives an empty mapping."""
    require(values is None or isinstance(values, dict), f"--config: {file!r}", values, "must be keys and their values")
    return values or {}


def _early(key: str, arguments: Sequence[str], read: Mapping[str, Any]) -> Any:
    """The value of a single key, read before there is a parser; None if it is not set."""
    chosen = os.environ.get(f"{ENVIRONMENT_PREFIX}_{key.upper()}", read.get(key))
    for word, after in itertools.pairwise([*arguments, ""]):
        if word == f"--{key}" or word.startswith(f"--{key}="):
            chosen = word.partition("=")[2] or after
    return chosen


def _list_keys(kind: type[Checked], prefix: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        if get_origin(hint) is list:
            yield f"--{prefix}{name}"
        elif isinstance(hint, type) and issubclass(hint, Checked):
            yield from _list_keys(hint, f"{prefix}{name}.")


def _plain_lists(arguments: Sequence[str], keys: set[str]) -> list[str]:
    """``--source a --source b`` means ``--source ["a", "b"]``, and ``--source a`` a list of one."""
    given: dict[str, list[str]] = {}
    rest = []
    words = iter(arguments)
    for word in words:
        key, equals, value = word.partition("=")
        if key not in keys:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if value.startswith("[") or value == "null":
            rest += [key, value]
        else:
            given.setdefault(key, []).append(value)
    return rest + [f"{key}={json.dumps(values)}" for key, values in given.items()]


def _check_environment(parser: ArgumentParser) -> None:
    """Refuse variables with our prefix that set no key: they are misspelt."""
    known = {_variable(key) for key in _keys(parser)}
    known |= {f"{ENVIRONMENT_PREFIX}_CACHE", API_KEY_VARIABLE}
    for name in os.environ:
        if name.startswith(f"{ENVIRONMENT_PREFIX}_") and name not in known:
            print(f"warning: the environment variable {name} sets no option of {parser.prog}", file=sys.stderr)


def _keys(parser: ArgumentParser) -> list[str]:
    actions: list[Any] = parser._actions
    return [action.dest for action in actions]
