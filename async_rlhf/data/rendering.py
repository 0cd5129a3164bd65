"""Conversations as tokens. What was sampled is never encoded again: only what comes between two answers is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from async_rlhf.data.calls import CallParser
from async_rlhf.models.chats import ChatTemplate, Message, Schemas, is_begun, joined_answer
from async_rlhf.types import Prompt, Sample


class Renderer:
    """Puts messages into the form of a chat template, and reads what the policy wrote.

    Prompts that are plain text are followed by plain text, the contents of the messages one after the other.

    Args:
        tokenizer: of the policy.
        tools: schemas of the functions that the policy may call.
        template: writes its chats; None for the tokenizer's.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Schemas = (), template: ChatTemplate | None = None
    ) -> None:
        template = template or ChatTemplate(tokenizer)
        self.tokenizer, self.tools = tokenizer, [dict(tool) for tool in tools]
        self._plain, self._others = template, dict[ChatTemplate, Renderer]()
        self.template = template.with_setting(replace(template.setting, tools=[*template.setting.tools, *self.tools]))

    @cached_property
    def _parser(self) -> CallParser:
        return CallParser(self.tokenizer, self.template.setting.tools, self.template)

    @property
    def is_chat(self) -> bool:
        """Whether there is a template."""
        return self.template.exists

    def check(self) -> None:
        """Require that the calls of tools can be written and read.

        Raises:
            ConfigError: they cannot.
        """
        if self.tools and self.is_chat:
            self.template.between(
                [{"role": "tool", "name": "f", "tool_call_id": "call00000", "content": ""}], self.template.end
            )
            self._parser.parse("")

    def with_tools(self, tools: Schemas) -> Renderer:
        """One for other tools."""
        if [*tools] == self.tools:
            return self
        plain = self._plain
        return self._written_by(plain.with_setting(replace(plain.setting, tools=[*plain.setting.tools, *tools])))

    def of_row(self, row: Mapping[str, Any], label: str) -> Renderer:
        """One with the row's own `tools` and `chat_template_kwargs`."""
        return self._written_by(self._plain.of_row(row, label))

    def _written_by(self, template: ChatTemplate) -> Renderer:
        if template is self._plain:
            return self
        if template not in self._others:
            self._others = {**self._others} if len(self._others) < _KEPT else {}
            self._others[template] = Renderer(self.tokenizer, self.tools, template)
        return self._others[template]

    def opening(self, prompt: Prompt, more: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a prompt and of further messages, up to where the policy begins."""
        if not more:
            return prompt.tokens
        if prompt.messages is None:
            return (*prompt.tokens, *self._encode(_contents(more)))
        return self._encode(self.template.prompt([*map(dict, prompt.messages), *more]))

    def observation(self, messages: Sequence[Message], stop: int, chat: bool) -> tuple[int, ...]:
        """The tokens between an answer of the policy and the next one.

        Args:
            messages: what it is to read.
            stop: the token that ended its answer.
            chat: whether the prompt is a chat.

        Raises:
            ConfigError: the template cannot write them.
        """
        return self._encode(self.template.between(messages, stop) if chat else _contents(messages))

    def message(self, tokens: Sequence[int], before: Sequence[int]) -> Message:
        """What the policy wrote, after these tokens. Special tokens are a part of it: calls may be made of them."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return self.read(text, self.tokenizer.decode(list(before)[-_TAIL:]))

    def read(self, text: str, prefix: str) -> Message:
        """The same of a text without the token that ends it, and of the end of its prompt."""
        parse = self._parser.parse if self.template.setting.tools else self._parser.thought
        return parse(text, prefix)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def conversations(
    renderer: Renderer, prompts: Sequence[Prompt], samples: Sequence[Sample]
) -> dict[str, list[list[Message]]]:
    """For reward functions, each conversation, and what of it comes after the prompt; nothing where neither chats nor
    episodes are.
    """
    if all(prompt.messages is None for prompt in prompts) and all(sample.messages is None for sample in samples):
        return {}
    said = [said_of(renderer, prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]
    return as_columns([prompt.messages or () for prompt in prompts], said)


def as_columns(
    asked: Sequence[Sequence[Mapping[str, Any]]], said: Sequence[Sequence[Message]]
) -> dict[str, list[list[Message]]]:
    """The columns of :func:`conversations`, of prompts and of what came after them."""
    whole = [_joined([*map(dict, before)], after) for before, after in zip(asked, said, strict=True)]
    return {"messages": whole, "completion_messages": [*map(list, said)]}


def _joined(before: list[Message], after: Sequence[Message]) -> list[Message]:
    """Both, with an answer that the prompt has begun as one message."""
    if is_begun(before) and after and after[0]["role"] == "assistant":
        return [*before[:-1], joined_answer(before[-1], after[0]), *after[1:]]
    return [*before, *after]


def said_of(renderer: Renderer, prompt: Prompt, sample: Sample) -> list[Message]:
    """The messages after a prompt: those of an episode, or the policy's answer."""
    if sample.messages is not None:
        return [*map(dict, sample.messages)]
    drawn, stopped = sample.drawn.tolist(), sample.finish_reason == "stop"
    row_renderer = renderer.of_row(prompt.columns, f"row {prompt.row + 1}")
    return [row_renderer.message(drawn[: len(drawn) - stopped], prompt.tokens)]


_KEPT = 1000
"""Most renderers of other settings that are remembered."""
_TAIL = 64
"""Tokens at the end of a prompt, in which a message may begin."""


def _contents(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)
