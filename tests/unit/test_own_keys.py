"""Classes of keys, ours and a user's with the standard library's decorator, take what their types say and no more."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from async_rlhf.config import ConfigError
from async_rlhf.config.base import Checked, configuration, key

MADE: list[type] = []


def made_by(decorate: Callable[[type], Any]) -> Any:
    """A class of keys by this decorator."""

    @decorate
    class Keys(Checked):
        pair: tuple[float, float] = (0.2, 0.3)
        names: tuple[str, ...] = ()
        counts: list[int] = key([1])
        at_least: int = key(1, ge=1)
        array: np.ndarray = field(default_factory=lambda: np.zeros(2))
        memo: dict[str, Any] = field(init=False, default_factory=dict)

        def __post_init__(self) -> None:
            MADE.append(type(self))
            super().__post_init__()

        def check(self) -> None:
            if self.at_least == 7:
                raise ValueError("seven")

    return Keys


Foreign, Own = made_by(dataclass(frozen=True)), made_by(configuration)


@pytest.mark.parametrize("kind", [Foreign, Own])
def test_each_value_of_its_type_is_taken_and_the_class_is_made_once(kind):
    MADE.clear()
    made = kind(pair=(1.0, 2.0), names=("a", "b", "c"), counts=(3, 4), array=np.ones(1))
    assert [kind] == MADE
    assert (made.pair, made.names, list(made.counts), made.memo) == ((1.0, 2.0), ("a", "b", "c"), [3, 4], {})
    assert replace(made, at_least=2).at_least == 2
    assert [*inspect.signature(kind).parameters] == ["pair", "names", "counts", "at_least", "array"]
    with pytest.raises(TypeError, match="takes 5 values without names; got 6"):
        kind(*range(6))


@pytest.mark.parametrize("kind", [Foreign, Own])
@pytest.mark.parametrize(("value", "right"), [
    ({"pair": (1.0,)}, "must be a list of 2 finite numbers"),
    ({"names": (1,)}, "must be a list of strings"),
    ({"counts": (1, "a")}, "must be a list of integers"),
    ({"at_least": 0}, "must be at least 1"),
    ({"at_least": True}, "must be an integer"),
    ({"array": [1]}, "must be ndarray"),
])  # fmt: skip
def test_any_other_is_named(kind, value, right):
    (name,) = value
    with pytest.raises(ConfigError, match=f"^{name}: got .*; {right}"):
        kind(**value)


@pytest.mark.parametrize("kind", [Foreign, Own])
def test_an_error_of_its_own_check_keeps_its_type_and_its_line(kind):
    with pytest.raises(ValueError, match=r"^seven$") as error:
        kind(at_least=7)
    assert any(frame.name == "check" for frame in traceback.extract_tb(error.value.__traceback__))


@configuration
class Below(Own):
    at_least = key(0)


@configuration
class Text(Checked):
    number: int = key("text")


@pytest.mark.parametrize(("kind", "right"), [
    (Below, "at_least: got 0; must be at least 1"),
    (Text, "number: got 'text'; must be an integer"),
])  # fmt: skip
def test_defaults_are_checked_too(kind, right):
    with pytest.raises(ConfigError, match=right):
        kind()
