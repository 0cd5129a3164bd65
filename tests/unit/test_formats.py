"""Text and chats mean the same wherever rows are read; tokens are kept between runs."""

from __future__ import annotations

import json
import os
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from datasets import Dataset
from huggingface_hub import HfApi
from tiny import byte_tokenizer

from async_rlhf.commands.reward import encode_pairs
from async_rlhf.commands.sft import encode_rows
from async_rlhf.config import ConfigError
from async_rlhf.data import tokenizer as tokenizers
from async_rlhf.data.formats import RowReader, asked_of
from async_rlhf.data.loading import load_rows, without_padding
from async_rlhf.data.rendering import as_columns
from async_rlhf.data.tokenizer import Part, encode_parts, encode_texts
from async_rlhf.models.chats import ChatTemplate, as_messages
from async_rlhf.system import names
from async_rlhf.system.names import why_nowhere

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no ' ~ m.role) }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def said(*contents: str) -> list[dict[str, str]]:
    """A chat, the user first."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture(scope="module")
def chatting():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def reader(chatting):
    return RowReader(chatting, "data")


ANSWERS = said("", "x")[1:], said("", "y")[1:]
START = "[user]a\n[assistant]b<eos>\n[user]c\n[assistant]"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"query": "Q:", "query_reference_response": "Q: A"}, ("Q:", " A")),
        ({"query_reference_response": "all of it"}, ("", "all of it")),
        ({"prompt": "Q:", "completion": " A"}, ("Q:", " A")),
        ({"text": "plain"}, ("", "plain")),
        ({"prompt": "Q:", "chosen": " A", "rejected": " B"}, ("Q:", " A")),
        ({"messages": said("a", "b", "c", "d")}, (START, "d")),
        ({"messages": said("a", "b", "c", "")}, (START, "")),
        ({"prompt": said("a", "b", "c"), "completion": said("", "d")[1:]}, (START, "d")),
        ({"prompt": said("a", "b", "c"), "completion": "d"}, (START, "d")),
        # The name of the column decides, not the order in the row.
        ({"text": "no", "query": "Q", "query_reference_response": "Q!"}, ("Q", "!")),
    ],
)  # fmt: skip
def test_demonstrations(reader, row, expected):
    assert list(reader.demonstrations([row])) == [expected]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "p", "chosen": " x", "rejected": " y"}, ("p", " x", " y")),
        ({"chosen": said("a", "b", "c", "x"), "rejected": said("a", "b", "c", "y")}, (START, "x", "y")),
        ({"prompt": said("a", "b", "c"), "chosen": ANSWERS[0], "rejected": ANSWERS[1]}, (START, "x", "y")),
        ({"prompt": said("a", "b", "c"), "chosen": "x", "rejected": "y"}, (START, "x", "y")),
        ({"chosen": "one text", "rejected": "another"}, ("", "one text", "another")),  # no prompt in common
        ({"prompt": None, "chosen": "one text", "rejected": "another"}, ("", "one text", "another")),
        # UltraFeedback: the prompt once more, as text beside two whole chats.
        ({"prompt": "a", "chosen": said("a", "x"), "rejected": said("a", "y")}, ("[user]a\n[assistant]", "x", "y")),
    ],
)  # fmt: skip
def test_preferences(reader, row, expected):
    assert list(reader.preferences([row])) == [expected]


def test_prompts_are_all_before_the_last_answer_of_a_whole_chat(reader):
    values = ["text", said("a", "b", "c"), said("a", "b", "c", "d")]
    assert [reader.prompt(value, "row", column="messages") for value in values] == ["text", START, START]


BEGUN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Let me solve this.\n<think>\n"}]


@pytest.mark.parametrize("column", ["query", "prompt", "own", "messages"])
def test_a_prompt_that_ends_with_the_beginning_of_an_answer_goes_on(reader, column):
    """As transformers' continue_final_message has it. In `messages` it has to say that it is a beginning."""
    begun = "[user]a\n[assistant]Let me solve this.\n<think>\n"
    assert reader.prompt(BEGUN, "row", column=column) == begun
    assert reader.messages(BEGUN, "row", {}, column) == BEGUN
    plain = [BEGUN[0], {"role": "assistant", "content": "So: ", **({"prefix": True} if column == "messages" else {})}]
    assert reader.prompt(plain, "row", column=column) == "[user]a\n[assistant]So: "
    continued = reader.tokenizer.apply_chat_template(plain, tokenize=False, continue_final_message=True)
    assert continued.strip() == "[user]a\n[assistant]So:"
    # Its rest is what sft learns, and what a pair compares.
    assert list(reader.demonstrations([{"prompt": BEGUN, "completion": "2</think>3"}])) == [(begun, "2</think>3")]
    pair = {"prompt": BEGUN, "chosen": "x", "rejected": "y"}
    assert list(reader.preferences([pair])) == [(begun, "x", "y")]
    turns = reader.turns({"prompt": BEGUN, "completion": "2"}, 1, last=False)
    assert (turns.prompt, turns.response) == (begun, "2")


