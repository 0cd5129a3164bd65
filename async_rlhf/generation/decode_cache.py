"""The keys and values of the rows being decoded, with room for the next tokens.

transformers' own ``DynamicCache`` copies its whole content at every step, and again whenever rows leave the batch. Here
a step writes only its own keys and values, and a row that leaves is overwritten by one from the end of the batch.

The rows of a long prompt may share its keys and values: then these stand once, in :class:`Prefixes`, the cache has what
the rows themselves have drawn, and attention reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

SHARED = 64
"""Tokens of a prompt, on average, from which its rows share its keys and values on a CPU."""
ROOM = 8
"""Tokens between two copies. With much more room reads would be slower: the heads would be far apart in memory."""


class RoomyLayer(DynamicLayer):
    """One layer with room for further tokens.

    Args:
        parts: keys and values of some prompts each, each part padded on the left.
        repeats: rows for each prompt.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]], repeats: int) -> None:
        super().__init__()
        self._filled = max(keys.shape[-2] for keys, _ in parts)
        self._keys, self._values = (_with_room(states, repeats, self._filled) for states in zip(*parts, strict=True))
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


class Prefixes:
    """Keys and values of prompts, which rows go on from.

    Args:
        layers: keys and values (G, heads, P, head size) of the prompts, padded on the left.
        lengths: tokens of each prompt.
        rows: which prompt each row goes on from.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]], lengths: list[int], rows: list[int]) -> None:
        kept = sorted(set(rows))
        device, longest = layers[0][0].device, max((lengths[number] for number in kept), default=0)
        if len(kept) < len(lengths) or longest < layers[0][0].shape[2]:
            kept_G = torch.tensor(kept, dtype=torch.long, device=device)
            cut = layers[0][0].shape[2] - longest
            layers = [(keys[kept_G, :, cut:], values[kept_G, :, cut:]) for keys, values in layers]
        numbers = {number: index for index, number in enumerate(kept)}
        self.layers, self.lengths = layers, [lengths[number] for number in kept]
        self.rows = [numbers[number] for number in rows]
        members: list[list[int]] = [[] for _ in kept]
        for row, number in enumerate(self.rows):
            members[number].append(row)
        most = max(map(len, members), default=0)
        slots = [row for rows_of in members for row in rows_of + rows_of[:1] * (most - len(rows_of))]
        places = [self.rows[row] * most + members[self.rows[row]].index(row) for row in range(len(rows))]
        move = partial(torch.tensor, dtype=torch.long, device=device)
        self._slots_GK, self._places_B = move(slots).view(len(kept), most), move(places)
        self.lengths_B = move([self.lengths[number] for number in self.rows])
        from_end_P = torch.arange(longest, 0, -1, device=device)
        self._padding_GP = from_end_P > move(self.lengths)[:, None]

    def of_rows(self, order: Sequence[int]) -> Prefixes:
        """Of these rows, in this order."""
        return Prefixes(self.layers, self.lengths, [self.rows[row] for row in order])

    def joined(self, other: Prefixes) -> Prefixes:
        """Of these rows, and those of another one."""
        longest = max(each.layers[0][0].shape[2] for each in (self, other))
        layers = [
            cast("tuple[Tensor, Tensor]", tuple(torch.cat([_padded(a, longest), _padded(b, longest)]) for a, b in pair))
            for pair in (zip(*both, strict=True) for both in zip(self.layers, other.layers, strict=True))
        ]
        rows = [*self.rows, *(row + len(self.lengths) for row in other.rows)]
        return Prefixes(layers, self.lengths + other.lengths, rows)

    def attend(
        self, layer: int, query_BH1D: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Attention (B, 1, H, D) of a token of each row to its prompt and to the row's own tokens.

        The queries of a prompt's rows meet its keys in one product, which reads these once.
        """
        keys_GHPD, values_GHPD = self.layers[layer]
        rows, heads, size = len(query_BH1D), keys_GHPD.shape[1], keys_GHPD.shape[3]
        query_BHRD = query_BH1D.view(rows, heads, -1, size) * scale
        before = self._by_prompt(query_BHRD) @ keys_GHPD.transpose(-1, -2)
        before = self._by_row(before.masked_fill_(self._padding_GP[:, None, None], -torch.inf))
        after = query_BHRD @ key_BHTD.transpose(-1, -2)
        if mask is not None:
            after = after.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else after + mask
        split = before.shape[-1], after.shape[-1]
        weights = torch.cat([before, after], dim=-1).softmax(dim=-1, dtype=torch.float32).to(value_BHTD.dtype)
        before, after = weights.split(split, dim=-1)
        out_BHRD = self._by_row(self._by_prompt(before) @ values_GHPD) + after @ value_BHTD
        return out_BHRD.reshape(rows, 1, -1, size)

    def _by_prompt(self, states_BHRX: Tensor) -> Tensor:
        """(G, heads, K R, X): those of a prompt's K rows, and some of them again for want of more."""
        return states_BHRX[self._slots_GK].transpose(1, 2).flatten(2, 3)

    def _by_row(self, states_GHNX: Tensor) -> Tensor:
        """(B, heads, R, X)."""
        most = self._slots_GK.shape[1]
        return states_GHNX.unflatten(2, (most, -1)).transpose(1, 2).flatten(0, 1)[self._places_B]


