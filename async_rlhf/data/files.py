"""Rows of JSON and CSV files as they are written there: no type is guessed from what a text looks like."""

from __future__ import annotations

import csv
import json
import os
import weakref
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from async_rlhf.config import ConfigError
from async_rlhf.data.views import Row, RowView
from async_rlhf.system.files import from_json
from async_rlhf.system.progress import progress_bar

LARGE = 1_000_000
"""Bytes of a file of JSON lines from which its rows stay in it."""
_LONGEST_CELL = 2**31 - 1


def read_file(path: Path, key: str, numbers: Sequence[str] = ()) -> Sequence[Row]:
    """All rows of a file; those of a large .jsonl file stay in it.

    Args:
        path: .jsonl; .json with an array, one object with nothing but a list of rows, or lines; .csv or .tsv. Others
            may be compressed.
        key: the configuration key that errors name.
        numbers: columns of a CSV file that are numbers; all others are text.

    Raises:
        ConfigError: it cannot be read; the error names the line.
    """
    if path.suffix == ".jsonl" and path.stat().st_size >= LARGE:
        return JsonLines(path, key)
    return list(each_row(path, key, numbers))


class JsonLines(RowView):
    """The rows of a file of JSON lines, which does not change. Only where each row begins is in memory.

    Args:
        path: the file; blank lines do not count, nor does a byte order mark.
        key: the configuration key that errors name.

    Raises:
        ConfigError: a line is not one JSON object; later, if a row is asked for after the file has changed.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._file = path.open("rb")
        weakref.finalize(self, self._file.close)
        self._state = self._state_now()
        starts, end = array("q"), 0
        with progress_bar(f"{key}: reading", path.stat().st_size) as progress:
            for _, start, end in _each_line(self._file, path, key):
                starts.append(start)
                if len(starts) % 10_000 == 0:
                    progress(end)
        starts.append(end)
        self._starts = np.frombuffer(starts, np.int64)

    def __reduce__(self) -> Any:
        return JsonLines, (self._path, self._key)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _item(self, number: int) -> dict[str, Any]:
        if self._state_now() != self._state:
            raise ConfigError(f"{self._key}: {str(self._path)!r} was changed while it was in use; must stay as it is")
        start, end = self._starts[number : number + 2].tolist()
        line, _, _ = os.pread(self._file.fileno(), end - start, start).partition(b"\n")  # blank lines may follow
        try:
            return from_json(line.decode())
        except ValueError as error:  # too deep for where it is read now
            raise ConfigError(f"{self._key}: row {number + 1} of {str(self._path)!r}: {error}") from error

    def _state_now(self) -> tuple[int, ...]:
        """What changes with a file's content, and not with its name as the time of its last change of state does."""
        stat = os.fstat(self._file.fileno())
        return stat.st_ino, stat.st_size, stat.st_mtime_ns


def each_row(path: Path, key: str, numbers: Sequence[str] = ()) -> Iterator[Row]:
    """The same as :func:`read_file`, one row after the other."""
    import fsspec
    from fsspec.utils import infer_compression

    kind = path.suffix if infer_compression(path.name) is None else Path(path.stem).suffix
    with fsspec.open(str(path), "rb", compression="infer") as file:
        if kind in (".csv", ".tsv"):
            yield from _csv_rows(file, path, key, numbers, "," if kind == ".csv" else "\t")
            return
        lines: Iterable[bytes] = file
        if kind == ".json":
            lines = file.readlines()
            whole = _whole(lines, path, key)
            if whole is not None:
                yield from whole
                return
        yield from (row for row, _, _ in _each_line(lines, path, key))


def _whole(lines: Iterable[bytes], path: Path, key: str) -> list[Row] | None:
    """The rows of a file that is one array or one object; None if there is one on each line."""
    text = "".join(_text_of(lines, path, key))
    try:
        document = _DECODER.decode(text) if text.strip() else []
    except ValueError as error:  # also a duplicate key, or a number with more digits than Python reads
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return None
        raise ConfigError(f"{key}: {str(path)!r} is not JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{key}: {str(path)!r} has lists or objects too deep within each other") from None
    if isinstance(document, dict):
        inner = next(iter(document.values())) if len(document) == 1 else None
        wraps = isinstance(inner, list) and all(isinstance(row, dict) and "role" not in row for row in inner)
        document = inner if wraps else [document]
    if not isinstance(document, list):
        raise ConfigError(f"{key}: {str(path)!r} is {text.strip()[:60]!r}; must be an array of objects")
    for number, row in enumerate(document, start=1):
        if not isinstance(row, dict):
            raise ConfigError(f"{key}: row {number} of {str(path)!r} is {row!r:.60}; must be an object")
    return document


def _csv_rows(lines: Iterable[bytes], path: Path, key: str, numbers: Sequence[str], delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(_text_of(lines, path, key), strict=True, delimiter=delimiter)
    start = 1
    try:
        names = next(reader, [])
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{key}: line 1 of {str(path)!r} has the column {name!r} twice; must be there once")
        start = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(names):
                problem = f"has {len(cells)} cells, and line 1 has {len(names)}; must be as many"
                rule = "a text with commas, quotes or line breaks must be in quotes"
                raise ConfigError(f"{key}: line {start} of {str(path)!r} {problem} ({rule})")
            if cells:
                yield {
                    name: None if cell == "" else _number(cell) if name in numbers else cell
                    for name, cell in zip(names, cells, strict=True)
                }
            start = reader.line_num + 1
    except csv.Error as error:
        rule = "a quote that is opened must be closed, and a quote in a text must be there twice"
        raise ConfigError(f"{key}: line {start} of {str(path)!r} is not CSV: {error} ({rule})") from error


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _text_of(lines: Iterable[bytes], path: Path, key: str) -> Iterator[str]:
    """Each line as text."""
    return (_decoded(raw, number, path, key) for number, raw in enumerate(lines, start=1))


def _each_line(lines: Iterable[bytes], path: Path, key: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Every row, and where its line begins and ends."""
    start = 0
    for number, raw in enumerate(lines, start=1):
        if number == 1 and raw.startswith(BOM_UTF8):
            start, raw = len(BOM_UTF8), raw[len(BOM_UTF8) :]
        row = _checked(raw, number, path, key)
        if row is not None:
            yield row, start, start + len(raw)
        start += len(raw)


def _checked(raw: bytes, number: int, path: Path, key: str) -> dict[str, Any] | None:
    """The row of a line; None if it is blank."""
    label = f"{key}: line {number} of {str(path)!r}"
    line = _decoded(raw, number, path, key)
    if not line.strip():
        return None
    try:
        row = json.loads(line) if line[0] == "\ufeff" else _DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{label} is not JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{label} has lists or objects too deep within each other") from None
    except ValueError as error:  # a duplicate key, or a number with more digits than Python reads
        raise ConfigError(f"{label} cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{label} is {line.strip()[:60]!r}; must be an object")
    return row


def _decoded(raw: bytes, number: int, path: Path, key: str) -> str:
    """The text of a line, whose number counts from 1; of the first one, without a byte order mark.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} is 0x{raw[error.start]:02x} ({error.reason})"
        raise ConfigError(
            f"{key}: line {number} of {str(path)!r} is not UTF-8: {problem}; must be saved as UTF-8"
        ) from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys, of which all but the last would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r:.80} is there twice")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_once_each)
