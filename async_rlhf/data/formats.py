"""The formats of rows: prompts, demonstrations, ratings and preference pairs, as plain text or as chats.

The tokenizer's chat template turns a chat into text. Everything after this module works with text.
"""

from __future__ import annotations

import json
import logging
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError
from async_rlhf.data.cache import code_of, kept_array
from async_rlhf.data.loading import Rows, columns_of, lacks, load_rows
from async_rlhf.data.tokenizer import TEXT, split_text
from async_rlhf.data.views import RowView, fingerprint_of

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]


class Demonstration(NamedTuple):
    """A prompt and the answer to learn."""

    prompt: str
    response: str


class Preference(NamedTuple):
    """Two responses, the first of which is preferred."""

    prompt: str
    chosen: str
    rejected: str


def is_chat(value: Any) -> bool:
    """Whether a column's value is a list of messages."""
    messages = isinstance(value, (list, tuple)) and len(value) > 0
    return messages and all(isinstance(one, Mapping) and "role" in one for one in value)


@dataclass(frozen=True)
class RowReader:
    """Reads rows of one data set.

    Args:
        tokenizer: its chat template turns chats into text; None if there are no chats.
        key: the configuration key that errors name.
        tools: schemas of functions that the template tells the model about.
    """

    tokenizer: PreTrainedTokenizerBase | None
    key: str
    tools: Sequence[Mapping[str, Any]] = ()

    def demonstrations(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Demonstration]:
        """Prompts with the answer to learn, one after the other: from `query_reference_response` (with `query`, its
        start), from `messages`, from `prompt` and `completion` (or, in preference pairs, `chosen`), or from `text`.

        Raises:
            ConfigError: a row has none of these, or they are not text.
        """
        return (self.demonstration(row, n) for n, row in enumerate(rows, start=1))

    def preferences(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Preference]:
        """`prompt`, `chosen` and `rejected` of every row; two whole chats must have their prompt in common. Two texts
        may have none, and then no prompt in common either.

        Raises:
            ConfigError: a column is missing, or is neither text nor a chat.
        """
        return (self.preference(row, n) for n, row in enumerate(rows, start=1))

    def prompt(self, value: Any, place: str) -> str:
        """A prompt as text; of a chat, everything before the assistant's last answer.

        Raises:
            ConfigError: it is neither text nor a chat; the error names the place.
        """
        if is_chat(value):
            return self._template(_without_answer(value, place), place)
        return _text(value, place)

    def chat(self, value: Any, place: str) -> Messages | None:
        """The messages that :meth:`prompt` spells; None of a text."""
        return _without_answer(value, place) if is_chat(value) else None

    def demonstration(self, row: Mapping[str, Any], number: int) -> Demonstration:
        """See :meth:`demonstrations`; rows count from 1."""
        place = f"{self.key}: row {number}"
        prompt, response, column = demonstration_parts(row, place)
        return Demonstration(*self._prompted(prompt, response, f"{place}: `{column}`"))

    def preference(self, row: Mapping[str, Any], number: int) -> Preference:
        """See :meth:`preferences`; rows count from 1."""
        place = f"{self.key}: row {number}"
        for column in ("chosen", "rejected"):
            if row.get(column) is None:
                raise ConfigError(f"{place} {lacks(row, column)}")
        chosen, rejected, given = row["chosen"], row["rejected"], row.get("prompt")
        # Data sets such as UltraFeedback repeat the prompt besides two whole chats.
        once_more = (
            is_chat(chosen) and is_chat(rejected) and (isinstance(given, str) or _begin_with(given, chosen, rejected))
        )
        if given is not None and not once_more:
            prompt, first = self._prompted(given, chosen, f"{place}: `chosen`")
            return Preference(prompt, first, self._prompted(given, rejected, f"{place}: `rejected`")[1])
        if isinstance(chosen, str) and isinstance(rejected, str):
            return Preference("", *(_text(row[side], f"{place}: `{side}`") for side in ("chosen", "rejected")))
        sides = [_chat(row[side], f"{place}: `{side}`") for side in ("chosen", "rejected")]
        starts = [_without_answer(side, place) for side in sides]
        if list(starts[0]) != list(starts[1]):
            raise ConfigError(f"{place}: `chosen` and `rejected` must be the same chat but for the last answer")
        prompt, first = self._answered(starts[0], sides[0], f"{place}: `chosen`")
        return Preference(prompt, first, self._answered(starts[1], sides[1], f"{place}: `rejected`")[1])

    def _prompted(self, prompt: Any, response: Any, place: str) -> tuple[str, str]:
        """A prompt and its response, both text or both chats."""
        if is_chat(prompt):
            answer = response if is_chat(response) else [{"role": "assistant", "content": _text(response, place)}]
            if [message["role"] for message in answer] != ["assistant"]:
                raise ConfigError(f"{place} is {response!r:.80}; must be one message, the assistant's, or its text")
            return self._answered(prompt, [*prompt, *answer], place)
        if is_chat(response):
            raise ConfigError(f"{place} is a chat, but `prompt` is {type(prompt).__name__}; must be a chat too")
        return _text(prompt, f"{place.partition(': `')[0]}: `prompt`"), _text(response, place)

    def _answered(self, prompt: Messages, chat: Messages, place: str) -> tuple[str, str]:
        """The text of a prompt, and the text that the template adds for the answer, up to the end of sequence."""
        start, whole = self._template(prompt, place), self._template(chat, place, answered=True)
        assert self.tokenizer is not None
        if not whole.startswith(start):
            raise ConfigError(
                f"{place}: the chat template writes a chat with its answer otherwise than without; must be one whose "
                "prompts (add_generation_prompt) are the start of the whole"
            )
        rest, answer = whole[len(start) :], str(chat[-1]["content"]).strip()
        before, found, after = rest.rpartition(answer) if answer else ("", "", rest)
        if not found:  # it is empty, or the template changes its text
            before, after = "", rest
        # The end of sequence that the template writes, not one within the answer's text.
        ended, eos, _ = after.partition(self.tokenizer.eos_token)
        return start, before + found + (ended if eos else after)

    def _template(self, chat: Messages, place: str, answered: bool = False) -> str:
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise ConfigError(
                f"{place} is a chat, and no tokenizer with a chat template is there to write it; give one, or text "
                "(sft adds one: chat_template)"
            )
        for number, message in enumerate(chat, start=1):
            if message.get("content") is None and not message.get("tool_calls"):
                raise ConfigError(f"{place}: message {number} ({message['role']}) has no content; must have text")
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in chat],
                    tools=list(self.tools) or None,
                    tokenize=False,
                    add_generation_prompt=not answered,
                )
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{place}: the chat template cannot write it: {error}") from error


