"""The states of the global random generators. The loop itself does not use them, but rewards and callbacks may."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh32

RandomState: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, and values for JSON."""


def seed_all(seed: int) -> None:
    """Have Python's, numpy's and torch's generators begin with a seed of 0 to 2^32 - 1."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_by(*parts: object) -> None:
    """Seed them by a digest of these values."""
    seed_all(xxh32(repr(parts).encode(errors="surrogatepass")).intdigest())


def capture(gpus: bool = True) -> RandomState:
    """The states of Python's, numpy's and torch's generators, as tensors and as values for JSON; those of GPUs, too,
    unless they are not to be touched.
    """
    tensors = {"random.torch": torch.get_rng_state()}
    if gpus and torch.cuda.is_available():
        tensors |= {f"random.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    kind, keys, *rest = np.random.get_state(legacy=True)
    values = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}
    return tensors, values


def equal(first: RandomState, second: RandomState) -> bool:
    """Whether nothing was drawn between two calls of :func:`capture`."""
    return first[1] == second[1] and all(torch.equal(state, second[0][name]) for name, state in first[0].items())


def restore(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Restore what :func:`capture` returned. GPUs that were not there at that time keep their state."""
    version, state, gauss = values["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = values["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors["random.torch"])
    for name, state_of_gpu in tensors.items():
        gpu = name.partition("random.cuda.")[2]
        if gpu and int(gpu) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state_of_gpu, int(gpu))
