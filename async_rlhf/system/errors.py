"""Failures whose message says all: the command line shows it on one line, without a traceback."""

from __future__ import annotations


class UserCodeError(RuntimeError):
    """Code of the user's, such as a reward function, has failed. The message names it, and the line if there is one."""


class DiffersError(RuntimeError):
    """Something is not the same again. The message says what, and how it differs."""