def test_a_row_that_a_command_has_written_keeps_the_beginning(reader):
    row = {"query": reader.prompt(BEGUN, "row"), "prompt_messages": BEGUN}
    assert reader.messages(row["query"], "row", row, "query") == BEGUN
    columns = as_columns([BEGUN], [[{"role": "assistant", "content": "2</think>3"}]])
    whole = {"role": "assistant", "content": "Let me solve this.\n<think>\n2</think>3"}
    assert columns["messages"] == [[BEGUN[0], whole]]
    assert columns["completion_messages"] == [[{"role": "assistant", "content": "2</think>3"}]]


CALLS = [
    {"function": {"name": "f", "arguments": {"city": "Rome", "n": None}}},
    {"function": {"name": "g", "arguments": {"x": 1}}},
]
CALLING = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": CALLS}]}]


def test_nulls_of_json_stay_and_those_with_which_arrow_fills_calls_do_not(tmp_path):
    def arguments(rows) -> list[Any]:
        chat = as_messages(rows[0]["messages"], "row 1")
        return [call["function"]["arguments"] for call in chat[-1]["tool_calls"]]

    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(CALLING[0]))
    written = [{"city": "Rome", "n": None}, {"x": 1}]
    assert arguments(load_rows(str(path))) == arguments(CALLING) == written
    dataset = Dataset.from_list(CALLING)
    assert dataset[0]["messages"][1]["tool_calls"][1]["function"]["arguments"].keys() == {"city", "n", "x"}
    dataset.to_parquet(tmp_path / "rows.parquet")
    stored = load_rows(str(tmp_path / "rows.parquet"))
    for rows in (stored, without_padding(dataset), stored.select([0])):
        assert arguments(rows) == arguments(list(rows)) == [{"city": "Rome"}, {"x": 1}]


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        ("demonstrations", {"a": 1}, r"data: row 1 has 'a'; must have `query_reference_response`, or `prompt` and"),
        ("demonstrations", {"text": 3}, r"data: row 1: `text` is a int; must be text"),
        ("demonstrations", {"messages": "hello"}, r"data: row 1: `messages` is 'hello'; must be a chat"),
        (
            "demonstrations",
            {"messages": said("a")},
            r"must be a chat: messages with role and content, the assistant's answer last",
        ),
        ("demonstrations", {"prompt": "a", "completion": said("a")}, r"`completion` is a chat, but `prompt` is str"),
        ("preferences", {"prompt": "p", "chosen": "x"}, r"data: row 1 has no 'rejected'; it has 'prompt', 'chosen'"),
        ("preferences", {"prompt": 2, "chosen": "x", "rejected": "y"}, r"row 1: `prompt` is a int; must be text"),
        ("preferences", {"chosen": said("a", "x"), "rejected": said("b", "y")}, r"must be the same chat but for the"),
        ("preferences", {"chosen": "x", "rejected": said("a", "y")}, r"row 1: `chosen` is 'x'; must be a chat"),
        (
            "demonstrations",
            {"messages": [{"role": "tool", "content": ""}, *said("a", "b")]},
            r"cannot write messages of tools",
        ),
    ],
)
def test_rows_that_mean_nothing_are_named(reader, read, row, message):
    with pytest.raises(ConfigError, match=message):
        list(getattr(reader, read)([row]))


