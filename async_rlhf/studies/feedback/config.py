"""Configuration of ``async-rlhf feedback``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from async_rlhf.config.base import FILE, at_least, at_most, key, require
from async_rlhf.config.common import OfRunConfig


@dataclass(frozen=True)
class PeopleConfig(OfRunConfig):
    """Ask people about a run's completions, on a page in their browsers: ``async-rlhf feedback RUN``.

    The run may be training, stopped or finished. With ``export``, what they have said is written into a file instead.
    """

    host: str = key("127.0.0.1", role="place")
    """The address to listen on: this host alone, unless you name another one."""
    port: int = key(8642, at_least(0), at_most(65535), role="place")
    """The port of the page; 0 for any that is free."""
    token: str | None = key(None, role="place")
    """What the page's address has to contain, so that nobody else answers; null makes one up."""
    export: str | None = key(None, *FILE, role="place")
    """Write all answers into this file, and ask nobody."""
    format: Literal["pairs", "ratings", "label_studio"] = "pairs"
    """Of that file. "pairs" has a line with prompt, chosen and rejected for each comparison that was no tie, "ratings"
    one with prompt, completion and score, from 1 to 5; `reward` reads both. "label_studio" is a list of tasks with
    their annotations, which Label Studio imports."""
    overwrite: bool = key(False, role="place")
    """Replace a file that is there."""

    def check(self) -> None:
        require(self.token != "", "token", self.token, "must have at least one character")