def _padded(states: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, columns - states.shape[2], 0))


def prefixes_of(cache: Any) -> Prefixes | None:
    """What the rows of a cache share; None if each row has all of its tokens."""
    return getattr(cache, "prefixes", None)


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
    pairs = [[x[row] for x in (layer.keys, layer.values)] for layer in layers]
    if (shared := prefixes_of(cache)) is not None:
        number = shared.rows[row]
        for pair, prompts in zip(pairs, shared.layers, strict=True):
            pair[:] = (
                torch.cat([prompt[number], x[:, x.shape[1] - (tokens - shared.lengths[number]) :]], dim=1)
                for prompt, x in zip(prompts, pair, strict=True)
            )
    return Past([tuple(x[:, x.shape[1] - tokens :].clone() for x in pair) for pair in pairs], version)


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


def join(
    caches: Sequence[DynamicCache], prompts: int, repeats: int, shared: Sequence[int] | None = None
) -> DynamicCache:
    """Join caches of some prompts each into one cache of all prompts.

    Args:
        caches: a single one if not all layers only grow; such layers stay transformers' own.
        prompts: how many there are in all.
        repeats: rows for each prompt.
        shared: tokens of each prompt, if its rows are to share them; only where all layers grow.
    """
    cache: Any = caches[0]
    stacks = list(zip(*(cache.layers for cache in caches), strict=True))
    grow = [type(parts[0]) is DynamicLayer and parts[0].is_initialized for parts in stacks]
    layers = [[(x.keys, x.values) for x in parts] if grows else [] for parts, grows in zip(stacks, grow, strict=True)]
    if shared is not None:
        longest = max(keys.shape[2] for keys, _ in layers[0])
        whole = [
            tuple(torch.cat([_padded(x, longest) for x in states]) for states in zip(*parts, strict=True))
            for parts in layers
        ]
        rows = [number for number in range(prompts) for _ in range(repeats)]
        cache.prefixes = Prefixes(cast(Any, whole), list(shared), rows)
        layers = [[(keys[:, :, :0], values[:, :, :0]) for keys, values in parts] for parts in layers]
    for i, grows in enumerate(grow):
        if grows:
            cache.layers[i] = RoomyLayer(layers[i], repeats)
        else:
            cache.layers[i].reorder_cache(torch.arange(prompts).repeat_interleave(repeats))
    return cache


def add_rows(cache: DynamicCache, other: DynamicCache) -> None:
    """Append the rows of a cache to another one. Both only grow, and were made by :func:`join`."""
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert isinstance(mine, RoomyLayer)
        assert isinstance(theirs, RoomyLayer)
        mine.add(theirs)
    if (shared := prefixes_of(cache)) is not None:
        added = prefixes_of(other)
        assert added is not None
        cast(Any, cache).prefixes = shared.joined(added)


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
    if rows and (shared := prefixes_of(cache)) is not None:
        cast(Any, cache).prefixes = shared.of_rows(order_B.tolist())
    return order_B
