"""Engines by name: what the configuration and the generators have to know of each. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

from async_rlhf.config.base import ConfigError, require
from async_rlhf.config.import_by_name import load_attribute

Feature = Literal["policy", "redraw", "server", "adapters", "unseeded", "sleep", "staged", "vllm_options", "routes"]
"""What an engine can do, which others cannot:

- policy: sample from the learner's policy itself, on every rank; other engines load a copy of its weights
- redraw: draw by inversion from :mod:`async_rlhf.generation.sampling`, so that the learner can draw the same again
- server: run as ``async-rlhf serve``
- adapters: load the adapters alone
- unseeded: draw from one random generator instead of one for each prompt
- sleep: give its memory back and take it again: methods sleep() and wake()
- staged: read weights that lie on its GPU already, where the next version then waits
- vllm_options: follow the keys below ``vllm``
- routes: say to which experts of a mixture each token was sent (``SamplingParams.routes``)
"""


@dataclass(frozen=True)
class EngineSpec:
    """An engine, by what is needed to choose it. Its functions are named, so that every process can find them."""

    make: str
    """"module:NAME" of a function of (:class:`~async_rlhf.generation.engines.ModelSpec`,
    :class:`~async_rlhf.generation.protocol.SamplingParams`) that returns an
    :class:`~async_rlhf.generation.protocol.Engine`, whose weights are loaded later."""
    supports: frozenset[Feature] = frozenset()
    environment: str | None = None
    """"module:NAME" of a function of the devices ("cuda:0", ..., or "cpu") that returns variables of the environment: a
    generator process is then a fresh interpreter with these. None for a fork, which starts in milliseconds."""
    check: Callable[[], str] = str
    """Returns what must be done before it can be imported; "" for nothing."""
    starting: str = ""
    """What is said when a generator process starts, if that takes long."""
    coldest: float = 0.0
    """Lowest temperature that it samples at."""


def _vllm_is_missing() -> str:
    rule = "needs vLLM: in a checkout make setup-vllm, or with a GPU pip install 'async-rlhf[vllm]'"
    return "" if find_spec("vllm") is not None else rule


ENGINES = {
    "transformers": EngineSpec(
        "async_rlhf.generation.transformers_engine:make", frozenset({"policy", "redraw", "routes"})
    ),
    "vllm": EngineSpec(
        "async_rlhf.generation.vllm_engine:VLLMEngine",
        frozenset({"server", "adapters", "unseeded", "sleep", "staged", "vllm_options", "routes"}),
        environment="async_rlhf.generation.vllm_engine:environment",
        check=_vllm_is_missing,
        starting="vLLM is starting, which takes minutes while it compiles for the first time",
        coldest=0.01,
    ),
}
"""The built-in engines."""


@cache
def find(name: str) -> EngineSpec:
    """An engine: of :data:`ENGINES`, or one that is given as "module:NAME" or "path/to/file.py:NAME".

    Raises:
        ConfigError: there is none of that name.
    """
    if name in ENGINES:
        return ENGINES[name]
    rule = f'must be {_one_of(ENGINES)}, or an EngineSpec of your own as "module:NAME" or "file.py:NAME"'
    require(":" in name, "engine", name, rule)
    spec = load(name, "NAME")
    if not isinstance(spec, EngineSpec):
        raise ConfigError(f"engine: got {name!r}, which is {spec!r:.100}; {rule}")
    return spec


def able(feature: Feature) -> str:
    """The built-in engines that can do this, for error texts."""
    return _one_of([name for name, engine in ENGINES.items() if feature in engine.supports])


def load(name: str, what: str = "function") -> Any:
    """What an engine names as "module:NAME"."""
    source, _, attribute = name.rpartition(":")
    return load_attribute(source, attribute, "engine", what)


def _one_of(names: Any) -> str:
    return " or ".join(f'"{name}"' for name in names)
