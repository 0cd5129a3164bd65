"""What every configuration shares: keys with rules and roles, and errors that name key, value and what is right.

A key is a field of a frozen dataclass. The text below the field explains the key; ``--help`` shows it. The field gives
type and default, and :func:`key` adds rules and a role. Everything else that is said of keys derives from these.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypedDict,
    Union,
    Unpack,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import ConfigDict, TypeAdapter, ValidationError

from async_rlhf.config.errors import ConfigError, problem_of_text, require, shown
from async_rlhf.config.secrets import HIDDEN, is_secret
from async_rlhf.config.spelling import dotted, meant

_STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, validate_default=True, arbitrary_types_allowed=True
)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """What makes configurations of a class, or checks the values of a key."""
    return TypeAdapter(kind, config=None if dataclasses.is_dataclass(kind) else _STRICT)


_WORDS = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string", type(None): "null"}
_SEVERAL = {"an integer": "integers", "a finite number": "finite numbers", "a string": "strings"}


def spelt(kind: Any) -> str:
    """A key's type in words."""
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(repr(option) for option in get_args(kind))
    if origin in (Union, types.UnionType):
        return " or ".join(spelt(option) for option in get_args(kind))
    if origin in (list, tuple):
        each, *more = get_args(kind)
        count = f"{len(more) + 1} " if origin is tuple and ... not in more else ""
        return f"a list of {count}{_SEVERAL.get(spelt(each), spelt(each))}"
    if origin is dict:
        return "a mapping" if get_args(kind)[1] is Any else f"a mapping of names to {spelt(get_args(kind)[1])} each"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


Role = Literal["result", "speed", "place", "log"]
"""What a key decides. "result": what comes out. "speed": how fast, and how long to wait. "place": where things are
read, computed and written, and what may be used or replaced there. "log": what is reported. A finished stage is
refused only if a "result" key differs; a run may be resumed with other values of the other roles."""
SUMS = "the last digits of sums depend on it"
"""Why a run cannot be resumed bit for bit on another device, or with another number of threads."""
_LARGEST = 10**12
"""No count in a run is larger, and a product of a few counts still fits the numbers that programs use."""
REQUIRED: Any = MISSING
"""Stands for a default that does not exist."""


class Rule(NamedTuple):
    """A condition on the value of one key, unless it is null."""

    holds: Callable[[Any], Any]
    """What is true where it holds."""
    text: str
    """What is right, for the error, such as "must be at least 1"."""


class Metadata(TypedDict, total=False):
    """What can be said of a key."""

    ge: float
    """The value is at least this."""
    gt: float
    """It is above this."""
    le: float
    """It is at most this."""
    lt: float
    """It is below this."""
    why: str
    """Why it is at most so much, for the error."""
    role: Role
    """What the key decides; "result" if nothing is said."""
    may_change: str
    """Why a run may be resumed with another value although the key decides the result."""
    must_stay: str
    """Why a run may not be resumed with another value although the key does not decide the result."""
    main: str
    """The title under which the short ``--help`` shows the key; without one, ``--help-all`` alone does."""
    without_gpu: Any
    """What the default means where there is no GPU, if it depends on one."""
    names: str
    """What kind of thing the value, or each in it, names: see :func:`~async_rlhf.system.names.check_names`."""


def key(default: Any, *rules: Rule, **said: Unpack[Metadata]) -> Any:
    """A field of a configuration.

    Args:
        default: REQUIRED for none; for a group its class, or a function that makes it.
        rules: conditions on the value that pydantic has not. Those on several keys belong in :meth:`Checked.check`.
        said: bounds, which pydantic reads in a field's metadata, and the rest.
    """
    known = {**said, "rules": rules} if rules else {**said}
    make = default.copy if isinstance(default, (list, dict)) else default  # each configuration gets its own copy
    if callable(make):
        return dataclasses.field(default_factory=make, metadata=known)
    return dataclasses.field(default=default, metadata=known)


_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {:,}", "lt": "below {}"}


def right_of(bound: str, known: Mapping[str, Any]) -> str:
    """What is right by one of the bounds that :func:`key` was given."""
    why = f": {known['why']}" if "why" in known and bound in ("le", "lt") else ""
    return f"must be {_BOUNDS[bound].format(known[bound])}{why}"


