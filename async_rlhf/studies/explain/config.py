"""Configuration of ``async-rlhf explain``."""

from __future__ import annotations

import re
from typing import Any

from async_rlhf.config.base import FOLDER, REQUIRED, Rule, configuration, key
from async_rlhf.config.common import OfRunConfig, RepeatableConfig

_SCORES = Rule(
    lambda scores: all(re.fullmatch("[1-9][0-9]{0,11}", n) and abs(x) <= 3e38 for n, x in scores.items()),
    "must be numbers of completions, from 1 in the order of the batch, with the score of each, a finite float32",
)
_NUMBERS = Rule(lambda numbers: all(n > 0 for n in numbers), "must be numbers of completions, from 1")


@configuration
class ExplainConfig(OfRunConfig, RepeatableConfig):
    """Say what moved the policy in one update: ``async-rlhf explain RUN --batch b``. The update is repeated, bit for
    bit, from the checkpoint before it."""

    batch: int = key(REQUIRED, ge=1)
    """The batch, from 1, whose update is explained."""
    sample: int | None = key(None, ge=1)
    """Tell the life of one completion of the batch instead, counted from 1: ``--sample b/n`` says both. How each of its
    tokens was drawn, what it was paid, what it added to the update, and how likely it was after it and at later
    checkpoints."""
    top: int = key(5, ge=0)
    """How many completions, or pairs, are left out in turn: those with the largest contributions. Each costs another
    update. They are ranked by how much the update changes without them."""
    after: int = key(5, ge=0)
    """How many later batches are repeated too, as far as the run has them: to see what the batch's gradient does there
    as momentum, and what becomes of the run with what_if."""
    before: int = key(0, ge=0)
    """Rank this many batches, up to this one, by how much each moved the policy in the direction in which all of them
    together moved it. The run is repeated from a checkpoint before the first of them."""
    what_if: dict[str, float] = key({}, _SCORES)
    """Other scores: numbers of completions of the batch, as the page has them, and the score that each gets in place of
    its own, e.g. --what_if.12 1.0. The run is repeated once more with them, up to the last of the batches after it. An
    environment is asked anew there, so it must repeat by itself."""
    without: list[int] = key([], _NUMBERS)
    """What if these completions of the batch were left out: their weight in its loss is 0, that of a pair whole. The
    others keep their credit. The run is repeated once more, as with what_if."""
    settings: dict[str, Any] = key({})
    """What if these keys of the objective had been others in this batch alone, e.g. --settings.cliprange 0.1, or
    --settings '{"off_policy.importance": "masked"}'."""
    output_dir: str | None = key(None, *FOLDER, role="place")
    """Where explain-BATCH.json and explain-BATCH.txt go; null for the folder "explain" in the run's folder."""

    @property
    def asks_what_if(self) -> bool:
        """Whether the run is to be repeated with something else."""
        return bool(self.what_if or self.without or self.settings)
