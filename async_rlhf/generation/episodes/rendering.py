"""Conversations as tokens. What was sampled is never encoded again: only what comes between two answers is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError
from async_rlhf.generation.episodes.environment import Message
from async_rlhf.generation.episodes.tools import CallParser
from async_rlhf.types import Prompt

_ASKED: Message = {"role": "user", "content": "A question."}
_THOUGHT = "<think>\nA thought.\n</think>\n\nAn answer."
_CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}


class Renderer:
    """Puts messages into the form of the tokenizer's chat template.

    Prompts that are plain text are followed by plain text, the contents of the messages one after the other.

    Args:
        tokenizer: of the policy.
        tools: schemas of the functions that the policy may call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tokenizer, self.tools = tokenizer, [dict(tool) for tool in tools]
        self._parser = CallParser(tokenizer, self.tools) if tools else None
        self._reads_prefix = getattr(tokenizer, "response_template", None) is not None
        self.before = lru_cache(self._render_before)

    @property
    def is_chat(self) -> bool:
        """Whether there is a template."""
        return self.tokenizer.chat_template is not None

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """One for other tools."""
        return self if [*tools] == self.tools else Renderer(self.tokenizer, tools)

    def opening(self, prompt: Prompt, more: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a prompt and of further messages, up to where the policy begins."""
        if not more:
            return prompt.tokens
        if prompt.messages is None:
            return (*prompt.tokens, *self._encode(_contents(more)))
        return self._encode(self._template([*prompt.messages, *more], True))

    def observation(self, messages: Sequence[Message], stop: int, chat: bool) -> tuple[int, ...]:
        """The tokens between an answer of the policy and the next one.

        Args:
            messages: what it is to read.
            stop: the token that ended its answer.
            chat: whether the prompt is a chat.

        Raises:
            ConfigError: the template would change the answers that come before.
        """
        if not chat:
            return self._encode(_contents(messages))
        earlier, before, closing = self.before(str(messages[0]["role"]))
        after = self._template([*earlier, *messages], True)
        return self._encode(closing.removeprefix(self.tokenizer.decode([stop])) + after.removeprefix(before))

    def message(self, tokens: Sequence[int], before: Sequence[int]) -> Message:
        """What the policy wrote, after these tokens. Special tokens are a part of it: calls may be made of them."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        if self._parser is None:
            return {"role": "assistant", "content": text}
        return self._parser.parse(text, self.tokenizer.decode(list(before)) if self._reads_prefix else "")

    def _render_before(self, role: str) -> tuple[list[Message], str, str]:
        """A question and an answer to which a message of the role may follow, their text, and how an answer ends.

        Raises:
            ConfigError: the template changes earlier answers then: the policy would be trained on texts that it never
                saw.
        """
        answer: Message = {"role": "assistant", "content": _THOUGHT}
        if role == "tool":
            answer["tool_calls"] = [_CALL]
        chat, follows = (
            [_ASKED, answer],
            {"role": role, "name": "f", "tool_call_id": "call00000", "content": "It is so."},
        )
        asked, before, after = self._template(chat[:1], True), self._template(chat, False), ""
        if before.startswith(asked + _THOUGHT):
            after = self._template([*chat, follows], True)
        if not (after.startswith(before) and before):
            raise ConfigError(
                f"tokenizer: its chat template changes earlier answers (such as their thinking) when a message of role "
                f"{role!r} follows; must keep them as they were sampled: give a tokenizer with another chat_template"
            )
        _, _, closing = self._template([_ASKED, {**answer, "tool_calls": []}], False).rpartition(_THOUGHT)
        return chat, before, closing

    def _template(self, chat: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        messages = [dict(message) for message in chat]
        return str(
            self.tokenizer.apply_chat_template(
                messages, tools=self.tools or None, tokenize=False, add_generation_prompt=prompt
            )
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _contents(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)
