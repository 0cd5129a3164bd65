"""Text to tokens: the tokenizer of a new model, and how prompts and responses are encoded everywhere.

A prompt and its response are always encoded separately: at sampling time the response follows a prompt that was encoded
alone, so training must have the same boundary. A prompt of plain text begins as the tokenizer begins a text (BOS), a
chat as its template writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from async_rlhf.config import ConfigError
from async_rlhf.data.token_cache import encode_texts
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.types import Sample

EOS = "<|endoftext|>"
PAD = "<|padding|>"
TEXT = "query_reference_response"
"""The column with a query and its response in one text."""

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


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Sequence[tuple[int, ...]]:
    """Token ids of each text, which begins as the tokenizer begins a text unless it is :class:`Rendered`."""
    return encode_texts(tokenizer, [begun(tokenizer, text) for text in texts])


def begun(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text with what the tokenizer puts before a text (BOS), where it puts something."""
    if isinstance(text, Rendered):
        return text
    start = _start(tokenizer)
    return text if text.startswith(start) else start + text


def _start(tokenizer: PreTrainedTokenizerBase) -> str:
    bare, whole = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    place = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return tokenizer.decode(whole[:place]) if place else ""


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


def split_text(row: Mapping[str, Any], place: str) -> tuple[str, str]:
    """The query ("" without one) and the rest of `query_reference_response`.

    Raises:
        ConfigError: the query is not the start of the text.
    """
    text, query = str(row[TEXT]), str(row.get("query") or "")
    if not text.startswith(query):
        raise ConfigError(
            f"{place}: `{TEXT}` must begin with `query`, {query[:60]!r}; it begins with {text[: len(query)][:60]!r}"
        )
    return query, text[len(query) :]


def decode_samples(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]) -> list[str]:
    """Texts of the tokens that the policy drew, without the stop token."""
    drawn = [(sample.drawn, sample.finish_reason == "stop") for sample in samples]
    if not drawn:
        return []  # of no texts transformers makes an empty one
    return tokenizer.batch_decode([(tokens[:-1] if stopped else tokens).tolist() for tokens, stopped in drawn])
