"""Chats of any template: where an answer begins and ends, what follows it, and how its calls are read back.

The templates here are written for these tests, each with one habit of a real family; ``tests/foreign`` has real ones.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer

from async_rlhf.config import ConfigError
from async_rlhf.config.common import ChatConfig
from async_rlhf.data.calls import CallParser
from async_rlhf.data.formats import MESSAGES, RowReader, identity, prompt_identity
from async_rlhf.data.rendering import Renderer
from async_rlhf.data.stream import PromptStream
from async_rlhf.data.tokenizer import encode_prompts, encode_responses
from async_rlhf.generation.episodes.endpoint import _spoken
from async_rlhf.generation.episodes.tools import ToolEnvironment
from async_rlhf.models.chats import ChatTemplate, Message, Setting, as_messages

ASKED = {"role": "user", "content": "17+4?"}
SYSTEM = {"role": "system", "content": "be brief"}
ANSWER = {"role": "assistant", "content": "21"}
THOUGHT = {**ANSWER, "reasoning_content": "it is odd"}
CALL = {"name": "add", "arguments": {"a": 17, "city": "Paris, 007"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
REPLY = {"role": "tool", "name": "add", "content": "result 21"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "city": {"type": "string"}}},
        },
    }
]
FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
ENDS = {"next": ("<|user|>", "<|observation|>"), "channels": ("<|return|>", "<|call|>")}
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|observation|>", "<|return|>", "<|call|>", "<|start|>"]


def tokenizer_of(template: str, *more: str):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*SPECIAL, "<|message|>", "<|channel|>", "<think>", "</think>", *more], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(params=TEMPLATES)
def kind(request):
    return request.param


@pytest.fixture
def chat(kind):
    tools = () if kind == "prefilled" else TOOLS  # it writes no schemas
    return ChatTemplate(tokenizer_of(TEMPLATES[kind]), setting=Setting(tools))


def test_an_answer_follows_its_prompt_and_ends_as_the_template_ends_it(chat, kind):
    prompt, text = chat.prompt([ASKED]), chat.answer([ASKED], ANSWER)
    assert prompt.count("17+4?") == 1
    assert text.endswith("21")
    assert "17+4?" not in text
    ends = tuple(chat.tokenizer.convert_ids_to_tokens([chat.end, chat.end_of_calls]))
    assert ends == ENDS.get(kind, ("<|end|>", "<|end|>"))
    assert {chat.end, chat.end_of_calls, chat.tokenizer.eos_token_id} == set(chat.ends)
    whole = chat.tokenizer.apply_chat_template(
        [{**m, "content": [{"text": m["content"]}] if kind == "parts" else m["content"]} for m in (ASKED, ANSWER)],
        tools=chat.setting.tools or None,
        tokenize=False,
    )
    assert kind == "prefilled" or whole.startswith(prompt + text)


def test_reasoning_is_learnt_where_the_template_has_a_place_for_it(chat, kind, caplog):
    text = chat.answer([ASKED], THOUGHT)
    assert ("it is odd" in text) == (kind not in ("next", "parts", "pythonic"))
    assert ("leaves reasoning" in caplog.text) == (kind in ("next", "parts", "pythonic"))
    said = CallParser(chat.tokenizer, TOOLS, chat).parse(text, chat.prompt([ASKED]))
    thought = {} if kind in ("next", "parts", "pythonic") else {"reasoning_content": "it is odd"}
    assert said == {"role": "assistant", "content": "21"} | thought


def test_a_call_that_the_template_writes_is_read_back(chat):
    text = chat.answer([ASKED], CALLED)
    parser = CallParser(chat.tokenizer, TOOLS, chat)
    said = parser.parse(text, chat.prompt([ASKED]))
    assert said["content"] == ""
    assert [call["function"] for call in said["tool_calls"]] == [CALL]
    assert chat.tokenizer.decode([chat.end_of_calls]) not in text
    cut = parser.parse(text[:-12], chat.prompt([ASKED]))
    assert "tool_calls" in cut or cut["call_errors"]


@pytest.mark.parametrize("following", [[{"role": "user", "content": "and 5?"}], [REPLY], [REPLY, REPLY]])
def test_what_comes_between_two_answers_is_what_the_template_writes_there(chat, kind, following):
    """In a chat in which it changes nothing that was said before."""
    called = following[0]["role"] == "tool"
    if kind == "channels" and len(following) == 2:
        return  # one call a message is all that it can write
    answer = {**CALLED, "tool_calls": CALLED["tool_calls"] * len(following)} if called else THOUGHT
    end = chat.end_of_calls if called else chat.end
    ours = chat.answer([ASKED], answer) + chat.tokenizer.decode([end]) + chat.between(following, end)
    theirs = chat.prompt([ASKED, answer, *following])
    written = chat.prompt([ASKED]) + ours
    if kind == "channels" and not called:  # the last answer ends otherwise than earlier ones
        written = written.replace("<|return|>", "<|end|>")
    if kind == "hermes":
        written = written.replace("<think></think><tool_call>", "<tool_call>")
    if kind == "prefilled":  # a whole chat has no thoughts
        written = written.replace("<think>\n\n</think>\n\n", "").replace("<think>\nit is odd\n</think>\n\n", "")
    assert written == theirs


def test_another_end_than_the_templates_is_followed_by_the_templates(chat, kind):
    after = chat.between([{"role": "user", "content": "and 5?"}], chat.tokenizer.eos_token_id)
    assert after.startswith({"channels": "<|end|>", "next": "<|user|>"}.get(kind, "<|end|>"))


@pytest.mark.parametrize(
    ("template", "messages", "lacks"),
    [
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            [SYSTEM, ASKED],
            "system messages",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", [ASKED, CALLED], "tool calls"),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", [ASKED, REPLY], "messages of tools"),
        (
            "{% for m in messages if m.role in ('system', 'user', 'assistant') %}{{ m.content }}{% endfor %}",
            [{**SYSTEM, "role": "developer"}, ASKED],
            "messages of role 'developer'",
        ),
    ],
)
def test_what_a_template_cannot_write_is_named(template, messages, lacks):
    reader = RowReader(tokenizer_of(template), "train")
    row = {"prompt": messages, "completion": [ANSWER]}
    with pytest.raises(ConfigError, match=f"train: row 1: `completion`: the chat template cannot write {lacks}"):
        list(reader.demonstrations([row]))


def test_calls_in_a_form_that_nobody_knows_are_refused_with_tools():
    template = TEMPLATES["hermes"].replace("<tool_call>{{ c.function | tojson }}</tool_call>", "((")
    template = template.replace("((", "{{ c.function.name ~ '?' ~ c.function.arguments.items() | list }}")
    chat = ChatTemplate(tokenizer_of(template))
    assert CallParser(chat.tokenizer, (), chat).parse("x") == {"role": "assistant", "content": "x"}
    with pytest.raises(ConfigError, match=r"tokenizer: its chat template writes a call as .*probe\?"):
        Renderer(chat.tokenizer, TOOLS, chat).check()


WRITTEN = (
    *("<tool_call>", "</tool_call>", "<function=f>", "<function=add>", "</function>", "<parameter=a>", "</parameter>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "[", "]", "(", ")", "f(a=", "[f(a=1j)]", "[f(a=...)]"),
    *("[f(a={1, 2})]", "[f(a={[1]: 2})]", "[f(a=b'x')]", "[f(a='\\ud800')]", "[f(**a)]", "[" * 3000, "{", "}"),
    *('"', "a", "1", '{"name": "f", "arguments": {}}', '"\\ud800"', "NaN", "9" * 5000),
    *("to=functions.f", "<|message|>", "<|channel|>"),
    *("-" * 3000, "<|call|>", "commentary", "<think>", "</think>", "\n", " "),
)  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(pieces=st.lists(st.sampled_from(WRITTEN), max_size=6))
def test_whatever_a_policy_writes_is_a_message(chat, pieces):
    """One that JSON can write: it goes into samples, templates and the answers of an endpoint."""
    message = CallParser(chat.tokenizer, TOOLS, chat).parse("".join(pieces), chat.prompt([ASKED]))
    json.dumps(message, ensure_ascii=False).encode()


@pytest.mark.parametrize("part", ["\n", "<function=", "<parameter=a>", "[", "<|channel|>", "to=functions.f\n"])
def test_calls_are_found_in_linear_time(chat, part):
    parser = CallParser(chat.tokenizer, TOOLS, chat)
    before = time.process_time()
    for opened in ("", "to=functions.f", "<tool_call><function=add>", "<|tool_call_start|>"):
        parser.parse(opened + part * 10_000)
    assert time.process_time() - before < 4, "a quadratic search takes 7 seconds"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "007", "007"),
        ({"type": ["string", "null"]}, "12345", "12345"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12345", 12345),
        ({"type": "integer"}, "12345", 12345),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "[1]", [1]),
        (True, "12345", 12345),
        (None, "many", "many"),
    ],
)
def test_values_without_quotes_have_the_types_of_the_schema(schema, text, value):
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": schema}}}
    chat = ChatTemplate(tokenizer_of(TEMPLATES["tags"]))
    parser = CallParser(chat.tokenizer, [{"type": "function", "function": function}], chat)
    said = parser.parse(f"<tool_call><function=add><parameter=a>\n{text}\n</parameter></function></tool_call>")
    assert said["tool_calls"][0]["function"]["arguments"] == {"a": value}


# ---------------------------------------------------------------- ends, and beginnings


def test_the_end_is_the_tokenizers_where_several_tokens_stand_together():
    for template, end in {
        "{% for m in messages %}{{ m.content }}<|return|><|end|>{% endfor %}": "<|end|>",
        "{% for m in messages %}{{ m.content }}<|call|>\n{% endfor %}<|end|>": "<|call|>",
        "{% for m in messages %}{{ m.content }}\n{% endfor %}": "<|end|>",
        None: "<|end|>",
    }.items():
        tokenizer = tokenizer_of(template)
        tokenizer.eos_token = "<|end|>"
        assert tokenizer.decode([ChatTemplate(tokenizer).end]) == end, template


def test_a_response_ends_once_whichever_end_is_spelt():
    chat = ChatTemplate(tokenizer_of(TEMPLATES["hermes"]))
    texts = ["21", "21<|end|>", "21<eos>", "2<eos>1", "21<|end|>"]
    found = encode_responses(chat, texts, [True, True, True, True, False])
    bare = tuple(chat.tokenizer.encode("21"))
    assert found[:3] == [(*bare, chat.end)] * 3
    assert found[3] == (*chat.tokenizer.encode("2<eos>1"), chat.end)
    assert found[4] == bare


def test_a_plain_prompt_begins_as_the_tokenizer_begins_a_text():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_of("<bos>" + TEMPLATES["hermes"], "<bos>")
    tokenizer.bos_token = "<bos>"
    bos = tokenizer.convert_tokens_to_ids("<bos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    assert tokenizer("ab")["input_ids"][0] == bos
    rows = [{"query": "ab"}, {"query": "<bos>ab"}, {"query": [ASKED]}]
    one, spelt, chat = PromptStream(rows, tokenizer, shuffle=False).batch(1, 3)
    assert one.tokens == spelt.tokens == (bos, *tokenizer.encode("ab", add_special_tokens=False))
    assert one.columns["query"] == "ab"
    assert chat.tokens.count(bos) == 1
    tokenizer.chat_template = TEMPLATES["hermes"]  # which writes none
    (chat,) = PromptStream([{"query": [ASKED]}], tokenizer).batch(1, 1)
    written = [{"prompt": str(chat.columns["query"]), MESSAGES: [ASKED]}]  # as `pairs` writes it
    (prompt,) = PromptStream(written, tokenizer).batch(1, 1)
    assert (prompt.tokens, prompt.messages) == (chat.tokens, chat.messages)
    assert list(encode_prompts(byte_tokenizer(), ["ab"])) == [tuple(byte_tokenizer().encode("ab"))]


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "1+"}, {"text": "1?"}]}, {"content": "1+1?"}),
        ({"role": "user", "content": ["1+", "1?"], "name": None, "tool_calls": None}, {"content": "1+1?"}),
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
         {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1, "b": None}}]},
         {"content": "", "tool_calls": [
             {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
         ]}),
        ({"role": "assistant", "tool_calls": [{"id": "x", "type": None, "function": {"name": "f", "arguments": None}}]},
         {"content": "", "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": {}}}]}),
        ({"role": "assistant", "content": "4", "thinking": "t"}, {"content": "4", "reasoning_content": "t"}),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "4"}]},
         {"content": "4", "reasoning_content": "t"}),
        ({"role": "assistant", "content": "4", "reasoning_content": [{"type": "thinking", "thinking": "t"}]},
         {"content": "4", "reasoning_content": "t"}),
        ({"role": "assistant", "content": "4", "reasoning": [{"type": "text", "text": "t"}], "tool_calls": "[]"},
         {"content": "4", "reasoning_content": "t"}),
        ({"role": "assistant", "tool_calls": '[{"function": {"name": "f"}}]'},
         {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}),
    ],
)  # fmt: skip
def test_messages_have_one_form(message, expected):
    (found,) = as_messages([message], "row 1")
    assert found == {"role": message["role"]} | expected


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": None}, r"row 1: message 1 \(user\) has no content; must have text"),
        ({"role": "user", "content": 7}, r"content is 7; must be text, or a list of parts of text"),
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "content has a part 'image'; must be text"),
        (
            {"role": "user", "content": [{"type": "image", "text": "", "image": "x"}]},
            "content has a part 'image'; must be",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "call 'f' are no JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, "a tool call is"),
        ({"content": "x"}, "must be a mapping with role and content"),
        ({"role": "assistant", "tool_calls": 5}, "row 1: message 1: tool_calls is 5; must be a list of calls"),
        ({"role": "assistant", "content": "4", "reasoning_content": 5}, "message 1: reasoning_content is 5; must be"),
        ({"role": "assistant", "content": [{"type": "reasoning", "summary": []}]}, "content has a part 'reasoning'"),
        (
            {"role": "assistant", "content": "4", "thinking": "so\ud800"},
            r"has the character '\\ud800' after .*so'; must",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": "\ud800"}}]},
            "must be Unicode text, without half",
        ),
    ],
)
def test_messages_that_are_none_are_named(message, error):
    with pytest.raises(ConfigError, match=error):
        as_messages([message], "row 1")


def test_a_row_has_its_own_tools_and_arguments_and_all_rows_a_system_message():
    tokenizer = tokenizer_of(TEMPLATES["hermes"] + "{% if add_generation_prompt and mood %}({{ mood }}){% endif %}")
    chat = ChatTemplate(tokenizer, ChatConfig(system="be short", template_arguments={"mood": "calm"}))
    rows = [{"query": [ASKED]}, {"query": [ASKED], "tools": TOOLS, "chat_template_kwargs": {"mood": "gay", "x": None}}]
    rows.append({"query": [ASKED], "tools": '[{"function": {"name": "g"}}]', "chat_template_kwargs": '{"mood": 3}'})
    texts = [p.columns["query"] for p in PromptStream(rows, tokenizer, shuffle=False, chat=chat).batch(1, 3)]
    assert all("<|system|>be short<|end|>" in text for text in texts)
    assert [text.rpartition("<|assistant|>")[2] for text in texts] == ["(calm)", "(gay)", "(3)"]
    assert ['"name": "add"' in text for text in texts] == [False, True, False]
    own = RowReader(tokenizer, "d", chat=chat).prompt([{"role": "system", "content": "be long"}, ASKED], "row")
    assert "be long" in own
    assert "be short" not in own
    for row, error in (
        ({"tools": "{"}, "`tools` is '{'; must be JSON"),
        ({"tools": [{"type": "function", "function": "add"}]}, "must be a list of the schemas of functions"),
        ({"chat_template_kwargs": [1]}, "mapping"),
        ({"chat_template_kwargs": {"tools": TOOLS}}, "`chat_template_kwargs` has tools; must not"),
    ):
        with pytest.raises(ConfigError, match=error):
            PromptStream([{"query": [ASKED], **row}], tokenizer)


def test_sft_learns_all_answers_as_they_would_be_sampled(chat, kind):
    """With the ends that sampling stops at; what is read between them is not learnt."""
    messages = [ASKED, THOUGHT, {"role": "user", "content": "call"}, CALLED, REPLY, ANSWER]
    reader = RowReader(chat.tokenizer, "train", chat=chat)
    turns = reader.turns({"messages": messages}, 1, last=False)
    assert len(turns.response) == len(turns.learnt)
    decode, runs = chat.tokenizer.decode, []
    for token, flag in zip(turns.response, turns.learnt, strict=True):
        if not runs or runs[-1][0] != flag:
            runs.append((flag, []))
        runs[-1][1].append(token)
    learnt = [decode(tokens) for flag, tokens in runs if flag]
    answers = [chat.answer(messages[:n], messages[n]) for n in (1, 3, 5)]
    ends = [decode([chat.end]), decode([chat.end_of_calls]), ""]
    assert learnt == [a + e for a, e in zip(answers, ends, strict=True)]
    between = [chat.between([messages[2]], chat.end), chat.between([messages[4]], chat.end_of_calls)]
    assert [decode(tokens) for flag, tokens in runs if not flag] == between
    assert turns.prompt == chat.prompt([ASKED])
    last = reader.turns({"messages": messages}, 1, last=True)
    assert (last.prompt, last.response, last.learnt) == (chat.prompt(messages[:5]), answers[2], ())


FLAGS = [{"weight": 0}, {"loss": False}, {"train": False}, {"training": False}, {"step_loss_mask": 0}, {"weight": 0.0}]


@pytest.mark.parametrize("flag", FLAGS, ids=str)
def test_an_answer_that_is_not_to_be_learnt_is_read_alone(chat, flag):
    """As what stands between two answers is; before the first that is learnt it belongs to the prompt."""
    wrong, asked = {"role": "assistant", "content": "wrong: 3", **flag}, {"role": "user", "content": "No."}
    reader = RowReader(chat.tokenizer, "train", chat=chat)
    plain = {"role": "assistant", "content": "wrong: 3"}

    def taught(*messages: Message, last: bool = False) -> tuple[str, str, list[str]]:
        turns = reader.turns({"messages": [ASKED, *messages]}, 1, last)
        if isinstance(turns.response, str):
            return turns.prompt, turns.response, [turns.response]
        kept = [[token for token, flag in zip(turns.response, turns.learnt, strict=True) if flag]]
        return turns.prompt, chat.tokenizer.decode(turns.response), [chat.tokenizer.decode(one) for one in kept]

    prompt, _, learnt = taught(wrong, asked, ANSWER)
    assert (prompt, learnt) == (chat.prompt([ASKED, plain, asked]), [chat.answer([ASKED, plain, asked], ANSWER)])
    end = chat.tokenizer.decode([chat.end])
    prompt, whole, learnt = taught(ANSWER, asked, wrong, asked, ANSWER)
    assert prompt == chat.prompt([ASKED])
    assert "wrong: 3" in whole
    first, last = chat.answer([ASKED], ANSWER), chat.answer([ASKED, ANSWER, asked, plain, asked], ANSWER)
    assert learnt == [first + end + last]
    assert taught(ANSWER, asked, wrong) == taught(ANSWER)
    assert taught(wrong, asked, ANSWER, last=True) == taught(wrong, asked, ANSWER)
    right = {name: bool(1) if isinstance(value, bool) else 1 for name, value in flag.items()}
    assert taught({**ANSWER, **right}) == taught(ANSWER)
    for messages, only_last, error in (
        ([ASKED, wrong], False, "the last answer is not to be learnt, as the row says; leave it out"),
        ([ASKED, wrong, asked, wrong], False, "its answers are all not to be learnt"),
        ([ASKED, ANSWER, asked, wrong], True, "the last answer is not to be learnt"),
        ([{**ASKED, **right}, ANSWER], False, rf"message 1 \(user\) has '{next(iter(flag))}': .*; must be left out"),
    ):
        with pytest.raises(ConfigError, match=error):
            reader.turns({"messages": messages}, 1, only_last)
    with pytest.raises(ConfigError, match="an answer that is not to be learnt; completion_only must be true"):
        reader.turns({"messages": [ASKED, wrong, asked, ANSWER]}, 1, False, whole=True)
    rated = reader.turns({"messages": [ASKED, wrong]}, 1, True, rated=True)
    assert rated.response == chat.answer([ASKED], plain)


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        ({"weight": 0.5}, "message 2 has 'weight': 0.5; must be 0 or 1"),
        ({"loss": "no"}, "has 'loss': 'no'; must be 0 or 1"),
        ({"loss_scale": 0.1}, "has 'loss_scale'; must be left out"),
        ({"train_detail": []}, "has 'train_detail'; must be left out"),
    ],
)
def test_what_says_how_much_to_learn_is_refused_by_name(chat, flag, error):
    with pytest.raises(ConfigError, match=error):
        RowReader(chat.tokenizer, "train", chat=chat).turns({"messages": [ASKED, {**ANSWER, **flag}]}, 1, False)


def test_a_row_may_have_its_last_answer_alone_learnt(chat):
    reader = RowReader(chat.tokenizer, "train", chat=chat)
    messages = [ASKED, ANSWER, {"role": "user", "content": "And?"}, ANSWER]
    masked = reader.turns({"messages": messages, "mask_history": True}, 1, last=False)
    assert masked == reader.turns({"messages": messages}, 1, last=True)
    assert reader.turns({"messages": messages, "mask_history": False}, 1, False) != masked
    with pytest.raises(ConfigError, match="`mask_history` is 'yes'; must be true or false"):
        reader.turns({"messages": messages, "mask_history": "yes"}, 1, last=False)


def test_a_prompt_has_one_identity_in_every_form():
    chat = [ASKED]
    forms = [
        prompt_identity(chat, "row"),
        prompt_identity([{"role": "user", "content": [{"type": "text", "text": "17+4?"}]}], "row"),
        prompt_identity([{**ASKED, "tool_calls": None}, ANSWER], "row"),
        identity({"prompt": "<|user|>17+4?", "prompt_messages": chat, "chosen": "a", "rejected": "b"}, "row"),
        identity({"chosen": [ASKED, ANSWER], "rejected": [ASKED, THOUGHT]}, "row"),
    ]  # fmt: skip
    assert set(forms) == {"17+4?"}


def test_templates_see_the_time_that_they_are_given():
    tokenizer = tokenizer_of("{{ strftime_now('%d %b %Y %H:%M') }}" + TEMPLATES["hermes"])
    chat = ChatTemplate(tokenizer, now=datetime(2024, 2, 29, 13, 5))
    assert chat.prompt([ASKED]).startswith("29 Feb 2024 13:05<|user|>")
    assert pickle.loads(pickle.dumps(chat)).prompt([ASKED]) == chat.prompt([ASKED])


NINE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if not m.tool_call_id or m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if not c.id or c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]<|end|>{% else %} {{ m.content }}<|end|>{% endif %}{% endfor %}"
)
"""As Mistral's: calls and answers of tools have ids of nine characters."""