def demonstration_parts(row: Mapping[str, Any], place: str) -> tuple[str | Messages, str | Messages, str]:
    """Prompt and response of a row as they are there, each text or messages, and the column that the response is in.

    See :meth:`RowReader.demonstrations`. The prompt is "" if there is none.

    Raises:
        ConfigError: the row has no such columns.
    """
    if row.get(TEXT) is not None:
        _text(row[TEXT], f"{place}: `{TEXT}`")
        return *split_text(row, place), TEXT
    if row.get("messages") is not None:
        chat = _chat(row["messages"], f"{place}: `messages`")
        return _without_answer(chat, place), chat[-1:], "messages"
    for column in ("completion", "chosen"):
        if row.get("prompt") is not None and row.get(column) is not None:
            return row["prompt"], row[column], column
    if row.get("text") is not None:
        return "", _text(row["text"], f"{place}: `text`"), "text"
    raise ConfigError(
        f"{place} has {columns_of(row)}; must have `{TEXT}`, or `prompt` and `completion`, or `messages`, or `text`"
    )


def identity(row: Mapping[str, Any], place: str) -> str:
    """What a demonstration, a rated row or a pair is about: its prompt, or without one its text; of a pair without a
    prompt, the chosen side. Rows with the same are not independent of each other.

    Raises:
        ConfigError: the row is none of these.
    """
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return prompt_identity(row["chosen"] if row.get("prompt") in (None, "") else row["prompt"], place)
    prompt, response, _ = demonstration_parts(row, place)
    return prompt_identity(response if prompt == "" else prompt, place)


def prompt_identity(value: Any, place: str) -> str:
    """The same of a prompt, or of a chat with its answer, which does not count. A chat of one message is its text.

    Raises:
        ConfigError: it is neither text nor a chat.
    """
    if not is_chat(value):
        return _text(value, place)
    chat = _without_answer(value, place)
    one = chat[0].get("content") if len(chat) == 1 else None
    return one if isinstance(one, str) else json.dumps([[m["role"], m.get("content")] for m in chat], default=str)


