"""What the built-in reward functions share."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, overload

from async_rlhf.config.base import Checked, configuration


@configuration
class Reward(Checked, ABC):
    """A reward function with options, the fields of its class.

    Called with completions, it rewards them; called with options only, it returns the same reward with those options.
    So both ``numeric_answer`` and ``numeric_answer(tolerance=0.01)`` are reward functions.
    """

    by_prompt: ClassVar[bool] = True
    """It may be called with some prompts of a batch; see :data:`~async_rlhf.rewards.functions.RewardFunction`."""

    @overload
    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]: ...

    @overload
    def __call__(self, **options: Any) -> Self: ...

    def __call__(
        self, prompts: Sequence[str] = (), completions: Sequence[str] | None = None, **named: Any
    ) -> list[float] | Self:
        return dataclasses.replace(self, **named) if completions is None else self.rewards(completions, named)

    @property
    def __name__(self) -> str:
        """Its name in metrics and messages: ExactMatch is exact_match."""
        kind: type = type(self)
        return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__qualname__).lower()

    @abstractmethod
    def rewards(self, completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[float]:
        """One number for each completion.

        Args:
            completions: texts without the stop token.
            columns: the data set's columns, one value for each completion.

        Raises:
            ValueError: a column is missing, or a value in it cannot be compared with.
        """


def column_values(columns: Mapping[str, Sequence[Any]], column: str) -> Sequence[Any]:
    """The values of a column of the data.

    Raises:
        ValueError: there is no such column.
    """
    if column not in columns:
        raise ValueError(f"the data has no column {column!r}; it has {', '.join(sorted(columns)) or 'none'}")
    return columns[column]
