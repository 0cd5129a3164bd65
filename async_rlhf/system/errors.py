"""Failures whose message says all: the command line shows it on one line, below the frames of the user's own code."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

_OTHERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[1]), "<")
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+).*\n(?:    .*\n)*', re.MULTILINE)


class UserCodeError(RuntimeError):
    """Code of the user's, such as a reward function, has failed.

    Args:
        message: names it, and the line if there is one.
        frames: of its traceback, those of the user's own code.
    """

    def __init__(self, message: str = "", frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


class NothingLearntError(RuntimeError):
    """A run has ended and its policy is the one that it started from. The message says why."""


def own_frames(trace: str) -> str:
    """The frames of a traceback's text that are in files of the user's own: not of this package, nor installed."""
    return "".join(frame[0] for frame in _FRAME.finditer(trace) if is_own(frame["file"]))


def is_own(file: str) -> bool:
    """Whether a file of code is the user's own."""
    return not (file.startswith(_OTHERS) or {"site-packages", "dist-packages"} & {*Path(file).parts})


def frames_of(error: BaseException) -> str:
    """:func:`own_frames` of an error."""
    return own_frames("".join(traceback.format_tb(error.__traceback__)))


def last_place(frames: str) -> str:
    """ " (file, line 3)" of the last of some frames; "" if there is none."""
    matches = [*_FRAME.finditer(frames)]
    return f" ({matches[-1]['file']}, line {matches[-1]['line']})" if matches else ""


class DiffersError(RuntimeError):
    """Something is not the same again. The message says what, and how it differs."""
