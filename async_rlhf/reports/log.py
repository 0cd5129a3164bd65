"""The log files of a run: one JSON object a line, flushed as they are written, so that they can be read meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class JsonLines:
    """Appends objects to a file.

    Args:
        path: a new file; an existing one is emptied.
    """

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line, whole, and hand it to the operating system."""
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
