"""Rated rows: their ratings as numbers, and pairs drawn from them."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from async_rlhf.config import ConfigError
from async_rlhf.config.base import shown
from async_rlhf.config.common import SCORE
from async_rlhf.data.formats import MESSAGES, SIDES, identity, kept_chat
from async_rlhf.data.held_out import taken
from async_rlhf.data.loading import Rows, lacks
from async_rlhf.models.chats import ROW_SETTING, loaded

_ROUNDING = 1e-9
_LARGEST = 1e30
"""Its square still is a number of 64 bits, and no rating is larger."""


def is_rated(rows: Rows, field: str) -> bool:
    """Whether these are rows with a rating, and not preference pairs."""
    first = rows[0]
    return "chosen" not in first and "rejected" not in first and any(field in row for row in rows)


def read_ratings(rows: Rows, field: str, key: str) -> np.ndarray:
    """The rating of every row, float64.

    Args:
        rows: any number.
        field: the column with the rating.
        key: the configuration key that errors name.

    Raises:
        ConfigError: a rating is missing or is no finite number.
    """
    ratings = (_rating(row, f"{key}: row {number}", field) for number, row in enumerate(rows, 1))
    return np.fromiter(ratings, np.float64)


def _rating(row: Mapping[str, Any], label: str, field: str) -> float:
    value = row.get(field)
    if value is None:
        raise ConfigError(f"{label} {lacks(row, field)}; must have a rating, a finite number")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        rule = "must be 1 or 0" if isinstance(value, bool) else "must be a finite number, without quotes or units"
        raise ConfigError(f"{label}: {field!r} is {shown(value)}, a {type(value).__name__}; {rule}")
    if not abs(value) <= _LARGEST:  # NaN neither
        raise ConfigError(f"{label}: {field!r} is {shown(value)}; must be a finite number, at most 1e30 in size")
    return float(value)


def require_different(ratings: Sequence[float] | np.ndarray, field: str, key: str) -> None:
    """Require at least two rows whose ratings differ.

    Raises:
        ConfigError: there is one row, or all ratings are equal.
    """
    if len(ratings) < 2:
        raise ConfigError(f"{key}: got {len(ratings)} rated row; must be 2 at least, with different ratings")
    if np.min(ratings) == np.max(ratings):
        same = f"all {len(ratings)} rows have {ratings[0]:g} as {field!r}"
        raise ConfigError(f"{key}: {same}; must differ, or there is nothing to learn")


def draw_pairs(
    groups: Sequence[Sequence[int]], ratings: Sequence[float], margin: float, count: int, seed: int
) -> tuple[list[tuple[int, int]], int]:
    """Pairs of rows whose ratings differ enough, drawn uniformly and without replacement from all such pairs.

    Args:
        groups: numbers of rows; both rows of a pair are in one group.
        ratings: of every row.
        margin: least difference of the two ratings, up to rounding; equal ratings never make a pair.
        count: how many to draw; all if there are no more.
        seed: of the draw.

    Returns:
        (better row, worse row) of every pair, and how many pairs there are to draw from.
    """
    orders, better = [], []  # each group by rating, and (group, row, how many of its rows make a pair below it)
    for number, group in enumerate(groups):
        order = sorted(group, key=ratings.__getitem__)
        values = [ratings[row] for row in order]
        orders.append(order)
        for row in order:
            value = ratings[row]
            enough = bisect_right(values, value - margin + _ROUNDING * max(1.0, abs(value)))
            better.append((number, row, min(enough, bisect_left(values, value))))
    ends = list(accumulate(below for *_, below in better))
    total = ends[-1] if ends else 0
    pairs = []
    for index in random.Random(seed).sample(range(total), min(count, total)):
        position = bisect_right(ends, index)
        number, row, below = better[position]
        pairs.append((row, orders[number][index - (ends[position] - below)]))
    return pairs, total


def best_rows(rows: Rows, least: float | None, of_prompt: bool, key: str) -> Rows:
    """The rows with a score of at least so much, or with the best of their prompt, the first of equal ones; or both.
    A score that is null counts as none.

    Args:
        rows: demonstrations with a `score`.
        least: for all if None.
        of_prompt: one row for each prompt.
        key: the configuration key that errors name.

    Raises:
        ConfigError: a row has no score, or none is left.
    """
    best: dict[str | int, tuple[float, int]] = {}
    for n, row in enumerate(rows):
        label = f"{key}: row {n + 1}"
        score = math.nan if SCORE in row and row[SCORE] is None else _rating(row, label, SCORE)
        if score >= (-math.inf if least is None else least):
            name = identity(row, label) if of_prompt else n
            best[name] = max((score, -n), best.get(name, (score, -n)))
    if not best:
        raise ConfigError(f"min_score: got {least}; none of the {len(rows)} rows of {key} has such a score")
    return taken(rows, np.array(sorted(-n for _, n in best.values())))


def pairs_of_rollouts(rows: Rows, key: str) -> Rows:
    """The best and the worst completion of each prompt of a run's rollouts, as a pair; equal scores make none. Rows of
    others as they are.

    Raises:
        ConfigError: a row is an episode, or there is no pair.
    """
    if "prompt_tokens" not in rows[0] or SIDES[0] in rows[0]:
        return rows
    pairs = []
    for _, group in groupby(enumerate(rows, start=1), lambda each: (each[1]["batch"], each[1]["draw"])):
        rated = [(row[SCORE], -n, row) for n, row in group if row[SCORE] is not None]
        episode = next((-n for _, n, row in rated if row["messages"] is not None), None)
        if episode is not None:
            raise ConfigError(f"{key}: row {episode} is an episode; must be one answer to a prompt, to make a pair")
        rated.sort(key=lambda each: each[:2])
        if rated and rated[0][0] < rated[-1][0]:
            pairs.append(_pair(rated[-1][2], rated[0][2], key))
    if not pairs:
        raise ConfigError(f"{key}: no prompt of {len(rows)} rows has completions with different scores")
    return pairs


def _pair(chosen: Mapping[str, Any], rejected: Mapping[str, Any], key: str) -> dict[str, Any]:
    """As `pairs` writes them, with the columns of the prompt's row."""
    kept = {MESSAGES: kept_chat(chosen, key), **{name: loaded(chosen[name], key) for name in ROW_SETTING}}
    pair = loaded(chosen["columns"], key) | {name: value for name, value in kept.items() if value}
    pair["prompt"] = chosen["prompt"]
    for side, row in zip(SIDES, (chosen, rejected), strict=True):
        drawn = [token for token, is_drawn in zip(row["tokens"], row["sampled"], strict=True) if is_drawn]
        reason = row["finish_reason"]
        pair |= {side: row["completion"], f"{side}_score": row[SCORE], f"{side}_finish_reason": reason}
        pair[f"{side}_tokens"] = drawn[: len(drawn) - (reason == "stop")]
    return pair
