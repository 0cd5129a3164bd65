"""Chats as text and tokens, by the chat template of a tokenizer: prompts, answers to learn, and what comes between two
answers.

All that is known of a template is what it writes: it is given a chat with a marker in it, and the text around the
marker says where an answer begins and ends, and what follows it. So a template that nobody here has seen is read like
any other, and one that cannot write what a row has is named.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, wraps
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from async_rlhf.config import ConfigError
from async_rlhf.config.common import ChatConfig
from async_rlhf.models.thoughts import OPENED, THOUGHTS
from async_rlhf.system.files import from_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = dict[str, Any]
"""A message of a chat: {"role": "user", "content": "..."}. An answer may have "reasoning_content", and "tool_calls":
[{"type": "function", "function": {"name": ..., "arguments": {...}}}]."""
Schemas = Sequence[Mapping[str, Any]]

ROW_SETTING = ("tools", "chat_template_kwargs")
"""The columns that say how a row's chat is written."""
_MARK = "Zq7Marker7qZ"
_KINDS = {
    "tool calls": "tool_calls",
    "messages of tools": "tool",
    "schemas of tools": "tools",
    "system messages": "system",
}
_ROLES = {"system", "user", "assistant", "tool"}
_ASKED: Message = {"role": "user", "content": "A question."}
_TEXTS = ("text", "input_text", "output_text", None)
_TAKEN = {"messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize"}
_THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")
_INLINE_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)\Z", re.DOTALL)
_ID = "call{:05}"
"""Of calls without one: Mistral's templates want nine letters and digits."""
_KEPT = 1000
"""Most settings, and texts between answers, that are remembered."""
_OF_ALL_TOOLS = ("_form", "_special", "_closing", "_two_calls", "end", "lead", "end_of_calls", "ends")
"""What is found out once, whatever tools a chat is written with."""
_WARNED: set[tuple[str, str]] = set()
_STARTS = "must be one whose prompts (add_generation_prompt) are the start of the whole"
FAILURES = (TemplateError, TypeError, KeyError, IndexError, ValueError, AttributeError, RecursionError)


def is_chat(value: Any) -> bool:
    """Whether a column's value is a list of messages."""
    messages = isinstance(value, (list, tuple)) and len(value) > 0
    return messages and all(isinstance(message, Mapping) and "role" in message for message in value)


def is_begun(messages: Sequence[Message]) -> bool:
    """Whether a chat ends with the beginning of an answer, which is to go on."""
    return len(messages) > 0 and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def joined_answer(begun: Message, rest: Message) -> Message:
    """The beginning of an answer and what was written after it, as one message."""
    thinks = not begun["content"] and bool(begun.get("reasoning_content"))
    if not thinks:
        return {**begun, **rest, "content": f"{begun['content']}{rest['content']}"}
    thought = f"{begun['reasoning_content']}{rest.get('reasoning_content', '')}"
    return {**begun, **rest, "reasoning_content": thought}


def setting_of(row: Mapping[str, Any], prompt: Any) -> dict[str, Any]:
    """The columns that say how the row's prompt is written; none if it is text."""
    return {name: row[name] for name in ROW_SETTING if row.get(name)} if is_chat(prompt) else {}


def as_messages(value: Iterable[Mapping[str, Any]], label: str) -> list[Message]:
    """Messages in one form, whatever form a file or a client gave them: content is text, arguments of calls are
    mappings, reasoning is `reasoning_content`, and what is null is left out.

    Raises:
        ConfigError: a message is none, or has content that is not text.
    """
    return [_as_message(message, f"{label}: message {number}") for number, message in enumerate(value, start=1)]


