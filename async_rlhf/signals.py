"""What comes from outside to end a run: SIGTERM, which asks it to save first, and the failure of another rank."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class RankError(RuntimeError):
    """Another rank of the learner has failed. The message says which, and why."""


@contextmanager
def ending_on_sigterm() -> Iterator[Callable[[], bool]]:
    """Within, the first SIGTERM is noted and the second does what it did before.

    Yields:
        Whether one has come. Outside the main thread, where Python allows no handlers, never.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = threading.Event()
    before = signal.getsignal(signal.SIGTERM)

    def note(_signal: int, _frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGTERM, before)
        logger.warning("SIGTERM: a checkpoint follows after this batch, then the run ends; resume goes on from there")

    signal.signal(signal.SIGTERM, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
