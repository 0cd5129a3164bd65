"""The endless stream of prompts.

It is a pure function of (seed, draw): every epoch is a new permutation of the rows, and draw n is always the same
prompt. So the state of the stream is one integer, and any process can compute the prompts of batch b.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError
from async_rlhf.data.formats import RowReader
from async_rlhf.data.loading import Rows, check_columns
from async_rlhf.data.token_cache import encode_texts
from async_rlhf.ranks.collectives import Ranks
from async_rlhf.types import Prompt

logger = logging.getLogger(__name__)


class PromptStream:
    """Prompts in a seeded, endless order.

    Args:
        rows: the data set.
        tokenizer: of the policy.
        prompt_field: the column with the prompt, as text or as a chat (see data/formats.py); returned prompts have the
            text in it.
        max_length: prompts with more tokens are dropped, and counted in ``dropped``.
        seed: of the order.
        shuffle: False keeps the order of the rows.
        key: name of the data set in errors.

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
    ) -> None:
        if not hasattr(rows, "__len__") or isinstance(rows, Mapping):
            raise ConfigError(f"{key}: got a {type(rows).__name__}; must be a list of rows, or one split of a data set")
        if len(rows) == 0:
            raise ConfigError(f"{key}: got 0 rows; must have at least one")
        check_columns(rows, [prompt_field], key)
        values = [row[prompt_field] for row in rows]
        texts = RowReader(tokenizer, key).prompts(values, prompt_field)
        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle
        self._field = prompt_field
        encoded = encode_texts(tokenizer, texts, key)
        self._tokens = {i: ids for i, ids in enumerate(encoded) if 0 < len(ids) <= max_length}
        # Only for chats: a second copy of plain text would waste memory.
        self._texts = {i: texts[i] for i in self._tokens if texts[i] is not values[i]}
        self._kept = np.fromiter(self._tokens, dtype=np.int64)
        self.dropped = len(rows) - len(self._kept)
        if len(self._kept) == 0:
            shortest = min(map(len, encoded))
            raise ConfigError(
                f"max_prompt_length: got {max_length}; none of the {len(rows)} prompts has 1 to {max_length} tokens "
                f"(the shortest has {shortest})"
            )
        if self.dropped:
            logger.warning("dropped %d of %d prompts: not 1 to %d tokens", self.dropped, len(rows), max_length)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._kept)

    def fingerprint(self) -> str:
        """A checksum of the prompts' tokens and of all columns, in row order."""
        digest = xxhash.xxh3_128()
        for row in self._kept.tolist():
            columns = json.dumps(dict(self.rows[row]), sort_keys=True, default=str)
            digest.update(f"{row} {self._tokens[row]} {columns}".encode(errors="backslashreplace"))
        return digest.hexdigest()

    def prompt(self, draw: int) -> Prompt:
        """The prompt of one draw."""
        epoch, position = divmod(draw, len(self))
        row = int(self._kept[self._order(epoch)[position]])
        columns: dict[str, Any] = dict(self.rows[row])
        if row in self._texts:  # readers of the columns see the text that the policy sees
            columns[self._field] = self._texts[row]
        return Prompt(draw, row, self._tokens[row], columns)

    def batch(self, index: int, size: int) -> Sequence[Prompt]:
        """The prompts of batch ``index``, which counts from 1."""
        return [self.prompt(draw) for draw in range((index - 1) * size, index * size)]

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self))
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self))


class SharedPrompts:
    """Rank 0's prompts, on every rank of the learner. Every rank must make each call.

    Their columns stay on rank 0: they may be large, and only rewards need them.

    Args:
        stream: on rank 0; None on the others.
        ranks: the ranks that get the prompts.
    """

    def __init__(self, stream: PromptStream | None, ranks: Ranks) -> None:
        self.stream, self.ranks = stream, ranks

    def batch(self, index: int, size: int) -> Sequence[Prompt]:
        """See :meth:`PromptStream.batch`."""
        return self._share(f"prompts of batch {index}", lambda stream: stream.batch(index, size))

    def all(self) -> Sequence[Prompt]:
        """The prompts of one epoch."""
        return self._share("all prompts", lambda stream: [stream.prompt(draw) for draw in range(len(stream))])

    def prompts(self, draws: Sequence[int]) -> Sequence[Prompt]:
        """The prompts of the given draws."""
        return self._share("prompts", lambda stream: [stream.prompt(draw) for draw in draws])

    def _share(self, place: str, draw: Callable[[PromptStream], Sequence[Prompt]]) -> Sequence[Prompt]:
        mine = () if self.stream is None else draw(self.stream)
        if self.ranks.count == 1:
            return mine
        told = self.ranks.from_lead(place, lambda: [replace(prompt, columns={}) for prompt in mine])
        return mine if self.ranks.leads else told