def _no_file(value: str) -> bool:
    path = Path(value).expanduser()
    return path.is_dir() or not path.exists()


def _in_folder(value: str) -> bool:
    above = Path(value).expanduser().parents
    return next((parent.is_dir() for parent in above if parent.exists()), True)


_INSIDE = Rule(_in_folder, "is inside a file; must be in a folder")
FOLDER = (Rule(_no_file, "is there and is no folder; must name a folder"), _INSIDE)
"""A folder that exists or can be made."""
FILE = (Rule(lambda value: not Path(value).expanduser().is_dir(), "is a folder; must name a file"), _INSIDE)
"""A file that can be written."""
DEVICE = Rule(
    re.compile(r"cpu|mps|(cuda|xpu)(:([0-9]|[1-9][0-9]|1[01][0-9]|12[0-7]))?").fullmatch,
    'must be "cpu", "cuda", "cuda:1" or the like up to 127, "mps" or "xpu"',
)
"""torch counts devices in 8 bits: it reads "cuda:128" as "cuda:-128"."""
APART = Rule(lambda value: value == "learner" or DEVICE.holds(value), f'{DEVICE.text}; or "learner"')
"""Where a model that is not trained computes: where the learner does, in its turn, or on a device, beside training."""

EACH_ONCE = Rule(lambda names: len(set(names)) == len(names), "must name each once")


hints_of: Callable[[type], dict[str, Any]] = cache(get_type_hints)
"""The types of a configuration's fields, by name; evaluated once for each class, as a run makes many of them."""


@dataclass_transform(frozen_default=True)
def configuration(kind: Any = None, /, *, kw_only: bool = False) -> Any:
    """A frozen dataclass of keys. A class of the user's own may as well have ``@dataclass(frozen=True)``."""
    return dataclasses.dataclass(kind, frozen=True, kw_only=kw_only)


def can_be(origin: type, kind: Any) -> bool:
    """Whether a key of this type may have a list, a tuple or a dictionary."""
    return any(get_origin(each) is origin for each in (kind, *get_args(kind)))


def _as_list(value: Any, kind: Any) -> Any:
    """A value as a list where the key's type is one."""
    if isinstance(value, tuple) and not can_be(tuple, kind):
        return list(value)
    # One name stands for a list of it.
    return [value] if isinstance(value, str) and kind == list[str] else value


def fitting(key: str, value: Any, kind: Any) -> Any:
    """A value as a key of this type has it.

    Raises:
        ConfigError: it is not of the type.
    """
    try:
        return _adapter(kind).validate_python(_as_list(value, kind))
    except ValidationError:
        require(False, key, value, f"must be {spelt(kind)}")


def _error_of(kind: Any, error: ValidationError, values: Mapping[str, Any]) -> Exception:
    """The first of pydantic's errors as one of ours."""
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    if isinstance(context.get("error"), Exception):  # of a class's own checks
        return context["error"]
    name = str(first["loc"][0])
    if name not in hints_of(kind):
        nearest = meant(name, [option.key for option in options_of(kind)], "")
        return ConfigError(f"{name}: {kind.__name__} has no such key{nearest}")
    if first["type"] == "missing" and name not in values:
        return ConfigError(f"{name}: must be given")
    value = values[name] if name in values else default_of(kind, name)
    known = kind.__dataclass_fields__[name].metadata
    bound = next((bound for bound in _BOUNDS if bound in context), None)
    rule = f"must be {spelt(hints_of(kind)[name])}" if bound is None else right_of(bound, known)
    return ConfigError(f"{kind._group}{name}: got {HIDDEN if is_secret(name) else shown(value)}; {rule}")


class _Signature:
    """What a class takes, as ``help()`` and notebooks show it; its ``__init__`` does not say."""

    def __get__(self, made: Any, kind: type) -> inspect.Signature:
        if made is not None or not dataclasses.is_dataclass(kind):  # a reward can be called, and takes something else
            raise AttributeError
        keys = [(item.name, item.type, copy(item)) for item in dataclasses.fields(kind)]
        return inspect.signature(dataclasses.make_dataclass(kind.__name__, keys))


