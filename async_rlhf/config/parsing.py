"""Configurations from a YAML file, the environment and the command line; each overrides those before it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import ValidationError

from async_rlhf.config import environment
from async_rlhf.config.base import Checked, ConfigError, adapter, fields_of, hints_of, require, rights_of, spelt
from async_rlhf.config.secrets import API_KEY_VARIABLE, HIDDEN, without_secrets
from async_rlhf.config.spelling import meant
from async_rlhf.config.yaml_text import key_lines, parse_yaml, read_yaml, reads_as_number

ENVIRONMENT_PREFIX = "ASYNC_RLHF"
Config = TypeVar("Config", bound=Checked)
FLAGS = ("--help", "--help-all")
FEW = 15
"""A command with at most so many keys has all of them in its short help."""


class Option(NamedTuple):
    """A key that can be set, and what the help says of it."""

    key: str
    """With dots."""
    hint: Any
    default: Any
    """MISSING if it must be set."""
    known: Mapping[str, Any]
    """What :func:`~async_rlhf.config.base.key` was told."""
    owner: Any
    """The class that has it."""

    @property
    def text(self) -> str:
        """The text below the field."""
        return str(texts_of(self.owner).get(self.key.rpartition(".")[2], ""))

    @property
    def more(self) -> str:
        """Its rules, role, and what may change on resume."""
        rules = [rule.partition(": ")[0] for rule in rights_of(self.known)]
        rules = [rule.removeprefix("must be ") for rule in rules if rule.startswith("must be ")]
        text = f" Must be {' and '.join(rules)}." if rules else ""
        text += f" [{self.known['role']}]" if self.known.get("role", "result") != "result" else ""
        for name, title in (("may_change", "may change on resume"), ("must_stay", "must stay on resume")):
            text += f" [{title}: {self.known[name]}]" if self.known.get(name) else ""
        return text


def options_of(kind: type[Checked], prefix: str = "", instance: Any = None) -> Iterator[Option]:
    """Every key of a configuration.

    Args:
        kind: its class.
        prefix: of the keys, with its dot.
        instance: one of them, whose values are the defaults; None for those of the class.
    """
    hints = hints_of(kind)
    for item in fields_of(kind):
        hint, key = hints[item.name], f"{prefix}{item.name}"
        default = _default(item) if instance is None else getattr(instance, item.name)
        if _is_group(hint):
            yield from options_of(hint, f"{key}.", None if default is MISSING else default)
        else:
            yield Option(key, hint, default, item.metadata, kind)


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
    read = {} if config_file is None else _mapping(read_yaml(config_file, "--config"), config_file)
    environment.checked_environment(read.get(environment.KEY))
    whole = kind.with_all_keys(lambda key: _early(key, words, read))
    if set(FLAGS) & set(words) or "-h" in words:
        print(long_help(whole, command) if "--help-all" in words else short_help(whole, command))
        sys.exit(0)
    places = {} if config_file is None or translated else _places(config_file)
    known = {option.key: option.hint for option in options_of(whole)}
    values = _Values(known, command)
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
    if export:
        environment.export(variables)
    shown = without_secrets(dataclasses.asdict(config), HIDDEN)  # type: ignore[call-overload]
    return config, yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


class _Values:
    """The values of keys, as they are set one after the other; only the last one of each has to be right."""

    def __init__(self, known: Mapping[str, Any], command: str) -> None:
        self._options = {**known, environment.KEY: dict[str, Any]}
        self.groups = {key[:at] for key in self._options for at, sign in enumerate(key) if sign == "."}
        self._command = command
        self._found: dict[str, tuple[Any, bool]] = {}
        """Each as it is written, and whether that is a text that stands for it."""

    def get(self, key: str) -> Any:
        """The value of a key; None if it is not set."""
        value, is_text = self._found.get(key, (None, False))
        return converted(key, value, self._options[key], is_text) if key in self._found else None

    def put(
        self,
        values: Mapping[str, Any],
        prefix: str = "",
        is_text: bool = False,
        location: Callable[[str], str] = lambda key: "",
    ) -> None:
        """Set keys of a mapping that has groups as mappings, as a file has; errors of unknown keys name the place."""
        for name, value in values.items():
            key = f"{prefix}{name}"
            if key in self._options:
                self._found[key] = value, is_text
                continue
            if key not in self.groups:
                shown, nearest = key if key.isprintable() else repr(key), meant(key, self._options, "")
                raise ConfigError(f"{shown}: {location(key)}async-rlhf {self._command} has no such key{nearest}")
            value = parse_yaml(value, key) if is_text else value
            require(isinstance(value, Mapping), key, value, "must be a group of keys and their values")
            self.put(value, f"{key}.", location=location)

    def put_environment(self) -> None:
        """Set keys by variables. A variable with our prefix that sets no key is misspelt, and warned of."""
        known = {variable_of(key): key for key in (*sorted(self.groups), *self._options)}  # the innermost wins
        for name, key in known.items():
            if name in os.environ:
                self.put({key: os.environ[name]}, is_text=True)
        for name in os.environ.keys() - known.keys() - {f"{ENVIRONMENT_PREFIX}_CACHE", API_KEY_VARIABLE}:
            if name.startswith(f"{ENVIRONMENT_PREFIX}_"):
                text = f"warning: the environment variable {name} sets no option of async-rlhf {self._command}"
                print(text, file=sys.stderr)

    def put_words(self, words: Sequence[str]) -> None:
        """Set keys by ``--key value`` and ``--key=value``. Of a list each word is one element, or all as YAML."""
        begun: set[str] = set()
        for key, text in _pairs(words, {name for name, hint in self._options.items() if hint is bool}):
            name, added = key.removesuffix("+"), key.endswith("+")
            free = next((stem for stem in self._options if key.startswith(f"{stem}.") and self._is_free(stem)), None)
            if free is None and name not in {*self._options, *self.groups}:
                option = f"--{name}" if name.isprintable() else repr(f"--{name}")
                nearest = meant(name, self._options, "--")
                raise ConfigError(f"{option}: async-rlhf {self._command} has no such option{nearest}")
            if free is not None:  # a key below one that holds keys of any name
                value = text if get_args(self._options[free])[-1] is str else parse_yaml(text, f"--{key}")
                self.put({free: _with(self.get(free), key[len(free) + 1 :].split("."), value)})
            elif get_origin(self._options.get(name)) is not list or (not added and (text[:1] == "[" or text == "null")):
                self.put({key: text}, is_text=True)
            else:
                more = parse_yaml(text, f"--{key}") if text.startswith("[") else [text]
                self.put({name: [*((self.get(name) or []) if added or name in begun else []), *more]})
                begun.add(name)

    def _is_free(self, name: str) -> bool:
        """Whether a key holds keys of any name, as ``models`` does."""
        hint = self._options[name]
        return any(get_origin(kind) is dict for kind in (hint, *get_args(hint)))

    def arguments(self, kind: type[Checked], prefix: str = "") -> dict[str, Any]:
        """What the class is called with: keys that are set, and groups of which one is set."""
        made: dict[str, Any] = {}
        hints = hints_of(kind)
        for item in dataclasses.fields(kind):  # type: ignore[arg-type]
            key, default = f"{prefix}{item.name}", _default(item)
            if _is_group(hint := hints[item.name]):
                inner = self.arguments(hint, f"{key}.")
                if default is MISSING:
                    made[item.name] = hint(**inner)
                elif inner:
                    made[item.name] = dataclasses.replace(default, **inner)
            elif key in self._found:
                made[item.name] = self.get(key)
            elif default is MISSING:
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


def converted(key: str, value: Any, hint: Any, is_text: bool) -> Any:
    """A value of the key's type.

    Args:
        key: with dots, for errors.
        value: as a file says it, or its text.
        hint: the type.
        is_text: whether it is the text of an option or a variable, which is YAML unless the key can be a text.

    Raises:
        ConfigError: it is not of the type.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, str):
        value = _of_text(key, value, hint, kinds, is_text)
    if hint == list[str] and isinstance(value, str):  # one name stands for a list of it
        value = [value]
    if get_origin(hint) is list and isinstance(value, list):
        value = [converted(key, each, get_args(hint)[0], False) for each in value]
    try:
        return adapter(hint).validate_python(value)
    except ValidationError:
        require(False, key, value, f"must be {spelt(hint)}")


