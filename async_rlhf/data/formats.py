"""The formats of rows: prompts, demonstrations and preference pairs, as plain text or as chats.

The tokenizer's chat template turns a chat into text. Everything after this module works with text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError
from async_rlhf.data.loading import Rows
from async_rlhf.data.tokenizer import TEXT, split_text

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
    """

    tokenizer: PreTrainedTokenizerBase | None
    key: str

    def prompts(self, values: Sequence[Any], field: str) -> list[str]:
        """Prompts from the values of column ``field``; for a chat, everything before the assistant's last answer.

        Raises:
            ConfigError: one is neither text nor a chat.
        """
        return [self._prompt(value, f"{self.key}: {field!r} of row {n}") for n, value in enumerate(values, start=1)]

    def demonstrations(self, rows: Rows) -> list[Demonstration]:
        """Prompts with the answer to learn: from `query_reference_response` (with `query`, its start), from `messages`,
        from `prompt` and `completion` (or, in preference pairs, `chosen`), or from `text`.

        Raises:
            ConfigError: a row has none of these, or they are not text.
        """
        return [self._demonstration(row, f"{self.key}: row {n}") for n, row in enumerate(rows, start=1)]

    def preferences(self, rows: Rows) -> list[Preference]:
        """`prompt`, `chosen` and `rejected` of every row; two whole chats must have their prompt in common.

        Raises:
            ConfigError: a column is missing, or is neither text nor a chat.
        """
        return [self._preference(row, f"{self.key}: row {n}") for n, row in enumerate(rows, start=1)]

    def _prompt(self, value: Any, place: str) -> str:
        if is_chat(value):
            return self._template(_without_answer(value, place), place)
        return _text(value, place)

    def _demonstration(self, row: Mapping[str, Any], place: str) -> Demonstration:
        if row.get(TEXT) is not None:
            _text(row[TEXT], f"{place}: `{TEXT}`")
            return Demonstration(*split_text(row, place))
        if row.get("messages") is not None:
            chat = _chat(row["messages"], f"{place}: `messages`")
            return Demonstration(*self._answered(_without_answer(chat, place), chat, f"{place}: `messages`"))
        for column in ("completion", "chosen"):
            if row.get("prompt") is not None and row.get(column) is not None:
                return Demonstration(*self._prompted(row["prompt"], row[column], f"{place}: `{column}`"))
        if row.get("text") is not None:
            return Demonstration("", _text(row["text"], f"{place}: `text`"))
        raise ConfigError(
            f"{place} has {', '.join(map(repr, row))}; must have `{TEXT}`, or `prompt` and `completion`, or "
            "`messages`, or `text`"
        )

    def _preference(self, row: Mapping[str, Any], place: str) -> Preference:
        for column in ("chosen", "rejected"):
            if row.get(column) is None:
                raise ConfigError(f"{place} has no {column!r}; it has {', '.join(map(repr, row))}")
        chosen, rejected, given = row["chosen"], row["rejected"], row.get("prompt")
        # Data sets such as UltraFeedback repeat the prompt besides two whole chats.
        once_more = (
            is_chat(chosen) and is_chat(rejected) and (isinstance(given, str) or _begin_with(given, chosen, rejected))
        )
        if given is not None and not once_more:
            prompt, first = self._prompted(given, chosen, f"{place}: `chosen`")
            return Preference(prompt, first, self._prompted(given, rejected, f"{place}: `rejected`")[1])
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
        before, found, after = rest.rpartition(answer)
        if not found:  # the template changes the answer's text
            before, after = "", rest
        # The end of sequence that the template writes, not one within the answer's text.
        ended, eos, _ = after.partition(self.tokenizer.eos_token)
        return start, before + found + (ended if eos else after)

    def _template(self, chat: Messages, place: str, answered: bool = False) -> str:
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise ConfigError(
                f"{place} is a chat, and no tokenizer with a chat template is there to write it; give one, or text"
            )
        for number, message in enumerate(chat, start=1):
            if message.get("content") is None and not message.get("tool_calls"):
                raise ConfigError(f"{place}: message {number} ({message['role']}) has no content; must have text")
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in chat], tokenize=False, add_generation_prompt=not answered
                )
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{place}: the chat template cannot write it: {error}") from error


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
