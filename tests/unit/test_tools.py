"""Tools: schemas, the calls in a text, and the environments that answer them."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import pytest

from async_rlhf.config import ConfigError
from async_rlhf.data.calls import CallParser
from async_rlhf.generation.episodes.environment import Observation
from async_rlhf.generation.episodes.tools import ObjectEnvironment, ToolEnvironment, as_environment, schemas_of
from tests.tiny import byte_tokenizer


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def step(environment: Any, *calls: dict[str, Any], **more: Any) -> Observation:
    calls_of_it = {"tool_calls": list(calls)} if calls else {}
    return asyncio.run(environment.step({"role": "assistant", "content": "", **calls_of_it, **more}))


def told(seen: Observation) -> list[str]:
    return [message["content"] for message in seen.messages]


# Schemas


def test_schemas_are_those_of_transformers():
    schema = schemas_of([add, wait])
    assert [one["function"]["name"] for one in schema] == ["add", "wait"]
    assert schema[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first."},
            "b": {"type": "integer", "description": "the second."},
        },
        "required": ["a"],
    }


def untyped(a):
    """Something.

    Args:
        a: something.
    """


def unexplained(a: int) -> int:
    """Something."""
    return a


def silent(a: int) -> int:
    return a


@pytest.mark.parametrize("bad", [untyped, unexplained, silent])
def test_a_function_that_cannot_be_a_tool(bad):
    with pytest.raises(ConfigError, match=f"tools: got {bad.__name__}; must be a function whose parameters have types"):
        ToolEnvironment([add, bad])


def test_two_tools_of_one_name():
    with pytest.raises(ConfigError, match="tools: got 'add twice'; must be tools with different names"):
        schemas_of([add, add])


# Calls in a text


def parse(text: str) -> dict[str, Any]:
    return CallParser(byte_tokenizer()).parse(text)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Just words, {not} a call.", "Just words, {not} a call.", []),
        ('So: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "So:", [call("add", a=1)]),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> and '
            '<tool_call>{"arguments": "{\\"a\\": 2}", "name": "add"}</tool_call>!',
            "and !",
            [call("add", a=1), call("add", a=2)],
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 3}}', "", [call("add", a=3)]),
        ('<think>maybe <tool_call>{"name": "x", "arguments": {}}</tool_call></think>\n4 ', None, []),
        ('<think>a</think>b<tool_call>{"name": "x", "arguments": {}}', "<think>a</think>b", [call("x")]),
        (' {"name": "add", "parameters": {"a": 1}} ', "", [call("add", a=1)]),
        ('{"type": "function", "parameters": {"a": 1}, "name": "add"}', "", [call("add", a=1)]),
        ('<|python_tag|>{"name": "add", "arguments": {"a": 1}}', "", [call("add", a=1)]),
        ('{"name": "Ada", "age": 36}', None, []),
        ('{"person": {"name": "Ada", "parameters": 3}}', None, []),
        ("{}", None, []),
        ("", "", []),
    ],
)
def test_calls_in_a_text(text, content, calls):
    expected = {"role": "assistant", "content": text if content is None else content}
    assert parse(text) == expected | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>', "Expecting value: line 1 column 36"),
        ("<tool_call></tool_call>", "Expecting value: line 1 column 1"),
        ('<tool_call>{"name": "add"}</tool_call>', "must be"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "must be"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "Expecting property name"),
        ("<tool_call>[1]</tool_call>", "must be"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "surrogates not allowed"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "too deep"),
        ('{"name": "add", "parameters": {"a": 1}', "Expecting ',' delimiter"),
        ('<|python_tag|>search.call(query="x")', "Expecting value"),
    ],
)
def test_what_cannot_be_read_stays_in_the_content_and_is_answered(text, why):
    message = parse(text)
    assert "tool_calls" not in message
    assert message["content"] == text
    assert [why in error for error in message["call_errors"]] == [True]
    seen = asyncio.run(ToolEnvironment([add]).step(message))
    assert seen.messages == [{"role": "tool", "name": "", "content": f"Error: {message['call_errors'][0]}"}]
    assert (seen.done, seen.metrics) == (False, {"tool_calls": 1, "tool_errors": 1})


def test_one_bad_call_among_good_ones():
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    message = parse(f"{good}<tool_call>{{bad</tool_call>{good}")
    assert (message["content"], message["tool_calls"]) == ("<tool_call>{bad</tool_call>", [call("add", a=1)] * 2)
    assert message["call_errors"][0].startswith("call 2 cannot be read: Expecting property name")
    assert told(asyncio.run(ToolEnvironment([add]).step(message)))[:2] == ["2", "2"]


@pytest.mark.parametrize(
    "part", ["<tool_call>", "<think>", '{"name"', "<|python_tag|>", '{"name": "a", "parameters": ']
)
def test_parsing_takes_linear_time(part):
    before = time.perf_counter()
    parse(part * 20_000)
    assert time.perf_counter() - before < 2


TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "[CALL]",
            "close": "[/CALL]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.args}"}},
        },
        "content": {},
    },
}


def test_the_template_of_the_tokenizer_decides():
    tokenizer = byte_tokenizer()
    tokenizer.response_template = TEMPLATE
    parser = CallParser(tokenizer, schemas_of([add]))
    text = 'hm</think>So [CALL]{"name": "add", "args": {"a": "7"}}[/CALL]'
    assert parser.parse(text, prefix="<|assistant|><think>") == {
        "role": "assistant",
        "content": "So",
        "thinking": "hm",
        "tool_calls": [call("add", a=7)],  # the schema says that it is no text
    }
    hermes = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert parser.parse(hermes) == {"role": "assistant", "content": hermes}
    for bad, why in (("[CALL]{[/CALL]", "could not parse"), ('[CALL]{"name": "add", "args": 1}[/CALL]', "must be")):
        message = parser.parse(bad)
        assert (message["content"], len(message["call_errors"])) == (bad, 1)
        assert "the message cannot be read" in message["call_errors"][0]
        assert why in message["call_errors"][0]


def test_an_invalid_template():
    tokenizer = byte_tokenizer()
    tokenizer.response_template = {"fields": {"content": {}}}
    with pytest.raises(ConfigError, match=r"response_template of the tokenizer: .*start_anchor"):
        CallParser(tokenizer)


# The environment of tools


def test_results_and_the_end():
    environment = ToolEnvironment([add])
    assert environment.tools == [add]
    assert asyncio.run(environment.reset({"prompt": "?"}, 3)) is None
    first = step(environment, call("add", a=1), call("add", a=2, b=3))
    assert first == Observation(
        [{"role": "tool", "name": "add", "content": "2"}, {"role": "tool", "name": "add", "content": "5"}],
        metrics={"tool_calls": 2.0, "tool_errors": 0.0},
    )
    assert step(environment, call("add", a=1, c=3)).metrics == {"tool_calls": 3.0, "tool_errors": 1.0}
    assert step(environment) == Observation([], done=True, metrics={"tool_calls": 3.0, "tool_errors": 1.0})
    asyncio.run(environment.reset({}, 0))
    assert step(environment).metrics == {"tool_calls": 0.0, "tool_errors": 0.0}


def fails(kind: str) -> None:
    """Fail.

    Args:
        kind: how.
    """
    if kind == "exit":
        raise SystemExit("gone")
    if kind == "empty":
        next(iter(()))
    raise ValueError(f"no {kind} \ud800")


async def fails_later(kind: str) -> None:
    """Fail.

    Args:
        kind: how.
    """
    await asyncio.sleep(0)
    fails(kind)


@pytest.mark.timeout(20)  # a StopIteration in a future hangs
@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        (call("sub", a=1), "there is no tool 'sub'; the tools are add, fails, fails_later"),
        (call("add"), "missing a required argument: 'a'; the parameters of add are a, b"),
        (call("add", a=1, c=2), "got an unexpected keyword argument 'c'; the parameters of add are a, b"),
        (call("add", a="1"), 'TypeError: can only concatenate str (not "int") to str'),
        (call("fails", kind="luck"), "ValueError: no luck ?"),
        (call("fails", kind="exit"), "SystemExit: gone"),
        (call("fails", kind="empty"), "RuntimeError: StopIteration"),
        (call("fails_later", kind="luck"), "ValueError: no luck ?"),
        (call("fails_later", kind="exit"), "SystemExit: gone"),
    ],
)
def test_what_goes_wrong_is_told_and_counted(wrong, answer):
    seen = step(ToolEnvironment([add, fails, fails_later]), wrong, call("add", a=1))
    assert told(seen) == [f"Error: {answer}", "2"]
    assert (seen.done, seen.metrics) == (False, {"tool_calls": 2.0, "tool_errors": 1.0})


@pytest.mark.timeout(20)
def test_calls_of_a_message_run_at_the_same_time_and_are_answered_in_order():
    met, ready = threading.Barrier(2, timeout=10), asyncio.Event()

    def meet(name: str) -> str:
        """Wait for the other one.

        Args:
            name: anything.
        """
        met.wait()
        return name

    async def listen() -> str:
        """Wait until somebody speaks."""
        await ready.wait()
        return "heard"

    async def speak() -> str:
        """Speak."""
        ready.set()
        return "spoken"

    calls = [call("listen"), call("meet", name="a"), call("meet", name="b"), call("speak")]
    assert told(step(ToolEnvironment([meet, listen, speak]), *calls)) == ["heard", "a", "b", "spoken"]


class Pair:
    def __str__(self) -> str:
        return "a pair"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("a\n", "a\n"),
        ({"a": [1, None, "é"]}, '{"a": [1, null, "é"]}'),
        (None, "null"),
        (Pair(), "a pair"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ("\ud800", "?"),
    ],
)
def test_results_become_text(result, text):
    def give() -> object:
        """Give it."""
        return result

    give.__annotations__.clear()
    assert told(step(ToolEnvironment([give]), call("give"))) == [text]


# Objects with methods


class Counter:
    """An environment as TRL's users write them."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    @property
    def explodes(self) -> int:
        raise AssertionError

    def reset(self, **row: Any) -> str | None:
        self.log.append(row)
        return row.get("hint")

    def note(self, text: str) -> str:
        """Note something.

        Args:
            text: what.
        """
        time.sleep(0.2 if text == "slow" else 0)
        self.log.append(text)
        return f"noted {text}"

    async def count(self) -> int:
        """Count the notes."""
        return len(self.log) - 1

    def _hidden(self) -> None: ...

    def get_reward(self) -> float:
        self.log.append("judged")
        return len(self.log) / 4

    def close(self) -> None:
        self.log.append("closed")


