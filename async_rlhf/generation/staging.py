"""The next version of the weights, copied to a generator's GPU while it still samples with an older one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from async_rlhf.models.publish import SnapshotRing, tensors_in

_SPARE = 1 << 30
"""Bytes of a GPU that are left free."""


class StagedWeights:
    """Numbered weights of which the next lie on the GPU, where there is room for them beside the engine.

    To load a version is then a copy within the GPU, which takes milliseconds, between two steps. It comes there by
    itself, from pinned memory and on a stream of its own: neither the host nor a step of the engine waits for it.

    Args:
        weights: in pinned memory of the host.
        device: of the engine, which has started.
        unheld: bytes there that the engine will take, and does not hold now.
    """

    def __init__(self, weights: SnapshotRing, device: torch.device, unheld: int = 0) -> None:
        self._weights, self._device = weights, device
        self._stream, self._ready = torch.cuda.Stream(device), torch.cuda.Event()
        free, _ = torch.cuda.mem_get_info(device)
        self._memory: Tensor | None = None
        """Of one version; None without room."""
        if free - weights.slot_bytes - unheld >= _SPARE:
            self._memory = torch.empty(weights.slot_bytes, dtype=torch.uint8, device=device)
        self._version = -1

    @property
    def newest(self) -> int:
        """The version published last."""
        return self._weights.newest

    @property
    def has_room(self) -> bool:
        """Whether a version can wait on the GPU."""
        return self._memory is not None

    def stage(self, held: int, newest: bool) -> None:
        """Begin to copy the version that is asked for next, unless it is here or the engine holds it. Returns at once.

        Args:
            held: by the engine.
            newest: the newest is taken next, as in flight; else the one after ``held``, however many there are.
        """
        following = self.newest if newest else min(self.newest, held + 1)
        if self._memory is None or following in (-1, held, self._version):
            return
        # What the engine was told to read of the version before comes first.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._memory.copy_(self._weights.slot(following), non_blocking=True)
            self._ready.record(self._stream)
        self._version = following

    def views(self, version: int) -> Mapping[str, Tensor]:
        """The tensors of a version: on the GPU, if it was copied there."""
        if self._memory is None or version != self._version:
            return self._weights.views(version)
        torch.cuda.current_stream(self._device).wait_event(self._ready)
        return self._weights.shared(tensors_in(self._memory, self._weights.specs), version)