class Checked:
    """Base of the configurations, which are dataclasses that pydantic makes: it checks types and bounds, then come the
    rules of each key; subclasses add checks of several.

    They are dataclasses, and no BaseModel: a user's own class is one by the standard library's decorator, keys are also
    given by position, and ``replace``, ``fields`` and ``asdict`` of the standard library take them.

    ``name = key(value)``, without a type, gives a key of a class above another default; the rest of what is said of it
    stays, unless that is said again.

    Raises:
        ConfigError: when one is made, by a value of another type, or with a key that it has not.
    """

    __pydantic_config__ = _STRICT
    __signature__ = _Signature()
    _group = ""
    """Prefix of key names in errors."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A class with an __init__ of its own gets none from the standard library's decorator, which checks nothing.
        cls.__init__ = cls.__init__  # type: ignore[method-assign]
        for name, value in [*vars(cls).items()]:
            above: Any = next((b for b in cls.__mro__[1:] if name in getattr(b, "__dataclass_fields__", ())), None)
            if above is not None and name not in cls.__annotations__:
                item: Any = value if isinstance(value, dataclasses.Field) else key(value)
                before, bounds = above.__dataclass_fields__[name], {*_BOUNDS, "why"}
                again = bounds if item.metadata.keys() & _BOUNDS.keys() else set[str]()
                kept = {word: meant for word, meant in before.metadata.items() if word not in again}
                item.metadata, item.kw_only = {**kept, **item.metadata}, before.kw_only
                setattr(cls, name, item)
                cls.__annotations__[name] = hints_of(above)[name]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        kind: Any = type(self)
        order = [item.name for item in dataclasses.fields(kind) if item.init and not item.kw_only]
        if len(arguments) > len(order):
            raise TypeError(f"{kind.__name__} takes {len(order)} values without names; got {len(arguments)}")
        values = dict(**dict(zip(order, arguments, strict=False)), **named)
        values = {name: _as_list(value, hints_of(kind).get(name)) for name, value in values.items()}
        try:
            _adapter(kind).validator.validate_python(values, self_instance=self)
        except ValidationError as error:
            failure = _error_of(kind, error, values)
            raise failure from failure.__cause__

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            counts = not isinstance(value, int) or abs(value) <= _LARGEST
            require(counts, item.name, value, f"must be at most {_LARGEST:,} in size: nothing that is counted is more")
            problem = problem_of_text(value) if isinstance(value, str) else None
            require(problem is None, item.name, value, str(problem))
            for rule in item.metadata.get("rules", ()) if value is not None else ():
                try:
                    holds, text = rule.holds(value), rule.text
                except (OSError, RuntimeError) as error:  # a path that is too long, circular links
                    holds, text = False, f"must name a folder: {error}"
                self.require(holds, item.name, text)
        self.check()

    @classmethod
    def with_all_keys(cls, value: Callable[[str], Any]) -> type[Checked]:
        """The class that a parser takes the keys from, if they depend on the value of another key: ``value(key)``."""
        return cls

    def check(self) -> None:
        """Checks of several keys together. Raises :class:`ConfigError`."""

    def require(self, condition: bool, name: str, rule: str) -> None:
        """Raise :class:`ConfigError` for the key with a dotted name unless ``condition`` holds."""
        if not condition:
            require(False, f"{self._group}{name}", attrgetter(name)(self), rule)

    def leaves_out(self, names: Iterable[str], why: str, group: str = "") -> None:
        """Require keys, dotted or not, to have their defaults; ``why`` ends the error. Raises :class:`ConfigError`."""
        for name in names:
            value, default = attrgetter(name)(self), default_of(self, name)
            require(value == default, f"{group}{name}", value, f"must be left out {why}")


def fields_of(kind: Any) -> list[dataclasses.Field[Any]]:
    """A configuration's keys in the order of ``--help``: its own, then those that it shares with other commands."""
    return sorted(dataclasses.fields(kind), key=lambda item: bool(item.kw_only))


