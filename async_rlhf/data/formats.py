"""The formats of rows: prompts, demonstrations, ratings and preference pairs, as plain text or as chats.

The tokenizer's chat template turns a chat into text.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest
from typing import Any, NamedTuple, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError
from async_rlhf.config.errors import shown
from async_rlhf.data.loading import Rows, check_columns, columns_of, has_all, lacks, load_rows
from async_rlhf.data.tokenizer import TEXT, Rendered, Sampled, spelt, split_text, strip_end
from async_rlhf.data.views import Row, Selected
from async_rlhf.models.chats import ChatTemplate, Message, Schemas, as_messages, is_chat, loaded, require_unicode
from async_rlhf.models.thoughts import OPENED

logger = logging.getLogger(__name__)

SIDES = ("chosen", "rejected")
"""Of a pair."""
MESSAGES = "prompt_messages"
"""The column in which a command keeps the chat whose text it has written as the prompt."""


class Demonstration(NamedTuple):
    """A prompt and the answer to learn."""

    prompt: str
    response: str


class Preference(NamedTuple):
    """Two responses, the first of which is preferred."""

    prompt: str
    chosen: str
    rejected: str


class Turns(NamedTuple):
    """What a row teaches: the text after its prompt, of which only a part may be learnt."""

    prompt: str | tuple[int, ...]
    """Tokens if the row has those that were sampled."""
    response: str | tuple[int, ...]
    """The text after the prompt, without the token that ends it; tokens if there are several answers in it."""
    learnt: tuple[int, ...]
    """1 for each token of the response that an answer has, else 0; empty if that is all of them."""
    end: int
    """The token that ends the last answer."""
    ended: bool
    """Whether that token is learnt: not after an answer that was cut off."""


@dataclass(frozen=True)
class RowReader:
    """Reads rows of one data set.

    Args:
        tokenizer: its chat template turns chats into text; None if there are no chats.
        key: the configuration key that errors name.
        tools: schemas of functions that the template tells the model about.
        chat: how chats are written; None for the tokenizer's template.
    """

    tokenizer: PreTrainedTokenizerBase | None
    key: str
    tools: Schemas = ()
    chat: ChatTemplate | None = None

    @cached_property
    def template(self) -> ChatTemplate:
        """Writes the chats of all rows."""
        assert self.tokenizer is not None
        template = self.chat or ChatTemplate(self.tokenizer)
        setting = template.setting
        return template.with_setting(replace(setting, tools=[*setting.tools, *self.tools]))

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

    def prompt(self, value: Any, label: str, row: Mapping[str, Any] | None = None, column: str = "") -> str:
        """A prompt as text; of a chat all of it, and of one in `messages` all before the assistant's last answer.

        Args:
            value: the text or the chat, which may end with the beginning of an answer.
            label: what errors name.
            row: may have `tools` and `chat_template_kwargs`.
            column: that the prompt is in.

        Raises:
            ConfigError: it is neither text nor a chat; the error begins with the label.
        """
        if is_chat(value):
            return self._prompt(as_messages(_asked(value, label, column), label), label, row or {})
        return self._as_written(_text(value, label), row or {}, label)

    def messages(self, value: Any, label: str, row: Mapping[str, Any], column: str = "") -> list[Message] | None:
        """The messages that :meth:`prompt` spells; None of a text that no command has written of a chat."""
        chat = _asked(value, label, column) if is_chat(value) else kept_chat(row, label)
        return as_messages(chat, label) if chat else None

    def demonstration(self, row: Mapping[str, Any], number: int) -> Demonstration:
        """See :meth:`demonstrations`; rows count from 1."""
        prompt, answers, column = self._parts(row, number)
        label = f"{self.key}: row {number}: `{column}`"
        if isinstance(answers, str):
            return Demonstration(cast(str, prompt), answers)
        chat, answer = [*prompt, *answers[:-1]], answers[-1]
        return Demonstration(self._prompt(chat, label, row), self._answer(chat, answer, label, row))

    def turns(self, row: Mapping[str, Any], number: int, last: bool, whole: bool = False, rated: bool = False) -> Turns:
        """The same with all answers of a chat that are to be learnt, see :func:`is_learnt`.

        Args:
            row: of the data.
            number: counts from 1.
            last: the last answer alone.
            whole: all of the text is learnt, with its prompt.
            rated: it is rated and not learnt, whatever the row says of learning.

        Raises:
            ConfigError: no answer is to be learnt.
        """
        if (drawn := self._drawn(row, f"{self.key}: row {number}", last, rated)) is not None:
            return drawn
        prompt, answers, column = self._parts(row, number)
        ended = has_ended(row, "chosen" if column == "chosen" else None, f"{self.key}: row {number}")
        label = f"{self.key}: row {number}: `{column}`"
        if isinstance(answers, str):
            text = strip_end(self.template, answers if column != "chosen" else sampled(row, column, answers))
            return Turns(cast(str, prompt), spelt(self.template.tokenizer, text), (), self.template.end, ended)
        template = self._written_by(row, label)
        chat = [*prompt, *answers]
        learnt = [rated or is_learnt(message, f"{label}: message {n}") for n, message in enumerate(chat, start=1)]
        said = [n for n, each in enumerate(chat) if n >= len(prompt) and each["role"] == "assistant"]
        if column == "messages":
            said = [n for n, each in enumerate(chat) if each["role"] == "assistant" and n > 0]
        said = said[-1:] if last or _only_last(row, label) else said
        taught = [n for n in said if learnt[n]]
        if whole and not all(learnt[n] or each["role"] != "assistant" for n, each in enumerate(chat)):
            raise ConfigError(
                f"{label} has an answer that is not to be learnt; completion_only must be true for such rows"
            )
        if not taught:
            what = "the last answer is" if len(said) == 1 else "its answers are all"
            raise ConfigError(f"{label}: {what} not to be learnt, as the row says; leave it out")
        ended, said = ended or taught[-1] < said[-1], [n for n in said if taught[0] <= n <= taught[-1]]
        first = self._prompt(chat[: said[0]], label, row)
        pieces: list[tuple[str, int, str, bool]] = []  # an answer, the token that ends it, what is read after it
        for here, following in zip_longest(said, said[1:]):
            answer = self._answer(chat[:here], chat[here], label, row)
            end = template.end_of_calls if chat[here].get("tool_calls") else template.end
            read = chat[here + 1 : following] if following is not None else []
            if following is not None and not read:
                raise ConfigError(f"{label} has two answers of the assistant in a row; must have a message between")
            between = self._said(label, template.between, read, end) if read else ""
            pieces.append((answer, end, between, learnt[here]))
        if len(pieces) == 1:
            return Turns(first, pieces[0][0], (), end, ended)
        return self._joined(first, pieces, ended)

    def _drawn(self, row: Mapping[str, Any], label: str, last: bool, rated: bool) -> Turns | None:
        """The tokens in a row of a run's rollouts. None of other rows, and where this tokenizer writes these tokens
        otherwise: then the row has texts.
        """
        tokens, places = row.get("tokens"), [n for n, drawn in enumerate(row.get("sampled") or ()) if drawn]
        if not isinstance(tokens, list) or not places:
            return None
        stopped, ends = row["finish_reason"] == "stop", places[-1] + 1
        answer = [tokens[n] for n in places[: len(places) - stopped]]
        if self.template.tokenizer.decode(answer) != row["completion"]:
            return None
        if row["starts"]:
            raise ConfigError(f"{label} has several conversations of an agent; must have one")
        sampled = row["sampled"][:ends]
        first = ends - sampled[::-1].index(False) if last else places[0]
        learnt = tuple(map(int, sampled[first : ends - stopped]))
        end = self.template.end if rated else tokens[places[-1]]
        response = tuple(tokens[first : ends - stopped])
        return Turns(tuple(tokens[:first]), response, () if all(learnt) else learnt, end, stopped)

    def _joined(self, first: str, pieces: Sequence[tuple[str, int, str, bool]], ended: bool) -> Turns:
        """Several answers, with the messages and the ends between them."""
        assert self.tokenizer is not None
        tokens: list[int] = []
        learnt: list[int] = []
        for number, (answer, end, read, learns) in enumerate(pieces, start=1):
            said, heard = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (answer, read))
            said = [*said, end] if number < len(pieces) else said
            tokens, learnt = [*tokens, *said, *heard], [*learnt, *[int(learns)] * len(said), *[0] * len(heard)]
        return Turns(first, tuple(tokens), tuple(learnt), pieces[-1][1], ended)

    def preference(self, row: Mapping[str, Any], number: int) -> Preference:
        """See :meth:`preferences`; rows count from 1. A side has the tokens that `pairs` has kept of it."""
        prompt, *sides = self._preference(row, number)
        return Preference(prompt, *(sampled(row, side, text) for side, text in zip(SIDES, sides, strict=True)))

    def _preference(self, row: Mapping[str, Any], number: int) -> Preference:
        label = f"{self.key}: row {number}"
        for column in ("chosen", "rejected"):
            if row.get(column) is None:
                raise ConfigError(f"{label} {lacks(row, column)}")
        chosen, rejected, asked = row["chosen"], row["rejected"], row.get("prompt")
        # Data sets such as UltraFeedback repeat the prompt besides two whole chats.
        once_more = (
            is_chat(chosen) and is_chat(rejected) and (isinstance(asked, str) or _begin_with(asked, chosen, rejected))
        )
        if asked is not None and not once_more:
            prompt, first = self._prompted(asked, chosen, f"{label}: `chosen`", row)
            return Preference(prompt, first, self._prompted(asked, rejected, f"{label}: `rejected`", row)[1])
        if isinstance(chosen, str) and isinstance(rejected, str):
            return Preference("", *(_text(row[side], f"{label}: `{side}`") for side in ("chosen", "rejected")))
        sides = [as_messages(_chat(row[side], f"{label}: `{side}`"), label) for side in ("chosen", "rejected")]
        starts = [side[:-1] for side in sides]
        if starts[0] != starts[1]:
            raise ConfigError(f"{label}: `chosen` and `rejected` must be the same chat but for the last answer")
        texts = [
            self._answer(starts[0], side[-1], f"{label}: `{name}`", row)
            for side, name in zip(sides, ("chosen", "rejected"), strict=True)
        ]
        return Preference(self._prompt(starts[0], label, row), texts[0], texts[1])

    def _parts(self, row: Mapping[str, Any], number: int) -> tuple[str | list[Message], str | list[Message], str]:
        """The prompt and what follows it, both as text or both as messages, and the column that this is in."""
        label = f"{self.key}: row {number}"
        prompt, answer, column = demonstration_parts(row, label)
        return *self._alike(prompt, answer, f"{label}: `{column}`", row), column

    def _alike(
        self, prompt: Any, response: Any, label: str, row: Mapping[str, Any]
    ) -> tuple[str | list[Message], str | list[Message]]:
        """A prompt and its response, both as text or both as messages."""
        if is_chat(prompt):
            answer = response if is_chat(response) else [{"role": "assistant", "content": _text(response, label)}]
            if answer[-1]["role"] != "assistant":
                raise ConfigError(f"{label} is {response!r:.80}; must be one message, the assistant's, or its text")
            return as_messages(prompt, label), as_messages(answer, label)
        if is_chat(response):
            raise ConfigError(f"{label} is a chat, but `prompt` is {type(prompt).__name__}; must be a chat too")
        text = _text(prompt, f"{label.partition(': `')[0]}: `prompt`")
        return self._as_written(text, row, label), _text(response, label)

    def _prompted(self, prompt: Any, response: Any, label: str, row: Mapping[str, Any]) -> tuple[str, str]:
        """The texts of a prompt and its one answer."""
        before, answer = self._alike(prompt, response, label, row)
        if isinstance(before, str) or isinstance(answer, str):
            return cast(str, before), cast(str, answer)
        if len(answer) != 1:
            raise ConfigError(f"{label} is {response!r:.80}; must be one message, the assistant's, or its text")
        return self._prompt(before, label, row), self._answer(before, answer[0], label, row)

    def _prompt(self, messages: Sequence[Message], label: str, row: Mapping[str, Any]) -> Rendered:
        return Rendered(self._said(label, self._written_by(row, label).prompt, messages))

    def _answer(self, messages: Sequence[Message], answer: Message, label: str, row: Mapping[str, Any]) -> str:
        return self._said(label, self._written_by(row, label).answer, messages, answer)

    def _as_written(self, text: str, row: Mapping[str, Any], label: str) -> str:
        """The prompt of a row, which a command may have written of a chat."""
        if kept_chat(row, label):
            return Rendered(text)
        if self.tokenizer is not None and text:
            self.template.warn_of_plain()
        return text

    def _written_by(self, row: Mapping[str, Any], label: str) -> ChatTemplate:
        if self.tokenizer is None or not self.template.exists:
            raise ConfigError(
                f"{label} is a chat, and no tokenizer with a chat template is there to write it; give one, or text "
                "(sft adds one: chat_template; relabel takes that of reward_tokenizer)"
            )
        return self.template.of_row(row, label)

    @staticmethod
    def _said(label: str, write: Callable[..., str], *what: Any) -> str:
        try:
            return write(*what)
        except ConfigError as error:
            raise ConfigError(f"{label}: {error}") from error


_LEARNT = ("weight", "loss", "train", "training", "trainable", "learn", "loss_mask", "step_loss_mask")
"""Of a message: whether it is to be learnt, as OpenAI, ms-swift, slime and axolotl write it."""
_IN_PART = ("loss_scale", "train_detail")
_ENDED = (None, "", "stop", "eos", "eos_token", "end_turn", "stop_sequence", "tool_calls", "tool_use", "function_call")
_CUT_OFF = ("length", "max_tokens", "max_output_tokens", "model_length", "content_filter", "abort", "error")


def is_learnt(message: Message, label: str) -> bool:
    """Whether a message says that it is to be learnt; an answer that says nothing is.

    Raises:
        ConfigError: it is to be learnt in part, or is not the assistant's and is to be learnt.
    """
    for name in (name for name in _IN_PART if message.get(name) is not None):
        raise ConfigError(f"{label} has {name!r}; must be left out: an answer is learnt as a whole or not at all")
    flags = {name: message[name] for name in _LEARNT if message.get(name) is not None}
    for name, value in flags.items():
        if value not in (0, 1):
            raise ConfigError(f"{label} has {name!r}: {value!r}; must be 0 or 1, false or true")
        if value == 1 and message["role"] != "assistant":
            problem = f"{label} ({message['role']}) has {name!r}: {value!r}"
            raise ConfigError(f"{problem}; must be left out: only answers of the assistant are learnt")
    return message["role"] == "assistant" and all(value == 1 for value in flags.values())


def _only_last(row: Mapping[str, Any], label: str) -> bool:
    """Whether a row has the last answer alone learnt."""
    masks = row.get("mask_history")
    if masks not in (None, False, True):
        raise ConfigError(f"{label}: `mask_history` is {masks!r}; must be true or false")
    return bool(masks)


def has_ended(row: Mapping[str, Any], side: str | None, label: str) -> bool:
    """Whether a row's answer ended by itself: by its `finish_reason`, or of a pair by `chosen_finish_reason`.

    Raises:
        ConfigError: the value is not known.
    """
    column = "finish_reason" if side is None else f"{side}_finish_reason"
    reason = row.get(column)
    if reason not in (*_ENDED, *_CUT_OFF):
        raise ConfigError(f"{label} has {reason!r} as {column!r}; must be 'stop' or 'length'")
    return reason in _ENDED


def sampled(row: Mapping[str, Any], side: str, text: str) -> str:
    """A side of a pair, with the tokens that `pairs` has kept of it."""
    tokens = row.get(f"{side}_tokens")
    return Sampled(text, tokens) if isinstance(tokens, (list, tuple)) else text


def demonstration_parts(row: Mapping[str, Any], label: str) -> tuple[Any, Any, str]:
    """Prompt and response of a row as they are there, each text or messages, and the column that the response is in.

    See :meth:`RowReader.demonstrations`. The prompt is "" if there is none.

    Raises:
        ConfigError: the row has no such columns.
    """
    if row.get(TEXT) is not None:
        _text(row[TEXT], f"{label}: `{TEXT}`")
        return *split_text(row, label), TEXT
    if row.get("messages") is not None:
        chat = _chat(_of_text(row["messages"], f"{label}: `messages`"), f"{label}: `messages`")
        return _without_answer(chat, label), chat[-1:], "messages"
    for column in ("completion", "chosen"):
        if row.get("prompt") is not None and row.get(column) is not None:
            return row["prompt"], row[column], column
    if row.get("text") is not None:
        return "", _text(row["text"], f"{label}: `text`"), "text"
    raise ConfigError(
        f"{label} has {columns_of(row)}; must have `{TEXT}`, or `prompt` and `completion`, or `messages`, or `text`"
    )


def identity(row: Mapping[str, Any], label: str) -> str:
    """What a demonstration, a rated row or a pair is about: its prompt, or without one its text; of a pair without a
    prompt, the chosen side. Rows with the same are not independent of each other.

    Raises:
        ConfigError: the row is none of these.
    """
    if chat := kept_chat(row, label):
        return prompt_identity(chat, label)
    if row.get("prompt_tokens") is not None:  # of a run's rollouts, perhaps an episode
        return prompt_identity(row["prompt"], label)
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return prompt_identity(row["chosen"] if row.get("prompt") in (None, "") else row["prompt"], label)
    prompt, response, _ = demonstration_parts(row, label)
    return prompt_identity(response if prompt == "" else prompt, label)


def prompt_identity(value: Any, label: str) -> str:
    """The same of a prompt, or of a chat with its answer, which does not count. A chat of one message is its text.

    Raises:
        ConfigError: it is neither text nor a chat.
    """
    if not is_chat(value):
        return _text(value, label)
    chat = as_messages(_without_answer(value, label), label)
    if len(chat) == 1:
        return str(chat[0]["content"])
    return json.dumps([[message["role"], message["content"]] for message in chat])


def asked_of(row: Mapping[str, Any], side: str, label: str) -> list[Message] | None:
    """The messages of the prompt of a pair, of which ``side`` is `chosen` or `rejected`; None of texts."""
    written = kept_chat(row, label) or (row["prompt"] if is_chat(row.get("prompt")) else None)
    chat = written or (_without_answer(row[side], label) if is_chat(row[side]) else None)
    return as_messages(chat, label) if chat else None


def prompt_of(row: Mapping[str, Any], field: str) -> Any:
    """The prompt of a row: its column of that name, or `prompt` where there is no `query`."""
    return row.get(other_column(row, field) or field)


def kept_chat(row: Mapping[str, Any], label: str) -> Any:
    """The chat whose text is a row's prompt; None if no command has written one.

    Raises:
        ConfigError: it is none.
    """
    chat = _of_text(row.get(MESSAGES), f"{label}: `{MESSAGES}`")
    if chat is None or is_chat(chat) or (isinstance(chat, list) and not chat):
        return chat
    raise ConfigError(f"{label}: `{MESSAGES}` is {shown(chat)}; must be a list of messages with role and content")


def _of_text(value: Any, label: str) -> Any:
    """A chat that a run's rollouts have as the text of JSON; any other value as it is."""
    return loaded(value, label) if isinstance(value, str) and value.startswith("[") else value


