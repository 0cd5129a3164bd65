"""Values as bytes for other ranks: the numbers of arrays as they are, and a short pickled description of the rest."""

from __future__ import annotations

import io
import pickle
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 64
"""Every array begins at a multiple of so many bytes."""


class _Pickler(pickle.Pickler):
    """Leaves the numbers of tensors, as those of arrays, where they are."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented


def packed(value: Any) -> Tensor:
    """(bytes,) uint8: one copy of every array, and of every tensor of a type that NumPy has, on the CPU."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    raw = [buffer.raw() for buffer in buffers]
    head = pickle.dumps((file.getvalue(), [len(each) for each in raw]))
    starts = _starts(len(head), [len(each) for each in raw])
    message = torch.zeros(starts[-1], dtype=torch.uint8)
    view = message.numpy().data
    view[:8] = len(head).to_bytes(8, "little")
    view[8 : 8 + len(head)] = head
    for start, each in zip(starts, raw, strict=False):
        view[start : start + len(each)] = each
    return message


def unpacked(message: Tensor) -> Any:
    """What :func:`packed` was given; its arrays and tensors are views of the message."""
    view = message.numpy().data
    size = int.from_bytes(view[:8], "little")
    head, lengths = pickle.loads(view[8 : 8 + size])
    starts = _starts(size, lengths)
    return pickle.loads(head, buffers=[view[s : s + n] for s, n in zip(starts, lengths, strict=False)])


def _starts(head: int, lengths: list[int]) -> list[int]:
    """Where each array begins, and where the message ends."""
    return list(accumulate([8 + head, *lengths], lambda at, n: -(-(at + n) // _ALIGNED) * _ALIGNED, initial=0))[1:]
