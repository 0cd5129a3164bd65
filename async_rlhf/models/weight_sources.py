"""Where the weights of a model come from: which tensors of which safetensors files, and how a part of them is read.

transformers computes some models with other names than their files have, or with other tensors: all experts of a layer
in one, for example. Its own tables say how. The files are read, not mapped: pages of a mapped file count as a process's
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

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
        name: of the tensor in the model.
        converter: makes it.
        parts: what it is made of, row by row, for each of the converter's patterns.
        shape: of the tensor.
    """

    name: str
    converter: WeightConverter
    parts: Mapping[str, Sequence[Place]]
    shape: tuple[int, ...]

    @property
    def files(self) -> set[str]:
        """The files that it is in."""
        return {place.file for places in self.parts.values() for place in places}

    def rows(self, start: int, stop: int, read: Callable[[Place], Tensor]) -> Tensor:
        """Rows of it, of parts that ``read`` reads."""
        converter = copy.deepcopy(self.converter)
        for pattern, places in self.parts.items():
            for place in places[start:stop]:
                converter.add_tensor(self.name, place.key, pattern, read(place))
        (made,) = converter.convert(self.name).values()
        return made


Origin: TypeAlias = Place | Merged | Tensor
"""Where a weight comes from; a tensor is known already."""
Read: TypeAlias = Callable[[Origin, tuple[slice, ...]], Tensor]
"""Reads a part of a tensor, in float32."""


@contextmanager
def reading() -> Iterator[Read]:
    """Within, files stay open."""
    opened = cache(_opened)

    def whole(place: Place) -> Tensor:
        return read(place, tuple(slice(0, size) for size in place.shape))

    def read(origin: Origin, part: tuple[slice, ...]) -> Tensor:
        if isinstance(origin, Merged):
            each = (origin.rows(row, row + 1, whole) for row in range(part[0].start, part[0].stop))
            return torch.cat([made[(slice(None), *part[1:])] for made in each])
        if isinstance(origin, Tensor):
            found = origin[part]
        else:
            file = opened(origin.file)
            found = file.get_slice(origin.key)[part] if part else file.get_tensor(origin.key)
        return found.to(DTYPE) if found.is_floating_point() else found

    yield read


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
        rest = tuple(slice(0, size) for size in shape[1:])
        for start in range(0, shape[0], step):
            yield read(origin, (slice(start, min(start + step, shape[0])), *rest))


def origins_of(model: PreTrainedModel, files: Sequence[str]) -> tuple[dict[str, Origin], set[str]]:
    """The tensors in the files by the names that transformers gives them when it loads them, and names of no use.

    Args:
        model: on the meta device; is told how its tensors were renamed, for ``save_pretrained``.
        files: in the format of safetensors.

    Raises:
        OnlyWholeError: a tensor is made of others otherwise than row by row.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Origin] = {}
    parts: dict[str, dict[str, list[Place]]] = {}
    unexpected = set()
    for place in sorted(_places(files), key=lambda place: dot_natural_key(place.key)):
        name, pattern = rename_source_key(place.key, renamings, converters, prefix, known)
        if name not in known and place.key in known:
            name, pattern = rename_source_key(place.key, [], [], prefix, known)
        if name not in known:
            unexpected.add(name)
        elif pattern is None:
            found[name] = place
        else:
            parts.setdefault(name, {}).setdefault(pattern, []).append(place)
    for name, places in parts.items():
        found[name] = _merged(name, of_pattern[next(iter(places))], places)
    model._weight_conversions = [each for each in conversions if each.was_used()]
    return found, unexpected


def _places(files: Sequence[str]) -> Iterator[Place]:
    for file in files:
        with _opened(file) as opened:
            for key in opened.keys():  # noqa: SIM118
                yield Place(file, key, tuple(opened.get_slice(key).get_shape()))


def _merged(name: str, converter: WeightConverter, parts: dict[str, list[Place]]) -> Merged:
    first, *others = converter.operations
    by_rows = isinstance(first, MergeModulelist) and first.dim == 0
    by_rows &= all(isinstance(each, Concatenate) and each.dim > 0 for each in others)
    counts = {len(places) for places in parts.values()}
    if not by_rows or len(converter.target_patterns) > 1 or len(counts) > 1:
        raise OnlyWholeError(f"transformers makes its {name} of other tensors")
    without_shape = Merged(name, converter, parts, ())
    (count,) = counts
    made = without_shape.rows(0, count, lambda place: torch.empty(place.shape, device="meta"))
    return Merged(name, converter, parts, tuple(made.shape))
