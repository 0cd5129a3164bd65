"""What an agent may ask of the policy: chats that are chats, and settings that are the run's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rlhf.config import GenerationConfig
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.system.files import from_json

_UNREAD = (
    *("model", "messages", "tools", "stream", "stream_options", "user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "timeout"),
)
"""What a request may have besides: these change no answer, or are read elsewhere."""


class RefusedError(Exception):
    """A request that cannot be answered. An agent may catch it, and end with what it has.

    Args:
        code: as OpenAI's API has it.
        message: what is wrong.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Settings:
    """How answers are sampled, whoever asks: what is trained on has the run's settings."""

    params: SamplingParams
    limits: GenerationConfig

    def check(self, asked: Any) -> None:
        """Require that a request says nothing else; null says nothing.

        Raises:
            RefusedError: it does; the error names the parameter and what would be right.
        """
        if not isinstance(asked, Mapping) or "messages" not in asked:
            raise RefusedError("invalid_request", f"got {asked!r:.100}; must be a JSON object with messages")
        rules = self._rules("tools" in asked)
        for name, value in asked.items():
            if name in _UNREAD or value is None:
                continue
            if name not in rules:
                rule = f"must be left out; what has a meaning here is {', '.join(sorted([*_UNREAD[:4], *rules]))}"
                raise RefusedError("unsupported_parameter", f"{name}: got {value!r:.100}; {rule}")
            fits, rule = rules[name]
            if not fits(value):
                raise RefusedError("unsupported_value", f"{name}: got {value!r:.100}; {rule}")

    def _rules(self, has_tools: bool) -> dict[str, tuple[Callable[[Any], bool], str]]:
        """For each parameter, whether a value is what happens anyway, and what would be right."""
        limits, params = self.limits, self.params

        def only(*values: Any, rule: str = "") -> tuple[Callable[[Any], bool], str]:
            return (lambda value: value in values), rule or f"must be {json.dumps(values[0])}, or left out"

        def the_runs(key: str) -> tuple[Callable[[Any], bool], str]:
            values = (getattr(limits, key), getattr(params, key))  # an evaluation may have others
            return only(*values, rule=f"must be {values[0]:g}, which the run samples with (generation.{key})")

        length = limits.response_length
        rule = f"must be at least {length}, the run's own bound of every answer (generation.response_length)"
        longest = (lambda value: isinstance(value, int) and value >= length), rule
        rule = f"must be left out, or among {limits.stop_tokens} (generation.stop_tokens)"
        stop = (lambda value: {*([value] if isinstance(value, str) else value)} <= {*limits.stop_tokens}), rule
        ids = list(params.stop_token_ids)
        rule = f"must be left out, or among {ids} (generation.stop_token_ids)"
        return {
            **{key: the_runs(key) for key in ("temperature", "top_p", "top_k")},
            **dict.fromkeys(("max_tokens", "max_completion_tokens"), longest),
            **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "top_logprobs"), only(0)),
            **dict.fromkeys(("n", "best_of", "repetition_penalty"), only(1)),
            "stop": stop,
            "stop_token_ids": ((lambda value: {*value} <= {*ids}), rule),
            "seed": only(rule="must be left out: random numbers are the run's (seed)"),
            "logprobs": only(False, rule="must be false: the run keeps what log-probabilities were sampled with"),
            "response_format": only({"type": "text"}),
            "tool_choice": only("auto", *(() if has_tools else ("none",))),
            "parallel_tool_calls": only(True),
            "logit_bias": only({}),
            "modalities": only(["text"]),
        }


def check_chat(messages: Any, tools: Any) -> None:
    """Require messages as OpenAI's API has them, of text alone, and schemas of functions.

    Raises:
        RefusedError: names the first message or tool that is none.
    """
    for name, values, wrong_with in (("messages", messages, _wrong_with), ("tools", tools, _wrong_with_tool)):
        if not _is_list(values) or (name == "messages" and not values):
            raise RefusedError("invalid_request", f"{name}: got {values!r:.100}; must be a list of them")
        for number, entry in enumerate(values):
            if rule := wrong_with(entry):
                raise RefusedError("invalid_request", f"{name}[{number}]: got {entry!r:.100}; must {rule}")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _wrong_with(message: Any) -> str:
    """What it would have to be; "" if it is that."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return 'be an object with a role, such as {"role": "user", "content": "..."}'
    calls, content = message.get("tool_calls") or (), message.get("content")
    if content is None and message["role"] != "assistant":
        return "have a content"
    parts: Sequence[Any] = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    if not all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        return 'have a content that is text, or parts of {"type": "text", "text": "..."}'
    if not _is_list(calls) or not all(map(_is_call, calls)):
        return 'have tool_calls like [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]'
    return ""


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    try:
        return isinstance(from_json(arguments) if isinstance(arguments, str) else arguments, Mapping)
    except ValueError:
        return False


def _wrong_with_tool(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    fine = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return "" if fine else 'be like {"type": "function", "function": {"name": "f", "parameters": {...}}}'
