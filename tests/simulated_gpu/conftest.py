"""One process with simulated GPUs, in which all runs of this folder take place."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "golden"))

import simulated_runs


@pytest.fixture(scope="session")
def on_gpu() -> Iterator[Callable[..., Any]]:
    """Calls a function of simulated_runs there, and raises here what it raises."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=simulated_runs.prepare) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result(timeout=300)
