"""The only YAML reader: for our own files, the original's files, and values on the command line.

Numbers mean what they look like: 1e-5 is one, while "1:30", which YAML 1.1 takes for 90, and "010", its 8, are texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from async_rlhf.config.errors import ConfigError, problem_of_text

MAX_CHARACTERS = 100_000
"""Of a file: about twenty times the longest that a run writes, and read within a second."""
MAX_ALIASES = 30
"""Ten aliases of ten of ten ... are a few lines and a billion values."""
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+|0x[0-9a-fA-F]+|0b[01]+)$")
_REAL = re.compile(
    r"[-+]?((0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_TAGS = "tag:yaml.org,2002:"
_KINDS = {"null", "bool", "int", "float", "str", "seq", "map", "merge"}
_OTHER = (":int", ":float", ":timestamp", ":value")
"""Kinds of plain scalars that YAML 1.1 sees in more texts."""


class Repeated(NamedTuple):
    """A key that a mapping has again."""

    key: str
    lines: tuple[int, int]
    """Where it stands before and again, from 1."""
    values: tuple[str, str]
    """The text of both values."""


class _RefusedError(yaml.composer.ComposerError):
    """YAML that a configuration cannot be."""


class _Loader(yaml.SafeLoader):
    """YAML whose keys are texts that stand there once, with few aliases."""

    def __init__(self, text: str, repeated: list[Repeated] | None) -> None:
        super().__init__(text)
        self._text, self._repeated, self._aliases = text, repeated, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias, mark, fault = self.check_event(yaml.AliasEvent), self.peek_event().start_mark, ""
        self._aliases += is_alias
        node = super().compose_node(parent, index)
        assert node is not None
        if node.end_mark is None:  # it has not come to its end
            fault = "holds itself, by an alias"
        elif is_alias and self._aliases > MAX_ALIASES:
            fault = f"more than {MAX_ALIASES} aliases"
        elif isinstance(node, yaml.ScalarNode) and (problem := problem_of_text(node.value)):
            fault = f"got {node.value[:60]!r}; {problem}"
        elif node.tag.removeprefix(_TAGS) not in _KINDS:
            fault = f"got the tag {node.tag.replace(_TAGS, '!!')}; must be without it"
        if fault:
            raise _RefusedError(None, None, fault, mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, seen = super().compose_mapping_node(anchor), dict[str, tuple[int, str]]()
        for key, value in node.value:
            if key.tag == f"{_TAGS}merge":
                continue
            if key.tag != f"{_TAGS}str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                fault = f"got {shown!r:.200} as a key; must be text, in quotes where it reads otherwise"
                raise _RefusedError(None, None, fault, key.start_mark)
            now = key.start_mark.line + 1, self._text[value.start_mark.index : value.end_mark.index].strip()
            before = seen.get(key.value, now)
            if before is not now and self._repeated is None:
                fault = f"got the key {key.value!r:.200} again (line {before[0]}); must be there once"
                raise _RefusedError(None, None, fault, key.start_mark)
            if before is not now and self._repeated is not None:
                self._repeated.append(Repeated(key.value, (before[0], now[0]), (before[1], now[1])))
            seen[key.value] = now
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith(_OTHER)]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _REAL, list("-+0123456789."))


def read_yaml(path: str, key: str, repeated: list[Repeated] | None = None) -> Any:
    """The content of a YAML file.

    Args:
        path: of the file.
        key: the option that names the file, for errors.
        repeated: takes the keys that are there again, of which the last value counts; None refuses them.

    Raises:
        ConfigError: it cannot be read, or is not YAML that a configuration can be; names file and line.
    """
    prefix = f"{key}: {path!r}"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # UnicodeDecodeError is one
        raise ConfigError(f"{prefix}: {error}; must be a text file in UTF-8") from error
    return parse_yaml(text, prefix, repeated)


def parse_yaml(text: str, prefix: str, repeated: list[Repeated] | None = None) -> Any:
    """The value of a YAML text.

    Args:
        text: all of it.
        prefix: what errors begin with.
        repeated: see :func:`read_yaml`.

    Raises:
        ConfigError: it is not YAML that a configuration can be; names the line.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{prefix} has {len(text)} characters; must be at most {MAX_CHARACTERS} characters")
    try:
        return _Loader(text, repeated).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        what = " ".join(filter(None, (error.context, error.problem)))
        is_yaml = "" if isinstance(error, _RefusedError) else "is no YAML: "
        raise ConfigError(f"{prefix}{line}: {is_yaml}{what}") from error
    except RecursionError:
        raise ConfigError(f"{prefix}: is no YAML: lists or mappings too deep in each other") from None
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        why = " ".join(str(error).split())[:300]  # such as ValueError: a tag on a value of another type
        raise ConfigError(f"{prefix}: is no YAML: {why}") from error


def reads_as_number(text: str) -> bool:
    """Whether a text is a number that means what it looks like: of ASCII digits, with underscores between thousands if
    at all. Python and YAML 1.1 take more, such as "1__0", "010" and the digits of all scripts."""
    return any(form.match(text.strip(" \t\r\n")) for form in (_INTEGER, _REAL)) and any(map(str.isdigit, text))


def key_lines(text: str) -> dict[str, int]:
    """The line of every key of a YAML text, by its name with dots; the text is one that :func:`parse_yaml` has read."""
    return dict(_lines(_Loader(text, []).get_single_node(), ""))


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.tag == "tag:yaml.org,2002:merge":
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _lines(merged, prefix)
        else:
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _lines(value, f"{prefix}{key.value}.")
