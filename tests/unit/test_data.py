"""Any common format takes the same way, and the prompt stream is a pure function of (seed, draw)."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections import deque
from functools import reduce

import numpy as np
import pandas
import pytest
from datasets import Dataset, DatasetDict
from tiny import byte_tokenizer

from async_rlhf.config import ConfigError
from async_rlhf.data import files
from async_rlhf.data.held_out import hold_out
from async_rlhf.data.loading import load_rows
from async_rlhf.data.stream import PromptStream

ROWS = [{"query": f"def f{i}():", "label": i} for i in range(7)]


TEXTS = [
    {"query": "on 2024-01-05", "answer": "2024-01-05", "code": "007"},
    {"query": 'a "quoted",\nsecond line', "answer": "NA", "code": "1e5"},
    {"query": "ä", "answer": "2024-01-05T10:00:00Z", "code": "true"},
    {"query": "not all", "answer": None, "code": "None"},
]
TYPED = [
    {"n": 7, "x": 0.5, "yes": True, "when": "2024-01-05", "m": [{"role": "user", "content": "1"}], "some": "a"},
    {"n": 8, "x": 1.0, "yes": False, "when": "2024", "m": [{"role": "user", "content": "2", "name": "n"}]},
]


def write_all(folder, rows):
    """The same rows in every format, also cut into two files of a folder and compressed."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    data = Dataset.from_list(rows)
    texts = {"lines.jsonl": "".join(lines), "bom.jsonl": "\ufeff" + "".join(lines), "lines.json": "".join(lines)}
    texts |= {"array.json": json.dumps(rows, indent=1), "inner.json": json.dumps({"data": rows})}
    texts |= {"parts/train-00000-of-00002.jsonl": lines[0], "parts/train-00001-of-00002.jsonl": "".join(lines[1:])}
    texts |= {"arrays/train-1.json": json.dumps(rows[:1]), "arrays/train-2.json": "\ufeff" + json.dumps(rows[1:])}
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "zipped").mkdir()
    with gzip.open(folder / "zipped" / "train.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(lines)
    data.to_parquet(str(folder / "rows.parquet"))
    data.save_to_disk(str(folder / "disk"))
    DatasetDict({"train": data, "validation": data.select(range(1))}).save_to_disk(str(folder / "splits"))
    if rows is TEXTS:
        (folder / "tables").mkdir()
        for name, encoding in (("rows.csv", "utf-8"), ("bom.csv", "utf-8-sig"), ("tables/train.csv", "utf-8")):
            pandas.DataFrame(rows).to_csv(folder / name, index=False, encoding=encoding)
    return {"lines.jsonl", "bom.jsonl", "lines.json", "array.json", "inner.json", "rows.parquet"} | {
        name.name for name in folder.iterdir() if name.is_dir() or name.suffix == ".csv"
    }


def without_null(value):
    """Null and absent are the same to every reader of rows."""
    if isinstance(value, dict):
        return {name: without_null(inner) for name, inner in value.items() if inner is not None}
    return [without_null(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("rows", [TEXTS, TYPED, ROWS])
def test_values_and_their_types_do_not_depend_on_the_kind_of_file(tmp_path, rows, on_disk, monkeypatch):
    monkeypatch.setattr(files, "LARGE", 1 if on_disk else 10**9)
    (tmp_path / "data").mkdir()
    for name in write_all(tmp_path / "data", rows):
        loaded = load_rows(str(tmp_path / "data" / name))
        for found in (loaded, [loaded[n - len(rows)] for n in range(len(rows))]):
            assert repr([without_null(dict(row)) for row in found]) == repr([without_null(row) for row in rows]), name


def test_an_object_of_a_json_file_is_a_row_unless_it_only_holds_rows(tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for number, found in enumerate((row, {"data": [row]}, {"data": [], "n": 1})):
        (tmp_path / f"{number}.json").write_text(json.dumps(found, indent=2))
        assert [*load_rows(str(tmp_path / f"{number}.json"))] == ([found] if number == 2 else [row])


def test_the_text_of_csv_is_a_number_where_a_column_must_be_one(tmp_path):
    (tmp_path / "rows.csv").write_text("completion,score\n5,4\n6,2.5\n7,bad\n8,\n")
    found = [(row["completion"], row["score"]) for row in load_rows(str(tmp_path / "rows.csv"), numbers=["score"])]
    assert found == [("5", 4), ("6", 2.5), ("7", "bad"), ("8", None)]
    assert isinstance(found[0][1], int)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'q,a\n"x\ny",1\nz,1,2\n', "line 4 of '.*a.csv' has 3 cells, and line 1 has 2; must be as many"),
        ("a.csv", b"q,a\nx,1\n\nz\n", "line 4 of '.*a.csv' has 1 cells, and line 1 has 2"),
        ("a.csv", b"q,a\nx,1\n\xe4,1\n", r"line 3 of '.*' is not UTF-8: byte 1 is 0xe4 .*must be saved as UTF-8"),
        ("a.csv", b'q,a\nx,1\nz,"1\n\n', "line 3 of '.*a.csv' is not CSV: unexpected end of data"),
        ("a.csv", b"q,q\nx,1\n", "line 1 of '.*a.csv' has the column 'q' twice"),
        ("a.csv", b"q,a\n", "a.csv' has no rows"),
        ("a.csv", b"", "a.csv' has no rows"),
        ("a.jsonl", b"", "a.jsonl' has no rows"),
        ("a.parquet", b"", "a.parquet' has no rows"),
        ("a.parquet", b"text", "a.parquet' could not be read .*Parquet"),
        ("a.json", b"", "a.json' has no rows"),
        ("a.json", b" \n", "a.json' has no rows"),
        ("a.json", b"[]", "a.json' has no rows"),
        ("a.json", b'[{"q": 1},\n{"q": ', r"a.json' is not JSON: Expecting value: line 2 column 7"),
        ("a.json", b'{"q": 1}\n{"q": ', r"line 2 of '.*a.json' is not JSON: Expecting value"),
        ("a.json", b'[{"q": 1},\n{"q": "\xff"}]', r"line 2 of '.*a.json' is not UTF-8: byte 8 is 0xff"),
        ("a.json", b'[{"q": 1}, 5]', "row 2 of '.*a.json' is 5; must be an object"),
        ("a.json", b'[{"q": 1, "q": 2}]', "a.json' is not JSON: the key 'q' is there twice"),
        ("a.json", b'"q"', "a.json' is '\"q\"'; must be an array of objects"),
        ("a.jsonl", '{"q": 1}\n'.encode("utf-16"), "line 1 of '.*a.jsonl' is not UTF-8: byte 1 is 0xff"),
        ("a/train.csv", b"q,a\nx\n", "line 2 of '.*train.csv' has 1 cells"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    source = str(path if path.parent == tmp_path else path.parent)
    with pytest.raises(ConfigError, match=f"^data.train: .*{message}"):
        load_rows(source, key="data.train")


@pytest.fixture
def sources(tmp_path) -> dict[str, str]:
    """Two splits."""
    data = Dataset.from_list(ROWS)
    DatasetDict({"train": data, "validation": data.select(range(2))}).save_to_disk(str(tmp_path / "splits"))
    return {"splits": str(tmp_path / "splits")}


def test_a_split_is_chosen_and_a_missing_one_is_named(sources):
    assert len(load_rows(sources["splits"], "validation")) == 2
    with pytest.raises(ConfigError, match=r"data: .*splits' has no split 'test'; it has train, validation"):
        load_rows(sources["splits"], "test")


def test_a_source_that_is_nothing_says_what_would_be_right(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty' could not be read .*; must be a .jsonl, .json, .parquet or .csv"):
        load_rows(str(tmp_path / "empty"))


def test_identity_and_order_are_those_of_earlier_versions():
    """A run resumes only with the fingerprint that its checkpoint has. These are values of November 2026.

    Then a prompt that ends with a message of the assistant began to go on from there.
    """
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    rows = [{"query": f"def f{i}(): ä"[: 10 + i], "label": i, "more": [{"b": i / 3, "a": None}]} for i in range(7)]
    chats = [[{"role": "user", "content": f"chat {i}"}, {"role": "assistant", "content": "x"}] for i in range(2)]
    rows += [{"query": chat, "label": 0.1} for chat in chats]
    rows += [{"prompt": "x" * 50}, {"prompt": "other column", "tools": None}]
    stream = PromptStream(rows, tokenizer, seed=5)
    assert stream.fingerprint() == "3e8478161dacf7aee2df26973981fe91"
    assert [stream.prompt(i).row for i in range(12)] == [7, 10, 4, 5, 9, 6, 3, 0, 8, 2, 1, 6]
    stream = PromptStream(rows, tokenizer, seed=5, max_length=20)
    assert stream.fingerprint() == "9e2f5cfee96e88e4705a0132ffa40055"
    assert [stream.prompt(i).row for i in range(12)] == [4, 10, 6, 3, 5, 0, 2, 1, 10, 3, 1, 6]


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.bz2", "rows.csv.gz", "rows.tsv", "rows.tsv.xz"])
def test_compressed_files_and_those_with_tabs_are_read(tmp_path, name):
    between = "\t" if ".tsv" in name else ","
    table = f"query{between}answer\na{between}1\nb, c{between}2\n".replace("b, c", '"b, c"')
    rows = [{"query": "a", "answer": "1"}, {"query": "b, c", "answer": "2"}]
    lines = "\n".join(map(json.dumps, rows))
    text = table if between == "\t" or ".csv" in name else lines if "jsonl" in name else json.dumps(rows)
    opened = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}.get(name.rpartition(".")[2], open)
    with opened(tmp_path / name, "wt") as file:
        file.write(text)
    assert list(load_rows(str(tmp_path / name))) == rows
    with pytest.raises(ConfigError, match=r"train: got '.*other.jsonl.gz'; there is no such file"):
        load_rows(str(tmp_path / "other.jsonl.gz"), key="train")


def test_a_file_of_another_kind_is_refused_by_what_would_be_right(tmp_path):
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"train: got '.*rows.txt'; must be a .jsonl, .json, .csv or .tsv file"):
        load_rows(str(tmp_path / "rows.txt"), key="train")


def fingerprint(value):
    return PromptStream([{"query": "a", "label": value}], byte_tokenizer()).fingerprint()


def test_of_arrays_all_bytes_count_for_the_identity():
    """Their text leaves out the middle of long ones, and the last digits."""
    whole, changed = np.zeros(5000), np.zeros(5000)
    changed[2500] = 1e-9
    others = [whole, changed, whole.astype(np.float32), whole.reshape(50, 100), whole.tolist(), pandas.Series(changed)]
    found = [fingerprint(value) for value in others]
    assert len({*found[:5]}) == 5
    assert found == [fingerprint(value) for value in others]
    assert fingerprint({"a": [changed]}) != fingerprint({"a": [whole]})
    assert fingerprint(np.array(["a", None], dtype=object)) != fingerprint(np.array(["b", None], dtype=object))


def test_no_order_of_a_set_is_in_the_identity():
    one, other = {0, 8}, {8, 0}
    assert str(one) != str(other)
    assert one == other
    assert fingerprint([one, deque([{1: frozenset(one)}])]) == fingerprint([other, deque([{1: frozenset(other)}])])
    assert fingerprint({"a", "b"}) != fingerprint({"a", "c"})


class Plain:
    """Printed as where it is in memory."""


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Plain(), "a Plain has another text in each run"),
        ([{"a": (Plain(),)}], "a tuple|a Plain has another text in each run"),
        (deque([lambda: 0]), "a function has another text in each run"),
        ({1: 0, "b": 0}, "not supported between"),
        (CIRCLE, "Circular reference"),
        ([10**5000], r"Exceeds the limit \(4300 digits\)"),
        (reduce(lambda inner, _: [inner], range(5000), 0), "maximum recursion depth"),
    ],
)
def test_a_value_that_has_no_text_of_its_own_is_named(value, why):
    rows = [{"query": "a", "n": 1, "label": 0}, {"query": "b", "n": 2, "label": value}]
    with pytest.raises(ConfigError, match=rf"mine: row 2: 'label' cannot be told again: .*({why}).*; must be text"):
        PromptStream(rows, byte_tokenizer(), key="mine").fingerprint()