def test_a_chat_needs_a_template_that_goes_on_from_its_prompt(tokenizer, chatting):
    row = {"messages": said("a", "b")}
    for without in (RowReader(tokenizer, "train"), RowReader(None, "train")):
        with pytest.raises(ConfigError, match=r"row 1: `messages` is a chat, and no tokenizer with a chat template"):
            list(without.demonstrations([row]))
    other = byte_tokenizer()
    other.chat_template = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(ConfigError, match="writes a chat with its answer otherwise than without"):
        list(RowReader(other, "train").demonstrations([row]))


def test_an_answer_may_spell_the_end_of_sequence(chatting):
    """What the template writes after it is cut off, not what the answer says itself."""
    silent = byte_tokenizer()
    silent.chat_template = TEMPLATE.replace("{{ eos_token }}", "")
    row = {"messages": said("a", "keep <eos> this")}
    for tokenizer in (chatting, silent):
        assert next(RowReader(tokenizer, "data").demonstrations([row])).response == "keep <eos> this"


def test_a_folder_of_files_has_their_splits(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"n": i, "s": split}) + "\n" for i in range(3)))
    (tmp_path / ".relabel.json").write_text("{}")  # a marker is no data
    assert [dict(row) for row in load_rows(str(tmp_path), "validation")] == [
        {"n": i, "s": "validation"} for i in range(3)
    ]
    with pytest.raises(ConfigError, match=r"has no split 'test'; it has train, validation"):
        load_rows(str(tmp_path), "test")


def test_a_hub_name_may_say_which_configuration(monkeypatch):
    """Of the hub itself only the call can be seen here."""
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: asked.append((args, options)) or [{"a": 1}])
    monkeypatch.setattr(names, "why_nowhere", lambda name, kind: None)
    load_rows("openai/gsm8k:main", "test")
    load_rows("owner/name")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"}), (("owner/name", None), {"split": "train"})]


def test_rows_that_datasets_has_cached_need_no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(HfApi, "repo_info", lambda *_, **__: pytest.fail("the hub was asked"))
    (tmp_path / "owner___name").mkdir()
    assert why_nowhere("owner/name", "dataset") is None


# ---------------------------------------------------------------- the cache of tokens

