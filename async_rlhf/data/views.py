"""Rows that stay where they are: some of a data set's rows by number, and what tells one data set from another."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, Self, TypeVar

import numpy as np
import xxhash

from async_rlhf.data import cache

Row = Mapping[str, Any]
T = TypeVar("T")
U = TypeVar("U")


class OnDemand(Sequence[T], Generic[T]):
    """Items that are made when they are asked for."""

    @abstractmethod
    def _item(self, number: int) -> T:
        """The item of a number from 0."""

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self._item(one) for one in range(len(self))[number]]
        return self._item(range(len(self))[number])


class Examples(OnDemand[T]):
    """Examples of a data set, each made when it is asked for.

    Args:
        make: makes the example of a row, whose number counts from 0.
        rows: the numbers of the rows.
        lengths: tokens of each example.
    """

    def __init__(self, make: Callable[[int], T], rows: np.ndarray, lengths: np.ndarray) -> None:
        self.make, self.rows, self.lengths = make, rows, lengths

    @classmethod
    def of(cls, make: Callable[[int], T], lengths: np.ndarray, kept: np.ndarray) -> Self:
        """The examples of those rows that are kept (bool); ``lengths`` are those of all rows."""
        rows = np.flatnonzero(kept)
        return cls(make, rows.astype(np.int32) if len(kept) < 2**31 else rows, lengths[rows])

    def __len__(self) -> int:
        return len(self.rows)

    def _item(self, number: int) -> T:
        return self.make(int(self.rows[number]))

    def with_items(self, change: Callable[[T], U]) -> Examples[U]:
        """The same with what a function makes of each example."""
        make = self.make
        return Examples(lambda row: change(make(row)), self.rows, self.lengths)


class RowView(OnDemand[Row]):
    """Rows that are read when they are asked for."""

    @property
    @abstractmethod
    def fingerprint(self) -> str | None:
        """Changes whenever the rows do; None if only reading all of them could tell."""

    def has_all(self, column: str) -> bool:
        """Whether every row is known, without reading it, to have a value in a column."""
        return False

    def __getitem__(self, number: Any) -> Any:
        return self.select(range(len(self))[number]) if isinstance(number, slice) else super().__getitem__(number)

    def select(self, numbers: Sequence[int] | np.ndarray) -> Selected:
        """The rows of these numbers, in their order."""
        return Selected(self, np.asarray(numbers, dtype=np.int64))


class Selected(RowView):
    """Some rows of a data set.

    Args:
        rows: the data set.
        numbers: which of its rows, from 0.
    """

    def __init__(self, rows: Sequence[Row], numbers: np.ndarray) -> None:
        self._rows = rows
        self._numbers = numbers.astype(np.int32) if len(rows) < 2**31 else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def _item(self, number: int) -> Row:
        return self._rows[int(self._numbers[number])]

    def has_all(self, column: str) -> bool:
        """Whether every row is known to have a value in a column."""
        return isinstance(self._rows, RowView) and self._rows.has_all(column)

    @property
    def fingerprint(self) -> str | None:
        """See :attr:`RowView.fingerprint`."""
        base = fingerprint_of(self._rows)
        if base is None:
            return None
        return f"{xxhash.xxh3_128_hexdigest(self._numbers.tobytes())} of {base}"


class Joined(RowView):
    """The rows of several data sets, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Row]]) -> None:
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self._parts)

    def _item(self, number: int) -> Row:
        part = int(np.searchsorted(self._ends, number, side="right"))
        return self._parts[part][number - int(self._ends[part])]  # from the part's end

    def has_all(self, column: str) -> bool:
        """Whether every row is known to have a value in a column."""
        return all(isinstance(part, RowView) and part.has_all(column) for part in self._parts)

    @property
    def fingerprint(self) -> str | None:
        """See :attr:`RowView.fingerprint`."""
        found = [fingerprint_of(part) for part in self._parts]
        return None if None in found else f"{found} joined"


def joined(parts: Sequence[Sequence[Row]]) -> Sequence[Row]:
    """The rows of several data sets, one after the other: in memory if those of each are."""
    if len(parts) == 1:
        return parts[0]
    in_memory = all(isinstance(part, list) for part in parts)
    return list(chain.from_iterable(parts)) if in_memory else Joined(parts)


def fingerprint_of(rows: Sequence[Row]) -> str | None:
    """What identifies the rows without reading all of them; None if there is nothing such, or they are few."""
    if isinstance(rows, RowView):
        return rows.fingerprint
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(rows, datasets.Dataset):
        return None
    # datasets changes its own fingerprint with every step, and what is on disk may change beneath it.
    files = [(file["filename"], os.stat(file["filename"])) for file in rows.cache_files]
    if not files or sum(stat.st_size for _, stat in files) < cache.CACHED_FROM:
        return None
    known = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in files]
    return cache.digest_of(f"{rows._fingerprint} {len(rows)} {rows.column_names} {known}")
