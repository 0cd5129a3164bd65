"""Splits data into a part to train on and a part held out, the same in every command."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from async_rlhf.config import ConfigError
from async_rlhf.data.formats import identity, prompt_identity
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
    places = (f"{key}: row {number}" for number in range(1, len(rows) + 1))
    if prompt_field is None:
        names = [identity(row, place) for row, place in zip(rows, places, strict=True)]
    else:
        names = [prompt_identity(row[prompt_field], place) for row, place in zip(rows, places, strict=True)]
    held = held_out_names(names, fraction, key)
    sides: tuple[list[int], list[int]] = ([], [])
    for number, name in enumerate(names):
        sides[name in held].append(number)
    return _take(rows, sides[0]), _take(rows, sides[1])


def held_out_names(names: Sequence[str], fraction: float, key: str) -> set[str]:
    """Those of the names whose hash is in the lowest ``fraction`` of all hashes; at least one, and not all.

    Raises:
        ConfigError: all names are the same.
    """
    hashes = {name: xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass")) for name in names}
    if len(hashes) < 2:
        raise ConfigError(f"{key}: got rows of {len(hashes)} prompt; must be of 2 at least, to hold one out")
    by_hash = sorted(hashes, key=hashes.__getitem__)
    count = sum(value < fraction * 2**64 for value in hashes.values())
    return set(by_hash[: min(max(1, count), len(by_hash) - 1)])


def _take(rows: Rows, numbers: list[int]) -> Rows:
    select = getattr(rows, "select", None)  # of datasets.Dataset: leaves the rows on disk
    return [rows[number] for number in numbers] if select is None else select(numbers)
