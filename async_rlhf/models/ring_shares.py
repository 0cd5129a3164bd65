"""Ranks of one host, each of which writes its share of sharded weights into the ring: nothing is gathered.

Rank 0 has the ring, whose memory the others map. Each copies its shares as they leave its device, and then says which
version it has written, in memory that all of them share; so no rank waits for another until the version is whole.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from async_rlhf.models.copy_stream import pinned
from async_rlhf.models.weights import TensorSpec, mapped_at, nameless_file, published_parameters, saved_buffers
from async_rlhf.ranks.parallel import Parallel

_WORD = 8
_LOOK_SECONDS = 0.0005
_ALIVE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Ring:
    """Where the versions lie in rank 0's memory.

    Args:
        path: of the memory, for processes of this user on this host.
        starts: of each slot; version v lies in slot v mod their number.
        specs: the tensors of a version within a slot.
    """

    path: str
    starts: tuple[int, ...]
    specs: tuple[TensorSpec, ...]


class RingShares:
    """What a rank needs to write its shares.

    Args:
        ring: where they go.
        memory: of the ring, as this process sees it.
        words: for each rank, the version that it has written last.
        pids: of every rank's process.
        parallel: how the weights are sharded.
    """

    def __init__(self, ring: Ring, memory: Tensor, words: Tensor, pids: Sequence[int], parallel: Parallel) -> None:
        self.ring, self._memory, self._words, self._pids, self._parallel = ring, memory, words, pids, parallel
        self._held, self._stopped = ExitStack(), threading.Event()
        if parallel.device is not None and parallel.device.type == "cuda" and not parallel.ranks.leads:
            self._held.enter_context(pinned(memory))

    def pieces(self, model: nn.Module, version: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's shares of a version, each with its place."""
        parallel = self._parallel
        parallel.meet("writing weights", model)
        start, specs = self.ring.starts[version % len(self.ring.starts)], {spec.name: spec for spec in self.ring.specs}
        for name, (parameter,), _ in published_parameters(model, adapters_only=False):
            mine, first = parallel.piece(parameter)
            if mine.numel():
                yield mine, self._place(start, specs[name], first, mine.numel())
        for name, buffer in saved_buffers(model) if parallel.ranks.leads else ():
            yield buffer.reshape(-1), self._place(start, specs[name], 0, buffer.numel())

    def _place(self, start: int, spec: TensorSpec, first: int, count: int) -> Tensor:
        """Some consecutive numbers of a tensor."""
        begin = start + spec.offset + first * spec.dtype.itemsize
        return self._memory[begin : begin + count * spec.dtype.itemsize].view(spec.dtype)

    def written(self, version: int) -> bool:
        """Say that this rank's share is written; on rank 0, wait for those of the others. Returns whether they are."""
        ranks = self._parallel.ranks
        self._words[ranks.rank] = version
        looked = time.monotonic()
        while ranks.leads and bool((self._words < version).any()):
            if self._stopped.wait(_LOOK_SECONDS):
                return False
            if time.monotonic() - looked > _ALIVE_SECONDS:
                self._require_all_alive(version)
                looked = time.monotonic()
        return True

    def _require_all_alive(self, version: int) -> None:
        for rank, pid in enumerate(self._pids):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                if int(self._words[rank]) < version:
                    raise RuntimeError(
                        f"rank {rank} has ended before it wrote its share of version {version}"
                    ) from None

    def stop(self) -> None:
        """Wait for no other rank any more, from any thread: this one ends, and they may have failed."""
        self._stopped.set()

    def close(self) -> None:
        """Let go of the memory."""
        self._held.close()


def agree(model: nn.Module, parallel: Parallel, ring: Callable[[], tuple[Ring, Tensor] | None]) -> RingShares | None:
    """What this rank writes its shares with, or None if rank 0 is to gather them. All ranks must call it.

    Args:
        model: whose weights they are.
        parallel: how they are sharded.
        ring: gives rank 0's ring, and its memory; None if there is none that others can map.
    """
    ranks = parallel.ranks
    own = ring() if ranks.leads and ranks.local_count == ranks.count and _has_pieces(model, parallel) else None
    words = nameless_file(_WORD * ranks.count) if own is not None else -1
    asked = ranks.from_lead("where weights are written", lambda: own and (own[0], f"/proc/{os.getpid()}/fd/{words}"))
    if asked is None:
        return None
    where, words_path = asked
    memory: Tensor | None = None
    with suppress(OSError):  # in containers of their own, processes do not see each other's
        said = mapped_at(words_path).view(torch.int64)
        memory = own[1] if own is not None else mapped_at(where.path)
    pids = ranks.gather("who writes weights", os.getpid() if memory is not None else -1)
    if words >= 0:
        os.close(words)
    if memory is None or -1 in pids:
        return None
    if ranks.leads:
        said.fill_(-1)
    ranks.meet("before the first weights are written")
    return RingShares(where, memory, said, pids, parallel)


def _has_pieces(model: nn.Module, parallel: Parallel) -> bool:
    """Whether every weight that is published is a parameter of which each rank has a piece."""
    if not parallel.spreads_weights:
        return False
    every = [parameters for _, parameters, _ in published_parameters(model, adapters_only=False)]
    return all(len(parameters) == 1 and parallel.has_piece(parameters[0]) for parameters in every)