TEXTS = ["one text", "", "another: ä😀", "one text"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the cache, which keeps even few tokens."""
    monkeypatch.setenv("ASYNC_RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizers, "_CHUNK", 3)
    return tmp_path / "cache"


def encode(tokenizer, texts):
    """As the texts of a data set."""
    return encode_parts(tokenizer, texts, lambda text, _: Part((text,)), "data").tokens[0]


def expected_of(tokenizer):
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]


@pytest.fixture
def tokenised(monkeypatch):
    """The texts that a tokenizer has had to read."""
    texts = []
    real = tokenizers._tokenise
    monkeypatch.setattr(tokenizers, "_tokenise", lambda t, some: texts.extend(some) or real(t, some))
    return texts


def test_tokens_are_computed_once(folder, tokenised, tokenizer):
    """Also for another data set that begins alike."""
    for reader in (tokenizer, byte_tokenizer()):  # an equal tokenizer of another object
        assert list(encode(reader, TEXTS)) == expected_of(tokenizer)
        assert tokenised == TEXTS
    assert list(encode(tokenizer, [*TEXTS, "new"]))[:4] == expected_of(tokenizer)
    assert tokenised == [*TEXTS, TEXTS[3], "new"]
    assert len(list(folder.iterdir())) == 3


def test_tokens_in_files_are_those_in_memory(folder, tokenizer, monkeypatch):
    before, files = pyarrow.total_allocated_bytes(), len(os.listdir("/proc/self/fd"))
    found = encode(tokenizer, TEXTS * 200)
    assert pyarrow.total_allocated_bytes() < before + 1000  # of 40,000
    assert len(os.listdir("/proc/self/fd")) == files
    assert list(found) == expected_of(tokenizer) * 200
    assert (found[-1], found[-3]) == (expected_of(tokenizer)[3], ())
    assert found.lengths().tolist() == [len(ids) for ids in expected_of(tokenizer)] * 200
    with pytest.raises(IndexError):
        found[800]
    monkeypatch.setattr(tokenizers, "_CHUNK", 10**6)
    assert list(encode(tokenizer, TEXTS * 200)) == list(found)


def test_whatever_changes_the_tokens_changes_the_file(folder, tokenizer):
    encode(tokenizer, TEXTS)
    other = byte_tokenizer()
    other.add_tokens(["text"])
    more = [(other, TEXTS), (tokenizer, [f"{text}." for text in TEXTS]), (tokenizer, list("abcd"))]
    for count, (reader, texts) in enumerate(more, 2):
        found = [tuple(reader(text, add_special_tokens=False)["input_ids"]) for text in texts]
        assert list(encode(reader, texts)) == found
        assert len(list(folder.iterdir())) == 2 * count
    # Where one text ends and the next begins is part of it.
    pieces = [["on", "e text", "", ""], ["one", " text", "", ""]]
    assert list(encode(tokenizer, pieces[0])) != list(encode(tokenizer, pieces[1]))


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "gone", "a folder", "other tokens"])
def test_a_damaged_file_is_computed_again(folder, tokenised, tokenizer, damage, caplog):
    expected = list(encode(tokenizer, TEXTS))
    for file in folder.iterdir():
        raw = file.read_bytes()
        file.unlink()
        if damage == "a folder":
            file.mkdir()
        elif damage == "other tokens":
            file.write_bytes(raw.replace(np.array(expected[0], np.int32).tobytes(), bytes(4 * len(expected[0]))))
        elif damage != "gone":
            file.write_bytes({"cut": raw[:-5], "empty": b"", "changed": bytes([raw[0] ^ 1]) + raw[1:]}[damage])
    tokenised.clear()
    assert list(encode(tokenizer, TEXTS)) == expected
    assert tokenised == TEXTS
    assert ("is damaged; it is made again" in caplog.text) == (damage != "gone")
    tokenised.clear()
    assert list(encode(tokenizer, TEXTS)) == expected
    assert (tokenised == []) == (damage != "a folder")


def test_one_bit_anywhere_in_a_file_changes_no_token(folder, tokenizer, caplog):
    expected = list(encode(tokenizer, TEXTS[:3] * 2))
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for position in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[position] ^= 32
        file.write_bytes(changed)
        caplog.clear()
        assert list(encode(tokenizer, TEXTS[:3] * 2)) == expected
        assert ("damaged" in caplog.text) == (not 16 <= position < 64)  # nothing is there
        if 16 <= position < 64:
            file.unlink()
        else:
            assert file.read_bytes() == whole


def test_without_a_place_to_keep_them_tokens_are_computed(folder, tokenised, tokenizer, caplog):
    folder.write_text("a file where the folder should be")
    for _ in range(2):
        assert list(encode(tokenizer, TEXTS)) == expected_of(tokenizer)
    assert tokenised == TEXTS * 2
    assert "could not be written" in caplog.text


def test_tokens_of_what_is_sampled_are_not_kept(folder, tokenizer):
    assert list(encode_texts(tokenizer, TEXTS)) == expected_of(tokenizer)
    assert list(encode_texts(tokenizer, [])) == []
    assert not folder.exists()


def test_texts_with_the_time_in_them_are_not_kept(folder, tokenizer):
    """No later start would find them."""
    dated = byte_tokenizer()
    dated.chat_template = "{{ strftime_now('%Y') }}"
    assert list(encode(dated, TEXTS)) == expected_of(tokenizer)
    assert not folder.exists()


def test_a_tokenizer_that_splits_special_tokens_has_tokens_of_its_own(folder):
    found = []
    for split in (False, True):
        reader = byte_tokenizer()
        reader.split_special_tokens = split
        texts = [f"{text}{reader.eos_token}" for text in TEXTS]
        assert list(encode(reader, texts)) == [
            tuple(reader(text, add_special_tokens=False).input_ids) for text in texts
        ]
        found.append(list(encode(reader, texts)))
    assert found[0] != found[1]


def test_few_tokens_are_in_memory(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizers, "_CHUNK", len(TEXTS))
    assert list(encode(tokenizer, TEXTS)) == expected_of(tokenizer)
    assert not folder.exists()


ENDED = [{}, {"finish_reason": None}, {"finish_reason": "stop"}, {"finish_reason": "tool_calls"}]
CUT_OFF = [{"finish_reason": "length"}, {"finish_reason": "max_tokens"}]


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "completion": "it is tw"}, {"messages": said("a", "it is tw")}], ids=str
)
def test_sft_learns_no_end_after_an_answer_that_was_cut_off(chatting, row):
    template = ChatTemplate(chatting)

    def learnt(row: dict[str, Any], **options: Any) -> str:
        (example,) = encode_rows([row], template, True, 100, "train", **options)[0]
        return chatting.decode(example.tokens[example.start :])

    assert {learnt({**row, **reason}) for reason in ENDED} == {"it is tw<eos>"}
    assert {learnt({**row, **reason}) for reason in CUT_OFF} == {"it is tw"}
    with pytest.raises(ConfigError, match="train: row 1 has 'no idea' as 'finish_reason'; must be 'stop' or 'length'"):
        learnt({**row, "finish_reason": "no idea"})


def test_the_better_side_of_a_pair_may_have_been_cut_off(chatting):
    """As `pairs` writes it, for every stage that reads such rows."""
    template, row = ChatTemplate(chatting), {"prompt": "a", "chosen": "it is tw", "rejected": "no"}
    for reason, ends in (("length", ""), ("stop", "<eos>")):
        cut = {**row, "chosen_finish_reason": reason}
        (example,) = encode_rows([cut], template, True, 100, "train")[0]
        assert chatting.decode(example.tokens) == f"ait is tw{ends}"
        (pair,) = encode_pairs([cut], template, 100, "train")[0]
        assert chatting.decode(pair.chosen) == f"ait is tw{ends}"
        assert chatting.decode(pair.rejected) == "ano<eos>"


@pytest.mark.parametrize(
    ("read", "row"),
    [
        ("prompt", "a"),
        ("demonstrations", {"prompt": "a", "completion": "b"}),
        ("demonstrations", {"query": "a", "query_reference_response": "a b"}),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ],
)
def test_prompts_outside_the_template_of_a_chat_model_are_said_once(caplog, monkeypatch, chatting, read, row):
    monkeypatch.setattr("async_rlhf.models.chats._WARNED", set())

    def said(tokenizer, row) -> list[str]:
        caplog.clear()
        for _ in range(2):
            reader = RowReader(tokenizer, "data")
            list(getattr(reader, read)([row])) if isinstance(row, dict) else reader.prompt(row, "row")
        return [record.getMessage() for record in caplog.records]

    assert said(byte_tokenizer(), row) == []
    if isinstance(row, dict) and "prompt" in row:
        assert said(chatting, {**row, "prompt_messages": [{"role": "user", "content": "a"}]}) == []
    (notice,) = said(chatting, row)
    assert "the chat template is not used for prompts that are plain text" in notice


def schema(name: str, argument: str) -> dict:
    properties = {argument: {"type": "string"}}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def test_nulls_with_which_arrow_fills_schemas_of_tools_are_left_out(tmp_path):
    tools = [schema("f", "city"), schema("g", "x")]
    dataset = Dataset.from_list([{"query": "a", "tools": tools}])
    assert dataset[0]["tools"][0]["function"]["parameters"]["properties"].keys() == {"city", "x"}
    dataset.to_parquet(tmp_path / "rows.parquet")
    for rows in (load_rows(str(tmp_path / "rows.parquet")), without_padding(dataset)):
        assert rows[0]["tools"] == next(iter(rows))["tools"] == tools


STRICT = TEMPLATE.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if (m.role == 'assistant') != (loop.index0 % 2 == 1) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}",
    1,
)


def test_the_rest_of_an_answer_is_written_as_one_message_with_its_beginning():
    """A template whose roles must alternate takes it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = STRICT
    reader, begun = RowReader(tokenizer, "data"), "[user]a\n[assistant]Let me solve this.\n<think>\n"
    assert list(reader.demonstrations([{"prompt": BEGUN, "completion": "2</think>3"}])) == [(begun, "2</think>3")]
    pair = {"prompt": BEGUN, "chosen": "x", "rejected": "y"}
    assert list(reader.preferences([pair])) == [(begun, "x", "y")]


def test_relabel_shows_rewards_the_beginning_of_an_answer():
    pair = {"prompt": "[user]a\n[assistant]Let me solve this.\n<think>\n", "chosen": "x", "rejected": "y"}
    for row in ({**pair, "prompt_messages": BEGUN}, {**pair, "prompt": BEGUN}):
        assert asked_of(row, "chosen", "row 1") == BEGUN