def other_column(row: Mapping[str, Any], field: str) -> str | None:
    """The column that stands for ``field`` in a row that lacks it, if one does."""
    return "prompt" if field == "query" and row.get("query") is None and row.get("prompt") is not None else None


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
    counts = np.fromiter(
        (_count_words(row, words, f"{key}: row {number}") for number, row in enumerate(rows, start=1)), np.int32
    )
    if (longest := counts.max(initial=0)) <= words:
        raise ConfigError(f"prompt_words: got {words}; no text of {key} has more words (the longest has {longest})")
    kept = np.flatnonzero(counts > words)
    if dropped := len(rows) - len(kept):
        logger.warning("%s: dropped %d of %d texts: no more than %d words", key, dropped, len(rows), words)

    def cut(row: Row) -> Row:
        text, ends = row["text"], list(islice(re.finditer(r"\S+", row["text"]), words))
        rest = {name: value for name, value in row.items() if name != "text"}
        return {**rest, "query": text[: ends[-1].end()], TEXT: text}

    made = Selected(rows, kept, cut)
    return list(made) if isinstance(rows, list) else made


def _count_words(row: Mapping[str, Any], most: int, label: str) -> int:
    """Words of a row's `text`, counted up to one more than ``most``."""
    if row.get("text") is None:
        raise ConfigError(f"{label} has {columns_of(row)}; must have `text` with prompt_words")
    other = next((name for name in ("query", TEXT, "prompt", "messages") if row.get(name) is not None), None)
    if other is not None:
        raise ConfigError(f"{label} has {other!r} beside `text`; must have no other prompt with prompt_words")
    return sum(1 for _ in islice(re.finditer(r"\S+", _text(row["text"], f"{label}: `text`")), most + 1))