def test_calls_of_a_template_that_wants_ids_are_read_and_answered():
    tokenizer = tokenizer_of(NINE, "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    renderer = Renderer(tokenizer, TOOLS)
    renderer.check()

    def said(*ids: str) -> Message:
        calls = [{"name": "add", "arguments": {"a": number}, "id": own} for number, own in enumerate(ids)]
        return renderer.read(f"[TOOL_CALLS] {json.dumps(calls)}", "[INST] 17+4?[/INST]")

    def add(a: int) -> int:
        """Adds.

        Args:
            a: a number.
        """
        return 21 + a

    for ids, answered in (
        (("call00000",), ["call00000"]),
        (("abcdefghi", "ihgfedcba"), ["abcdefghi", "ihgfedcba"]),
        (("1", "2"), ["call00000", "call00001"]),  # which the template refuses
        (("", ""), ["call00000", "call00001"]),
    ):
        message = said(*ids)
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"a": n} for n in range(len(ids))]
        replies = asyncio.run(ToolEnvironment([add]).step(message)).messages
        tokens = renderer.observation(replies, renderer.template.end_of_calls, chat=True)
        results = (f'{{"content": {21 + n}, "call_id": "{own}"}}' for n, own in enumerate(answered))
        assert tokenizer.decode(tokens) == "".join(f"[TOOL_RESULTS] {one}[/TOOL_RESULTS]" for one in results)


