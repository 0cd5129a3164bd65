"""How many generators a run has, in its folder: the run says it there, and a command asks for more or fewer."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from async_rlhf.system.files import write_file

logger = logging.getLogger(__name__)


class WorkerCount:
    """Two small files in a run's folder, each written whole: one by the run, one by who asks.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._present, self._wanted = folder / "workers.json", folder / "workers-wanted.json"
        self._taken = folder / ".workers-wanted.taken"

    def write(self, numbers: Sequence[int]) -> None:
        """Say which generators there are, after what was asked for is done."""
        write_file(self._present, json.dumps(sorted(numbers)))
        self._taken.unlink(missing_ok=True)

    def present(self) -> list[int] | None:
        """The numbers of the generators; None if no run has said."""
        with suppress(OSError, ValueError):
            return list(json.loads(self._present.read_text(encoding="utf-8")))
        return None

    def ask(self, count: int) -> None:
        """Ask for so many."""
        write_file(self._wanted, json.dumps(count))

    def is_asked(self) -> bool:
        """Whether a number was asked for and the run has not said yet what has become of that."""
        return self._wanted.exists() or self._taken.exists()

    def take(self) -> int | None:
        """The number that was asked for since the last time; None if none was. It counts as asked for until
        :meth:`write`.
        """
        try:
            self._wanted.replace(self._taken)  # what is asked for from now on is for the next time
        except FileNotFoundError:
            return None
        text = self._taken.read_text(encoding="utf-8")
        if text.isdecimal() and int(text) > 0:
            return int(text)
        logger.warning("WARNING: %s: got %r; must be a number of generators, at least 1", self._wanted, text)
        return None

    def clear(self) -> None:
        """Delete the files: there are no generators, or not yet."""
        for path in (self._present, self._wanted, self._taken):
            path.unlink(missing_ok=True)