def test_an_object_of_trl():
    counter = Counter()
    environment = as_environment(counter)
    assert [tool.__name__ for tool in environment.tools] == ["count", "note"]
    assert asyncio.run(environment.reset({"hint": "think", "answer": 3}, 0)) == [{"role": "user", "content": "think"}]
    seen = step(environment, call("note", text="slow"), call("note", text="fast"), call("count"))
    assert (told(seen), seen.reward, seen.done) == (["noted slow", "noted fast", "2"], 0.0, False)
    seen = step(environment)
    assert (seen.reward, seen.done, seen.metrics) == (1.0, True, {"tool_calls": 3.0, "tool_errors": 0.0})
    environment.close()
    assert counter.log == [{"hint": "think", "answer": 3}, "slow", "fast", "judged", "closed"]
    assert asyncio.run(environment.reset({}, 0)) is None


def test_an_object_of_trl_with_little_or_with_coroutines():
    class Little:
        def look(self) -> str:
            """Look."""
            return "nothing"

    environment = as_environment(Little())
    assert asyncio.run(environment.reset({"a": 1}, 0)) is None
    assert told(step(environment, call("look"))) == ["nothing"]
    assert step(environment).reward == 0.0
    environment.close()

    class Waiting(Little):
        async def reset(self, **row: Any) -> str:
            return str(row)

        async def get_reward(self) -> float:
            return 0.5

    environment = as_environment(Waiting())
    assert asyncio.run(environment.reset({"a": 1}, 0)) == [{"role": "user", "content": "{'a': 1}"}]
    assert step(environment).reward == 0.5


def test_reset_must_return_text_or_none():
    class Wrong(Counter):
        def reset(self, **row: Any) -> Any:
            return 3

    with pytest.raises(ConfigError, match=r"environment: got 3; reset\(\) must return text or None"):
        asyncio.run(ObjectEnvironment(Wrong()).reset({}, 0))


def test_an_environment_stays_what_it_is():
    class Own(Counter):
        def step(self, message: Any) -> Observation:
            return Observation(done=True)

    own = Own()
    assert as_environment(own) is own


class Empty:
    x = 3


class Abstract(ABC):
    @abstractmethod
    def act(self) -> str:
        """Act."""


@pytest.mark.parametrize("made", [None, 3, "text", [add], add, Counter, Abstract, Empty(), SimpleNamespace(a=1)])
def test_what_is_no_environment(made):
    with pytest.raises(ConfigError, match=r"environment: got .*; must be an object with reset\(\), step\(\) and close"):
        as_environment(made)
