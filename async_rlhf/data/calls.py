"""Tool calls and reasoning in what a model wrote, in the forms of today's families of models.

The chat template decides which form a tokenizer's calls have: the one in which a call that it writes is read back.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError
from async_rlhf.models.chats import FAILURES, ChatTemplate, Message, Schemas
from async_rlhf.models.thoughts import OPENED, THOUGHTS, by_channels

_ARGUMENTS = ("arguments", "parameters", "args")
_NAMES = ("name", "tool_name", "recipient_name")
Found = list[tuple[Any, ...]]
"""Names of called functions, with their arguments (a mapping, or the JSON of one), and with the call's id, if any."""


class _Form(NamedTuple):
    """How a family of models writes calls."""

    blocks: re.Pattern[str]
    """What is a block of calls; its group is the body. An end that is missing counts as the end of the text."""
    read: Callable[[str, Schemas], Found]
    """The calls in a body.

    Raises:
        ValueError: it has none, or wrong ones.
    """


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


def _loaded(text: str) -> Any:
    document, *others = _documents(text)
    if others:
        raise ValueError("must be one value")
    return document


def _documents(text: str) -> list[Any]:
    """The values of JSON that a text is, one after the other: Llama writes calls so, perhaps with ";" between."""
    documents: list[Any] = []
    rest = text.strip()
    try:
        while rest or not documents:
            value, end = json.JSONDecoder().raw_decode(rest)
            documents, rest = [*documents, value], rest[end:].lstrip("; \t\r\n")
        json.dumps(documents, ensure_ascii=False).encode()  # refuses half characters, which no tokenizer takes
    except RecursionError as error:
        raise ValueError("too deep") from error
    return documents


def _json_calls(body: str, schemas: Schemas) -> Found:
    """{"name": ..., "arguments": {...}}, or several, or a list of these."""
    documents = _documents(body)
    calls: Found = []
    for call in (each for value in documents for each in (value if isinstance(value, list) and value else [value])):
        call = (
            call.get("function", call) | call
            if isinstance(call, dict) and isinstance(call.get("function"), dict)
            else call
        )
        name = next((call[key] for key in _NAMES if key in call), None) if isinstance(call, dict) else None
        arguments = next((call[key] for key in _ARGUMENTS if key in call), None) if name is not None else None
        calls.append((name, arguments, call.get("id") if isinstance(call, dict) else None))
    return calls


def _named_json(separator: str) -> Callable[[str, Schemas], Found]:
    """A name, what separates it, and the JSON of its arguments, perhaps in a fence."""

    def read(body: str, schemas: Schemas) -> Found:
        match = re.search(separator, body)
        if match is None:
            raise ValueError("must be a name and arguments")
        name, rest = body[: match.start()], body[match.end() :]
        rest = re.sub(r"\A\s*```(?:json)?\s*|\s*```\s*\Z", "", rest)
        name = re.split(r"\s|<\|", name.strip(), maxsplit=1)[0]  # gpt-oss names the channel, too
        named, marked, call_id = name.partition("[CALL_ID]")  # Mistral; Kimi's names with a number are ids
        called = call_id if marked else name if ":" in name else None
        return [(named.removeprefix("functions.").partition(":")[0], _loaded(rest), called)]

    return read


def _typed(name: str, key: str, text: str, schemas: Schemas) -> Any:
    """A value without quotes, by the type that the function's schema gives it."""
    functions = (schema.get("function", schema) for schema in schemas)
    parameters = next((function.get("parameters") for function in functions if function.get("name") == name), None)
    types = _types(((parameters or {}).get("properties") or {}).get(key))
    words = {"True": True, "False": False, "None": None}
    if types - {"null"} == {"string"}:
        return None if "null" in types and text.strip() in ("null", "None") else text
    try:
        return _loaded(text)
    except ValueError:
        return words.get(text.strip(), text)


def _types(schema: Any) -> set[str]:
    """The types of JSON that a schema allows, as far as it says."""
    if not isinstance(schema, Mapping):
        return set()
    names = schema.get("type") or ()
    types = {names} if isinstance(names, str) else set(names)
    return types.union({"null"} if schema.get("nullable") else (), *map(_types, schema.get("anyOf") or ()))


