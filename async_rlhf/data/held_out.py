"""Splits data into a part to train on and a part held out, the same in every command."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from async_rlhf.config import ConfigError
from async_rlhf.data.formats import identity, kept_chat, prompt_identity, prompt_of
from async_rlhf.data.loading import Rows


def hold_out(rows: Rows, fraction: float, key: str, prompt_field: str | None = None) -> tuple[Rows, Rows]:
    """The rows to train on, and those held out.

    A hash of what the row is about decides (see :func:`~async_rlhf.data.formats.identity`). So a row is on the same
    side in every command and with every seed, also among other rows, and rows of one prompt are on the same side.

    Args:
        rows: demonstrations, pairs, rated rows or prompts.
        fraction: about the share to hold out; at least one prompt is on either side.
        key: the configuration key that errors name.
        prompt_field: the column with the prompt, if rows are prompts.

    Raises:
        ConfigError: a row has no prompt and no text, or there are fewer than two prompts.
    """

    def identities() -> Iterator[str]:
        for number, row in enumerate(rows, start=1):
            label = f"{key}: row {number}"
            if prompt_field is None:
                yield identity(row, label)
            else:
                yield prompt_identity(kept_chat(row, label) or prompt_of(row, prompt_field), label)

    held = _lowest(np.fromiter(map(_hash, identities()), np.uint64), fraction, key)
    return taken(rows, np.flatnonzero(~held)), taken(rows, np.flatnonzero(held))


def held_out_names(names: Sequence[str], fraction: float, key: str) -> set[str]:
    """Those of the names whose hash is in the lowest ``fraction`` of all hashes; at least one, and not all.

    Raises:
        ConfigError: all names are the same.
    """
    hashes = np.fromiter(map(_hash, names), np.uint64)
    return {name for name, is_held in zip(names, _lowest(hashes, fraction, key), strict=True) if is_held}


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass"))


def _lowest(hashes: np.ndarray, fraction: float, key: str) -> np.ndarray:
    """Which of the hashes, uint64 and perhaps equal, are held out: bool."""
    limit = math.ceil(fraction * 2**64)  # an integer is below the product just if it is below this
    held = hashes < np.uint64(min(limit, 2**64 - 1))
    if 0 < np.count_nonzero(held) < len(hashes):
        return held
    different = np.unique(hashes)
    if len(different) < 2:
        raise ConfigError(f"{key}: got rows of {len(different)} prompt; must be of 2 at least, to hold one out")
    return hashes < different[-1] if held.all() else hashes == different[0]


def taken(rows: Rows, numbers: np.ndarray) -> Rows:
    """The rows of these numbers, from 0."""
    select = getattr(rows, "select", None)  # leaves the rows on disk
    return [rows[number] for number in numbers.tolist()] if select is None else select(numbers)