def test_a_template_that_cannot_write_an_answer_that_is_a_call_is_refused_by_name():
    template = ChatTemplate(tokenizer_of(NINE.replace("| length != 9", "!= 'of-the-hub'")), setting=Setting(TOOLS))
    template._can["tool_calls"] = True
    with pytest.raises(
        ConfigError, match=r"its chat template cannot write an answer that is a call: .*nine characters"
    ):
        CallParser(template.tokenizer, TOOLS, template)


@pytest.mark.parametrize("between", ["", ";", "; ", "\n"])
def test_several_calls_that_are_bare_json_are_read(between):
    """As Llama 4's JSON form writes them."""
    calls = [{"name": "add", "parameters": {"a": number}} for number in range(3)]
    said = CallParser(byte_tokenizer(), TOOLS).parse(between.join(map(json.dumps, calls)))
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [{"a": 0}, {"a": 1}, {"a": 2}]
    assert said["content"] == ""


def test_a_call_that_an_agent_sends_back_has_an_id_that_the_template_takes():
    """In a history that begins another conversation the template writes it, with the id that the endpoint gave it."""
    tokenizer = tokenizer_of(NINE, "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    renderer = Renderer(tokenizer, TOOLS)
    for own in ({}, {"id": "abcdefghi"}):
        calls = [{"name": "add", "arguments": {"a": 1}, **own}]
        message = renderer.read(f"[TOOL_CALLS] {json.dumps(calls)}", "[INST] 17+4?[/INST]")
        sent = json.loads(json.dumps(_spoken(message)))
        (call,) = sent["tool_calls"]
        assert call["id"] == own.get("id", call["id"])
        reply = {"role": "tool", "tool_call_id": call["id"], "content": "21"}
        text = renderer.template.prompt(as_messages([ASKED, sent, reply], "messages"))
        assert text.count(call["id"]) == 2