class Option(NamedTuple):
    """A key that can be set, and what the help says of it."""

    key: str
    """With dots."""
    hint: Any
    default: Any
    """MISSING if it must be set."""
    known: Mapping[str, Any]
    """What :func:`key` was told."""
    owner: Any
    """The class that has it."""

    @property
    def text(self) -> str:
        """The text below the field."""
        return texts_of(self.owner).get(self.key.rpartition(".")[2], "")

    @property
    def more(self) -> str:
        """Its rules, role, and what may change on resume."""
        rules = [right_of(bound, self.known) for bound in _BOUNDS if bound in self.known]
        rules += [rule.text for rule in self.known.get("rules", ())]
        rules = [rule.partition(": ")[0].removeprefix("must be ") for rule in rules if rule.startswith("must be ")]
        text = f" Must be {' and '.join(rules)}." if rules else ""
        text += f" [{self.known['role']}]" if self.known.get("role", "result") != "result" else ""
        for name, title in (("may_change", "may change on resume"), ("must_stay", "must stay on resume")):
            text += f" [{title}: {self.known[name]}]" if self.known.get(name) else ""
        return text


def options_of(kind: Any, prefix: str = "", instance: Any = None) -> Iterator[Option]:
    """Every key of a configuration.

    Args:
        kind: its class.
        prefix: of the keys, with its dot.
        instance: one of them, whose values are the defaults; None for those of the class.
    """
    for item in fields_of(kind):
        hint, key = hints_of(kind)[item.name], f"{prefix}{item.name}"
        usual = default(item) if instance is None else getattr(instance, item.name)
        if is_group(hint):
            yield from options_of(hint, f"{key}.", None if usual is MISSING else usual)
        else:
            yield Option(key, hint, usual, item.metadata, kind)


def is_group(hint: Any) -> bool:
    """Whether the type of a key says that it has keys of its own."""
    return isinstance(hint, type) and issubclass(hint, Checked)


@cache
def texts_of(kind: type) -> dict[str, str]:
    """The text below each field, of this class and those that it is made of. (pydantic's use_attribute_docstrings
    reads fields with a type alone, and not those of the classes above.)"""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            body: Any = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # no source of its own, as of a class made while the program runs
            continue
        for item, below in itertools.pairwise(body.body):
            match item, below:
                case (ast.AnnAssign(ast.Name(name)) | ast.Assign([ast.Name(name)]), ast.Expr(ast.Constant(str(text)))):
                    texts[name] = " ".join(text.split())
    return texts


def known_of(config: Any, name: str) -> Mapping[str, Any]:
    """What :func:`key` says about the field with a dotted name; empty if it says nothing or there is no such field."""
    first, _, rest = name.partition(".")
    item, value = config.__dataclass_fields__.get(first), getattr(config, first, None)
    if rest and isinstance(value, Checked):
        return known_of(value, rest)
    return {} if item is None else item.metadata


def decides_result(config: Any, name: str) -> bool:
    """Whether another value of this key makes a finished stage a different one."""
    return known_of(config, name).get("role", "result") == "result"


def with_new_keys(saved: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Values of an older version of this code, with dotted names. A key that it did not know counts as its default."""
    new = {name: default_of(config, name) for name in dotted(dataclasses.asdict(config)).keys() - saved.keys()}
    return {**saved, **{name: value for name, value in new.items() if value is not MISSING}}


def without_gpu(values: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Values with dotted names, where those that a GPU would decide are what they are without one."""
    meant = {name: known_of(config, name).get("without_gpu", MISSING) for name in values}
    open_ = {name for name, value in meant.items() if value is not MISSING and values[name] == default_of(config, name)}
    return {name: meant[name] if name in open_ else value for name, value in values.items()}


def default(item: dataclasses.Field[Any]) -> Any:
    """What a field is if nobody sets it; MISSING if it must be set."""
    return item.default if item.default_factory is MISSING else item.default_factory()


_default = cache(lambda kind, name: default(kind.__dataclass_fields__[name]))
"""The same of a class and a name, made once, as a group's is costly. Nobody may change it."""


def default_of(config: Any, name: str) -> Any:
    """What the key with a dotted name is if nobody sets it; MISSING if it must be set."""
    first, _, rest = name.partition(".")
    value = _default(config if isinstance(config, type) else type(config), first)
    if value is MISSING and rest and isinstance(getattr(config, first), Checked):
        return default_of(getattr(config, first), rest)  # a group that must be given: its own keys may have defaults
    for part in rest.split(".") if rest else ():
        value = getattr(value, part, MISSING)
    return value


def may_change(config: Any, name: str) -> bool:
    """Whether a run can be resumed with another value of this key."""
    known = known_of(config, name)
    return bool(known.get("may_change")) or (known.get("role", "result") != "result" and not known.get("must_stay"))