def _as_message(message: Any, label: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{label} is {message!r:.80}; must be a mapping with role and content")
    rest = {name: value for name, value in message.items() if value is not None}
    calls = loaded(rest.pop("tool_calls", None) or (), f"{label}: tool_calls")
    if not isinstance(calls, (list, tuple)):
        raise ConfigError(f"{label}: tool_calls is {calls!r:.80}; must be a list of calls")
    calls = [_as_call(call, label) for call in calls]
    named = next((name for name in _THOUGHT_NAMES if rest.get(name)), None)
    before = "".join(_as_text(rest[named], f"{label}: {named}")) if named is not None else ""
    content, within = _as_text(rest.pop("content", ""), f"{label} ({message['role']}): content")
    thought = before or within
    if message.get("content") is None and not (calls or thought):
        raise ConfigError(f"{label} ({message['role']}) has no content; must have text")
    plain = {name: value for name, value in rest.items() if name not in _THOUGHT_NAMES} | {"content": content}
    plain |= {"reasoning_content": thought} if thought else {}
    plain |= {"tool_calls": calls} if calls else {}
    try:
        text = json.dumps(plain, ensure_ascii=False, default=str)
    except (ValueError, RecursionError) as error:  # too many digits, too deep, or a list within itself
        raise ConfigError(f"{label} ({message['role']}) has a value that cannot be written: {error}") from error
    require_unicode(text, f"{label} ({message['role']})")
    return plain


def _as_text(content: Any, label: str) -> tuple[str, str]:
    """The text of a message, and the reasoning among its parts."""
    parts = [content] if isinstance(content, (str, Mapping)) else content
    if not isinstance(parts, (list, tuple)):
        raise ConfigError(f"{label} is {content!r:.80}; must be text, or a list of parts of text")
    text, thought = "", ""
    for part in parts:
        mapping = part if isinstance(part, Mapping) else {"text": part}
        kind = mapping.get("type")
        thinks = kind in ("thinking", "reasoning")
        content_text = next((mapping[name] for name in (kind, "text") if mapping.get(name) is not None), None)
        if not isinstance(content_text, str) or not (thinks or kind in _TEXTS):
            rule = "must be text: only text is trained on"
            raise ConfigError(f"{label} has a part {kind or type(part).__name__!r}; {rule}")
        text, thought = (text, thought + content_text) if thinks else (text + content_text, thought)
    return text, thought


def require_unicode(text: str, label: str) -> None:
    """Require text that can be encoded.

    Raises:
        ConfigError: it has half characters.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {text[error.start]!r} after {text[max(0, error.start - 40) : error.start]!r}"
        rule = "must be Unicode text, without half characters (surrogates)"
        raise ConfigError(f"{label} has the {half}; {rule}") from error


def _as_call(call: Any, label: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (None, 0)
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments or "{}")
        except ValueError as error:
            raise ConfigError(f"{label}: arguments of the call {name!r} are no JSON: {error}") from error
    arguments = {} if arguments is None else arguments
    if not (isinstance(name, str) and isinstance(arguments, Mapping)):
        rule = 'must be {"function": {"name": "...", "arguments": {...}}}'
        raise ConfigError(f"{label}: a tool call is {call!r:.80}; {rule}")
    rest = {key: call[key] for key in ("id",) if call.get(key) is not None}
    return {**rest, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _named(write: Callable[..., str]) -> Callable[..., str]:
    """Gives what a template raises a sentence."""

    @wraps(write)
    def named(*arguments: Any) -> str:
        try:
            return write(*arguments)
        except ConfigError:
            raise
        except FAILURES as error:
            raise ConfigError(f"the chat template cannot write it: {error}") from error

    return named


@dataclass(frozen=True)
class Setting:
    """What a chat is written with, beside its messages."""

    tools: Schemas = ()
    """Schemas of the functions that the model may call."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as `enable_thinking`."""

    def of_row(self, row: Mapping[str, Any], label: str) -> Setting:
        """With the row's `tools` and `chat_template_kwargs`.

        Raises:
            ConfigError: they are neither lists of schemas nor a mapping, or the JSON of these.
        """
        tools, arguments = map(row.get, ROW_SETTING)
        if not tools and not arguments:
            return self
        schemas = loaded(tools, f"{label}: `tools`") or ()
        named = loaded(arguments, f"{label}: `chat_template_kwargs`") or {}
        if not (isinstance(schemas, (list, tuple)) and all(map(_is_schema, schemas))):
            raise ConfigError(f"{label}: `tools` is {tools!r:.80}; must be a list of the schemas of functions")
        if not isinstance(named, Mapping):
            rule = 'must be a mapping, such as {"enable_thinking": false}'
            raise ConfigError(f"{label}: `chat_template_kwargs` is {arguments!r:.80}; {rule}")
        chosen = {name: value for name, value in named.items() if value is not None}
        if taken := sorted(_TAKEN & {*chosen}):
            rule = "the template gets these from the row's own columns, or from the command"
            raise ConfigError(f"{label}: `chat_template_kwargs` has {', '.join(taken)}; must not: {rule}")
        return Setting([*self.tools, *schemas], {**self.arguments, **chosen})


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("function", value), Mapping)


