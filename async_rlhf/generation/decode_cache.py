"""The keys and values of the rows being decoded, with room for the next tokens.

transformers' own ``DynamicCache`` copies its whole content at every step, and again whenever rows leave the batch. Here
a step writes only its own keys and values, and a row that leaves is overwritten by one from the end of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

ROOM = 8
"""Tokens between two copies. With much more room reads would be slower: the heads would be far apart in memory."""


class RoomyLayer(DynamicLayer):
    """One layer with room for further tokens.

    Args:
        parts: layers with the keys and values of some prompts each, each part padded on the left.
        repeats: rows for each prompt.
    """

    def __init__(self, parts: Sequence[CacheLayerMixin], repeats: int) -> None:
        super().__init__()
        self._filled = max(part.get_seq_length() for part in parts)
        self._keys, self._values = (
            _with_room(states, repeats, self._filled)
            for states in ([part.keys for part in parts], [part.values for part in parts])
        )
        self._rows = len(self._keys)
        self.is_initialized = True
        self._set_views()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (rows, heads, 1, head size) of one more token; returns those of all tokens so far."""
        start, self._filled = self._filled, self._filled + key_states.shape[-2]
        if self._filled > self._keys.shape[-2]:
            self._keys, self._values = (_with_room([old], 1, start) for old in (self.keys, self.values))
        self._set_views()
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def keep(self, rows: int, gaps: Tensor, movers: Tensor) -> None:
        """Move the rows ``movers`` into the places ``gaps``, and keep the first ``rows``."""
        for states in (self.keys, self.values):
            states[gaps] = states[movers]
        self._rows = rows
        self._set_views()

    def add(self, other: RoomyLayer) -> None:
        """Append the rows of another layer; whichever has fewer tokens is padded on the left."""
        rows, filled = self._rows + other._rows, max(self._filled, other._filled)
        if rows > len(self._keys) or filled > self._filled:
            self._copy(max(rows, len(self._keys)), filled)
        for states, theirs in ((self._keys, other.keys), (self._values, other.values)):
            states[self._rows : rows, :, filled - other._filled : filled] = theirs
        self._rows = rows
        self._set_views()

    def forget_left(self, filled: int) -> None:
        """Keep the last ``filled`` tokens."""
        self._copy(len(self._keys), filled)
        self._set_views()

    def _copy(self, rows: int, filled: int) -> None:
        """Make room for so many rows, with so many tokens each."""
        kept = min(filled, self._filled)
        states = []
        for old in (self.keys, self.values):
            room = old.new_zeros(rows, old.shape[1], filled + ROOM, old.shape[3])
            room[: self._rows, :, filled - kept : filled] = old[:, :, self._filled - kept :]
            states.append(room)
        self._keys, self._values = states
        self._filled = filled

    def _set_views(self) -> None:
        self.keys = self._keys[: self._rows, :, : self._filled]
        self.values = self._values[: self._rows, :, : self._filled]


def _with_room(parts: Sequence[Tensor], repeats: int, filled: int) -> Tensor:
    """The states of each prompt, repeated ``repeats`` times, up to token ``filled``, with zeros after it."""
    _, heads, _, size = parts[0].shape
    room = parts[0].new_zeros(sum(map(len, parts)), repeats, heads, filled + ROOM, size)
    for rows, states in zip(room.split([len(part) for part in parts]), parts, strict=True):
        rows[:, :, :, filled - states.shape[-2] : filled] = states[:, None]
    return room.flatten(0, 1)


