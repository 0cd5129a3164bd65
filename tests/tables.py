"""Tests of many cases: tables that are gone through in one test, and combinations of values, two by two."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest


def each(cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test of a table: every case is tried, and all that fail are named together.

    A case is the first argument of the test, or a tuple of the first ones; fixtures follow. Each case has an empty
    folder of its own, its changes by ``monkeypatch`` end with it, and it does not see what others printed or logged.
    """
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert rows

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(**fixtures: Any) -> None:
            failed = []
            for number, row in enumerate(rows):
                own = dict(fixtures)
                if "tmp_path" in own:
                    own["tmp_path"] = own["tmp_path"] / f"case_{number}"
                    own["tmp_path"].mkdir()
                patches = own["monkeypatch"].context() if "monkeypatch" in own else nullcontext()
                try:
                    with patches as patch:
                        check(*row, **own | ({"monkeypatch": patch} if patch else {}))
                except (Exception, pytest.fail.Exception) as error:
                    failed.append((row, error))
                if "capsys" in own:
                    own["capsys"].readouterr()
                if "caplog" in own:
                    own["caplog"].clear()
            told = "\n".join(f"{row!s:.300}: {type(error).__name__}: {error}" for row, error in failed)
            if failed:
                raise AssertionError(f"{len(failed)} of {len(rows)} cases fail:\n{told}") from failed[0][1]

        parameters = list(inspect.signature(check).parameters.values())[len(rows[0]) :]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of one value of each axis, with every pair of values of two axes in at least one of them.

    Each combination begins with a pair that is missing, then takes on every other axis the value that adds most.
    """
    places = list(itertools.combinations(range(len(axes)), 2))
    missing = {(a, i, b, j): None for a, b in places for i in range(len(axes[a])) for j in range(len(axes[b]))}
    found = []
    while missing:
        a, i, b, j = next(iter(missing))
        row = {a: i, b: j}
        for c in (c for c in range(len(axes)) if c not in row):
            new = [
                sum((*min((c, k), pair), *max((c, k), pair)) in missing for pair in row.items())
                for k in range(len(axes[c]))
            ]
            # Of values that add as much, another one each time.
            row[c] = max(range(len(new)), key=lambda k: (new[k], (k - len(found)) % len(new)))
        for (c, k), (d, m) in itertools.combinations(sorted(row.items()), 2):
            missing.pop((c, k, d, m), None)
        found.append(tuple(axis[row[c]] for c, axis in enumerate(axes)))
    return found
