"""The log files of a run: one JSON object a line, flushed as they are written, so that they can be read meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO


class JsonLines:
    """Appends objects to a file.

    Args:
        path: the file.
        keep: bytes of an existing file to go on behind; what comes after them is cut off.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        self._file: BinaryIO = path.open("ab" if keep else "wb")
        if self._file.tell() < keep:
            raise OSError(f"{str(path)!r} has {self._file.tell()} bytes, but {keep} when the checkpoint was written")
        self._file.truncate(keep)
        self._file.seek(0, os.SEEK_END)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line, whole, and hand it to the operating system."""
        text = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        # Half a character, from a prompt that is no Unicode text, becomes an escape that JSON knows.
        self._file.write(text.encode(errors="backslashreplace"))
        self._file.flush()

    def position(self) -> int:
        """Bytes written so far, which are on the disk when this returns."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
