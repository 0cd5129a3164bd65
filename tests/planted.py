"""Faults in one function of the package, for as long as a test needs them."""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A mistake in one function of the package."""

    function: str
    """Module below the package and name within it: "models.forward:score_batch"."""
    right: str
    """What the function says, once."""
    wrong: str
    """What it says with the mistake."""


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    module, _, name = fault.function.partition(":")
    place: Any = importlib.import_module(f"async_rlhf.{module}")
    function = inspect.unwrap(attrgetter(name)(place))
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(fault.right) != 1:
        raise LookupError(f"{fault.function} says {fault.right!r} {source.count(fault.right)} times; must be once")
    text = source.replace(fault.right, fault.wrong)
    found: dict[str, Any] = {}
    exec(
        compile(text, f"<{fault.function}>", "exec", __future__.annotations.compiler_flag),
        dict(function.__globals__),
        found,
    )
    made = found[function.__name__]
    made = made.fget if isinstance(made, property) else inspect.unwrap(made)
    right, function.__code__ = function.__code__, made.__code__
    try:
        yield
    finally:
        function.__code__ = right
