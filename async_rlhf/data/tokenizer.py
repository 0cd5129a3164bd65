"""Text to tokens: the tokenizer of a new model, and how prompts and responses are encoded everywhere.

A prompt and its response are always encoded separately: at sampling time the response follows a prompt that was encoded
alone, so training must have the same boundary. A prompt of plain text begins as the tokenizer begins a text (BOS), a
chat as its template writes it.

Data sets are encoded when a command starts. A fast tokenizer itself spreads a list of texts over the cores. The tokens
of large data sets are in files that are mapped: memory holds only what is in use, and other ranks and later starts find
them. A file is named by a hash of its texts, as rendered, and of the tokenizer, so it is never one of other data.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
import transformers
import xxhash
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from async_rlhf.config import ConfigError
from async_rlhf.data.checksums import digest_of
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.system.files import cache_folder, whole_file
from async_rlhf.system.progress import progress_bar
from async_rlhf.types import Sample

logger = logging.getLogger(__name__)

T = TypeVar("T")
EOS = "<|endoftext|>"
PAD = "<|padding|>"
TEXT = "query_reference_response"
"""The column with a query and its response in one text."""
_CHUNK, _CHUNK_CHARACTERS = 10_000, 2_000_000
"""Most rows, and about so many characters, that are tokenised at once and are in one file: what a tokenizer returns
of a text takes some fifty times its memory."""
_HEAD = 64
"""Bytes before the batch in a file: its checksum, and as many as its alignment takes."""

# Spaces are separate from words, and identifiers are split at underscores and capitals. A word is then the same token
# in `parse_args`, `parseArgs` and "parse the arguments", so even a tiny model learns to copy it from name to text.
_WORDS = r"[A-Z]?[a-z]+|[A-Z]+|\d|\s+|_|[^\w\s]+|[^\W\d_]+"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int, special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (like GPT-2's and Pythia's, except for how words are split); deterministic.

    Args:
        texts: the merges are learned from these; an ``<|endoftext|>`` at the end of one is left out.
        vocab_size: most tokens: 256 bytes, special tokens and the merges. Short texts may yield fewer.
        max_length: longest sequence of the model; recorded in the tokenizer.
        special: more tokens that are never part of a word, such as those of a chat template.

    Returns:
        A tokenizer with ``<|endoftext|>`` (id 0) to end texts and ``<|padding|>`` (id 1) to pad them. Every text
        survives encoding and decoding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    between = re.compile("|".join(map(re.escape, special)) or "(?!)")
    pieces = (piece for text in texts for piece in between.split(text.removesuffix(EOS)))
    tokenizer.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


class Rendered(str):
    """A chat as its template writes it. Nothing is to be put before it."""

    __slots__ = ()


class Sampled(str):
    """A text that a policy wrote, with its tokens: the text alone may be read as others, or lack half a character.

    Args:
        text: as it was decoded.
        tokens: without the one that ended it.
    """

    tokens: tuple[int, ...]

    def __new__(cls, text: str, tokens: Sequence[int] = ()) -> Sampled:
        made = super().__new__(cls, text)
        made.tokens = tuple(tokens)
        return made


def spelt(tokenizer: PreTrainedTokenizerBase, text: str) -> str | tuple[int, ...]:
    """The tokens of a text that a policy with this tokenizer wrote; any other text as it is."""
    if isinstance(text, Sampled) and text.tokens and tokenizer.decode(list(text.tokens)) == text:
        return text.tokens
    return text


class Part(NamedTuple):
    """What is kept of a row."""

    texts: tuple[str | tuple[int, ...], ...]
    """Each is tokenised alone; tokens are taken as they are."""
    numbers: tuple[float, ...] = ()
    """Whatever else is to be known of the row."""
    rendered: str | None = None
    """The text of a chat, if it is to be kept."""


class TokenRows(Sequence[tuple[int, ...]]):
    """Token ids of many texts.

    Args:
        column: lists of int32.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, number: Any) -> Any:
        return tuple(self._column[number].values.to_numpy().tolist())

    def lengths(self) -> np.ndarray:
        """Tokens of each text, int32."""
        return pc.list_value_length(self._column).to_numpy()