def load_prompts(source: str, split: str, prompt_field: str, prompt_words: int | None, key: str) -> Rows:
    """Rows with prompts in ``prompt_field``, or if ``prompt_words`` is given, with `query` from :func:`first_words`.

    Raises:
        ConfigError: they cannot be read, or a row has no prompt.
    """
    if prompt_words is not None:
        return first_words(load_rows(source, split, key=key), prompt_words, key)
    rows = load_rows(source, split, key=key)
    check_prompts(rows, prompt_field, key, source)
    return rows


def check_prompts(rows: Rows, field: str, key: str, source: str = "the data set") -> None:
    """Require a prompt in every row; see :func:`prompt_of`."""
    check_columns(rows, [], key, source)
    if has_all(rows, field):  # known without reading a row
        return
    if not all(isinstance(row, Mapping) and prompt_of(row, field) is not None for row in rows):
        first = rows[0] if isinstance(rows[0], Mapping) else {}
        check_columns(rows, [other_column(first, field) or field], key, source)


def _text(value: Any, label: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            f"{label} is a {type(value).__name__}; must be text, or a list of messages with role and content"
        )
    require_unicode(value, label)
    return value


def _chat(value: Any, label: str) -> Sequence[Mapping[str, Any]]:
    if not is_chat(value) or len(value) < 2 or value[-1]["role"] != "assistant":
        raise ConfigError(
            f"{label} is {value!r:.80}; must be a chat: messages with role and content, the assistant's answer last"
        )
    return value


def _begin_with(prompt: Any, *sides: Any) -> bool:
    """Whether all sides are chats that begin with the messages of the prompt."""
    return is_chat(prompt) and all(
        len(side) > len(prompt) and list(side[: len(prompt)]) == list(prompt) for side in sides
    )


def _asked(chat: Any, label: str, column: str) -> Sequence[Mapping[str, Any]]:
    """What is asked in a chat. The last message of the assistant in `messages` is the answer, unless it says that it is
    a beginning; in a prompt it is one.
    """
    last = chat[-1]
    opened = isinstance(last.get("content"), str) and OPENED.search(last["content"])
    goes_on = last["role"] == "assistant" and (column != "messages" or last.get("prefix") or opened)
    return chat if goes_on and len(chat) > 1 else _without_answer(chat, label)


def _without_answer(chat: Any, label: str) -> Sequence[Mapping[str, Any]]:
    """Everything before the assistant's last answer, if the chat ends with one."""
    rest = chat[:-1] if chat and chat[-1]["role"] == "assistant" else chat
    if not rest:
        raise ConfigError(f"{label} has no message but the assistant's; must have a prompt")
    return rest
