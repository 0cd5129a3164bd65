"""Tokens of whole data sets: computed on all cores, and kept for the next run.

A fast tokenizer itself spreads a list of texts over the cores. Tokens of large data sets are written to files as they
are computed, and mapped: memory holds only what is in use. The files are named by a hash of everything that the tokens
depend on: the rows, what is read of them and by which code, and the tokenizer. So what is found is always valid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import transformers
import xxhash
from transformers import PreTrainedTokenizerBase

from async_rlhf.data import cache
from async_rlhf.data.views import OnDemand, fingerprint_of
from async_rlhf.system.progress import progress_bar

logger = logging.getLogger(__name__)

_CHUNK, _CHUNK_CHARACTERS = 10_000, 2_000_000
"""Most rows, and about so many characters, that are tokenised at once: what a tokenizer returns of a text takes some
fifty times its memory."""


class Part(NamedTuple):
    """What is kept of a row."""

    texts: tuple[str | tuple[int, ...], ...]
    """Each is tokenised alone; tokens are taken as they are."""
    numbers: tuple[float, ...] = ()
    """Whatever else is to be known of the row."""


class TokenRows(OnDemand[tuple[int, ...]]):
    """Token ids of many texts, in one flat array.

    Args:
        ids: int32, of all texts one after the other.
        ends: int64, where the ids of each text end.
    """

    def __init__(self, ids: np.ndarray, ends: np.ndarray) -> None:
        self._ids, self._ends = ids, ends

    def __len__(self) -> int:
        return len(self._ends)

    def _item(self, number: int) -> tuple[int, ...]:
        start = int(self._ends[number - 1]) if number else 0
        return tuple(self._ids[start : int(self._ends[number])].tolist())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        first = 0
        for start in range(0, len(self), _CHUNK):
            ends = self._ends[start : start + _CHUNK].tolist()
            ids = self._ids[first : ends[-1]].tolist()
            yield from (tuple(ids[a - first : b - first]) for a, b in pairwise([first, *ends]))
            first = ends[-1]
            cache.forget(self._ids)

    def lengths(self) -> np.ndarray:
        """Tokens of each text, int32."""
        found = np.empty(len(self), dtype=np.int32)
        last = 0
        for start in range(0, len(self), 1 << 18):  # a copy of all ends would be large
            ends = self._ends[start : start + (1 << 18)]
            found[start : start + len(ends)] = np.diff(ends, prepend=last)
            last = int(ends[-1])
        cache.forget(self._ends)
        return found


@dataclass(frozen=True)
class Encoded:
    """Tokens and numbers of every row of a data set."""

    tokens: tuple[TokenRows, ...]
    """For each text of a row."""
    numbers: np.ndarray
    """float64, a line for each row."""
    key: str | None
    """Identifies the rows and everything that the tokens depend on; None if only reading the rows could."""


def encode_parts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],
    what: str,
    read: Callable[[Mapping[str, Any], int], Part],
    label: str,
) -> Encoded:
    """Tokens of what is read of each row, without special tokens.

    The rows of a large file or data set on disk are read one after the other, and only the first time.

    Args:
        tokenizer: any.
        rows: at least one.
        what: says what ``read`` reads; different readings have different names.
        read: what to keep of a row, whose number counts from 1. Every row has as many texts and numbers as the first.
        label: the rows' name on the progress bar.
    """
    of = fingerprint_of(rows)
    # A template that writes the time writes another text in the next run.
    if of is None or "strftime_now" in str(tokenizer.chat_template):
        return replace(_encode(tokenizer, [read(row, n) for n, row in enumerate(rows, 1)], label), key=None)
    code = cache.code_of(
        "formats.py", "../models/chats.py", "tokenizer.py", "token_cache.py", read.__code__.co_filename
    )
    name = f"{of} {what} {code} {_state(tokenizer)}"
    return _kept(tokenizer, name, lambda: (read(row, n) for n, row in enumerate(rows, 1)), len(rows), label)


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Sequence[tuple[int, ...]]:
    """Token ids of each text, without special tokens."""
    return _encode(tokenizer, [Part((text,)) for text in texts], "texts").tokens[0] if texts else []


def _encode(tokenizer: PreTrainedTokenizerBase, parts: Sequence[Part], label: str) -> Encoded:
    """Parts that are in memory. If they are large, their tokens are kept under a hash of all texts."""
    if sum(len(text) for part in parts for text in part.texts) < cache.CACHED_FROM:
        return _in_memory(_chunks(tokenizer, parts))
    digest = xxhash.xxh3_128()
    for part in parts:
        for text in part.texts:
            raw = text.encode() if isinstance(text, str) else np.array(text, np.int32).tobytes()
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)
        digest.update(np.array(part.numbers).tobytes())
    return _kept(tokenizer, f"{digest.hexdigest()} {_state(tokenizer)}", lambda: parts, len(parts), label)


def _kept(
    tokenizer: PreTrainedTokenizerBase, of: str, parts: Callable[[], Iterable[Part]], count: int, label: str
) -> Encoded:
    """The tokens from the cache, or computed now and put there."""

    def chunks() -> Iterator[_Chunk]:
        done = 0
        with progress_bar(f"{label}: tokenising", count) as progress:
            for chunk in _chunks(tokenizer, parts()):
                yield chunk
                done += len(chunk.numbers)
                progress(done)

    key = cache.digest_of(of)
    name = f"tokens-{key}"
    found = cache.find(name, key)
    if found is not None:
        logger.info("%s: tokens of %d rows, from %s", label, count, found.folder)
    else:
        found = cache.keep(name, key, lambda folder: _write(folder, chunks()))
    if found is None:
        return replace(_in_memory(chunks()), key=key)
    texts, numbers = found.meta["texts"], found.meta["numbers"]
    tokens = [TokenRows(found.array(f"ids{i}", np.int32), found.array(f"ends{i}", np.int64)) for i in range(texts)]
    return Encoded(tuple(tokens), found.array("numbers", np.float64).reshape(count, numbers), key)


class _Chunk(NamedTuple):
    """Consecutive rows."""

    ids: list[np.ndarray]
    """For each text, the ids of all rows one after the other."""
    lengths: list[np.ndarray]
    """For each text, its tokens in every row."""
    numbers: np.ndarray


def _chunks(tokenizer: PreTrainedTokenizerBase, parts: Iterable[Part]) -> Iterator[_Chunk]:
    for some in _split(parts):
        columns = [_tokenise(tokenizer, texts) for texts in zip(*(part.texts for part in some), strict=True)]
        yield _Chunk(
            [np.fromiter(chain.from_iterable(column), dtype=np.int32) for column in columns],
            [np.fromiter(map(len, column), dtype=np.int64, count=len(some)) for column in columns],
            np.array([part.numbers for part in some], dtype=np.float64),
        )


def _split(parts: Iterable[Part]) -> Iterator[list[Part]]:
    some: list[Part] = []
    characters = 0
    for part in parts:
        some.append(part)
        characters += sum(map(len, part.texts))
        if len(some) == _CHUNK or characters >= _CHUNK_CHARACTERS:
            yield some
            some, characters = [], 0
    if some:
        yield some


def _in_memory(chunks: Iterable[_Chunk]) -> Encoded:
    ids, lengths, numbers = zip(*chunks, strict=True)
    tokens = [
        TokenRows(np.concatenate(some), np.concatenate(each).cumsum())
        for some, each in zip(zip(*ids, strict=True), zip(*lengths, strict=True), strict=True)
    ]
    return Encoded(tuple(tokens), np.concatenate(numbers), None)


def _write(folder: Path, chunks: Iterable[_Chunk]) -> dict[str, int]:
    ends: list[int] = []
    numbers = 0
    for chunk in chunks:
        ends = ends or [0] * len(chunk.ids)
        for i, (ids, lengths) in enumerate(zip(chunk.ids, chunk.lengths, strict=True)):
            _append(folder / f"ids{i}", ids)
            _append(folder / f"ends{i}", ends[i] + lengths.cumsum())
            ends[i] += int(lengths.sum())
        _append(folder / "numbers", chunk.numbers)
        numbers = chunk.numbers.shape[1]
    return {"texts": len(ends), "numbers": numbers}


def _append(path: Path, values: np.ndarray) -> None:
    with path.open("ab") as file:
        file.write(values.tobytes())


def _tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str | tuple[int, ...]]) -> list[Sequence[int]]:
    spelt = [text for text in texts if isinstance(text, str)]
    read = iter(tokenizer(spelt, add_special_tokens=False, return_attention_mask=False)["input_ids"] if spelt else ())
    return [next(read) if isinstance(text, str) else text for text in texts]


def _state(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything of a tokenizer that tokens depend on. A slow one is identified by its vocabulary and its class."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    own = f"{type(tokenizer)} {words} {tokenizer.chat_template} {sorted(tokenizer.special_tokens_map.items())}"
    versions = f"{transformers.__version__} {tokenizers.__version__}"
    return cache.digest_of(f"{own} {versions}")
