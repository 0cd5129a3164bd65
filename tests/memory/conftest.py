"""One process of fake tensors, in which everything is measured: it changes torch while it does."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from fake_rank import Peak
from memory import Case, along_a_line, measure

Measure = Callable[..., dict[str, Peak]]


@pytest.fixture(scope="session")
def measured() -> Iterator[Measure]:
    """Measures a case there, also with a fault; nothing twice."""
    known: dict[tuple[str, str], dict[str, Peak]] = {}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:

        def find(case: Case, how: Measure = measure) -> dict[str, Peak]:
            name = (how.__name__, repr(case))
            if name not in known:
                known[name] = pool.submit(how, case).result(timeout=1800)
            return known[name]

        yield find


@pytest.fixture(scope="session")
def of_all_layers(measured: Measure) -> Measure:
    """Measures with four and five layers, and goes on along a straight line."""
    return lambda case: along_a_line({few: measured(case.of_depth(few)) for few in (4, 5)}, case.layers)
