"""Tools: their schemas, and the environments that answer calls."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from transformers.utils import get_json_schema

from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.generation.episodes.environment import Environment, Message, Observation, Tool

_NOT_A_TOOL = ("reset", "step", "get_reward", "close")


def schemas_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The JSON schemas of tools, as chat templates take them.

    Raises:
        ConfigError: a tool lacks types or explanations, or two have the same name.
    """
    schemas: dict[str, dict[str, Any]] = {}
    for tool in tools:
        try:
            schema = get_json_schema(tool)
        except Exception as error:  # of any kind: annotations are evaluated
            rule = "must be a function whose parameters have types, and whose docstring explains it and each of them"
            raise ConfigError(f"tools: got {getattr(tool, '__name__', repr(tool))}; {rule} ({error})") from error
        name = schema["function"]["name"]
        require(name not in schemas, "tools", f"{name} twice", "must be tools with different names")
        schemas[name] = schema
    return list(schemas.values())


class ToolEnvironment:
    """Runs the tools that the policy calls, and gives it their results. A message without calls ends the episode.

    The calls of one message run at the same time, plain functions in threads; their answers have the order of the
    calls. A wrong call and a tool that raises are answered with what is wrong, and count as `tool_errors`.

    Args:
        tools: functions, `def` or `async def`, that :func:`schemas_of` accepts.
    """

    _at_the_same_time = True

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = list(tools)
        self._by_name = {s["function"]["name"]: tool for s, tool in zip(schemas_of(tools), tools, strict=True)}
        self._calls = self._errors = 0

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message] | None:
        """Begin an episode: nothing follows the prompt."""
        self._calls = self._errors = 0
        return None

    async def step(self, message: Message) -> Observation:
        """Run the calls of a message."""
        calls = message.get("tool_calls", ())
        answering = [self._answer(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        if self._at_the_same_time:
            answers = await asyncio.gather(*answering)
        else:
            answers = [await answer for answer in answering]
        answers += [("", error, False) for error in message.get("call_errors", ())]
        self._calls += len(answers)
        self._errors += sum(not fine for *_, fine in answers)
        messages = [
            {"role": "tool", "name": name, "content": text if fine else f"Error: {text}"}
            | ({"tool_call_id": call_id} if call_id else {})
            for (name, text, fine), call_id in zip_longest(answers, (call.get("id") for call in calls))
        ]
        metrics = {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}
        return Observation(messages, done=not answers, metrics=metrics)

    def close(self) -> None:
        """Nothing is held."""

    async def _answer(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, str, bool]:
        """The tool's name, the text for the policy, and whether it is a result."""
        if name not in self._by_name:
            return name, f"there is no tool {name!r}; the tools are {', '.join(self._by_name)}", False
        tool = self._by_name[name]
        signature = inspect.signature(tool)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            return name, f"{error}; the parameters of {name} are {', '.join(signature.parameters)}", False
        try:
            return name, _text_of(await _called(tool, arguments)), True
        except (Exception, SystemExit) as error:  # of any kind: the policy may try again
            return name, _unicode(f"{type(error).__name__}: {error}"), False


async def _called(function: Tool, arguments: Mapping[str, Any]) -> Any:
    """Call what may be `def` or `async def`; what is plain does not hold up other episodes."""

    def call() -> Any:
        try:
            return function(**arguments)
        except StopIteration as error:  # which no future can hold: before Python 3.12 its reader waits forever
            raise RuntimeError("StopIteration") from error

    result = call() if inspect.iscoroutinefunction(function) else await asyncio.to_thread(call)
    return await result if inspect.isawaitable(result) else result


def _text_of(result: Any) -> str:
    if isinstance(result, str):
        return _unicode(result)
    try:
        return _unicode(json.dumps(result, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return _unicode(str(result))


def _unicode(text: str) -> str:
    """The text without half characters, which no tokenizer takes."""
    return text.encode(errors="replace").decode()


class ObjectEnvironment(ToolEnvironment):
    """An object whose public methods are the tools, as TRL's `environment_factory` makes them.

    `reset(**row)` begins an episode and may return text for the policy; `get_reward()` gives the reward of the last
    message; `close()` frees what is held. The object may lack any of them. All but `close` may be coroutines. The calls
    of one message run one after another, since they may change the object.
    """

    _at_the_same_time = False

    def __init__(self, instance: Any) -> None:
        self._instance = instance
        super().__init__([getattr(instance, name) for name in _public_methods(instance)])

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message] | None:
        """Begin an episode; a text that the object returns becomes a message of the user."""
        await super().reset(row, seed)
        text = await _called(self._instance.reset, row) if hasattr(self._instance, "reset") else None
        require(text is None or isinstance(text, str), "environment", text, "reset() must return text or None")
        return None if text is None else [{"role": "user", "content": text}]

    async def step(self, message: Message) -> Observation:
        """Run the calls of a message, or ask for the reward."""
        seen = await super().step(message)
        if not seen.done or not hasattr(self._instance, "get_reward"):
            return seen
        return replace(seen, reward=float(await _called(self._instance.get_reward, {})))

    def close(self) -> None:
        """Close the object."""
        if hasattr(self._instance, "close"):
            self._instance.close()


def _public_methods(instance: Any) -> list[str]:
    """Looked up on the class, so that no property is computed."""
    kind = type(instance)
    names = [name for name in dir(kind) if not name.startswith("_") and name not in _NOT_A_TOOL]
    return [name for name in names if inspect.isroutine(getattr(kind, name))]


def as_environment(made: Any) -> Environment:
    """What a user's factory made, as an environment.

    Raises:
        ConfigError: it is neither an environment nor an object with public methods.
    """
    rule = "must be an object with reset(), step() and close(), or one whose public methods are tools"
    require(type(made).__module__ != "builtins" and not isinstance(made, type), "environment", made, rule)
    if hasattr(made, "step"):
        environment: Environment = made
        return environment
    require(bool(_public_methods(made)), "environment", made, rule)
    return ObjectEnvironment(made)
