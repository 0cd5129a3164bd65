"""Configuration of ``async-rlhf diff``."""

from __future__ import annotations

from async_rlhf.config.base import FILE, REQUIRED, Checked, Rule, configuration, key

_SOME = Rule(lambda runs: len(runs) > 0, "must name at least one run")
_JSON = Rule(lambda path: path.endswith(".json"), "must end with .json")


@configuration
class DiffConfig(Checked):
    """Say where runs part, and why: ``async-rlhf diff A B``. Of one run: repeat it, and say whether it repeats here.

    Exit code 0: they are equal in all that both have; 1: they differ; 2: they cannot be compared.
    """

    runs: list[str] = key(REQUIRED, _SOME, names="folder")
    """Output folders of ``train`` or of a trainer in Python. Two are compared; of more, a table says which are equal up
    to where; one alone is repeated, and compared with itself."""
    repeat: bool = key(False)
    """Repeat both runs up to where they part, each from its newest checkpoint before it, and show the first number that
    differs. Both must be runs of the command with one rank."""
    batches: int | None = key(None, ge=1)
    """Of one run alone: how many of its batches are repeated; null for all."""
    out: str | None = key(None, _JSON, *FILE, role="place")
    """Write all that was found to this file, too."""
