"""A file of JSON lines whose rows stay on the disk: one is read when it is asked for.

The first time every line is read and checked, and where each row begins is kept in the cache. After that the file is
not read again until it changes.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from array import array
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from async_rlhf.config import ConfigError
from async_rlhf.data import cache
from async_rlhf.data.views import RowView
from async_rlhf.system.progress import progress_bar

_BLOCK = 1 << 20  # bytes read at once by who reads rows in order
_MOST_COLUMNS = 1000
_SETTLED = 0.1  # seconds: longer than a file system's clock needs to tell two changes apart


def read_json_lines(path: Path, key: str) -> list[dict[str, Any]] | JsonLines:
    """The rows of a file: in memory if it is small.

    Args:
        path: the file; blank lines do not count, nor does a byte order mark.
        key: the configuration key that errors name.

    Raises:
        ConfigError: a line is not one JSON object.
    """
    if path.stat().st_size >= cache.CACHED_FROM:
        return JsonLines(path, key)
    with path.open("rb") as lines:
        return [row for row, _, _ in each_line(lines, path, key)]


class JsonLines(RowView):
    """The rows of a file that does not change; see :func:`read_json_lines`.

    Raises:
        ConfigError: a line is not one JSON object; later, if a row is asked for after the file has changed.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        age = time.time() - os.fstat(self._descriptor).st_ctime
        if 0 <= age < _SETTLED:  # a change right after this one could have the same time
            time.sleep(_SETTLED)
        stat = os.fstat(self._descriptor)
        self._state = _state(stat)
        name, of = f"lines-{cache.digest_of(os.path.realpath(path))}", f"{self._state} {stat.st_ctime_ns}"
        kept = cache.find(name, of)
        if kept is None:
            with open(path, "rb", opener=lambda *_: os.dup(self._descriptor)) as lines:
                starts, meta = _index(lines, path, key)
            self._require_unchanged()
            kept = cache.keep(name, of, partial(cache.write_array, "starts.bin", starts, meta))
            self._starts, self._meta = starts, meta
        if kept is not None:
            self._starts, self._meta = kept.array("starts.bin", np.int64), kept.meta

    def __reduce__(self) -> Any:
        return JsonLines, (self._path, self._key)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first = 0
        while first < len(self):
            after = int(np.searchsorted(self._starts, self._starts[first] + _BLOCK, side="right")) - 1
            after = min(max(after, first + 1), len(self))
            starts = self._starts[first : after + 1].tolist()
            block = self._read(starts[0], starts[-1])
            for start, end in pairwise(starts):
                yield _row(block[start - starts[0] : end - starts[0]])
            first = after

    @property
    def fingerprint(self) -> str:
        """A checksum of the file."""
        return str(self._meta["digest"])

    def has_all(self, column: str) -> bool:
        """Whether every row is known to have a value in a column."""
        counts = self._meta["counts"]  # None if there were too many columns to count
        return counts is not None and counts.get(column, 0) == len(self)

    def _item(self, number: int) -> dict[str, Any]:
        return _row(self._read(int(self._starts[number]), int(self._starts[number + 1])))

    def _read(self, start: int, end: int) -> bytes:
        self._require_unchanged()
        return os.pread(self._descriptor, end - start, start)

    def _require_unchanged(self) -> None:
        if _state(os.fstat(self._descriptor)) != self._state:
            raise ConfigError(f"{self._key}: {str(self._path)!r} was changed while it was in use; must stay as it is")


def _state(stat: os.stat_result) -> tuple[int, ...]:
    """What changes with a file's content, and not with its name as the time of its last change of state does."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _row(line: bytes) -> dict[str, Any]:
    return json.loads(line.partition(b"\n")[0].decode("utf-8"))  # blank lines may follow


def _index(lines: BinaryIO, path: Path, key: str) -> tuple[np.ndarray, Mapping[str, Any]]:
    """Where each row begins and the last one ends, in bytes; checksum, and rows with a value in each column."""
    starts, digest = array("q"), xxhash.xxh3_128()
    counts: Counter[str] | None = Counter()
    size, end = os.fstat(lines.fileno()).st_size, 0
    with progress_bar(f"{key}: reading", size) as progress:
        for row, start, raw in each_line(lines, path, key, digest):
            starts.append(start)
            end = start + len(raw)
            if counts is not None:
                counts.update(name for name, value in row.items() if value is not None)
                if len(counts) > _MOST_COLUMNS:
                    counts = None
            if len(starts) % 10_000 == 0:
                progress(end)
    starts.append(end)
    return np.frombuffer(starts, np.int64), {"digest": digest.hexdigest(), "counts": counts}


def each_line(
    lines: Iterable[bytes], path: Path, key: str, digest: Any = None
) -> Iterator[tuple[dict[str, Any], int, bytes]]:
    """Every row, where its line begins, and the line."""
    start = 0
    for number, raw in enumerate(lines, start=1):
        if digest is not None:
            digest.update(raw)
        if number == 1 and raw.startswith(BOM_UTF8):
            start, raw = len(BOM_UTF8), raw[len(BOM_UTF8) :]
        row = _checked(raw, number, path, key)
        if row is not None:
            yield row, start, raw
        start += len(raw)


def _checked(raw: bytes, number: int, path: Path, key: str) -> dict[str, Any] | None:
    """The row of a line; None if it is blank."""
    place = f"{key}: line {number} of {str(path)!r}"
    line = decoded(raw, number, path, key)
    if not line.strip():
        return None
    try:
        row = json.loads(line) if line[0] == "\ufeff" else DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{place} has lists or objects too deep within each other") from None
    except ValueError as error:  # a duplicate key, or a number with more digits than Python reads
        raise ConfigError(f"{place} cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place} is {line.strip()[:60]!r}; must be an object")
    return row


def decoded(raw: bytes, number: int, path: Path, key: str) -> str:
    """The text of a line, whose number counts from 1; of the first one, without a byte order mark.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} is 0x{raw[error.start]:02x} ({error.reason})"
        raise ConfigError(
            f"{key}: line {number} of {str(path)!r} is not UTF-8: {found}; must be saved as UTF-8"
        ) from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys, of which all but the last would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r:.80} is there twice")
    return made


DECODER = json.JSONDecoder(object_pairs_hook=_once_each)