def loaded(value: Any, label: str) -> Any:
    """The value of JSON text: Parquet and CSV have schemas, calls and chats as text."""
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except ValueError as error:
        raise ConfigError(f"{label} is {value!r:.80}; must be JSON: {error}") from error


def unpadded(value: Any) -> Any:
    """A column of Arrow without the nulls of its calls and schemas: it gives each of them the keys of all."""
    if is_chat(value):
        return [
            {**message, "tool_calls": _without_nulls(message["tool_calls"])} if message.get("tool_calls") else message
            for message in value
        ]
    return _without_nulls(value) if isinstance(value, (list, tuple)) and all(map(_is_schema, value)) else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, (list, tuple)) else value


class _Form(NamedTuple):
    """How a template wants its messages."""

    as_parts: bool = False
    """Content as a list of parts."""
    as_json: bool = False
    """Arguments of calls as JSON text."""
    empty: str | None = ""
    """The content of an answer that has calls alone."""
    thought: str | None = None
    """The key under which it reads reasoning; None if it reads none."""


class ChatTemplate:
    """Writes chats as a tokenizer's chat template does.

    Args:
        tokenizer: with or without a template.
        config: what all chats of a command are written with.
        now: the time that templates see; None for the time at which this is made.
        setting: with what chats are written.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: ChatConfig | None = None,
        now: datetime | None = None,
        setting: Setting | None = None,
    ) -> None:
        self.tokenizer, self.config, self.now = tokenizer, config or ChatConfig(), now or datetime.now()
        self.setting = setting or Setting((), self.config.template_arguments)
        self._others: dict[str, ChatTemplate] = {}
        self._texts: dict[tuple[str, int], str] = {}
        self._can: dict[str, bool] = {}

    def __reduce__(self) -> Any:
        return ChatTemplate, (self.tokenizer, self.config, self.now, self.setting)

    def with_setting(self, setting: Setting) -> ChatTemplate:
        """The same with another setting."""
        if setting == self.setting:
            return self
        name = json.dumps([list(setting.tools), setting.arguments], default=str)
        if name not in self._others:
            other = ChatTemplate(self.tokenizer, self.config, self.now, setting)
            if setting.arguments == self.setting.arguments:  # each row may have tools of its own
                other._can = self._can
                vars(other).update({name: getattr(self, name) for name in _OF_ALL_TOOLS})
            _keep(self._others, name, other)
        return self._others[name]

    def of_row(self, row: Mapping[str, Any], label: str) -> ChatTemplate:
        """The same with the row's own setting."""
        return self.with_setting(self.setting.of_row(row, label))

    @property
    def name(self) -> str:
        """Identifies what it writes, beside the tokenizer; empty for what the tokenizer's template does by itself."""
        settings = [self.config.system, self.config.renderer, list(self.setting.tools), dict(self.setting.arguments)]
        return f" with {json.dumps(settings, sort_keys=True, default=str)}" if any(settings) else ""

    @property
    def exists(self) -> bool:
        """Whether there is a template."""
        return self.config.renderer is not None or self.tokenizer.chat_template is not None

    @_named
    def prompt(self, messages: Sequence[Message]) -> str:
        """The text of a chat, up to where an answer begins; or goes on, if the chat ends with its beginning.

        Raises:
            ConfigError: the template cannot write it.
        """
        self._require(messages)
        if not is_begun(messages):
            return self._write(messages, True)
        *before, begun = messages
        field_name = "content" if begun["content"] or not begun.get("reasoning_content") else "reasoning_content"
        text, mark, _ = self._write([*before, {**begun, field_name: f"{begun[field_name]}{_MARK}"}], False).partition(
            _MARK
        )
        if not mark:
            raise ConfigError(f"the chat template leaves out what an answer begins with ({field_name})")
        return text

    @_named
    def answer(self, messages: Sequence[Message], answer: Message) -> str:
        """What a model writes as the given answer after :meth:`prompt`, without the token that ends it.

        Raises:
            ConfigError: the template cannot write it.
        """
        self._require([*messages, answer])
        if is_begun(messages):
            return self._going_on(messages, answer)
        prompt, whole = self._write(messages, True), self._write([*messages, answer], False)
        begun = _common(prompt, self._write([*messages, {"role": "assistant", "content": _MARK}], False))
        left, thought, lost = prompt[len(begun) :], answer.get("reasoning_content"), ""
        if thought and not whole.startswith(begun):  # the prompt has an empty thought, and so no room for this one
            whole = self._write([*messages, {n: x for n, x in answer.items() if n != "reasoning_content"}], False)
        if not whole.startswith(begun):
            raise ConfigError(f"the chat template writes a chat with its answer otherwise than without; {_STARTS}")
        rest = whole[len(begun) :]
        if rest.startswith(left) or not left.strip():
            rest = rest.removeprefix(left)
        elif (opened := OPENED.search(left)) is None:
            raise ConfigError(
                f"the chat template writes a chat with its answer otherwise than without ({left!r:.80}); {_STARTS}"
            )
        else:  # the prompt opens a thought that the template leaves out of whole chats
            within = _INLINE_THOUGHT.match(answer["content"])
            lost = f"{thought or (within[1].strip() if within else '')}\n{THOUGHTS[opened[1]]}\n\n"
        if thought and thought.strip() not in lost + rest:
            self._warn("leaves reasoning (`reasoning_content`) out of answers, so it is not learnt")
        return lost + self._ended(rest, "tool_calls" in answer)

    def _going_on(self, messages: Sequence[Message], answer: Message) -> str:
        """The same where the chat ends with the beginning of the answer."""
        *before, begun = messages
        prompt, joined = self.prompt(messages), joined_answer(begun, answer)
        whole = self._write([*before, joined], False)
        if not whole.startswith(prompt):
            raise ConfigError("the chat template writes the beginning of an answer otherwise when it goes on")
        return self._ended(whole[len(prompt) :], "tool_calls" in answer)

    def _ended(self, rest: str, called: bool) -> str:
        """The text of an answer without what ends it."""
        if self._closing and rest.endswith(self._closing):
            return rest.removesuffix(self._closing) + self.lead
        end = self.tokenizer.decode([self.end_of_calls if called else self.end])
        ended, ending, after = rest.rpartition(end)
        return ended if ending and not after.strip() else rest

    def between(self, messages: Sequence[Message], stop: int) -> str:
        """The text between an answer, which the token ``stop`` ended, and the next one, with messages that are read.

        Raises:
            ConfigError: the template cannot write them.
        """
        known = json.dumps([dict(message) for message in messages], default=str), stop
        if known not in self._texts:
            try:
                text = self._text_between(_with_ids(messages), stop)
            except ConfigError:  # perhaps of an id that the policy made up, where the template wants others
                if all("tool_call_id" not in message for message in messages):
                    raise
                text = self._text_between(_with_ids(messages, anew=True), stop)
            _keep(self._texts, known, text)
        return self._texts[known]

    @_named
    def _text_between(self, messages: Sequence[Message], stop: int) -> str:
        self._require(messages)
        before, calls, after = self._around(messages)
        if self.thinks and messages[0]["role"] == "user":
            thought: Message = {"role": "assistant", "content": "It is so.", "reasoning_content": _MARK}
            if _MARK not in self._write([_ASKED, thought, *messages], True):
                self._warn(
                    "leaves out earlier reasoning when a user's message follows; here it stays, as it was written"
                )
        if not after.startswith(calls):
            raise ConfigError(
                f"tokenizer: its chat template changes earlier calls when a message of role {messages[0]['role']!r} "
                "follows; must keep them as they were sampled: give a tokenizer with another chat_template"
            )
        rest, spelt = after[len(calls) :], self.tokenizer.decode([stop])
        for written in (self.lead + spelt, spelt):
            if rest.startswith(written):
                return rest.removeprefix(written)
        if before[len(calls) :].startswith(spelt):  # the template ends the last answer with another token than others
            return rest.removeprefix(self._first_special(rest))
        return rest

    def _around(self, messages: Sequence[Message]) -> tuple[str, str, str]:
        """What the template writes after the marker in an answer, at the end of a chat; as much of it as belongs to the
        answer's calls; and the same where messages follow.
        """
        neutral = [_ASKED, self._marked(messages if self.writes("tool_calls") else ())]
        before, after = _after_mark(self._write(neutral, False)), _after_mark(self._write([*neutral, *messages], True))
        if "tool_calls" not in neutral[1]:
            return before, "", after
        if self._closing and before.endswith(self._closing):
            return before, before.removesuffix(self._closing), after
        calls = _common(before, after)
        end = self._last_special(calls)
        # A token that is written once however many calls there are ends the answer.
        if end and self._two_calls.count(end) - self._write([_ASKED], True).count(end) == 1:
            calls = calls[: calls.rindex(end)]
        return before, calls, after

    @cached_property
    def _two_calls(self) -> str:
        """A chat that ends with two calls; empty if the template writes one at most."""
        called = _without_mark(self._marked([{"role": "tool"}] * 2))
        try:
            return self._write([_ASKED, called], False)
        except FAILURES:
            return ""

    def _marked(self, following: Sequence[Message]) -> Message:
        """An answer that ends with the marker, to which these messages may be replies."""
        replies = [message for message in following if message["role"] == "tool"]
        if not replies or following[0]["role"] != "tool":
            return {"role": "assistant", "content": _MARK}
        calls = [
            {
                "type": "function",
                "id": message.get("tool_call_id", _ID.format(number)),
                "function": {"name": message.get("name", "f"), "arguments": {"x": _MARK}},
            }
            for number, message in enumerate(replies)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer: those that the template writes, and the tokenizer's."""
        return tuple(dict.fromkeys([self.end, self.end_of_calls, self.tokenizer.eos_token_id]))

    @cached_property
    def spelt_ends(self) -> list[str]:
        """The texts of these tokens."""
        return [self.tokenizer.decode([end]) for end in self.ends]

    @cached_property
    def end(self) -> int:
        """The token that a model learns to write after its answer.

        It is the first special token that the template writes after it. Where several stand together, it is the one
        that the tokenizer calls the end, if that is among them. Templates that write none end an answer with the first
        token of what follows.
        """
        run = self._specials_at(self._closing.lstrip())
        if not run and self.exists:
            with suppress(*FAILURES):
                _, _, after = self._around([_ASKED])
                run = self._specials_at(after)[:1]
        eos = self.tokenizer.eos_token
        return self.tokenizer.convert_tokens_to_ids(eos if eos in run or not run else run[0])

    @cached_property
    def lead(self) -> str:
        """What a model writes after the text of its answer and before :attr:`end`."""
        lead, ended, _ = self._closing.partition(self.tokenizer.decode([self.end]))
        return lead if ended else ""

    @cached_property
    def end_of_calls(self) -> int:
        """The same after calls of tools."""
        reply: Message = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "It is so."}
        if not (self.exists and self.writes("tool_calls")):
            return self.end
        try:
            before, calls, after = self._around([reply])
        except FAILURES:
            return self.end
        closed = self._closing and any(text.endswith(self._closing) for text in (before, self._two_calls))
        if closed or not after.startswith(calls):
            return self.end
        run = self._specials_at(after[len(calls) :].lstrip())
        return self.tokenizer.convert_tokens_to_ids(run[0]) if run else self.end

    def _specials_at(self, text: str) -> list[str]:
        """The special tokens with which a text begins, up to the first other text."""
        run: list[str] = []
        while (match := self._special.match(text)) is not None:
            run, text = [*run, match[0]], text[match.end() :]
        return run

    def _first_special(self, text: str) -> str:
        """The special token with which a text begins, if any."""
        return next(iter(self._specials_at(text)), "")

    def _last_special(self, text: str) -> str:
        """The special token with which a text ends, if any."""
        text = text.rstrip()
        *_, last = [None, *self._special.finditer(text)]
        return last[0] if last is not None and last.end() == len(text) else ""

    @cached_property
    def _closing(self) -> str:
        """What the template writes after the last answer."""
        if not self.exists:
            return ""
        try:
            return _after_mark(self._write([_ASKED, {"role": "assistant", "content": _MARK}], False))
        except FAILURES:
            return ""

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added} | set(self.tokenizer.all_special_tokens)
        return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if name) or r"(?!)")

    @cached_property
    def _family(self) -> Any:
        assert self.config.renderer is not None
        return family(self.config.renderer, self.tokenizer, self.setting.arguments)

    @property
    def thinks(self) -> bool:
        """Whether the template writes reasoning."""
        return self._form.thought is not None

    def writes(self, what: str) -> bool:
        """Whether the template writes "tool_calls", schemas ("tools"), or messages of any role, such as "system"."""
        if what not in self._can:
            self._can[what] = self._probed(what)
        return self._can[what]

    def _probed(self, what: str) -> bool:
        called = self._marked([{"role": "tool", "content": ""}])
        reply: Message = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": _MARK}
        chat: dict[str, list[Message]] = {
            "tool_calls": [_ASKED, called],
            "tool": [_ASKED, _without_mark(called), reply],
            "tools": [_ASKED],
        }
        schema = {"name": _MARK, "description": "It is so.", "parameters": {"type": "object", "properties": {}}}
        schemas = [{"type": "function", "function": schema}] if what == "tools" else self.setting.tools
        try:
            said = chat.get(what, [{"role": what, "content": _MARK}, _ASKED])
            return _MARK in self._write(said, what != "tool_calls", schemas)
        except FAILURES:
            return False

    def _require(self, messages: Sequence[Message]) -> None:
        """Require that the template writes all kinds of messages that are there."""
        calls = any(message.get("tool_calls") for message in messages)
        roles = {message["role"] for message in messages}
        asked = {"tool calls": calls, "messages of tools": "tool" in roles}
        asked |= {"schemas of tools": bool(self.setting.tools), "system messages": "system" in roles}
        asked |= {f"messages of role {role!r}": True for role in sorted(roles - _ROLES)}
        kinds = _KINDS | {f"messages of role {role!r}": role for role in roles - _ROLES}
        lacks = [what for what, there in asked.items() if there and not self.writes(kinds[what])]
        if lacks == ["schemas of tools"]:
            self._warn("does not write the schemas of tools: say in a system message which there are")
        elif lacks:
            rule = "leave them out, or give a tokenizer whose chat_template writes them"
            raise ConfigError(f"the chat template cannot write {' and '.join(lacks)}{self._why(messages)}; {rule}")

    def _why(self, messages: Sequence[Message]) -> str:
        """What the template itself says of messages that it refuses."""
        try:
            self._write(messages, False)
        except FAILURES as error:
            return f" ({error})"
        return ""

    def warn_of_plain(self) -> None:
        """Say once that prompts are plain text, for which the template is not used."""
        if self.exists:
            self._warn(
                "is not used for prompts that are plain text. A server writes such a text as a user's message, so for "
                'a chat model give chats: [{"role": "user", "content": "..."}]'
            )

    def _warn(self, what: str) -> None:
        if (str(self.tokenizer.chat_template), what) not in _WARNED:
            _WARNED.add((str(self.tokenizer.chat_template), what))
            logger.warning("WARNING: the chat template %s", what)

    @cached_property
    def _form(self) -> _Form:
        """Found by trying: the first form in which the template writes a text, a call, and reasoning."""
        form = _Form()

        def wrote(chat: Sequence[Message], form: _Form, *marks: str) -> bool:
            try:
                written = self._written(chat, False, self.setting.tools, form)
            except FAILURES:
                return False
            return all(mark in written for mark in marks)

        asked = [{"role": "user", "content": _MARK}]
        if not wrote(asked, form, _MARK) and wrote(asked, form._replace(as_parts=True), _MARK):
            form = form._replace(as_parts=True)
        called = [_ASKED, self._marked([{"role": "tool", "content": ""}])]
        forms = [form._replace(as_json=json_, empty=empty) for json_ in (False, True) for empty in ("", None)]
        form = next((candidate for candidate in forms if wrote(called, candidate, _MARK)), form)
        thought: Message = {"role": "assistant", "content": "It is so.", "reasoning_content": _MARK}
        forms = [form._replace(thought=name) for name in _THOUGHT_NAMES]
        return next((one for one in forms if wrote([_ASKED, thought], one, _MARK)), form)

    def _write(self, messages: Sequence[Message], prompt: bool, tools: Schemas | None = None) -> str:
        return self._written(messages, prompt, self.setting.tools if tools is None else tools, self._form)

    def _written(self, messages: Sequence[Message], prompt: bool, tools: Schemas, form: _Form) -> str:
        chat = [_formed(message, form) for message in messages]
        if self.config.system is not None and not (chat and chat[0]["role"] == "system"):
            system: Message = {"role": "system", "content": self.config.system}
            chat = [_formed(system, form), *chat]
        if self.config.renderer is not None:
            schemas = [dict(tool) for tool in tools] or None
            ids = self._family.render_ids(chat, tools=schemas, add_generation_prompt=prompt)
            return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        variables: dict[str, Any] = {"strftime_now": self.now.strftime, **self.setting.arguments}
        variables |= {"tools": [dict(tool) for tool in tools] or None, "add_generation_prompt": prompt}
        return str(self.tokenizer.apply_chat_template(chat, tokenize=False, **variables))


