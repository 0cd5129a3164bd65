"""transformers' own messages and bars while a model is loaded or saved: none that say what is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging

SMALL = 10**9
"""Bytes of a model that is loaded or saved within seconds, and needs no bar."""


def bytes_of(name: str) -> float:
    """Bytes of the weights in a folder; infinite for a name on the hub."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return float("inf")
    return sum(path.stat().st_size for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))


@contextmanager
def quietly(size: float) -> Iterator[None]:
    """Within, transformers reports only errors, and shows bars only for models of at least :data:`SMALL` bytes.

    Its report of missing and unexpected weights is left out: the callers check these themselves.
    """
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if size < SMALL:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
