"""Progress on the error stream: a bar with rate and time left on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from rich import progress as bars
from rich.console import Console
from rich.text import Text

SECONDS = 5.0
"""Between two lines in a log: often enough to see that it goes on, seldom enough for a run of days."""


class _RateColumn(bars.ProgressColumn):
    """Units per second."""

    def render(self, task: bars.Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f}/s", style="progress.data.speed")


def on_terminal() -> bool:
    """Whether the error stream is a terminal, where a bar can be drawn."""
    return Console(stderr=True).is_terminal


class Lines:
    """Says how far something is, in lines for a log: the first, the last, and between them one every few seconds.

    Args:
        what: is done, with its unit, such as "train: batch".
        total: units.
        done: units that are done already.
        brief: say nothing of what takes less than a few seconds.
    """

    def __init__(self, what: str, total: int, done: int = 0, brief: bool = False) -> None:
        self.what, self.total, self.begun, self.brief = what, total, done, brief
        self._started = time.monotonic()
        self._said = self._started if brief else -SECONDS
        self._last = done

    def say(self, done: int, more: str = "") -> None:
        """Say that so many units are done, if it is time.

        Args:
            done: units, those from before included.
            more: whatever else is to be on the line.
        """
        now = time.monotonic()
        late = now - (self._started if self.brief and done >= self.total else self._said) >= SECONDS
        due = late or (done >= self.total and not self.brief)
        if not due or done <= self._last:
            return
        self._said, self._last = now, done
        rate = (done - self.begun) / max(now - self._started, 1e-9)
        left = timedelta(seconds=round((self.total - done) / rate))
        shown = [f"{self.what} {done} of {self.total}", f"{rate:.3g}/s", f"{left} left", *([more] if more else [])]
        with suppress(OSError):  # whoever read it may be gone, which must not end a run
            print(", ".join(shown), file=sys.stderr, flush=True)


@contextmanager
def progress_bar(
    description: str, total: int, shown: bool = True, done: int = 0, brief: bool = True
) -> Iterator[Callable[..., None]]:
    """Show the progress during the block, unless it is not ``shown``: of several ranks, one shows it.

    Args:
        description: what is done.
        total: units.
        shown: whether anything is.
        done: units that are done already.
        brief: say nothing of what takes less than a few seconds, where there is no terminal.

    Yields:
        A function to call with how much is done so far, and maybe a text that is shown beside it.
    """
    if not shown:
        yield lambda done, more="": None
        return
    if not on_terminal():
        yield Lines(f"{description}:" if brief else description, total, done, brief).say
        return
    columns = [bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(), _RateColumn()]
    columns += [bars.TimeElapsedColumn(), bars.TimeRemainingColumn(), bars.TextColumn("{task.fields[more]}")]
    with bars.Progress(*columns, refresh_per_second=2, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total, completed=done, more="")

        def show(done: int, more: str = "") -> None:
            progress.update(task, completed=done, more=more or progress.tasks[0].fields["more"])

        yield show
