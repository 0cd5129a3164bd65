"""Several servers side by side: started together, told apart, ended together."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1


class Replica(NamedTuple):
    """One server."""

    url: str
    words: Sequence[str]
    environment: Mapping[str, str]


def run_side_by_side(replicas: Sequence[Replica]) -> int:
    """Run them until all have ended; signals to end go to each, and none outlives this process.

    One that ends does not end the others: a run goes on with those.

    Returns:
        The first exit code that is not 0, as a shell would give it.
    """
    running: dict[int, tuple[Replica, subprocess.Popen[bytes]]] = {}

    def pass_on(number: int, frame: FrameType | None) -> None:
        for _, process in running.values():
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    code = 0
    try:
        for replica in replicas:
            # A group of its own, so that Ctrl-C comes once: vLLM takes a second one for an order to leave all behind.
            process = subprocess.Popen(
                replica.words, env=dict(replica.environment), process_group=0, preexec_fn=_end_with_this_process
            )
            running[process.pid] = replica, process
        while running:
            pid, status = os.wait()
            if pid in running:
                replica, process = running.pop(pid)
                ended = process.returncode = os.waitstatus_to_exitcode(status)
                left = ", ".join(other.url for other, _ in running.values()) or "none"
                print(f"async-rlhf serve: {replica.url} ended (exit code {ended}); left: {left}", file=sys.stderr)
                code = code or (ended if ended >= 0 else 128 - ended)
    finally:
        for _, process in running.values():
            process.terminate()
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


def _end_with_this_process() -> None:
    """In a child that has just been made, on Linux: the kernel ends it when this process ends, however that comes."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