def _formed(message: Message, form: _Form) -> Message:
    """A message as a template takes it."""
    content = message["content"]
    if not content and message.get("tool_calls"):
        content = form.empty
    if form.as_parts and content is not None:
        content = [{"type": "text", "text": content}]
    formed = {**message, "content": content}
    thought = formed.pop("reasoning_content", None)
    if thought and form.thought is not None:
        formed[form.thought] = thought
    if form.as_json and message.get("tool_calls"):
        formed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return formed


def _with_ids(messages: Sequence[Message], anew: bool = False) -> list[Message]:
    """The messages, those of tools with the ids of the calls that they answer."""
    numbers = count()
    return [
        {**message, "tool_call_id": call_id if call_id and not anew else _ID.format(next(numbers))}
        if message["role"] == "tool"
        else message
        for message in messages
        for call_id in [message.get("tool_call_id")]
    ]


def _without_mark(message: Message) -> Message:
    return json.loads(json.dumps(message).replace(_MARK, "x"))


def _keep(remembered: dict[Any, Any], name: Any, value: Any) -> None:
    if len(remembered) >= _KEPT:
        remembered.clear()
    remembered[name] = value


def _common(first: str, second: str) -> str:
    """What both texts begin with."""
    length = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))
    return first[:length]


def _after_mark(text: str) -> str:
    _, mark, after = text.rpartition(_MARK)
    if not mark:
        raise ValueError("the chat template does not write answers")
    return after


def family(name: str, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> Any:
    """What `renderers` has for a family of models.

    Raises:
        ConfigError: it is not installed, knows no such family, or the tokenizer is not of it.
    """
    try:
        from renderers import config_from_name, create_renderer
    except ImportError as error:
        rule = "needs the package renderers: pip install 'async-rlhf[renderers]'"
        raise ConfigError(f"chat.renderer: got {name!r}; {rule}") from error
    try:
        return create_renderer(tokenizer, config_from_name(name), chat_template_kwargs=dict(arguments) or None)
    except Exception as error:  # of any kind: each family checks what it needs of a tokenizer
        raise ConfigError(f"chat.renderer: got {name!r}, which does not fit the tokenizer: {error}") from error
