"""Rows and examples that are made when they are asked for, so that data on disk stay there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, Self, TypeVar

import numpy as np

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
            return [self._item(index) for index in range(len(self))[number]]
        return self._item(range(len(self))[number])


class Examples(OnDemand[T]):
    """Examples of a data set.

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
        return cls(make, rows.astype(index_type(len(kept))), lengths[rows])

    def __len__(self) -> int:
        return len(self.rows)

    def _item(self, number: int) -> T:
        return self.make(int(self.rows[number]))

    def with_items(self, change: Callable[[T], U]) -> Examples[U]:
        """The same with what a function makes of each example."""
        make = self.make
        return Examples(lambda row: change(make(row)), self.rows, self.lengths)


class RowView(OnDemand[Row]):
    """Rows of a data set."""

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
        change: what to make of each row.
    """

    def __init__(self, rows: Sequence[Row], numbers: np.ndarray, change: Callable[[Row], Row] | None = None) -> None:
        self._rows, self._numbers, self._change = rows, numbers.astype(index_type(len(rows))), change

    def __len__(self) -> int:
        return len(self._numbers)

    def _item(self, number: int) -> Row:
        row = self._rows[int(self._numbers[number])]
        return row if self._change is None else self._change(row)


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


def index_type(count: int) -> type[np.signedinteger[Any]]:
    """The smaller type that holds numbers below the count."""
    return np.int32 if count < 2**31 else np.int64
