"""The only YAML reader: for our own files, the original's files, and values on the command line.

Numbers mean what they look like: "1:30" is not 90, and "010" is neither 8 nor 10 but an error. Input that could cost
unbounded time or memory (deep nesting, aliases of aliases, integers of a million digits) is refused before it is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from async_rlhf.config.base import ConfigError, problem_of_text

MAX_CHARACTERS = 100_000
"""Of a file: about twenty times the longest that a run writes, and read within a second."""
MAX_DEPTH = 20
"""Of nested mappings and lists. Ours need four, options of vLLM and DeepSpeed some more."""
MAX_NODES = 20_000
"""Keys and values after aliases are expanded: ten aliases of ten of ten ... are a few lines and a billion values."""
MAX_INTEGER = 2**63 - 1
"""The largest integer that fits 64 bits, as all programs below require."""
_DOUBTFUL = re.compile(r"[-+]?0[0-9_]+|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_PLAIN_NUMBER = re.compile(
    r"(?![-+]?0[0-9_]+$)[-+]?(0x[0-9a-fA-F]+|0b[01]+|\.[0-9]+([eE][-+]?[0-9]+)?"
    r"|([0-9]+|[0-9]{1,3}(_[0-9]{3})+)(\.[0-9]*)?([eE][-+]?[0-9]+)?)"
)
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without dates, and with 1e-5 as a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith((":timestamp", ":float", ":value"))]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


class Repeated(NamedTuple):
    """A key that a mapping has again."""

    key: str
    lines: tuple[int, int]
    """Where it stands before and again, from 1."""
    values: tuple[str, str]
    """The text of both values."""


def read_yaml(path: str, key: str, repeated: list[Repeated] | None = None) -> Any:
    """The content of a YAML file.

    Args:
        path: of the file.
        key: the option that names the file, for errors.
        repeated: takes the keys that are there again, of which the last value counts; None refuses them.

    Raises:
        ConfigError: it cannot be read, or is not YAML that a configuration can be; names file and line.
    """
    place = f"{key}: {path!r}"
    try:
        with Path(path).open("rb") as file:
            raw = file.read(4 * MAX_CHARACTERS + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, ValueError) as error:  # UnicodeDecodeError is one
        raise ConfigError(f"{place}: {error}; must be a text file in UTF-8") from error
    return parse_yaml(text, place, repeated)


def parse_yaml(text: str, place: str, repeated: list[Repeated] | None = None) -> Any:
    """The value of a YAML text.

    Args:
        text: all of it.
        place: what errors begin with.
        repeated: see :func:`read_yaml`.

    Raises:
        ConfigError: it is not YAML that a configuration can be; names the line.
    """
    if text.startswith("\ufeff"):  # YAML would skip it
        raise ConfigError(f"{place} begins with a byte-order mark; must be without it")
    right = f"must be at most {MAX_CHARACTERS} characters"
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{place} has {len(text)} characters or more; {right}")
    try:
        _check_depth(text, place)
        node = yaml.compose(text, _Loader)
        if node is None:
            return None
        _check_nodes(node, place, text, repeated)
        return _Loader("").construct_document(node)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        what = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{place}{line}: is no YAML: {what}") from error
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        told = " ".join(str(error).split())[:300]  # such as ValueError: a tag on a value of another type
        raise ConfigError(f"{place}: is no YAML: {told}") from error


def reads_as_number(text: str) -> bool:
    """Whether a text is a number that means what it looks like: of ASCII digits, with underscores between thousands if
    at all. Python and YAML take more, such as "1__0", "010" and the digits of all scripts."""
    return _PLAIN_NUMBER.fullmatch(text.strip(" \t\r\n")) is not None


def key_lines(text: str) -> dict[str, int]:
    """The line of every key of a YAML text, by its name with dots; the text is one that :func:`parse_yaml` has read."""
    lines: dict[str, int] = {}

    def walk(node: yaml.Node, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag == "tag:yaml.org,2002:merge":
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    walk(merged, prefix)
                continue
            lines[f"{prefix}{key.value}"] = key.start_mark.line + 1
            walk(value, f"{prefix}{key.value}.")

    if (root := yaml.compose(text, _Loader)) is not None:
        walk(root, "")
    return lines


def _check_depth(text: str, place: str) -> None:
    """Check the depth by parser events: building the values would recurse as deep as the text is nested."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ConfigError(f"{place}, line {line}: has lists or mappings deeper than {MAX_DEPTH} in each other")


def _check_nodes(root: yaml.Node, place: str, text: str, repeated: list[Repeated] | None) -> None:
    """Refuse aliases of themselves, too many values, duplicate keys, and ambiguous scalars."""
    sizes: dict[int, int | None] = {}  # None while it is being computed

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node), 0)
        line = f"{place}, line {node.start_mark.line + 1}"
        if known is None:
            raise ConfigError(f"{line}: holds itself, by an alias; must end somewhere")
        if known:
            return known
        sizes[id(node)] = None
        if node.tag not in _PLAIN_TAGS:
            raise ConfigError(f"{line}: got the tag {node.tag!r}; must be without: text, a number, a list or a mapping")
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node, line)
        elif isinstance(node, yaml.MappingNode):
            _check_keys(node, place, text, repeated)
        total = 1 + sum(size(child) for child in _children(node))
        if total > MAX_NODES:
            raise ConfigError(f"{line}: has more than {MAX_NODES} values, its aliases written out")
        sizes[id(node)] = total
        return total

    size(root)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _check_keys(node: yaml.MappingNode, place: str, text: str, repeated: list[Repeated] | None) -> None:
    seen: dict[str, tuple[int, str]] = {}
    for key, value in node.value:
        line = f"{place}, line {key.start_mark.line + 1}"
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.tag != "tag:yaml.org,2002:str":
            shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise ConfigError(f"{line}: got {shown!r:.200} as a key; must be text, in quotes where it reads otherwise")
        now = key.start_mark.line + 1, text[value.start_mark.index : value.end_mark.index].strip()
        before = seen.get(key.value)
        if before is not None and repeated is None:
            raise ConfigError(f"{line}: got the key {key.value!r:.200} again (line {before[0]}); must be there once")
        if before is not None and repeated is not None:
            repeated.append(Repeated(key.value, (before[0], now[0]), (before[1], now[1])))
        seen[key.value] = now


def _check_scalar(node: yaml.ScalarNode, line: str) -> None:
    shown = f"{line}: got {node.value[:60]!r}{'...' * (len(node.value) > 60)}"
    if problem := problem_of_text(node.value):
        raise ConfigError(f"{shown}; {problem}")
    is_number = node.tag.endswith((":int", ":float")) and any(map(str.isdigit, node.value))
    if node.style is None and (_DOUBTFUL.fullmatch(node.value) or (is_number and not reads_as_number(node.value))):
        raise ConfigError(f"{shown}; must be a plain decimal number, or text in quotes: YAML reads it in several ways")
    if node.tag == "tag:yaml.org,2002:int":
        digits = node.value.replace("_", "")
        if len(digits) > 70 or abs(int(digits, 0)) > MAX_INTEGER:
            raise ConfigError(f"{shown}; must be an integer of at most 64 bits")
