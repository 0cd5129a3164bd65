"""Where the weights of a model come from: which tensors of which safetensors files, and how a part of them is read.

transformers computes some models with other names than their files have, or with other tensors: all experts of a layer
in one, for example. It is given tensors that have no values and know where they come from (:class:`Unread`), and what
it makes of them knows it, too. The files are read, not mapped: pages of a mapped file count as a process's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

DTYPE = torch.float32
"""What weights are before anything rounds them, whatever the type in their file."""
CHUNK = 2**24
"""Bytes of float32 that :func:`rows` reads at a time."""


class OnlyWholeError(Exception):
    """A model has to be read whole; the message says why."""


@dataclass(frozen=True)
class Place:
    """A tensor in a file."""

    file: str
    key: str
    shape: tuple[int, ...]

    @property
    def files(self) -> set[str]:
        """The files that it is in."""
        return {self.file}


@dataclass(frozen=True)
class Merged:
    """A tensor whose every row transformers makes of other tensors: the experts of a layer.

    Args:
        parts: what it is made of.
        dim: 0 if each part is a row; else the dimension along which rows of the parts are concatenated.
        shape: of the tensor.
    """

    parts: Sequence[Origin]
    dim: int
    shape: tuple[int, ...]

    @property
    def files(self) -> set[str]:
        """The files that it is in."""
        return {file for part in self.parts if not isinstance(part, Tensor) for file in part.files}


Origin: TypeAlias = Place | Merged | Tensor
"""Where a weight comes from; a tensor is known already."""
Read: TypeAlias = Callable[[Origin, tuple[slice, ...]], Tensor]
"""Reads a part of a tensor, in float32."""


class Unread(Tensor):
    """A tensor on the meta device that knows where its values come from; so does what transformers makes of it."""

    origin: Origin | None = None
    """None if it is made of others otherwise than row by row."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What torch computes on the meta device, with its origin."""
        made = super().__torch_function__(func, types, args, kwargs or {})
        if not isinstance(made, Unread) or made.origin is not None:
            return made
        dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
        if (func is torch.stack and dim == 0) or (func is torch.cat and dim > 0):
            parts = [part.origin for part in args[0] if getattr(part, "origin", None) is not None]
            made.origin = Merged(parts, dim, tuple(made.shape)) if len(parts) == len(args[0]) else None
        elif func in (Tensor.detach, Tensor.to) or (func is Tensor.__getitem__ and args[1] is ...):
            made.origin = args[0].origin
        return made


def unread_tensors(files: Sequence[str]) -> dict[str, Unread]:
    """All tensors of files in the format of safetensors, by their names there."""
    found = {}
    for file in files:
        with _opened(file) as opened:
            for key in opened.keys():  # noqa: SIM118
                shape = tuple(opened.get_slice(key).get_shape())
                found[key] = torch.empty(shape, device="meta").as_subclass(Unread)
                found[key].origin = Place(file, key, shape)
    return found


@contextmanager
def reading() -> Iterator[Read]:
    """Within, files stay open."""
    opened = cache(_opened)

    def row(origin: Merged, number: int) -> Tensor:
        if origin.dim == 0:
            return read(origin.parts[number], _whole(origin.shape[1:]))[None]
        one = slice(number, number + 1)
        return torch.cat([read(part, (one, *_whole(part.shape[1:]))) for part in origin.parts], dim=origin.dim)

    def read(origin: Origin, part: tuple[slice, ...]) -> Tensor:
        if isinstance(origin, Merged):
            each = (row(origin, number) for number in range(part[0].start, part[0].stop))
            return torch.cat([made[(slice(None), *part[1:])] for made in each])
        if isinstance(origin, Tensor):
            found = origin[part]
        else:
            file = opened(origin.file)
            found = file.get_slice(origin.key)[part] if part else file.get_tensor(origin.key)
        return found.to(DTYPE) if found.is_floating_point() else found

    yield read


def _whole(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _opened(file: str) -> Any:
    return safe_open(file, framework="pt", backend="pread")


def rows(origin: Origin) -> Iterator[Tensor]:
    """A tensor's rows, so many at a time that they are not much larger than :data:`CHUNK`."""
    shape = tuple(origin.shape)
    with reading() as read:
        if not shape:
            yield read(origin, ())
            return
        step = max(1, CHUNK // max(1, torch.Size(shape[1:]).numel() * DTYPE.itemsize))
        for start in range(0, shape[0], step):
            yield read(origin, (slice(start, min(start + step, shape[0])), *_whole(shape[1:])))
