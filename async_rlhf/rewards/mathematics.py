"""The reward for answers that are no single number, such as 2\\sqrt{3}: read and compared by math-verify."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from async_rlhf.config.base import ConfigError, configuration
from async_rlhf.rewards.base import Reward, column_values
from async_rlhf.rewards.numeric import marked_answer


@configuration
class MathAnswer(Reward):
    r"""1 if the completion's answer equals the reference, as the library math-verify reads and compares them, else 0.

    Both are formulas: terms, intervals, sets, pairs, matrices. A completion's answer is what follows the last "####" or
    is in the last ``\boxed{}``; without either, what the library finds. A reference is marked so, or is the whole text.
    The library sets no time limit of its own here: set ``reward_timeout``.

    Args:
        column: the column with the reference.
    """

    column: str = "answer"

    def rewards(self, completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[float]:
        references = column_values(columns, self.column)
        return [float(self._right(text, str(truth))) for text, truth in zip(completions, references, strict=True)]

    def _right(self, completion: str, reference: str) -> bool:
        library = _library()
        wanted = library.parse(_boxed(marked_answer(reference) or reference), parsing_timeout=None)
        if not wanted:
            raise ValueError(f"column {self.column!r} holds {reference[-200:]!r}; must hold a formula")
        marked = marked_answer(completion)
        answer = library.parse(completion if marked is None else _boxed(marked), parsing_timeout=None)
        return bool(library.verify(wanted, answer, timeout_seconds=None))


def _boxed(formula: str) -> str:
    return rf"\boxed{{{formula.strip().strip('$')}}}"


@cache
def _library() -> Any:
    try:
        import math_verify
    except ImportError as error:
        rule = "needs the library math-verify: pip install 'async-rlhf[math]'"
        raise ConfigError(f"async_rlhf.rewards.mathematics {rule} ({error})") from error
    # Its time limits are signals, which only a main thread gets: it says at each call that there are none.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


math_answer = MathAnswer()
"""Compares with the column ``answer``; see :class:`MathAnswer`."""
