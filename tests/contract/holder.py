"""A process that holds the lock of a folder, as a run does, until it is killed or its input ends.

    python tests/contract/holder.py LOCK [fork | outlived]

It says "held", or the error. With "fork" a fork of it ends in the ordinary way meanwhile; with "outlived" one lives on
until the input ends, whatever becomes of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from async_rlhf.system import lock


def main(path: Path, forks: bool, is_outlived: bool) -> None:
    """Hold it."""
    try:
        held = lock.hold(path, "output_dir", path.parent)
    except lock.InUseError as error:
        print(error, flush=True)
        return
    if forks and os.fork() == 0:
        held.release()
        sys.exit()  # with what is done at the exit of an interpreter
    if forks:
        os.wait()
    if is_outlived and os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "fork" in sys.argv[2:], "outlived" in sys.argv[2:])