def _of_text(key: str, text: str, hint: Any, kinds: Sequence[Any], is_text: bool) -> Any:
    if text in (option for kind in kinds if get_origin(kind) is Literal for option in get_args(kind)):
        return text
    if is_text and text in ("null", "Null", "NULL", "~") and type(None) in kinds:
        return None
    if {int, float} & set(kinds):
        require(not any(map(str.isdigit, text)) or reads_as_number(text), key, text, "must be a number")
        return _number(text) if reads_as_number(text) else text
    written = (is_text and str not in kinds) or bool in kinds
    return parse_yaml(text, key) if written and text else text


def _number(text: str) -> int | float:
    try:
        return int(text, 0)
    except ValueError:
        return float(text)


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Checked)


def _default(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


@cache
def texts_of(kind: type) -> dict[str, str]:
    """The text below each field, of this class and those that it is made of."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # no source of its own, as of a class made while the program runs
            continue
        for item, below in itertools.pairwise(getattr(body, "body", ())):
            text = getattr(getattr(below, "value", None), "value", None) if isinstance(below, ast.Expr) else None
            target = item.targets[0] if isinstance(item, ast.Assign) else getattr(item, "target", None)
            if isinstance(target, ast.Name) and isinstance(text, str):
                texts[target.id] = " ".join(text.split())
    return texts


def short_help(kind: type[Checked], command: str) -> str:
    """The help of the keys that matter most, in groups; of all keys where a command has few.

    Those that matter have a title: ``key(..., main="the title")``.
    """
    options = list(options_of(kind))
    titles = [option.known["main"] for option in options if option.known.get("main")]
    if not titles or len(options) <= FEW:
        return long_help(kind, command)
    lines = [*_head(kind, command), ""]
    for title in sorted(dict.fromkeys(titles), key=lambda title: title == "output"):
        lines.append(f"{title}:")
        for option in (option for option in options if option.known.get("main") == title):
            lines += _explained(option, re.split(r"(?<=\w\w[.:]) +(?=[A-Z])", option.text)[0])
        lines.append("")
    return "\n".join([*lines, f"async-rlhf {command} --help-all explains all {len(options)} keys."])


def long_help(kind: type[Checked], command: str) -> str:
    """The help of all keys, with their rules and roles."""
    lines = [*_head(kind, command), ""]
    for option in options_of(kind):
        lines += _explained(option, f"{option.text}{option.more}")
    lines += _explained(Option(environment.KEY, dict, {}, {}, None), environment.EXPLAINED)
    end = (
        f"Every option can also be set by a YAML file (--config) or an environment variable: {ENVIRONMENT_PREFIX}_"
        "TRAIN__SEED sets --train.seed. The command line wins over the environment, the environment over the file. An "
        "option marked [speed], [place] or [log] decides no result: what is finished is not done again for another "
        "value, and a run can be resumed with one."
    )
    return "\n".join([*lines, "", *textwrap.wrap(end, _width())])


def _head(kind: type[Checked], command: str) -> list[str]:
    usage = f"usage: async-rlhf {command} [--config FILE.yml] [--key value ...] [--dry-run]"
    return [usage, "", " ".join((kind.__doc__ or "").split("\n\n")[0].replace("``", "").split())]


def _explained(option: Option, text: str) -> list[str]:
    default = "required" if option.default is MISSING else f"default: {json.dumps(option.default, default=str)}"
    wide = {"width": _width(), "initial_indent": " " * 6, "subsequent_indent": " " * 6}
    return [f"  --{option.key} {_metavar(option.hint)}".rstrip(), *textwrap.wrap(f"{text} ({default})", **wide)]  # type: ignore[arg-type]


def _metavar(hint: Any) -> str:
    """What the value of an option is, in a word."""
    if get_origin(hint) is list:
        return f"{_metavar(get_args(hint)[0])} ..."
    if get_origin(hint) in (Union, types.UnionType):
        words = (_metavar(option) for option in get_args(hint) if option is not type(None))
        return "|".join(dict.fromkeys(word for word in words if word))
    if get_origin(hint) is Literal:
        return "|".join(str(option).lower() for option in get_args(hint))
    return {bool: "[true|false]", int: "INT", float: "FLOAT", str: "TEXT", dict: "YAML"}.get(
        get_origin(hint) or hint, ""
    )


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns)


def _places(config_file: str) -> dict[str, str]:
    """File and line of every key of a file."""
    lines = key_lines(Path(config_file).read_text(encoding="utf-8-sig"))
    return {key: f"{config_file!r}, line {line}" for key, line in lines.items()}


def _placed(error: ConfigError, places: Mapping[str, str], arguments: Sequence[str]) -> ConfigError:
    """The error with the place of the key that it names, if that key's value is from the file."""
    named = re.match(r"([\w.]+): ", str(error))
    if named is None:
        return error
    keys = [key for key in places if key == named[1] or key.endswith(f".{named[1]}")]
    options = {word.partition("=")[0] for word in arguments}
    above = len(keys) == 1 and (f"--{keys[0]}" in options or variable_of(keys[0]) in os.environ)
    has_place = above or len(keys) != 1 or f": {places[keys[0]]}: " in str(error)
    return error if has_place else ConfigError(f"{error} ({places[keys[0]]})")


def take_config_file(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file after the last ``--config``, and all other words."""
    rest, file = [], None
    words = iter(arguments)
    for word in words:
        if word == "--config" or word.startswith("--config="):
            file = word.partition("=")[2] or next(words, "")
            require(Path(file).is_file(), "--config", file, "there is no such file")
        else:
            rest.append(word)
    return file, rest


def _mapping(values: Any, file: str) -> dict[str, Any]:
    """The content of a file; an empty file gives an empty mapping."""
    require(values is None or isinstance(values, dict), f"--config: {file!r}", values, "must be keys and their values")
    return values or {}


def _early(key: str, arguments: Sequence[str], read: Mapping[str, Any]) -> Any:
    """The value of a single key, read before the others are known; None if it is not set."""
    chosen = os.environ.get(variable_of(key), read.get(key))
    for word, after in itertools.pairwise([*arguments, ""]):
        if word == f"--{key}" or word.startswith(f"--{key}="):
            chosen = word.partition("=")[2] or after
    return chosen
