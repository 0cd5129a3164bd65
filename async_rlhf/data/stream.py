"""The endless stream of prompts.

It is a pure function of (seed, draw): every epoch is a new permutation of the rows, and draw n is always the same
prompt. So the state of the stream is one integer, and any process can compute the prompts of batch b.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import compress, count
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError
from async_rlhf.data.formats import RowReader, check_prompts, other_column
from async_rlhf.data.loading import Rows, without_padding
from async_rlhf.data.tokenizer import Part, Rendered, begun, encode_parts, text_start
from async_rlhf.data.views import index_type
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.models.chats import ChatTemplate, Schemas
from async_rlhf.types import Prompt

logger = logging.getLogger(__name__)


def _stable(value: Any) -> Any:
    """What stands for a value in a checksum: not its place in memory, nor the order of a set.

    Raises:
        ValueError: nothing does.
    """
    if isinstance(value, Set):
        return sorted(map(_COLUMNS.encode, value))
    if isinstance(value, (Mapping, deque)):
        return dict(value) if isinstance(value, Mapping) else list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if not isinstance(value, np.generic) and {"__array__", "__array_interface__"} & {*dir(type(value))}:
        array = np.asarray(value)  # of numpy, torch, pandas or PIL
        held = array.tolist() if array.dtype.hasobject else xxhash.xxh3_128_hexdigest(array.tobytes())
        return [str(array.dtype), array.shape, held]
    if re.search(r" at 0x[0-9a-f]+", text := str(value)):
        raise ValueError(f"a {type(value).__name__} has another text in each run")
    return text


_COLUMNS = json.JSONEncoder(sort_keys=True, default=_stable)


def _text_of(columns: Mapping[str, Any], label: str) -> str:
    """The text of a row's columns that is the same in every run.

    Raises:
        ConfigError: a value has none.
    """
    try:
        return _COLUMNS.encode(dict(columns))
    except (TypeError, ValueError, RecursionError) as error:
        for name, value in columns.items() if len(columns) > 1 else ():
            _text_of({name: value}, label)
        rule = "must be text, numbers, arrays, or lists and mappings of these"
        raise ConfigError(f"{label}: {', '.join(map(repr, columns))} cannot be told again: {error}; {rule}") from error


class PromptStream:
    """Prompts in a seeded, endless order. Rows that are on disk stay there until they are drawn.

    Args:
        rows: the data set.
        tokenizer: of the policy.
        prompt_field: the column with the prompt, as text or as a chat (see data/formats.py); returned prompts have the
            text in it.
        max_length: prompts with more tokens are dropped, and counted in ``dropped``.
        seed: of the order.
        shuffle: False keeps the order of the rows.
        key: name of the data set in errors.
        tools: schemas of functions that the chat template tells the policy about.
        chat: how chats are written; None for the tokenizer's template.

    Raises:
        ConfigError: a row has no prompt, or none is left.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_field: str = "query",
        max_length: int = 512,
        seed: int = 0,
        shuffle: bool = True,
        key: str = "train_dataset",
        tools: Schemas = (),
        chat: ChatTemplate | None = None,
    ) -> None:
        if len(rows) == 0:
            raise ConfigError(f"{key}: got 0 rows; must have at least one")
        check_prompts(rows, prompt_field, key)
        rows = without_padding(rows)
        reader, start = RowReader(tokenizer, key, tools, chat), text_start(tokenizer)

        def read(row: Mapping[str, Any], number: int) -> Part:
            column = other_column(row, prompt_field) or prompt_field
            prompt = reader.prompt(row.get(column), f"{key}: {column!r} of row {number}", row, column)
            return Part((begun(start, prompt),), rendered=prompt if isinstance(prompt, Rendered) else None)

        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle
        self._reader = reader
        self._field = prompt_field
        (self._tokens,), _, self._rendered = encode_parts(tokenizer, rows, read, key)
        lengths = self._tokens.lengths()
        self._kept = np.flatnonzero((lengths > 0) & (lengths <= max_length)).astype(index_type(len(rows)))
        self.dropped = len(rows) - len(self._kept)
        if len(self._kept) == 0:
            raise ConfigError(
                f"max_prompt_length: got {max_length}; none of the {len(rows)} prompts has 1 to {max_length} tokens "
                f"(the shortest has {lengths.min()})"
            )
        if self.dropped:
            logger.warning("dropped %d of %d prompts: not 1 to %d tokens", self.dropped, len(rows), max_length)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._kept)

    def fingerprint(self) -> str:
        """A checksum of the prompts' tokens and of all columns, in row order.

        Raises:
            ConfigError: a value has no text that is the same in every run.
        """
        digest, is_kept = xxhash.xxh3_128(), np.zeros(len(self.rows), dtype=bool)
        is_kept[self._kept] = True
        for number, row, tokens in compress(zip(count(), self.rows, self._tokens), is_kept):  # in order: that is fast
            text = f"{number} {tokens} {_text_of(row, f'{self._reader.key}: row {number + 1}')}"
            digest.update(text.encode(errors="backslashreplace"))
        return digest.hexdigest()

    def prompt(self, draw: int) -> Prompt:
        """The prompt of one draw, which counts from 0."""
        epoch, position = divmod(draw, len(self))
        row = int(self._kept[self._order(epoch)[position]])
        columns: dict[str, Any] = dict(self.rows[row])
        column = None if columns.get(self._field) is not None else "prompt"  # every row has one of the two
        value = columns[self._field] if column is None else columns.pop(column)
        messages = None
        if (rendered := self._rendered[row].as_py()) is not None:
            label = f"{self._field!r} of row {row + 1}"
            messages = self._reader.messages(value, label, columns, column or self._field)
            value = Rendered(rendered)
        columns[self._field] = value
        return Prompt(draw, row, self._tokens[row], columns, messages, column)

    def batch(self, index: int, size: int) -> Sequence[Prompt]:
        """The prompts of batch ``index``, which counts from 1."""
        return [self.prompt(draw) for draw in range((index - 1) * size, index * size)]

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self), dtype=self._kept.dtype)
        order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self))
        return order.astype(self._kept.dtype)


class SharedPrompts:
    """Prompts that rank 0 has. Every rank of the learner must make each call; the others get none.

    Args:
        stream: on rank 0; None on the others.
        ranks: of the learner.
    """

    def __init__(self, stream: PromptStream | None, ranks: Ranks) -> None:
        self.stream, self.ranks = stream, ranks

    def batch(self, index: int, size: int) -> Sequence[Prompt]:
        """See :meth:`PromptStream.batch`."""
        return self._draw(f"prompts of batch {index}", lambda stream: stream.batch(index, size))

    def all(self) -> Sequence[Prompt]:
        """The prompts of one epoch."""
        return self._draw("all prompts", lambda stream: [stream.prompt(draw) for draw in range(len(stream))])

    def prompts(self, draws: Sequence[int]) -> Sequence[Prompt]:
        """The prompts of the given draws."""
        return self._draw("prompts", lambda stream: [stream.prompt(draw) for draw in draws])

    def _draw(self, label: str, draw: Callable[[PromptStream], Sequence[Prompt]]) -> Sequence[Prompt]:
        prompts = () if self.stream is None else draw(self.stream)
        self.ranks.barrier(label)
        return prompts
