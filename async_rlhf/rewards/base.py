"""What the built-in reward functions share."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, overload

from async_rlhf.config.base import Checked, configuration
from async_rlhf.models.thoughts import answer_of


@configuration(kw_only=True)
class Reward(Checked, ABC):
    """A reward function with options, the fields of its class.

    Called with completions, it rewards them; called with options only, it returns the same reward with those options.
    So both ``numeric_answer`` and ``numeric_answer(tolerance=0.01)`` are reward functions.

    What a model thinks (``<think>...</think>`` and its like) is no part of its answer, whether the thought was ended or
    cut off, and whether the completion or the prompt has begun it. A pattern that names such a mark reads all.

    Args:
        thoughts: what was thought is read as a part of the answer.
    """

    thoughts: bool = False

    by_prompt: ClassVar[bool] = True
    """It may be called with some prompts of a batch; see :data:`~async_rlhf.rewards.functions.RewardFunction`."""

    @overload
    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]: ...

    @overload
    def __call__(self, **options: Any) -> Self: ...

    def __call__(
        self, prompts: Sequence[str] = (), completions: Sequence[str] | None = None, **named: Any
    ) -> list[float] | Self:
        if completions is None:
            return dataclasses.replace(self, **named)
        if not self.thoughts:
            said = named.get("completion_messages") or [None] * len(completions)
            rows = zip(completions, prompts, said, self.patterns(len(completions), named), strict=True)
            completions = [
                text if _NAMES_THOUGHT.search(pattern) else _answer(text, *row) for text, *row, pattern in rows
            ]
        return self.rewards(completions, named)

    @property
    def __name__(self) -> str:
        """Its name in metrics and messages: ExactMatch is exact_match."""
        kind: type = type(self)
        return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__qualname__).lower()

    def patterns(self, rows: int, columns: Mapping[str, Sequence[Any]]) -> Sequence[str]:
        """The pattern that each completion is matched with; empty for none."""
        return [""] * rows

    @abstractmethod
    def rewards(self, completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[float]:
        """One number for each completion.

        Args:
            completions: texts without the stop token.
            columns: the data set's columns, one value for each completion.

        Raises:
            ValueError: a column is missing, or a value in it cannot be compared with.
        """


_NAMES_THOUGHT = re.compile("think|thought|reasoning|analysis", re.IGNORECASE)


def _answer(completion: str, prompt: str, said: Sequence[Mapping[str, Any]] | None) -> str:
    """What was answered; of an episode with thoughts, in all its turns."""
    answers = [message for message in said or () if message["role"] == "assistant"]
    if len(answers) > 1 and any(message.get("reasoning_content") for message in answers):
        return "\n".join(answer_of(str(message["content"])) for message in answers)
    return answer_of(completion, prompt)


def column_values(columns: Mapping[str, Sequence[Any]], column: str) -> Sequence[Any]:
    """The values of a column of the data.

    Raises:
        ValueError: there is no such column.
    """
    if column not in columns:
        raise ValueError(f"the data has no column {column!r}; it has {', '.join(sorted(columns)) or 'none'}")
    return columns[column]