class Encoded(NamedTuple):
    """What is kept of every row of a data set."""

    tokens: tuple[TokenRows, ...]
    """For each text of a row."""
    numbers: tuple[np.ndarray, ...]
    """float64, for each number of a row."""
    rendered: pa.ChunkedArray
    """Strings or null."""


def encode_parts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[T], read: Callable[[T, int], Part], label: str, keep: bool = True
) -> Encoded:
    """What is read of each row, its texts as tokens without special tokens.

    Args:
        tokenizer: any.
        rows: at least one. They are read once, one after the other.
        read: what to keep of a row, whose number counts from 1. Every row has as many texts and numbers as the first.
        label: the rows' name on the progress bar.
        keep: keep tokens for a later start, if they are many.
    """

    def read_one(number: int, row: T) -> Part:
        try:
            return read(row, number)
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:  # too many digits, or too deep
            raise ConfigError(f"{label}: row {number} has a value that cannot be written: {error}") from error

    chunks = _split(starmap(read_one, enumerate(rows, 1)))
    first = next(chunks)
    is_small = len(first) == len(rows)
    make = partial(_batch, tokenizer)
    tells_time = "strftime_now" in str(getattr(tokenizer, "chat_template", ""))  # no later start finds its texts
    if keep and not is_small and not tells_time:
        make = partial(_kept, tokenizer, _state(tokenizer))
    batches, done = [], 0
    with progress_bar(f"{label}: tokenising", len(rows), shown=not is_small) as progress:
        for batch in map(make, chain([first], chunks)):
            batches.append(batch)
            done += len(batch)
            progress(done)
    table = pa.Table.from_batches(batches)
    tokens = tuple(TokenRows(table[name]) for name in table.column_names if name.startswith("tokens"))
    numbers = tuple(table[name].to_numpy() for name in table.column_names if name.startswith("number"))
    return Encoded(tokens, numbers, table["rendered"])


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Sequence[tuple[int, ...]]:
    """Token ids of each text, without special tokens."""
    if not texts:
        return []
    return encode_parts(tokenizer, texts, lambda text, _: Part((spelt(tokenizer, text),)), "texts", False).tokens[0]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Sequence[tuple[int, ...]]:
    """Token ids of each text, which begins as the tokenizer begins a text unless it is :class:`Rendered`."""
    start = text_start(tokenizer)
    return encode_texts(tokenizer, [begun(start, text) for text in texts])


def _kept(tokenizer: PreTrainedTokenizerBase, state: str, parts: Sequence[Part]) -> pa.RecordBatch:
    """A batch of tokens from its file, or computed now and put there."""
    path = cache_folder() / f"tokens-{digest_of(f'{state} {parts!r}')}.arrow"
    if (cached := _mapped(path)) is not None:
        return cached
    batch, sink = _batch(tokenizer, parts), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    raw = sink.getvalue()
    try:
        with whole_file(path) as file:
            file.buffer.write(xxhash.xxh3_128_digest(raw).ljust(_HEAD, b"\0"))
            file.buffer.write(raw)
    except OSError as error:
        logger.warning("the cache file %s could not be written: %s", path, error)
        return batch
    cached = _mapped(path)
    return batch if cached is None else cached


def _mapped(path: Path) -> pa.RecordBatch | None:
    """The batch in a file, which stays there; None if there is none. One that is damaged is warned of."""
    if not path.exists():
        return None
    with suppress(OSError, ValueError), path.open("rb") as file:
        head = file.read(_HEAD)
        if head.startswith(hashlib.file_digest(file, xxhash.xxh3_128).digest()):
            with pa.memory_map(str(path)) as mapped:  # which is closed: a process may have few open files
                return pa.ipc.open_file(mapped.read_buffer()[_HEAD:]).get_batch(0)
    logger.warning("the cache file %s is damaged; it is made again", path)
    return None


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


