"""Outside events that end a run: signals, which ask it to save first, and another rank's failure."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class RankError(RuntimeError):
    """Another rank of the learner has failed. The message says which, and why."""


def ending_signals() -> list[signal.Signals]:
    """SIGTERM, and the SIGHUP of a closed terminal unless nohup ignores it."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


@contextmanager
def ending_on_signals() -> Iterator[Callable[[], int]]:
    """Within, the first Ctrl-C, SIGTERM or SIGHUP is noted. The next one of the same kind does what it did before: the
    next SIGHUP nothing, even after this context. When a terminal closes, its shell sends one and the kernel sends
    another when the shell ends, perhaps while the program is cleaning up.

    Yields:
        A function that gives the number of the signal that has come, or 0; always 0 outside the main thread, where
        Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    # No lock, so no threading.Event: another signal may interrupt the handler, which would then wait for itself.
    asked, hung_up = 0, False
    interrupts = [signal.SIGINT] if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN else []
    before = {number: signal.getsignal(number) for number in (*interrupts, *ending_signals())}

    def note(number: int, _frame: object) -> None:
        nonlocal asked, hung_up
        asked, hung_up = number, hung_up or number == signal.SIGHUP
        for other, handler in before.items():
            if not (number == signal.SIGINT and other == signal.SIGTERM):  # a launcher sends it after Ctrl-C
                signal.signal(other, signal.SIG_IGN if other == signal.SIGHUP else handler)
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        again = "" if number == signal.SIGHUP else "; once more ends it now, without a checkpoint"
        logger.warning("%s: a checkpoint follows after this batch, then the run ends%s", name, again)

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            if not (hung_up and number == signal.SIGHUP):
                signal.signal(number, handler)
