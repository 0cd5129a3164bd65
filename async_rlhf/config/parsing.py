"""Configurations from a YAML file, the environment and the command line; each overrides those before it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from async_rlhf.config import environment
from async_rlhf.config.base import Checked, Option, can_be, default, fitting, hints_of, is_group, options_of
from async_rlhf.config.errors import ConfigError, require
from async_rlhf.config.secrets import API_KEY_VARIABLE, HIDDEN, without_secrets
from async_rlhf.config.spelling import meant
from async_rlhf.config.yaml_text import key_lines, parse_yaml, read_yaml, reads_as_number

ENVIRONMENT_PREFIX = "ASYNC_RLHF"
Config = TypeVar("Config", bound=Checked)
FLAGS = ("--help", "--help-all")
FEW = 15
"""A command with at most so many keys has all of them in its short help."""


def variable_of(key: str) -> str:
    """The environment variable that sets a key."""
    return f"{ENVIRONMENT_PREFIX}_{key.replace('.', '__').upper()}"


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
    config_file, words = take_config_file(arguments)
    read = None if config_file is None else read_yaml(config_file, "--config")
    require(read is None or isinstance(read, dict), f"--config: {config_file!r}", read, "must be keys and their values")
    read = read or {}
    environment.checked_environment(read.get(environment.KEY))
    whole = kind.with_all_keys(lambda key: _early(key, words, read))
    if set(FLAGS) & set(words) or "-h" in words:
        print(help_of(whole, command, "--help-all" in words))
        sys.exit(0)
    file = "" if config_file is None or translated else Path(config_file).read_text(encoding="utf-8-sig")
    places = {key: f"{config_file!r}, line {line}" for key, line in key_lines(file).items()}
    values = _Values(whole, command)
    try:
        values.put(read, location=lambda key: f"{places.get(key, 'the file')}: ")
        values.put_environment()
        values.put_words(words)
        variables = environment.checked_environment(values.get(environment.KEY))
        config = kind(**values.arguments(whole))
    except ConfigError as error:
        raise _placed(error, places, words) from error.__cause__
    except (TypeError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    for name, value in variables.items() if export else ():
        os.environ.setdefault(name, value)
    shown = without_secrets(dataclasses.asdict(config), HIDDEN)  # type: ignore[call-overload]
    return config, yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


class _Text(str):
    """Of an option or a variable, which is YAML unless the key can be a text."""


class _Values:
    """The values of keys, as they are set one after the other; only the last one of each has to be right."""

    def __init__(self, kind: type[Checked], command: str) -> None:
        self._options = {option.key: option.hint for option in options_of(kind)} | {environment.KEY: dict[str, Any]}
        self._groups = {key[:at] for key in self._options for at, sign in enumerate(key) if sign == "."}
        self._command = command
        self._found: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        """The value of a key; None if it is not set."""
        return _converted(key, self._found[key], self._options[key]) if key in self._found else None

    def put(self, values: Mapping[str, Any], prefix: str = "", location: Callable[[str], str] = lambda key: "") -> None:
        """Set keys of a mapping that has groups as mappings, as a file has; errors of unknown keys name the place."""
        for name, value in values.items():
            key = f"{prefix}{name}"
            if key in self._options:
                self._found[key] = value
            elif key in self._groups:
                value = parse_yaml(value, key) if isinstance(value, _Text) else value
                require(isinstance(value, Mapping), key, value, "must be a group of keys and their values")
                self.put(value, f"{key}.", location)
            else:
                shown, nearest = key if key.isprintable() else repr(key), meant(key, self._options, "")
                raise ConfigError(f"{shown}: {location(key)}async-rlhf {self._command} has no such key{nearest}")

    def put_environment(self) -> None:
        """Set keys by variables. A variable with our prefix that sets no key is misspelt, and warned of."""
        known = {variable_of(key): key for key in (*sorted(self._groups), *self._options)}  # the innermost wins
        self.put({key: _Text(os.environ[name]) for name, key in known.items() if name in os.environ})
        for name in os.environ.keys() - known.keys() - {f"{ENVIRONMENT_PREFIX}_CACHE", API_KEY_VARIABLE}:
            if name.startswith(f"{ENVIRONMENT_PREFIX}_"):
                text = f"warning: the environment variable {name} sets no option of async-rlhf {self._command}"
                print(text, file=sys.stderr)

    def put_words(self, words: Sequence[str]) -> None:
        """Set keys by ``--key value`` and ``--key=value``. Of a list each word is one element, or all as YAML."""
        begun: set[str] = set()
        kept = {name: hint for name, hint in self._options.items() if can_be(dict, hint)}
        for key, text in _pairs(words, {name for name, hint in self._options.items() if hint is bool}):
            name, added = key.removesuffix("+"), key.endswith("+")
            free = next((stem for stem in kept if key.startswith(f"{stem}.")), None)
            if free is not None:  # a key below one that holds keys of any name, as ``models`` does
                value = text if get_args(kept[free])[-1] is str else parse_yaml(text, f"--{key}")
                self.put({free: _with(self.get(free), key[len(free) + 1 :].split("."), value)})
            elif name not in {*self._options, *self._groups}:
                option = f"--{name}" if name.isprintable() else repr(f"--{name}")
                nearest = meant(name, self._options, "--")
                raise ConfigError(f"{option}: async-rlhf {self._command} has no such option{nearest}")
            elif get_origin(self._options.get(name)) is not list or (not added and (text[:1] == "[" or text == "null")):
                self.put({key: _Text(text)})
            else:
                more = parse_yaml(text, f"--{key}") if text.startswith("[") else [text]
                self.put({name: [*((self.get(name) or []) if added or name in begun else []), *more]})
                begun.add(name)

    def arguments(self, kind: type[Checked], prefix: str = "") -> dict[str, Any]:
        """What the class is called with: keys that are set, and groups of which one is set."""
        made: dict[str, Any] = {}
        for item in dataclasses.fields(kind):  # type: ignore[arg-type]
            key, hint, usual = f"{prefix}{item.name}", hints_of(kind)[item.name], default(item)
            if is_group(hint):
                inner = self.arguments(hint, f"{key}.")
                if inner or usual is MISSING:
                    made[item.name] = hint(**inner) if usual is MISSING else dataclasses.replace(usual, **inner)
            elif key in self._found:
                made[item.name] = self.get(key)
            elif usual is MISSING:
                raise ConfigError(f"{key}: must be given")
        return made


def _with(values: Any, names: Sequence[str], value: Any) -> dict[str, Any]:
    """A mapping with a value at the end of names, each below the one before."""
    first, *rest = names
    held = dict(values) if isinstance(values, Mapping) else {}
    return held | {first: _with(held.get(first), rest, value) if rest else value}


def _pairs(words: Sequence[str], switches: Collection[str]) -> Iterator[tuple[str, str]]:
    """Every key of a command line, and the text of its value; "true" for a switch without one."""
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        key, equals, value = word.partition("=")
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"got {word!r:.200}; must be --key value or --key=value")
        if not equals:
            has_value = bool(rest) and not rest[-1].startswith("--")
            require(has_value or key[2:] in switches, key, "", "must have a value behind it")
            value = rest.pop() if has_value else "true"
        yield key[2:], value


def _converted(key: str, value: Any, hint: Any) -> Any:
    """A value of the key's type, of a value as a file says it, or of its text.

    Raises:
        ConfigError: it is not of the type.
    """
    if isinstance(value, str):
        value = _of_text(key, value, hint)
    if get_origin(hint) is list and isinstance(value, list):
        value = [_converted(key, each, get_args(hint)[0]) for each in value]
    return fitting(key, value, hint)


def _of_text(key: str, text: str, hint: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if text in (option for kind in kinds if get_origin(kind) is Literal for option in get_args(kind)):
        return str(text)
    if isinstance(text, _Text) and text in ("null", "Null", "NULL", "~") and type(None) in kinds:
        return None
    is_yaml = bool(text) and (bool in kinds or (isinstance(text, _Text) and str not in kinds))
    if {int, float} & set(kinds):
        is_yaml = reads_as_number(text)
        require(is_yaml or not any(map(str.isdigit, text)), key, text, "must be a number")
    return parse_yaml(text, key) if is_yaml else str(text)


def help_of(kind: type[Checked], command: str, whole: bool) -> str:
    """The help of all keys, with their rules and roles; or, where there are many, of those that matter most, in groups.

    Those that matter have a title: ``key(..., main="the title")``.
    """
    options = list(options_of(kind))
    titles = dict.fromkeys(option.known["main"] for option in options if option.known.get("main"))
    summary = " ".join((kind.__doc__ or "").split("\n\n")[0].replace("``", "").split())
    lines = [f"usage: async-rlhf {command} [--config FILE.yml] [--key value ...] [--dry-run]", "", summary, ""]
    if titles and len(options) > FEW and not whole:
        for title in sorted(titles, key=lambda title: title == "output"):
            lines.append(f"{title}:")
            for option in (option for option in options if option.known.get("main") == title):
                lines += _explained(option, re.split(r"(?<=\w\w[.:]) +(?=[A-Z])", option.text)[0])
            lines.append("")
        return "\n".join([*lines, f"async-rlhf {command} --help-all explains all {len(options)} keys."])
    for option in options:
        lines += _explained(option, f"{option.text}{option.more}")
    lines += _explained(Option(environment.KEY, dict, {}, {}, None), environment.EXPLAINED)
    end = (
        f"Every option can also be set by a YAML file (--config) or an environment variable: {ENVIRONMENT_PREFIX}_"
        "TRAIN__SEED sets --train.seed. The command line wins over the environment, the environment over the file. An "
        "option marked [speed], [place] or [log] decides no result: what is finished is not done again for another "
        "value, and a run can be resumed with one."
    )
    return "\n".join([*lines, "", *_wrapped(end)])


def _explained(option: Option, text: str) -> list[str]:
    default = "required" if option.default is MISSING else f"default: {json.dumps(option.default, default=str)}"
    return [f"  --{option.key} {_metavar(option.hint)}".rstrip(), *_wrapped(f"{text} ({default})", " " * 6)]


def _wrapped(text: str, indent: str = "") -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


_METAVARS = {bool: "[true|false]", int: "INT", float: "FLOAT", str: "TEXT", dict: "YAML"}


def _metavar(hint: Any) -> str:
    """What the value of an option is, in a word."""
    if get_origin(hint) is list:
        return f"{_metavar(get_args(hint)[0])} ..."
    if get_origin(hint) in (Union, types.UnionType):
        words = (_metavar(option) for option in get_args(hint) if option is not type(None))
        return "|".join(dict.fromkeys(word for word in words if word))
    if get_origin(hint) is Literal:
        return "|".join(str(option).lower() for option in get_args(hint))
    return _METAVARS.get(get_origin(hint) or hint, "")


def _placed(error: ConfigError, places: Mapping[str, str], arguments: Sequence[str]) -> ConfigError:
    """The error with the place of the key that it names, if that key's value is from the file."""
    named = re.match(r"([\w.]+): ", str(error))
    keys = [key for key in places if named and f".{key}".endswith(f".{named[1]}")]
    if len(keys) != 1 or f": {places[keys[0]]}: " in str(error):
        return error
    is_above = _take(f"--{keys[0]}", arguments)[0] is not None or variable_of(keys[0]) in os.environ
    return error if is_above else ConfigError(f"{error} ({places[keys[0]]})")


def take_config_file(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file after the last ``--config``, and all other words."""
    file, rest = _take("--config", arguments)
    require(file is None or Path(file).is_file(), "--config", file, "there is no such file")
    return file, rest


def _take(option: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of an option where it is last, None without it; and all other words."""
    value, rest, words = None, [], iter(arguments)
    for word in words:
        name, _, behind = word.partition("=")
        if name == option:
            value = behind or next(words, "")
        else:
            rest.append(word)
    return value, rest


def _early(key: str, arguments: Sequence[str], read: Mapping[str, Any]) -> Any:
    """The value of a single key, read before the others are known; None if it is not set."""
    value, _ = _take(f"--{key}", arguments)
    return os.environ.get(variable_of(key), read.get(key)) if value is None else value
