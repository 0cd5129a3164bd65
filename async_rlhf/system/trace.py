"""The trace of a run in Chrome's trace-event format: drop trace.json on ui.perfetto.dev to see what overlapped.

Times are from the monotonic clock, which all processes of a host share, so the spans of generator processes align
with the learner's without correction.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from async_rlhf.config.secrets import masked
from async_rlhf.system.files import naming

LEARNER = "learner"


class Trace:
    """Sums spans since the last :meth:`take_seconds`, and after :meth:`write_to` writes all of them to a file."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._path = Path()
        self._tracks: dict[str, int] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._one = threading.Lock()

    def write_to(self, path: Path) -> None:
        """From now on, write every span to a new file."""
        self._path, self._file = path, path.open("w", encoding="utf-8")
        self._file.write("[\n")

    @contextmanager
    def span(self, name: str, **details: int) -> Iterator[None]:
        """Record the body as a span of the learner."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, started, time.monotonic(), LEARNER, **details)

    def add(self, name: str, started: float, ended: float, track: str, **details: int) -> None:
        """Record a span that has ended, on the monotonic clock; from any thread."""
        with self._one:
            self._seconds[name] += ended - started
            if self._file is None:
                return
            event = {"name": name, "ph": "X", "ts": round(started * 1e6, 1), "dur": round((ended - started) * 1e6, 1)}
            self._write({**event, "tid": self._track(track), "args": details})

    def mark(self, name: str, track: str, why: str) -> None:
        """Record that something has happened now, such as a fault, without the secrets of URLs; from any thread."""
        with self._one:
            if self._file is not None:
                event = {"name": name, "ph": "i", "s": "t", "ts": round(time.monotonic() * 1e6, 1)}
                self._write({**event, "tid": self._track(track), "args": {"why": masked(why)}})

    def _track(self, name: str) -> int:
        """The number of a track, which is told to the file when it is new."""
        if name not in self._tracks:
            self._tracks[name] = len(self._tracks)
            self._write({"name": "thread_name", "ph": "M", "tid": self._tracks[name], "args": {"name": name}})
        return self._tracks[name]

    def take_seconds(self) -> dict[str, float]:
        """Seconds by name of span since the last call."""
        with self._one:
            seconds = dict(self._seconds)
            self._seconds.clear()
        return seconds

    def flush(self) -> None:
        """Pass buffered spans to the operating system. The format allows the closing bracket to be missing."""
        if self._file is not None:
            with naming(self._path):
                self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            with self._one:
                file, self._file = self._file, None
            with naming(self._path), file:
                file.write('{"name": "end", "ph": "i", "ts": 0, "pid": 1, "tid": 0}\n]\n')

    def _write(self, event: dict[str, object]) -> None:
        assert self._file is not None
        with naming(self._path):
            self._file.write(json.dumps({"pid": 1, **event}) + ",\n")