def _batch(tokenizer: PreTrainedTokenizerBase, parts: Sequence[Part]) -> pa.RecordBatch:
    columns = {"rendered": pa.array([part.rendered for part in parts], pa.string())}
    for i, texts in enumerate(zip(*(part.texts for part in parts), strict=True)):
        ids = _tokenise(tokenizer, texts)
        ends = np.cumsum([0, *map(len, ids)], dtype=np.int32)
        columns[f"tokens{i}"] = pa.ListArray.from_arrays(ends, np.fromiter(chain.from_iterable(ids), np.int32))
    for i, numbers in enumerate(zip(*(part.numbers for part in parts), strict=True)):
        columns[f"number{i}"] = pa.array(np.array(numbers, np.float64))
    return pa.RecordBatch.from_pydict(columns)


def _tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str | tuple[int, ...]]) -> list[Sequence[int]]:
    spelt = [text for text in texts if isinstance(text, str)]
    read = iter(tokenizer(spelt, add_special_tokens=False, return_attention_mask=False)["input_ids"] if spelt else ())
    return [next(read) if isinstance(text, str) else text for text in texts]


def text_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """All of a tokenizer that tokens depend on. A slow one is identified by its vocabulary and its class."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    split = getattr(tokenizer, "split_special_tokens", None)
    return str([type(tokenizer), words, sorted(tokenizer.special_tokens_map.items()), split])


def _state(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that the tokens of a text depend on."""
    parts = text_of(tokenizer)
    return digest_of(f"{parts} {transformers.__version__} {tokenizers.__version__} {Path(__file__).read_bytes()!r}")


def begun(start: str, text: str) -> str:
    """The text with what the tokenizer puts before a text (see :func:`text_start`), where it puts something."""
    return text if isinstance(text, Rendered) or text.startswith(start) else start + text


def text_start(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the tokenizer puts before a text (BOS); empty if nothing."""
    bare, whole = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    offset = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return tokenizer.decode(whole[:offset]) if offset else ""


def encode_responses(
    template: ChatTemplate, texts: Sequence[str], ended: Sequence[bool] | None = None
) -> list[tuple[int, ...]]:
    """Token ids of each text plus one token that ends it, whether or not the text already ends with its spelling.

    Args:
        template: says what ends an answer.
        texts: the responses.
        ended: whether each ended by itself; one that was cut off gets no such token. None: all ended.
    """
    bare = encode_texts(template.tokenizer, [strip_end(template, text) for text in texts])
    flags = [True] * len(bare) if ended is None else ended
    return [ids + (template.end,) * flag for ids, flag in zip(bare, flags, strict=True)]


def strip_end(template: ChatTemplate, text: str) -> str:
    """The text without a token spelt at its end that ends an answer."""
    for spelt in template.spelt_ends:
        if text.endswith(spelt):
            return text.removesuffix(spelt)
    return text


def split_text(row: Mapping[str, Any], label: str) -> tuple[str, str]:
    """The query ("" without one) and the rest of `query_reference_response`.

    Raises:
        ConfigError: the query is not the start of the text.
    """
    text, query = str(row[TEXT]), str(row.get("query") or "")
    if not text.startswith(query):
        raise ConfigError(
            f"{label}: `{TEXT}` must begin with `query`, {query[:60]!r}; it begins with {text[: len(query)][:60]!r}"
        )
    return query, text[len(query) :]


def decode_samples(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]) -> list[Sampled]:
    """Texts of the tokens that the policy drew, without the stop token."""
    drawn = [(sample.drawn, sample.finish_reason == "stop") for sample in samples]
    tokens = [(tokens[:-1] if stopped else tokens).tolist() for tokens, stopped in drawn]
    texts = tokenizer.batch_decode(tokens) if tokens else ()  # of no texts transformers makes an empty one
    return [Sampled(text, ids) for text, ids in zip(texts, tokens, strict=True)]
