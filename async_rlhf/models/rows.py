"""Rows: samples as padded tensors, in batches that waste little on padding, and each rank's share of the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from async_rlhf.distributed.parallel import Parallel
from async_rlhf.types import Sample


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
    by_id = {id(tensor): part.view(tensor.dtype).view(tensor.shape) for tensor, part in zip(order, parts, strict=True)}
    return {name: by_id[id(tensor)] for name, tensor in rows.items()}


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
    place: str, batches: Sequence[T], compute: Callable[[T], U], parallel: Parallel, sharing: int = 1
) -> list[U]:
    """What ``compute`` gives for each batch, in their order, on every rank. All ranks must call it.

    The batches do not depend on the number of ranks, so the results are those of one rank. If every pass needs all
    ranks, as with sharded weights, a rank without a batch in the last round computes one again, and drops the result.

    Args:
        place: in the program; see :meth:`~async_rlhf.distributed.collectives.Ranks.gather`.
        batches: the same on every rank.
        compute: the result must be such that it can be pickled.
        parallel: who share the batches.
        sharing: C, how many ranks that follow one another compute the same batches.
    """
    ranks = parallel.ranks
    groups = ranks.count // sharing
    share = share_of(batches, ranks.rank // sharing, groups)
    mine = [(compute(batch), counts) for batch, counts in share if counts or parallel.is_sharded]
    everyone = ranks.gather(place, [result for result, counts in mine if counts])[::sharing]
    return [everyone[number % groups][number // groups] for number in range(len(batches))]