@pytest.mark.parametrize("kept", ["what is 1+1?", [{"content": "a"}], {"role": "user"}, [10**5000]])
def test_a_chat_that_is_kept_with_its_text_must_be_one(kept):
    rows = [{"query": "a"}, {"query": "b", "prompt_messages": kept}]
    with pytest.raises(ConfigError, match=r"mine: 'query' of row 2: `prompt_messages` is .*; must be a list of mess"):
        PromptStream(rows, byte_tokenizer(), key="mine")
    with pytest.raises(ConfigError, match=r"mine: row 2: `prompt_messages` is .*; must be a list of messages"):
        hold_out(rows, 0.5, "mine", "query")
    assert len(PromptStream([{"query": "b", "prompt_messages": none} for none in ([], None)], byte_tokenizer())) == 2


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    ("value", "why"), [("9" * 5000, r"Exceeds the limit \(4300 digits\)"), ("[" * 5000 + "]" * 5000, "too deep")]
)
def test_what_python_cannot_read_is_named_with_its_file_and_line(tmp_path, monkeypatch, on_disk, value, why):
    monkeypatch.setattr(files, "LARGE", 1 if on_disk else 10**9)
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"query": "a"}}\n{{"query": "b", "label": {value}}}\n')
    with pytest.raises(ConfigError, match=rf"data: line 2 of .*rows\.jsonl.*{why}"):
        load_rows(str(path))
    path.with_suffix(".json").write_text(f'[{{"query": "b", "label": {value}}}]')
    with pytest.raises(ConfigError, match=rf"data: .*rows\.json' .*{why}"):
        load_rows(str(path.with_suffix(".json")))


def test_a_message_that_cannot_be_written_is_named():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for value, why in ((10**5000, "4300 digits"), (CIRCLE, "Circular"), (reduce(lambda a, _: [a], range(5000), 0), "")):
        rows = [{"query": [{"role": "user", "content": "a", "more": value}]}]
        with pytest.raises(
            ConfigError, match=rf"row 1: message 1 \(user\) has a value that cannot be written: .*{why}"
        ):
            PromptStream(rows, tokenizer)
        rows = [{"query": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "parameters": value}]}]
        with pytest.raises(ConfigError, match="row 1 has a value that cannot be written: "):
            PromptStream(rows, tokenizer)
