"""The log files of a run: one JSON object per line, flushed at once, so that they can be read during the run."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from async_rlhf.system.files import naming


class JsonLines:
    """Appends objects to a file.

    Args:
        path: the file.
        keep: bytes of an existing file to keep; the rest is cut off.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        self._path = path
        self._file: BinaryIO = path.open("ab" if keep else "wb")
        if self._file.tell() < keep:
            raise OSError(f"{str(path)!r} has {self._file.tell()} bytes, but {keep} when the checkpoint was written")
        self._file.truncate(keep)
        self._file.seek(0, os.SEEK_END)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one whole line and pass it to the operating system.

        Raises:
            OSError: it cannot be written, or the file is no longer at its path, so nobody would find the line.
        """
        self._require_place()
        text = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        # A lone surrogate, from a prompt that is not valid Unicode, becomes a JSON escape.
        with naming(self._path):
            self._file.write(text.encode(errors="backslashreplace"))
            self._file.flush()

    def position(self) -> int:
        """Bytes written so far, which are on the disk when this returns."""
        self._require_place()
        with naming(self._path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def _require_place(self) -> None:
        try:
            there = os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            there = False
        if not there:
            why = "gone while the run writes it: was it deleted, moved or replaced?"
            raise FileNotFoundError(errno.ENOENT, why, str(self._path))

    def close(self) -> None:
        """Close the file."""
        with naming(self._path):
            self._file.close()
