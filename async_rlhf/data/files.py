"""Rows of JSON and CSV files as they are written there: no type is guessed from what a text looks like."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from async_rlhf.config import ConfigError
from async_rlhf.data.json_lines import DECODER, decoded, each_line, read_json_lines
from async_rlhf.data.views import Row

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
    return read_json_lines(path, key) if path.suffix == ".jsonl" else list(each_row(path, key, numbers))


def each_row(path: Path, key: str, numbers: Sequence[str] = ()) -> Iterator[Row]:
    """The same, one row after the other."""
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
        yield from (row for row, _, _ in each_line(lines, path, key))


def _whole(lines: Iterable[bytes], path: Path, key: str) -> list[Row] | None:
    """The rows of a file that is one array or one object; None if there is one on each line."""
    text = "".join(line for _, line in _text_of(lines, path, key))
    try:
        found = DECODER.decode(text) if text.strip() else []
    except ValueError as error:  # also a duplicate key, or a number with more digits than Python reads
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return None
        raise ConfigError(f"{key}: {str(path)!r} is not JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{key}: {str(path)!r} has lists or objects too deep within each other") from None
    if isinstance(found, dict):
        inner = next(iter(found.values())) if len(found) == 1 else None
        wraps = isinstance(inner, list) and all(isinstance(row, dict) and "role" not in row for row in inner)
        found = inner if wraps else [found]
    if not isinstance(found, list):
        raise ConfigError(f"{key}: {str(path)!r} is {text.strip()[:60]!r}; must be an array of objects")
    for number, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            raise ConfigError(f"{key}: row {number} of {str(path)!r} is {row!r:.60}; must be an object")
    return found


def _csv_rows(lines: Iterable[bytes], path: Path, key: str, numbers: Sequence[str], delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader((line for _, line in _text_of(lines, path, key)), strict=True, delimiter=delimiter)
    start = 1
    try:
        names = next(reader, [])
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{key}: line 1 of {str(path)!r} has the column {name!r} twice; must be there once")
        start = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(names):
                found = f"has {len(cells)} cells, and line 1 has {len(names)}; must be as many"
                right = "a text with commas, quotes or line breaks must be in quotes"
                raise ConfigError(f"{key}: line {start} of {str(path)!r} {found} ({right})")
            if cells:
                yield {
                    name: None if cell == "" else _number(cell) if name in numbers else cell
                    for name, cell in zip(names, cells, strict=True)
                }
            start = reader.line_num + 1
    except csv.Error as error:
        right = "a quote that is opened must be closed, and a quote in a text must be there twice"
        raise ConfigError(f"{key}: line {start} of {str(path)!r} is not CSV: {error} ({right})") from error


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _text_of(lines: Iterable[bytes], path: Path, key: str) -> Iterator[tuple[int, str]]:
    """Each line, counted from 1, as text."""
    return ((number, decoded(raw, number, path, key)) for number, raw in enumerate(lines, start=1))
