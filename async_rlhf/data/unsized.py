"""Training prompts from rows that can only be read one after the other: generators, a hub's data set that is streamed.

Draw n is the n-th prompt that fits, in the order of the rows; what order that is, and whether it is shuffled, is the
rows' own business. At their end they are read again from the start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError
from async_rlhf.data.cache import digest_of
from async_rlhf.data.formats import RowReader, other_column, prompt_of
from async_rlhf.data.stream import with_prompt_text
from async_rlhf.data.tokenizer import encode_prompts
from async_rlhf.models.chats import ChatTemplate, Schemas
from async_rlhf.types import Prompt

logger = logging.getLogger(__name__)

Stream = Iterable[Mapping[str, Any]]

_FRUITLESS = 100_000
"""Rows in a row without a prompt that fits, after which there is something wrong."""


def is_unsized(rows: object) -> bool:
    """Whether these are rows that can be read one after the other, and not counted."""
    return isinstance(rows, Iterable) and not hasattr(rows, "__len__")


class UnsizedPrompts:
    """Prompts in the order of the rows, which are read as they are needed.

    A resumed run reads them again from the start, so they must come in the same order each time. Then it goes on with
    exactly the prompt that was next.

    Args:
        rows: anything that can be iterated over; an iterator, such as a generator, only once.
        tokenizer: of the policy.
        window: how many of the newest prompts can be drawn again at once; older ones are read from the start.
        prompt_field: see :class:`~async_rlhf.data.stream.PromptStream`.
        max_length: the same.
        key: the same.
        tools: the same.
        chat: the same.

    Raises:
        ConfigError: the first prompt cannot be read; later, another one, or the rows of an iterator have ended.
    """

    def __init__(
        self,
        rows: Stream,
        tokenizer: PreTrainedTokenizerBase,
        *,
        window: int,
        prompt_field: str = "query",
        max_length: int = 512,
        key: str = "train_dataset",
        tools: Schemas = (),
        chat: ChatTemplate | None = None,
    ) -> None:
        self._rows, self._tokenizer, self._reader = rows, tokenizer, RowReader(tokenizer, key, tools, chat)
        self._window, self._field, self._longest, self._key = window, prompt_field, max_length, key
        self._recent: dict[int, Prompt] = {}
        self._next = 0
        self._left = self._read()
        self._first = self.prompt(0)  # mistakes in the rows show within seconds

    @property
    def epoch_size(self) -> int | None:
        """Unknown."""
        return None

    def fingerprint(self) -> str:
        """A checksum of the first prompt; the others have not been read."""
        text = f"{self._first.row} {self._first.tokens} {sorted(self._first.columns)}"
        return digest_of(text)

    def prompt(self, draw: int) -> Prompt:
        """The prompt of one draw."""
        if draw < self._next and draw not in self._recent:
            if self._once():
                raise ConfigError(f"{self._key}: prompt {draw + 1} is needed again; {self._right()}")
            self._recent, self._next, self._left = {}, 0, self._read()
        while self._next <= draw:
            self._recent[self._next] = next(self._left)
            self._next += 1
            self._recent.pop(self._next - 1 - self._window, None)
        return self._recent[draw]

    def batch(self, index: int, size: int) -> Sequence[Prompt]:
        """The prompts of batch ``index``, which counts from 1."""
        return [self.prompt(draw) for draw in range((index - 1) * size, index * size)]

    def _once(self) -> bool:
        return isinstance(self._rows, Iterator)

    def _right(self) -> str:
        return (
            f"a {type(self._rows).__name__} can be read only once; must be an object whose __iter__ starts anew, "
            "or have enough prompts for the run"
        )

    def _read(self) -> Iterator[Prompt]:
        """Every prompt that fits, with its draw, again and again."""
        draw = dropped = fruitless = 0
        for row, columns in self._endless():
            prompt = self._prompt(draw, row, columns)
            if 0 < len(prompt.tokens) <= self._longest:
                draw, fruitless = draw + 1, 0
                yield prompt
                continue
            dropped, fruitless = dropped + 1, fruitless + 1
            if dropped & (dropped - 1) == 0:  # 1, 2, 4, 8 ...
                logger.warning("%s: dropped %d prompts so far: not 1 to %d tokens", self._key, dropped, self._longest)
            if fruitless == _FRUITLESS or (draw == 0 and fruitless > row + 1):  # or a whole epoch
                raise ConfigError(
                    f"max_prompt_length: got {self._longest}; none of {fruitless} rows of {self._key}, one after the "
                    f"other, has a prompt of 1 to {self._longest} tokens (the last has {len(prompt.tokens)})"
                )

    def _prompt(self, draw: int, row: int, columns: dict[str, Any]) -> Prompt:
        column = other_column(columns, self._field)
        value, place = prompt_of(columns, self._field), f"{self._key}: {(column or self._field)!r} of row {row + 1}"
        if value is None:
            right = f"must have a prompt there (prompt_field); it has {', '.join(map(repr, columns))}"
            raise ConfigError(f"{place} is {'null' if self._field in columns else 'missing'}; {right}")
        messages = with_prompt_text(columns, self._field, self._reader, place)
        (tokens,) = encode_prompts(self._tokenizer, [columns[self._field]])
        return Prompt(draw, row, tokens, columns, messages, column)

    def _endless(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every row with its number in its epoch, from 0."""
        while True:
            number = -1
            for number, row in enumerate(self._rows):
                if not isinstance(row, Mapping):
                    raise ConfigError(f"{self._key}: row {number + 1} is a {type(row).__name__}; must be a mapping")
                yield number, dict(row)
            if number < 0:
                raise ConfigError(f"{self._key}: got 0 rows; must have at least one")
            if self._once():
                raise ConfigError(f"{self._key}: its rows have ended after {number + 1}; {self._right()}")
            logger.info("%s: all %d rows were read; starting again with the first", self._key, number + 1)
