"""Rows: samples as padded tensors, in batches that waste little on padding, and the passes over them.

Rank 0 alone has the rows. Each rank gets those of the passes that it computes, a round ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from async_rlhf.distributed.collectives import Ranks
from async_rlhf.types import Sample

_SENT = {torch.int64: torch.int32}
"""Types of what is sent, where they differ: tokens and lengths are below 2^31."""
_AHEAD = 2
"""Rounds under way at a time: that which is computed, and the next."""


class Pass(NamedTuple):
    """What a rank computes at once."""

    number: int
    """Which of all passes it is."""
    rows: dict[str, Tensor]
    """Its rows, on the CPU."""
    counts: bool
    """False if another rank computes it as well, and counts: this one has no other work in the last round."""


class ScatteredBatches:
    """The passes of one rank, in order; as many for each rank. It can be iterated over again, to the end each time.

    Every rank must make it and use it at the same places; what others than rank 0 give it is ignored. With one rank
    nothing is sent or copied.

    Args:
        ranks: who share the passes.
        place: names the point in the program; see :class:`~async_rlhf.distributed.collectives.Ranks`.
        passes: how many there are.
        sizes: the size of each dimension of a pass, by its letter.
        rows: the tensors of a pass; their names end in dimension letters, and are the same for each pass.
        header: what all ranks have to know besides the rows.
        sharing: C, how many ranks that follow one another get the same pass.
    """

    def __init__(
        self,
        ranks: Ranks,
        place: str,
        passes: int,
        sizes: Callable[[int], Mapping[str, int]],
        rows: Callable[[int], dict[str, Tensor]],
        header: Any = None,
        sharing: int = 1,
    ) -> None:
        self._ranks, self._rows = ranks, rows
        self._sizes: list[Mapping[str, int]] = []
        self._types: dict[str, torch.dtype] = {}
        self.header = header

        def plan() -> tuple[list[Mapping[str, int]], dict[str, torch.dtype], Any]:
            types = {name: tensor.dtype for name, tensor in (rows(0) if passes else {}).items()}
            return [sizes(number) for number in range(passes)], types, header

        if ranks.count > 1:
            self._sizes, types, self.header = ranks.broadcast(place, plan)
            # The largest first, so that each begins where its type may.
            self._types = dict(sorted(types.items(), key=lambda item: -_sent(item[1]).itemsize))
            passes = len(self._sizes)
        groups = ranks.count // sharing
        self._shares = [list(share_of(range(passes), rank // sharing, groups)) for rank in range(ranks.count)]

    def __len__(self) -> int:
        """Passes of each rank."""
        return len(self._shares[0])

    def __iter__(self) -> Iterator[Pass]:
        under_way: deque[tuple[list[Callable[[], object]], Tensor | None]] = deque()
        for turn, (number, counts) in enumerate(self._shares[self._ranks.rank]):
            while len(under_way) < min(_AHEAD, len(self) - turn):
                under_way.append(self._begin(turn + len(under_way)))
            waits, message = under_way.popleft()
            if message is None:
                yield Pass(number, self._rows(number), counts)
            for wait in waits:
                wait()
            if message is not None:
                yield Pass(number, self._unpacked(message, number), counts)

    def _begin(self, turn: int) -> tuple[list[Callable[[], object]], Tensor | None]:
        """Start to send or to receive the rows of a round: what waits for them, and where they arrive."""
        if not self._ranks.is_main:
            number, _ = self._shares[self._ranks.rank][turn]
            message = torch.empty(sum(self._bytes(number)), dtype=torch.uint8)
            return [self._ranks.start_receiving(message, 0)], message
        others = range(1, self._ranks.count)
        return [self._ranks.start_sending(self._packed(self._shares[rank][turn][0]), rank) for rank in others], None

    def _packed(self, number: int) -> Tensor:
        rows = self._rows(number)
        parts = [rows[name].to(_sent(dtype)).view(-1).view(torch.uint8) for name, dtype in self._types.items()]
        return torch.cat(parts)

    def _unpacked(self, message: Tensor, number: int) -> dict[str, Tensor]:
        parts = message.split(self._bytes(number))
        return {
            name: part.view(_sent(dtype)).view(self._shape(name, number)).to(dtype)
            for (name, dtype), part in zip(self._types.items(), parts, strict=True)
        }

    def _bytes(self, number: int) -> list[int]:
        """Of each tensor of a pass."""
        return [prod(self._shape(name, number)) * _sent(dtype).itemsize for name, dtype in self._types.items()]

    def _shape(self, name: str, number: int) -> list[int]:
        return [self._sizes[number][letter] for letter in name.rpartition("_")[2]]


def _sent(dtype: torch.dtype) -> torch.dtype:
    return _SENT.get(dtype, dtype)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A GPU gets it from pinned memory, so the host goes on meanwhile."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def in_one_copy(rows: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Rows on the CPU, on a device. On a GPU they arrive by one copy from pinned memory: the host goes on meanwhile,
    while each copy from other memory would wait for what the GPU has to do before.
    """
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in rows.items()}
    # The largest first, so that each begins where its type may.
    order = sorted(rows.values(), key=lambda tensor: -tensor.itemsize)
    packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in order]).pin_memory()
    parts = packed.to(device, non_blocking=True).split([tensor.nbytes for tensor in order])
    found = {id(tensor): part.view(tensor.dtype).view(tensor.shape) for tensor, part in zip(order, parts, strict=True)}
    return {name: found[id(tensor)] for name, tensor in rows.items()}