def first_words(rows: Rows, words: int, key: str) -> Rows:
    """Rows of plain `text` as rows of `query`, its first so many words, and `query_reference_response`, the whole.

    The space after the query belongs to the response. Texts with no more words than that are left out, with a warning.

    Args:
        rows: with `text`, and without another prompt.
        words: at least 1.
        key: the configuration key that errors name.

    Raises:
        ConfigError: a row has no text or another prompt, or no text has more words.
    """
    cut = _FirstWords(rows, words)

    def long_enough() -> np.ndarray:
        found, longest = array("q"), 0
        for number, row in enumerate(rows, start=1):
            count = _count_words(row, words, f"{key}: row {number}")
            longest = max(longest, count)
            if count > words:
                found.append(number - 1)
        if not found:
            right = f"no text of {key} has more words (the longest has {longest})"
            raise ConfigError(f"prompt_words: got {words}; {right}")
        return np.frombuffer(found, np.int64)

    kept = kept_array("first-words", cut.fingerprint, np.int64, long_enough)
    if len(kept) < len(rows):
        dropped = len(rows) - len(kept)
        logger.warning("%s: dropped %d of %d texts: no more than %d words", key, dropped, len(rows), words)
    made = cut.select(kept)
    return list(made) if cut.fingerprint is None else made


class _FirstWords(RowView):
    """All rows, with the first words of each; see :func:`first_words`."""

    def __init__(self, rows: Rows, words: int) -> None:
        self._rows, self._words = rows, words

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str | None:
        base = fingerprint_of(self._rows)
        return None if base is None else f"first {self._words} words, {code_of('formats.py')}, of {base}"

    def _item(self, number: int) -> dict[str, Any]:
        row = self._rows[number]
        text, ends = row["text"], list(islice(re.finditer(r"\S+", row["text"]), self._words))
        rest = {name: value for name, value in row.items() if name != "text"}
        return {**rest, "query": text[: ends[-1].end()], TEXT: text}


def _count_words(row: Mapping[str, Any], most: int, place: str) -> int:
    """Words of a row's `text`, counted up to one more than ``most``."""
    if row.get("text") is None:
        raise ConfigError(f"{place} has {columns_of(row)}; must have `text` with prompt_words")
    other = next((name for name in ("query", TEXT, "prompt", "messages") if row.get(name) is not None), None)
    if other is not None:
        raise ConfigError(f"{place} has {other!r} beside `text`; must have no other prompt with prompt_words")
    return sum(1 for _ in islice(re.finditer(r"\S+", _text(row["text"], f"{place}: `text`")), most + 1))


def load_prompts(source: str, split: str, prompt_field: str, prompt_words: int | None, key: str) -> Rows:
    """Rows with prompts in ``prompt_field``, or if ``prompt_words`` is given, with `query` from :func:`first_words`.

    Raises:
        ConfigError: they cannot be read, or a row has no prompt.
    """
    if prompt_words is not None:
        return first_words(load_rows(source, split, key=key), prompt_words, key)
    return load_rows(source, split, columns=[prompt_field], key=key)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            f"{place} is a {type(value).__name__}; must be text, or a list of messages with role and content"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place} is {value[:60]!r}; must be Unicode text, without half characters (surrogates)"
        ) from error
    return value


def _chat(value: Any, place: str) -> Messages:
    if not is_chat(value) or len(value) < 2 or value[-1]["role"] != "assistant":
        raise ConfigError(
            f"{place} is {value!r:.80}; must be a chat: messages with role and content, the assistant's answer last"
        )
    return value


def _begin_with(prompt: Any, *sides: Messages) -> bool:
    """Whether all sides are chats that begin with the messages of the prompt."""
    return is_chat(prompt) and all(
        len(side) > len(prompt) and list(side[: len(prompt)]) == list(prompt) for side in sides
    )


def _without_answer(chat: Messages, place: str) -> Messages:
    """Everything before the assistant's last answer, if the chat ends with one."""
    rest = chat[:-1] if chat and chat[-1]["role"] == "assistant" else chat
    if not rest:
        raise ConfigError(f"{place} has no message but the assistant's; must have a prompt")
    return rest