def _tagged(name: str, parameters: str) -> Callable[[str, Schemas], Found]:
    """A name and parameters in tags, found by these patterns."""
    names, keys = _pattern(name), _pattern(parameters)

    def read(body: str, schemas: Schemas) -> Found:
        name_match = names.search(body)
        if name_match is None:
            raise ValueError("it has no name of a function")
        called = name_match[1].strip()
        pairs = [(match[1].strip(), match[2]) for match in keys.finditer(body)]
        return [(called, {key: _typed(called, key, text, schemas) for key, text in pairs})]

    return read


def _pythonic(body: str, schemas: Schemas) -> Found:
    """[f(a=1, b='x'), g()]."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        parsed: Found = []
        for call in calls:
            if not isinstance(call, ast.Call) or call.args or any(pair.arg is None for pair in call.keywords):
                raise ValueError("must be calls with named arguments, such as [f(a=1)]")
            parsed.append((ast.unparse(call.func), {str(pair.arg): _literal(pair.value) for pair in call.keywords}))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is no list of calls: {error}") from error
    return parsed


def _literal(node: ast.expr) -> Any:
    """A literal of Python that JSON can write, too. It may have JSON's true, false and null in it."""
    words = {"true": True, "false": False, "null": None}

    class Words(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return ast.Constant(words[name.id]) if name.id in words else name

    return _loaded(json.dumps(ast.literal_eval(Words().visit(node))))


def _quoted(body: str, schemas: Schemas) -> Found:
    """call:f{a:1,b:<|"|>x<|"|>}: JSON with other quotes, and none around keys."""
    name, brace, rest = body.strip().removeprefix("call:").partition("{")
    if not brace:
        raise ValueError("must be call:name{...}")
    parts = f"{brace}{rest}".split('<|"|>')
    texts = [
        json.dumps(part, ensure_ascii=False) if n % 2 else re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', part)
        for n, part in enumerate(parts)
    ]
    return [(name.strip(), _loaded("".join(texts)))]


_DEEP_BEGIN, _DEEP_END = (rf"<\uff5ctool\u2581call\u2581{which}\uff5c>" for which in ("begin", "end"))
_DEEP_SEPARATOR = r"<\uff5ctool\u2581sep\uff5c>"
_JSON_BLOCK = r"<tool_call>(.*?)(?:</tool_call>|\Z)"
_HERMES = _Form(_pattern(_JSON_BLOCK + r"|<\|python_tag\|>(.*)"), _json_calls)
_FORMS = (
    _HERMES,
    _Form(  # Qwen3-Coder, Qwen3.5 and later, Nemotron 3
        _pattern(_JSON_BLOCK + r"|(<function=.*?)(?:</function>|\Z)"),
        _tagged(
            r"<function=([^<>]*)>",
            r"<parameter=([^<>]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)",
        ),
    ),
    _Form(  # GLM 4.5 and later
        _pattern(_JSON_BLOCK), _tagged(r"\A\s*([^\s<]+)", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>")
    ),
    _Form(  # DeepSeek V3, R1
        _pattern(rf"{_DEEP_BEGIN}(?:\w+{_DEEP_SEPARATOR})?(?=[^\n]*\n```)(.*?)(?:{_DEEP_END}|\Z)"),
        _named_json(r"\n(?=```)"),
    ),
    _Form(_pattern(rf"{_DEEP_BEGIN}(.*?)(?:{_DEEP_END}|\Z)"), _named_json(_DEEP_SEPARATOR)),  # V3.1
    _Form(_pattern(r"<\|tool_call>(.*?)(?:<tool_call\|>|\Z)"), _quoted),  # Gemma 4
    _Form(  # gpt-oss
        _pattern(r"(?:<\|channel\|>commentary)?\s*to=(functions\..*?)(?:<\|call\|>|\Z)"), _named_json(r"<\|message\|>")
    ),
    _Form(  # Muse; MiniMax
        _pattern(
            r"(?:\s*to=[\w.]+<\|message\|>\s*)?<(?:atem:function_calls|minimax:tool_call)>(.*?)"
            r"(?:</(?:atem:function_calls|minimax:tool_call)>|\Z)"
        ),
        _tagged(
            r'<(?:\w+:)?invoke name="([^"<]*)">', r'<(?:\w+:)?parameter name="([^"<]*)">(.*?)</(?:\w+:)?parameter>'
        ),
    ),
    _Form(_pattern(r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)"), _pythonic),  # LFM2
    _Form(_pattern(r"<\|START_ACTION\|>(.*?)(?:<\|END_ACTION\|>|\Z)"), _json_calls),  # Cohere
    _Form(_pattern(r"\[TOOL_CALLS\]\s*(\[.*)"), _json_calls),  # Mistral
    _Form(_pattern(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|\Z)"), _named_json(r"\[ARGS\]")),
    _Form(  # Kimi K2
        _pattern(r"<\|tool_call_begin\|>(.*?)(?:<\|tool_call_end\|>|\Z)"),
        _named_json(r"<\|tool_call_argument_begin\|>"),
    ),
    _Form(_pattern(r"<\|tool_call\|>(.*?)(?:<\|/tool_call\|>|\Z)"), _json_calls),  # Phi-4, Granite
    _Form(_pattern(r"<tool_calls?>(.*?)(?:</tool_calls?>|\Z)"), _json_calls),
    _Form(_pattern(r"\A\s*(\[\s*\w[\w.]*\(.*)"), _pythonic),  # Llama 4
)
_WRAPPERS = re.compile(
    r"<\uff5ctool\u2581calls\u2581(?:begin|end)\uff5c>|<\|tool_calls_section_(?:begin|end)\|>|<\|tool_response>"
    r"|<\|start\|>assistant\s*\Z"
)


class CallParser:
    """Finds the calls of tools, and reasoning, in a text of the policy.

    If the tokenizer has a `response_template`, that decides. If not, the form in which its chat template writes calls.
    A tokenizer without either, or whose template writes no calls, is taken to write
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), any number of them, but not within
    `<think>`; what follows `<|python_tag|>`; and a text that is one JSON object with "name" and "parameters" (Llama).

    Args:
        tokenizer: of the policy.
        schemas: of the tools, for forms that need types to read arguments.
        template: writes the policy's chats; None for what the tokenizer says.

    Raises:
        ConfigError: the tokenizer's `response_template` is invalid, or its chat template writes calls in a form that is
            not read here.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[Mapping[str, Any]] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        self._tokenizer, self._schemas = tokenizer, [dict(schema) for schema in schemas]
        self._template = template or ChatTemplate(tokenizer)
        self._by_template = getattr(tokenizer, "response_template", None) is not None
        self._form, self._thinks = _HERMES, False
        if self._by_template:
            try:
                tokenizer.get_response_parser(prefix="")
            except (ValueError, TypeError) as error:
                raise ConfigError(f"response_template of the tokenizer: {error}") from error
        elif self._template.exists:
            self._thinks = self._template.thinks
            self._form = self._found_form()

    def _found_form(self) -> _Form:
        """The first form in which a call that the template writes is read as it was written."""
        if not self._template.writes("tool_calls"):
            return _HERMES
        arguments = {"place": "Paris, 1st", "count": 3}
        call = as_call("probe", arguments, "call00000")  # Mistral's templates take calls with such ids alone
        called: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked: list[Message] = [{"role": "user", "content": "A question."}]
        try:
            written = self._template.answer(asked, called)
        except FAILURES as error:
            if self._schemas:
                raise ConfigError(
                    f"tokenizer: its chat template cannot write an answer that is a call: {error}"
                ) from error
            return _HERMES
        properties = {"place": {"type": "string"}, "count": {"type": "integer"}}
        schema = {"function": {"name": "probe", "parameters": {"type": "object", "properties": properties}}}
        for form in _FORMS:
            _, calls, _ = _taken(written, form, [schema])
            if [each["function"] for each in calls] == [call["function"]]:
                return form
        if self._schemas:
            rule = "must be a form that is known here, or the tokenizer must have a response_template that reads it"
            raise ConfigError(f"tokenizer: its chat template writes a call as {written!r:.200}; {rule}")
        return _HERMES

    def parse(self, text: str, prefix: str = "") -> Message:
        """The message that a text is: "role", "content", and if there are any, "reasoning_content", "tool_calls" and
        "call_errors".

        A call that cannot be read stays in the content, as it was written. "call_errors" says what is wrong with each
        such call; chat templates ignore that key, and tools answer it.

        Args:
            text: what the policy wrote, with special tokens, without the stop token.
            prefix: the prompt before it, which may begin the message, as with an open `<think>`.
        """
        if self._by_template:
            return self._parse_by_template(text, prefix)
        thought, rest = self._split(text.removesuffix(self._template.lead), prefix)
        content, calls, errors = _taken(rest, self._form, self._schemas)
        message = _message({"content": content if calls else rest}, calls, errors)
        return message | ({"reasoning_content": thought} if thought else {})

    def thought(self, text: str, prefix: str = "") -> Message:
        """The same where there are no tools to call."""
        thought, rest = self._split(text.removesuffix(self._template.lead), prefix)
        return _message({"content": rest} | ({"reasoning_content": thought} if thought else {}))

    def _split(self, text: str, prefix: str) -> tuple[str, str]:
        """Reasoning, and the rest."""
        if "<|message|>" in text:
            return by_channels(text)
        opened = OPENED.search(prefix)
        if not (opened or self._thinks):
            return "", text
        whole = (opened[1] if opened else "") + text
        for begin, end in THOUGHTS.items():
            if whole.lstrip().startswith(begin):
                thought, ended, rest = whole.lstrip()[len(begin) :].partition(end)
                return thought.strip(), rest.lstrip("\n") if ended else ""
        return "", text

    def _parse_by_template(self, text: str, prefix: str) -> Message:
        try:
            message = self._tokenizer.parse_response(text, prefix=prefix, tools=self._schemas)
            calls = [_checked(*_json_calls(json.dumps(call), ())[0]) for call in message.pop("tool_calls", ())]
            return _message(message, calls)
        except Exception as error:  # of any kind: the template's parsers meet what they were not made for
            return _message({"content": text}, errors=[f"the message cannot be read: {error}"])


def _taken(text: str, form: _Form, schemas: Schemas) -> tuple[str, list[dict[str, Any]], list[str]]:
    """A text without its calls, the calls, and what is wrong with those that cannot be read."""
    calls: list[dict[str, Any]] = []
    errors: list[str] = []

    def take(match: re.Match[str]) -> str:
        body = next((group for group in match.groups() if group is not None), None)
        if body is None:  # a thought
            return match[0]
        try:
            calls.extend(_checked(*call) for call in form.read(body, schemas))
        except ValueError as error:
            errors.append(f"call {len(calls) + len(errors) + 1} cannot be read: {error}")
            return match[0]
        return ""

    blocks = _pattern(rf"<think>.*?(?:</think>|\Z)|{form.blocks.pattern}")
    bare = form is _HERMES and _is_bare_call(text)
    rest = blocks.sub(take, f"<|python_tag|>{text}" if bare else text)
    return (_WRAPPERS.sub("", rest) if calls else rest).strip(), calls, errors


def _message(parts: Mapping[str, Any], calls: Sequence[dict[str, Any]] = (), errors: Sequence[str] = ()) -> Message:
    message = {"content": "", **parts, "role": "assistant"}
    return message | ({"tool_calls": calls} if calls else {}) | ({"call_errors": errors} if errors else {})


def _is_bare_call(text: str) -> bool:
    """Whether a text without tags is meant as a call, readable or not."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        document = _documents(text)[0]
    except ValueError:
        return '"name"' in text and any(f'"{key}"' in text for key in _ARGUMENTS[:2])
    return "name" in document and any(key in document for key in _ARGUMENTS[:2])


def as_call(name: str, arguments: Mapping[str, Any], called: Any = None) -> dict[str, Any]:
    """A call as messages have it; with its id, if that is a text."""
    entry = {"id": called} if isinstance(called, str) and called else {}
    return {**entry, "type": "function", "function": {"name": name, "arguments": arguments}}


def _checked(name: Any, arguments: Any, called: Any = None) -> dict[str, Any]:
    arguments = _loaded(arguments) if isinstance(arguments, str) else arguments
    if isinstance(name, str) and isinstance(arguments, dict):
        return as_call(name, arguments, called)
    raise ValueError('must be {"name": "...", "arguments": {...}}')