T = TypeVar("T")
U = TypeVar("U")


def pad_rows(rows: Sequence[Sequence[float] | np.ndarray], dtype: torch.dtype, fill: float = 0) -> Tensor:
    """(B, T), each row padded on the right with ``fill``."""
    padded_BT = torch.empty((len(rows), max(map(len, rows), default=0)), dtype=dtype)
    view_BT = padded_BT.numpy()
    for i, row in enumerate(rows):
        view_BT[i, : len(row)] = row
        view_BT[i, len(row) :] = fill
    return padded_BT


def sampled_rows(samples: Sequence[Sample]) -> dict[str, Any]:
    """The fields of an Experience that come from sampling."""
    tokens_BT = pad_rows([sample.tokens for sample in samples], torch.long)
    rewarded = [(i, sample.rewards) for i, sample in enumerate(samples) if sample.rewards is not None]
    # Most often there are none, and then they take no memory.
    rewards_BT = torch.zeros(tokens_BT.shape) if rewarded else torch.zeros(1, 1).expand(tokens_BT.shape)
    for i, rewards in rewarded:
        rewards_BT[i, : len(rewards)] = torch.from_numpy(rewards)
    parts = {}
    if any(sample.starts for sample in samples):
        parts["positions_BT"] = pad_rows([sample.places for sample in samples], torch.long)
    if any(sample.routes_TLE is not None for sample in samples):
        parts["routes_BTLE"] = _padded_routes([sample.routes_TLE for sample in samples], tokens_BT.shape[1])
    return {
        **parts,
        "tokens_BT": tokens_BT,
        "lengths_B": torch.tensor([len(sample) for sample in samples], dtype=torch.long),
        "sampled_BT": pad_rows([sample.sampled for sample in samples], torch.float32),
        "behaviour_logprobs_BT": pad_rows([sample.logprobs for sample in samples], torch.float32),
        "rewards_BT": rewards_BT,
        "truncated_B": torch.tensor([sample.finish_reason == "length" for sample in samples], dtype=torch.bool),
    }


def _padded_routes(routes: Sequence[np.ndarray | None], longest: int) -> Tensor:
    """(B, T, L, E), padded on the right with what stands for no expert.

    Raises:
        ValueError: some rows have routes, and some have none.
    """
    known = [routes_TLE for routes_TLE in routes if routes_TLE is not None]
    if len(known) < len(routes):
        raise ValueError(f"{len(known)} of {len(routes)} samples have routes; must be all of a batch, or none")
    dtype = known[0].dtype
    padded_BTLE = np.full((len(known), longest, *known[0].shape[1:]), np.iinfo(dtype).max, dtype)
    for row_TLE, routes_TLE in zip(padded_BTLE, known, strict=True):
        row_TLE[: len(routes_TLE)] = routes_TLE
    # PyTorch computes little in uint16; no model has so many experts that int16 would not do.
    return torch.from_numpy(padded_BTLE if dtype == np.uint8 else padded_BTLE.view(np.int16))


def by_length(lengths_B: Tensor, size: int) -> Iterator[Tensor]:
    """Row indices in batches of ``size``, rows of similar length together, the longest first."""
    order_B = torch.argsort(lengths_B, descending=True, stable=True)
    if len(order_B):  # split() would make one empty part
        yield from order_B.split(size)


def share_of(parts: Sequence[T], rank: int, count: int) -> Iterator[tuple[T, bool]]:
    """A rank's parts, each with whether it counts.

    All ranks get the same number, because a pass may need every rank. If the last round has too few parts, the first
    part is computed again and does not count.
    """
    for start in range(0, len(parts), count):
        number = start + rank
        yield (parts[number], True) if number < len(parts) else (parts[0], False)


def in_shares(
    place: str, batches: Sequence[T], compute: Callable[[T], U], ranks: Ranks, together: bool = False
) -> list[U]:
    """What ``compute`` gives for each batch, in their order, on every rank. All ranks must call it.

    The batches do not depend on the number of ranks, so the results are those of one rank.

    Args:
        place: in the program; see :meth:`~async_rlhf.distributed.collectives.Ranks.gather`.
        batches: the same on every rank.
        compute: the result must be such that it can be pickled.
        ranks: who share the batches.
        together: every pass needs all ranks, as with sharded weights. Then a rank without a batch in the last round
            computes one again, and drops the result.
    """
    mine = [
        (compute(batch), counts) for batch, counts in share_of(batches, ranks.rank, ranks.count) if counts or together
    ]
    everyone = ranks.gather(place, [result for result, counts in mine if counts])
    return [everyone[number % ranks.count][number // ranks.count] for number in range(len(batches))]
