"""Chat templates of real models, those that come with TRL: each is right, or refused by what it cannot do.

The tokenizer is a byte tokenizer that knows the template's special tokens.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from conftest import CACHE, beside
from tiny import byte_tokenizer

from async_rlhf.config import ConfigError
from async_rlhf.config.common import ChatConfig
from async_rlhf.data.calls import CallParser
from async_rlhf.data.formats import RowReader
from async_rlhf.models.chats import ChatTemplate, Setting

pytestmark = pytest.mark.foreign

TRL = "trl==1.16.0"
SPECIAL = re.compile(
    r"<\|[^<>\s]+?\|>|<\|[\w\"]+>|<\w+\|>|<\uff5c[^<>]+?\uff5c>|</?s>|<(?:start|end)_of_\w+>|\[/?[A-Z_]+\]"
    r"|</?(?:think|tool_\w+|arg_\w+)>"
)
RIGHT_EVERYWHERE = (
    "qwen2_5.",
    "qwen3",
    "llama3",
    "gemma",
    "gptoss",
    "glm",
    "deepseek",
    "nemotron",
    "lfm2_2_5",
    "phi",
    "cohere",
)
ASKED = {"role": "user", "content": "What is 17+4?"}
SYSTEM = {"role": "system", "content": "Be terse please."}
ANSWER = {"role": "assistant", "content": "It is 21."}
THOUGHT = {**ANSWER, "reasoning_content": "17 and 4 make 21"}
CALL = {"name": "add", "arguments": {"a": 17, "city": "Paris"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": CALL}]}
REPLY = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "21 (sum)"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "a number"},
                    "city": {"type": "string", "description": "a city"},
                },
                "required": ["a", "city"],
            },
        },
    }
]  # fmt: skip
COLUMNS = ("answer", "system", "reasoning", "call", "user", "tool", "read back")
EXPECTED = {
    "answer": (72, 0), "system": (70, 2), "reasoning": (72, 0), "call": (48, 24), "user": (72, 0), "tool": (48, 24),
    "read back": (48, 24),
}  # fmt: skip


def tokenizer_of(template: str):
    tokenizer = byte_tokenizer()
    names = dict.fromkeys([*SPECIAL.findall(template), "<think>", "</think>"])
    tokenizer.add_tokens(list(names), special_tokens=True)
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = template
    return tokenizer


def asked(column: str, chat: ChatTemplate) -> None:
    """Raises what is refused; asserts that the rest is right."""
    tokenizer, end = chat.tokenizer, chat.tokenizer.decode
    reader = RowReader(tokenizer, "train", chat=chat)

    def learnt(*messages):
        (found,) = reader.demonstrations([{"messages": list(messages)}])
        assert found.prompt == chat.prompt(list(messages[:-1]))
        assert "What is" not in found.response
        return found

    if column in ("answer", "system", "reasoning"):
        before = [SYSTEM, ASKED] if column == "system" else [ASKED]
        found = learnt(*before, THOUGHT if column == "reasoning" else ANSWER)
        assert found.response.removesuffix(chat.lead).endswith("It is 21.")
        assert ("terse" in found.prompt) == (column == "system")
        thought = CallParser(tokenizer, (), chat).thought(found.response, found.prompt).get("reasoning_content")
        assert thought in ((None, "17 and 4 make 21") if column == "reasoning" else (None,))
    elif column in ("call", "read back"):
        found = learnt(ASKED, CALLED)
        assert end([chat.end_of_calls]) not in found.response
        said = CallParser(tokenizer, TOOLS, chat).parse(found.response, found.prompt)
        assert column == "call" or [call["function"] for call in said["tool_calls"]] == [CALL]
        assert column == "call" or not said["content"].strip()
    else:
        follows = {"role": "user", "content": "And 5+5?"} if column == "user" else REPLY
        answer = THOUGHT if column == "user" else CALLED
        text = learnt(ASKED, answer).response
        stop = chat.end if column == "user" else chat.end_of_calls
        between = chat.between([follows], stop)
        assert follows["content"].split()[0] in between
        whole = chat.prompt([ASKED, answer, follows])
        # The end and all after it are what the template writes there, up to which token ends the last answer.
        assert whole.endswith(between)
        assert text.count(follows["content"]) == 0


def test_templates_of_real_models(capsys):
    beside("trl", TRL)
    folder = CACHE / "trl" / "trl" / "chat_templates"
    counted = {column: Counter() for column in COLUMNS}
    for path in sorted(folder.glob("*.jinja")):
        plain = ChatTemplate(tokenizer_of(path.read_text(encoding="utf-8")))
        for column in COLUMNS:
            tools = column in ("call", "tool", "read back")
            try:
                asked(column, plain.with_setting(Setting(TOOLS)) if tools else plain)
                counted[column]["right"] += 1
            except ConfigError as error:
                refused, can = str(error), plain.writes("tool_calls" if tools else "system")
                if can or not re.search(r"cannot write (system messages|tool calls|messages of tools)", refused):
                    raise
                counted[column]["refused"] += 1
    with capsys.disabled():
        for column, found in counted.items():
            print(f"{column}: {found['right']} right, {found['refused']} refused")
    assert {column: (found["right"], found["refused"]) for column, found in counted.items()} == EXPECTED


def test_a_family_of_renderers_writes_what_its_template_does():
    beside("trl", TRL)
    needs = ("openai>=1.108", "openai-harmony", "prime-pydantic-config", "tiktoken", "jiter", "sniffio", "distro")
    beside("renderers", "renderers==0.1.12", *needs)
    template = (CACHE / "trl" / "trl" / "chat_templates" / "qwen3_5_think.jinja").read_text(encoding="utf-8")
    tokenizer = tokenizer_of(template)
    vision = ("image_pad", "video_pad", "vision_start", "vision_end", "im_start", "im_end", "endoftext")
    names = [*(f"<|{name}|>" for name in vision), "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_tokens(names, special_tokens=True)
    by_template = ChatTemplate(tokenizer, setting=Setting(TOOLS))
    without = tokenizer_of(template)
    without.add_tokens(names, special_tokens=True)
    without.chat_template = None
    family = ChatTemplate(without, ChatConfig(renderer="qwen3.5"), setting=Setting(TOOLS))
    for answer in (ANSWER, THOUGHT, CALLED):
        assert family.prompt([ASKED]) == by_template.prompt([ASKED])
        assert family.answer([ASKED], answer) == by_template.answer([ASKED], answer)
    assert family.ends == by_template.ends
    assert family.between([REPLY], family.end) == by_template.between([REPLY], by_template.end)
    said = CallParser(without, TOOLS, family).parse(family.answer([ASKED], CALLED), family.prompt([ASKED]))
    assert [call["function"] for call in said["tool_calls"]] == [CALL]
    with pytest.raises(ConfigError, match=r"chat.renderer: got 'qwen9'"):
        ChatTemplate(without, ChatConfig(renderer="qwen9")).prompt([ASKED])