class TokenCache:
    """The tokens of the rows being decoded, for models whose own cache cannot be used: each step computes them anew."""

    def __init__(self) -> None:
        self.layers = [self]
        self._tokens_BT: Tensor | None = None

    is_initialized = False
    """As layers that stay as they are."""

    def extended(self, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
        """All tokens so far with these, and rows of so many tokens at the left, padded on the right: (B, T)."""
        before = [] if self._tokens_BT is None else [self._tokens_BT]
        self._tokens_BT = all_BT = torch.cat([*before, tokens_BT], dim=1)
        places_T = torch.arange(all_BT.shape[1], device=all_BT.device)
        places_BT = places_T + (all_BT.shape[1] - lengths_B[:, None])
        return all_BT.gather(1, places_BT.clamp(max=all_BT.shape[1] - 1))[:, : int(lengths_B.max())]

    def reorder_cache(self, order_B: Tensor) -> None:
        """Keep these rows, in this order."""
        assert self._tokens_BT is not None
        self._tokens_BT = self._tokens_BT[order_B]


@dataclass
class Past:
    """What a cache had of one row when it ended; used once."""

    layers: list[tuple[Tensor, ...]]
    """Keys and values, (heads, T, head size) each; none once they are used."""
    version: int | None
    """Of the weights that computed them; None if they were several."""

    def tokens(self, version: int) -> int:
        """T, if they are of these weights; else 0."""
        return self.layers[0][0].shape[1] if self.layers and version == self.version else 0


def past_of(cache: DynamicCache, row: int, tokens: int, version: int | None) -> Past:
    """A row's last tokens in a cache that only grows, made by :func:`join`."""
    layers: Any = cache.layers
    return Past([tuple(x[row, :, -tokens:].clone() for x in (own.keys, own.values)) for own in layers], version)


def go_on_from(pasts: Sequence[Past], kept: Sequence[int], columns: int, cache: DynamicCache) -> None:
    """Give an empty cache the first ``kept`` tokens of each row's past, padded on the left to so many columns."""
    known = [(row, count, past.layers) for row, (past, count) in enumerate(zip(pasts, kept, strict=True)) if count > 0]
    for number, pair in enumerate(known[0][2] if known else ()):
        rooms = [states.new_zeros(len(pasts), len(states), columns, states.shape[2]) for states in pair]
        for row, count, layers in known:
            for room, states in zip(rooms, layers[number], strict=True):
                room[row, :, columns - count :] = states[:, :count]
        cache.update(*rooms, number)


def only_grows(cache: DynamicCache) -> bool:
    """Whether a step only appends a token to every layer: no sliding window, no recurrent state."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def join(caches: Sequence[DynamicCache], prompts: int, repeats: int) -> DynamicCache:
    """Join caches of some prompts each into one cache of all prompts.

    Args:
        caches: a single one if not all layers only grow; such layers stay transformers' own.
        prompts: how many there are in all.
        repeats: rows for each prompt.
    """
    cache = caches[0]
    for i, parts in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        if type(parts[0]) is DynamicLayer and parts[0].is_initialized:
            cache.layers[i] = RoomyLayer(parts, repeats)
        else:
            parts[0].reorder_cache(torch.arange(prompts).repeat_interleave(repeats))
    return cache


def add_rows(cache: DynamicCache, other: DynamicCache) -> None:
    """Append the rows of a cache to another one. Both only grow, and were made by :func:`join`."""
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert isinstance(mine, RoomyLayer)
        assert isinstance(theirs, RoomyLayer)
        mine.add(theirs)


def forget_left(cache: DynamicCache, columns: int) -> None:
    """Drop all but the last columns of a cache that only grows, made by :func:`join`."""
    for layer in cache.layers:
        assert isinstance(layer, RoomyLayer)
        layer.forget_left(columns)


def keep_rows(cache: DynamicCache, stays: Sequence[bool], device: torch.device) -> Tensor:
    """Drop the rows that do not stay; the last ones move into their places.

    Args:
        cache: on ``device``, which is not waited for.
        stays: whether each row stays.
        device: of the cache.

    Returns:
        For each remaining row, its index before: (rows,) on the CPU.
    """
    stays_B = torch.tensor(stays)
    rows = int(stays_B.sum())
    gaps, movers = (~stays_B[:rows]).nonzero().squeeze(-1), stays_B[rows:].nonzero().squeeze(-1) + rows
    order_B = torch.arange(rows)
    order_B[gaps] = movers
    gaps, movers, moved_B = (places.to(device, non_blocking=True) for places in (gaps, movers, order_B))
    for layer in cache.layers:
        if isinstance(layer, RoomyLayer):
            layer.keep(rows, gaps, movers)
        else:
            layer.reorder_cache(moved_B)
    return order_B
