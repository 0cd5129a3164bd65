"""Data sets that stay on disk give the prompts, examples and errors that rows in memory give."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import random
import time
import tracemalloc
from itertools import chain, islice
from pathlib import Path

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
import torch
import xxhash
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file
from tables import each
from tiny import byte_tokenizer, new_args

from async_rlhf.commands.generate import run_generate
from async_rlhf.commands.ratings import encode_ratings
from async_rlhf.commands.relabel import run_relabel
from async_rlhf.commands.reward import encode_pairs, run_reward
from async_rlhf.commands.sft import encode_rows, run_sft
from async_rlhf.commands.stage_loop import steps_of
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError, GenerateConfig, RelabelConfig, RewardConfig, SFTConfig
from async_rlhf.data import files
from async_rlhf.data import tokenizer as tokenizers
from async_rlhf.data.files import JsonLines
from async_rlhf.data.formats import RowReader, first_words, prompt_identity
from async_rlhf.data.held_out import hold_out
from async_rlhf.data.loading import load_rows
from async_rlhf.data.ratings import read_ratings
from async_rlhf.data.stream import PromptStream
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import DataConfig, RunConfig

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
DRAW = random.Random(5)
ROWS = [
    {
        "query": "ä" * DRAW.randint(1, 12) + f" {i % 40}" if i % 7 else [{"role": "user", "content": f"chat {i}"}],
        "n": i,
        "more": [{"b": i / 3, "a": "\n"}, {"b": None, "a": "ä"}],
    }
    for i in range(200)
]
PAIRS = [
    {"prompt": f"p{i % 60}", "chosen": "a" * (i % 9), "rejected": "b" * (i % 4), "chosen_finish_reason": "length"}
    | ({"chosen": "same", "rejected": "same", "chosen_finish_reason": "stop"} if i % 11 == 0 else {})
    for i in range(150)
]
RATED = [
    {"prompt": f"p{i % 60}", "completion": "c" * (i % 13), "score": i % 5, "finish_reason": ["length", "stop"][i % 2]}
    for i in range(150)
]


@pytest.fixture(autouse=True)
def large(tmp_path, monkeypatch):
    """Even little counts as large; the folder of the tokens."""
    monkeypatch.setenv("ASYNC_RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(files, "LARGE", 1)
    monkeypatch.setattr(tokenizers, "_CHUNK", 17)
    return tmp_path / "cache"


@pytest.fixture
def chatting():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def written(path: Path, rows, between: str = "\n") -> str:
    path.write_text(between.join(json.dumps(row, ensure_ascii=False) for row in rows) + between)
    return str(path)


def listed(path: str) -> list:
    """What the loader returned before rows could stay on disk."""
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


# ---------------------------------------------------------------- rows


def test_a_file_of_json_lines_is_a_sequence(tmp_path):
    path = written(tmp_path / "rows.jsonl", ROWS, "\n \u00a0\n\n")
    rows = load_rows(path, columns=["query", "n"])
    assert isinstance(rows, JsonLines)
    assert [*rows] == ROWS == listed(path)
    assert (len(rows), rows[0], rows[-1], rows[77]) == (200, ROWS[0], ROWS[-1], ROWS[77])
    assert [*rows[-3::-50]] == ROWS[-3::-50]
    assert [*rows[10:90].select([3, 3, -1])] == [ROWS[13], ROWS[13], ROWS[89]]
    assert [*pickle.loads(pickle.dumps(rows))] == ROWS
    assert (ROWS[5] in rows, {} in rows, rows.index(ROWS[9])) == (True, False, 9)
    for number in (200, -201):
        with pytest.raises(IndexError):
            rows[number]
    rows[0]["n"] = "changed"
    assert rows[0] == ROWS[0]


def test_without_a_last_line_break(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}')
    assert [row["a"] for row in load_rows(str(path))] == [1, 2]
    assert load_rows(str(path))[1] == {"a": 2}


@pytest.mark.quick
@each([
    (b"{", r"data: line 3 of '.*rows.jsonl' is not JSON"),
    (b'{"a": "\xff"}', r"data: line 3 of '.*rows.jsonl' is not UTF-8"),
    (b'{"a": 1, "a": 2}', r"data: line 3 of '.*rows.jsonl' cannot be read: the key 'a' is there twice"),
    (b"[1]", r"data: line 3 of '.*rows.jsonl' is '\[1\]'; must be an object"),
    ("\ufeff{}".encode(), r"data: line 3 of '.*rows.jsonl' is not JSON: Unexpected UTF-8 BOM"),
    (b'{"b": 1}', r"data: row 2 of '.*rows.jsonl' has no 'a'; it has 'b'"),
    (b'{"a": null}', r"data: row 2 of '.*rows.jsonl' has null as 'a'"),
])  # fmt: skip
def test_mistakes_are_named_by_line_or_row(line, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            load_rows(str(path), columns=["a"])
    path.write_text('{"a": 1}\n')
    assert [*load_rows(str(path), columns=["a"])] == [{"a": 1}]


def test_a_small_file_is_read_into_memory(tmp_path, large, monkeypatch):
    path = written(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setattr(files, "LARGE", os.path.getsize(path) + 1)
    assert load_rows(path) == ROWS
    assert not large.exists()


# ---------------------------------------------------------------- files that change


@pytest.mark.parametrize("same_time", [False, True])
def test_a_changed_file_is_read_again(tmp_path, tokenizer, same_time):
    """Also with the same size, within a moment, and with its old date."""
    path = tmp_path / "rows.jsonl"
    for letter in "abcde":
        stat = path.stat() if path.exists() else None
        path.write_text(json.dumps({"query": letter * 5}) + "\n")
        if same_time and stat is not None:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        stream = PromptStream(load_rows(str(path)), tokenizer)
        assert stream.prompt(0).columns == {"query": letter * 5}
        assert tokenizer.decode(stream.prompt(0).tokens) == letter * 5


WRITTEN = {  # by pandas, of the same size for the same number of letters
    "parquet": lambda frame, path: frame.to_parquet(path, compression=None, index=False),
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "json": lambda frame, path: frame.to_json(path, orient="records", lines=True),
}


@pytest.mark.quick
@each(itertools.product(["{}.{}", "split/train.{1}", "folder/{}-00000-of-00001.{}"], WRITTEN))
def test_a_file_of_another_format_that_is_changed_in_its_place_is_read_again(place, kind, tmp_path, tokenizer):
    """Also with the same size and its old date."""
    path = tmp_path / place.format("train", kind)
    path.parent.mkdir(exist_ok=True)
    source = str(path if path.parent == tmp_path else path.parent)
    was = None
    for letter in "abab":
        WRITTEN[kind](pandas.DataFrame({"query": [letter * 5, letter * 7]}), path)
        if was is not None:
            assert path.stat().st_size == was.st_size
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        was = path.stat()
        rows = load_rows(source)
        assert [row["query"] for row in rows] == [letter * 5, letter * 7]
        assert tokenizer.decode(PromptStream(rows, tokenizer).prompt(0).tokens)[:5] == letter * 5


def test_a_file_of_another_format_is_converted_once(tmp_path):
    path = tmp_path / "train.parquet"
    WRITTEN["parquet"](pandas.DataFrame({"query": ["a", "b"]}), path)
    files = [load_rows(str(path)).cache_files[0]["filename"] for _ in range(2)]
    assert files[0] == files[1]
    times = {os.stat(file).st_mtime_ns for file in (tmp_path / "datasets").rglob("*.arrow")}
    assert len(times) == 1


def test_a_file_that_changes_in_use_is_an_error_and_a_new_one_in_its_place_none(tmp_path):
    path = Path(written(tmp_path / "rows.jsonl", ROWS))
    rows = load_rows(str(path), key="data.train")
    replaced = path.rename(tmp_path / "other.jsonl")
    written(path, ROWS[:3])
    assert rows[9] == ROWS[9]  # the file that was opened is still there
    time.sleep(0.05)  # longer than the tick of a file system's clock
    with replaced.open("r+b") as file:
        file.write(b" ")
    for read in (lambda: rows[9], lambda: [*rows]):
        with pytest.raises(ConfigError, match=r"data.train: .*rows.jsonl' was changed while it was in use"):
            read()


def test_other_tokenizers_templates_and_columns_have_other_tokens(tmp_path, chatting):
    path = written(tmp_path / "rows.jsonl", [{"query": [{"role": "user", "content": "q"}], "other": "text"}] * 3)
    rows = load_rows(path)
    decode = chatting.decode
    assert decode(PromptStream(rows, chatting).prompt(0).tokens) == "[user]q\n[a]"
    assert decode(PromptStream(rows, chatting, prompt_field="other").prompt(0).tokens) == "text"
    changed = byte_tokenizer()
    changed.chat_template = TEMPLATE.replace("[a]", "[answer]")
    assert decode(PromptStream(rows, changed).prompt(0).tokens) == "[user]q\n[answer]"
    assert decode(PromptStream(rows, chatting).prompt(0).tokens) == "[user]q\n[a]"


def test_a_template_that_writes_the_time_is_rendered_once(tmp_path, monkeypatch):
    """The text that rewards see is the one that the tokens spell; another stream has the time of its start."""
    dated = byte_tokenizer()
    dated.chat_template = "{{ strftime_now('%f') }}" + TEMPLATE
    rows = load_rows(written(tmp_path / "rows.jsonl", ROWS))
    texts = []
    for _ in range(2):
        stream = PromptStream(rows, dated, shuffle=False)
        with monkeypatch.context() as drawing:
            drawing.setattr(ChatTemplate, "prompt", lambda *_: pytest.fail("rendered again"))
            texts.append(stream.prompt(0).columns["query"])
        assert texts[-1].endswith("[user]chat 0\n[a]")
        assert dated.decode(stream.prompt(0).tokens) == texts[-1]
    assert texts[0] != texts[1]


# ---------------------------------------------------------------- prompts


class OldStream:
    """Prompts as they were before rows could stay on disk: everything in lists."""

    def __init__(self, rows, tokenizer, field="query", longest=512, seed=0):
        values = [row[field] for row in rows]
        texts = [RowReader(tokenizer, "data").prompt(value, "row") for value in values]
        encoded = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        self.tokens = {i: ids for i, ids in enumerate(encoded) if 0 < len(ids) <= longest}
        self.texts = {i: texts[i] for i in self.tokens if texts[i] is not values[i]}
        self.rows, self.kept, self.seed, self.field = rows, list(self.tokens), seed, field

    def prompt(self, draw):
        epoch, position = divmod(draw, len(self.kept))
        order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self.kept))
        row = self.kept[order[position]]
        columns = dict(self.rows[row]) | ({self.field: self.texts[row]} if row in self.texts else {})
        return draw, row, self.tokens[row], columns

    def fingerprint(self):
        digest = xxhash.xxh3_128()
        for row in self.kept:
            columns = json.dumps(dict(self.rows[row]), sort_keys=True, default=str)
            digest.update(f"{row} {self.tokens[row]} {columns}".encode(errors="backslashreplace"))
        return digest.hexdigest()


@pytest.mark.parametrize("kept_in", ["list", "jsonl", "disk", "disk, selected", "slice", "small"])
def test_every_container_gives_the_prompts_and_the_fingerprint_of_before(tmp_path, chatting, kept_in, monkeypatch):
    rows = [{**row, "query": row["query"] if isinstance(row["query"], str) else "a chat"} for row in ROWS]
    path = written(tmp_path / "rows.jsonl", rows)
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "disk"))
    Dataset.from_list([*rows[::-1], *rows]).save_to_disk(str(tmp_path / "more"))
    if kept_in == "small":
        monkeypatch.undo()
    data = {
        "list": lambda: rows,
        "jsonl": lambda: load_rows(path),
        "disk": lambda: load_from_disk(str(tmp_path / "disk")),
        "disk, selected": lambda: load_from_disk(str(tmp_path / "more")).select(range(200, 400)),
        "slice": lambda: load_rows(written(tmp_path / "more.jsonl", [*rows[:5], *rows]))[5:],
        "small": lambda: load_rows(path),
    }[kept_in]
    old = OldStream([dict(row) for row in data()], chatting, longest=14, seed=3)
    for _ in range(2):
        stream = PromptStream(data(), chatting, max_length=14, seed=3)
        assert stream.fingerprint() == old.fingerprint()
        for draw in (*range(300), 2 * len(stream) + 7):
            prompt = stream.prompt(draw)
            assert (prompt.draw, prompt.row, prompt.tokens, prompt.columns) == old.prompt(draw)
        assert stream.dropped == 200 - len(old.kept) > 0


def test_chats_on_disk_are_drawn_as_the_policy_sees_them(tmp_path, chatting):
    stream = PromptStream(load_rows(written(tmp_path / "rows.jsonl", ROWS)), chatting)
    old = OldStream(ROWS, chatting)
    for draw in range(250):
        prompt = stream.prompt(draw)
        assert (prompt.draw, prompt.row, prompt.tokens, prompt.columns) == old.prompt(draw)
    assert stream.fingerprint() == old.fingerprint()


def test_a_prompt_that_is_none_is_named_by_its_row(tmp_path, tokenizer):
    path = written(tmp_path / "rows.jsonl", [*ROWS[1:5], {"query": 3}])
    for rows in (load_rows(path), listed(path)):
        with pytest.raises(ConfigError, match="train_dataset: 'query' of row 5 is a int; must be text"):
            PromptStream(rows, tokenizer)


def test_memory_hardly_grows_with_the_data(tmp_path, tokenizer, monkeypatch):
    """Bytes of each further row: where its line begins, how long it is and whether it is kept."""
    monkeypatch.setattr(tokenizers, "_CHUNK", 300)

    def peaks(count: int) -> list[int]:
        rows = [{"query": f"{i:05} " * 20, "more": "x" * 200} for i in range(count)]
        path = written(tmp_path / f"{count}.jsonl", rows)
        found = []
        for _ in range(2):
            arrays = pyarrow.total_allocated_bytes()
            tracemalloc.start()
            stream = PromptStream(load_rows(path, columns=["query"]), tokenizer, shuffle=False)
            stream.fingerprint()
            assert len(stream.batch(3, 10)) == 10
            found.append(tracemalloc.get_traced_memory()[1] + pyarrow.total_allocated_bytes() - arrays)
            tracemalloc.stop()
        return found

    few, many = peaks(1000), peaks(5000)
    more = [(after - before) / 4000 for before, after in zip(few, many, strict=True)]
    assert max(more) < 40, more  # a row has 340 bytes, and its 120 tokens as numbers of Python 1,000
    assert many[1] < 500_000


def test_long_texts_are_tokenised_few_at_a_time(tokenizer, monkeypatch):
    texts = [chr(97 + i) * (100 if i % 2 else 3) for i in range(20)]
    expected = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    sizes, tokenise = [], tokenizers._tokenise
    monkeypatch.setattr(tokenizers, "_CHUNK_CHARACTERS", 200)
    monkeypatch.setattr(tokenizers, "_tokenise", lambda t, x: sizes.append(sum(map(len, x))) or tokenise(t, x))
    assert list(tokenizers.encode_texts(tokenizer, texts)) == expected
    assert len(sizes) == 5
    assert max(sizes) < 200 + 100


# ---------------------------------------------------------------- what is held out


def old_sides(rows, fraction, field):
    """The rule of before, on names in a dictionary."""
    names = [prompt_identity(row[field], "row") for row in rows]
    hashes = {name: xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass")) for name in names}
    by_hash = sorted(hashes, key=hashes.__getitem__)
    count = sum(value < fraction * 2**64 for value in hashes.values())
    held = set(by_hash[: min(max(1, count), len(by_hash) - 1)])
    return [row for row, name in zip(rows, names, strict=True) if name not in held], [
        row for row, name in zip(rows, names, strict=True) if name in held
    ]


@pytest.mark.quick
@each([1e-9, 0.01, 0.3, 0.5, 0.97, 1 - 1e-9, math.nextafter(1, 0)])
def test_what_is_held_out_has_not_changed(fraction, tmp_path):
    expected = old_sides(ROWS, fraction, "query")
    path = written(tmp_path / "rows.jsonl", ROWS)
    for rows in (ROWS, load_rows(path), load_rows(path)):
        training, held = hold_out(rows, fraction, "data", "query")
        assert ([*training], [*held]) == expected
    assert all(expected)


def test_sides_of_sides_and_of_first_words(tmp_path):
    rows = [{"text": f"{i} two three {'word ' * (i % 3)}", "n": i} for i in range(90)]
    path = written(tmp_path / "rows.jsonl", rows)
    expected = hold_out(hold_out(first_words(rows, 3, "x"), 0.3, "x")[0], 0.5, "x")
    for _ in range(2):
        found = hold_out(hold_out(first_words(load_rows(path), 3, "x"), 0.3, "x")[0], 0.5, "x")
        assert ([*found[0]], [*found[1]]) == expected
    with pytest.raises(ConfigError, match=r"prompt_words: got 9; no text of x has more words \(the longest has 5\)"):
        first_words(load_rows(path), 9, "x")


# ---------------------------------------------------------------- examples


def examples_of(kind, rows, tokenizer):
    if kind == "sft":
        return encode_rows(rows, ChatTemplate(tokenizer), True, 12, "train")
    if kind == "pairs":
        return encode_pairs(rows, ChatTemplate(tokenizer), 10, "train")
    rated, dropped = encode_ratings(rows, ChatTemplate(tokenizer), "score", 12, "train")
    return rated, (dropped, rated.ratings.tolist())


@pytest.mark.parametrize(("kind", "rows"), [("sft", RATED), ("pairs", PAIRS), ("ratings", RATED)])
def test_examples_are_the_same(tmp_path, tokenizer, kind, rows, monkeypatch):
    path = written(tmp_path / "rows.jsonl", rows)
    with monkeypatch.context() as small:
        small.setattr(tokenizers, "_CHUNK", 10**9)
        examples, counts = examples_of(kind, rows, tokenizer)
        expected = [examples[i] for i in range(len(examples))]
    assert 0 < len(expected) < len(rows)
    found, also = examples_of(kind, load_rows(path), tokenizer)
    assert ([*found], also) == (expected, counts)
    lengths = [max(len(one.chosen), len(one.rejected)) if kind == "pairs" else len(one.tokens) for one in expected]
    assert found.lengths.tolist() == lengths
    assert (found[-1], found[3:9:2]) == (expected[-1], expected[3:9:2])


def test_ratings_of_a_file_are_checked(tmp_path):
    rows = load_rows(written(tmp_path / "rows.jsonl", RATED))
    assert read_ratings(rows, "score", "train").tolist() == [row["score"] for row in RATED]
    bad = load_rows(written(tmp_path / "bad.jsonl", [*RATED, {"completion": "x", "score": "3"}]))
    with pytest.raises(ConfigError, match="train: row 151: 'score' is '3', a str; must be a finite number"):
        read_ratings(bad, "score", "train")


@each([(*one, seed) for one in [(1, 3), (999, 4), (1000, 4), (451, 3)] for seed in range(4)])
def test_batches_of_similar_length_are_those_of_before(count, size, seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 9) for _ in range(count)]
    generator = torch.Generator().manual_seed(seed)
    batches = steps_of(np.array(lengths, dtype=np.int32), size, 1, seed)
    for _ in range(3):  # epochs
        order = torch.randperm(count, generator=generator).tolist()
        pools = [order[i : i + 50 * size] for i in range(0, count, 50 * size)]
        ordered = [i for pool in pools for i in sorted(pool, key=lambda i: lengths[i])]
        expected = [ordered[i : i + size] for i in range(0, count, size)]
        expected = [expected[i] for i in torch.randperm(len(expected), generator=generator).tolist()]
        assert [*islice(batches, len(expected))] == expected
    several, one = (steps_of(np.array(lengths), size, at_once, seed) for at_once in (3, 1))
    assert next(several) == [*chain.from_iterable(islice(one, min(3, len(expected))))]


@pytest.mark.parametrize("kind", ["sft", "pairs", "ratings"])
def test_models_trained_from_disk_are_those_trained_from_memory(tmp_path, make_policy, tokenizer, monkeypatch, kind):
    """Whole commands, with held-out rows, bit for bit."""
    write_model(make_policy(), tokenizer, tmp_path / "base")
    path = written(tmp_path / "rows.jsonl", PAIRS if kind == "pairs" else RATED)
    results, weights = [], []
    for number, least in enumerate((10**9, 1)):
        monkeypatch.setattr(files, "LARGE", least)
        monkeypatch.setattr(tokenizers, "_CHUNK", 10**9 if number == 0 else 17)
        output = tmp_path / f"out{number}"
        options = {"output_dir": str(output), "num_epochs": 1, "eval_fraction": 0.2, "model": str(tmp_path / "base")}
        if kind == "sft":
            results.append(run_sft(SFTConfig(path, max_length=14, **options)))
        else:
            results.append(run_reward(RewardConfig(path, max_length=10, **options)))
        weights.append(load_file(output / "model.safetensors"))
    assert results[0] == results[1]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])


def test_all_commands_that_sample_read_rows_on_disk(tmp_path, make_policy, tokenizer, monkeypatch):
    """Online training, answers to held-out prompts and relabelled pairs are those from rows in memory."""
    write_model(make_policy(), tokenizer, tmp_path / "base")
    (tmp_path / "reward.py").write_text(
        "def length(completions, **rest):\n    return [float(len(c)) for c in completions]\n"
    )
    reward = [f"{tmp_path / 'reward.py'}:length"]
    texts = written(tmp_path / "texts.jsonl", [{"text": f"one {i} two {'word ' * (i % 4)}end."} for i in range(40)])
    pairs = written(tmp_path / "pairs.jsonl", PAIRS[:30])
    split = {"prompt_words": 3, "eval_fraction": 0.3}
    found = []
    for least in (10**9, 1):
        monkeypatch.setattr(files, "LARGE", least)
        out = tmp_path / f"out{len(found)}"
        args = new_args(out, total_episodes=8, num_mini_batches=1, eval_steps=1, num_samples_logged=100)
        run_train(RunConfig(str(tmp_path / "base"), DataConfig(texts, **split), reward_funcs=reward, train=args))
        models = {"models": {"a": str(tmp_path / "base")}, "data": texts, "response_length": 4, "device": "cpu"}
        run_generate(GenerateConfig(output_dir=str(out / "said"), **models, **split))
        base = {"output_dir": str(out / "again"), "splits": ["train"], "reward_funcs": reward, "device": "cpu"}
        run_relabel(RelabelConfig(data=pairs, **base))
        results = ("run/samples.jsonl", "said/a.jsonl", "again/train.jsonl")
        found.append([(out / result).read_text() for result in results])
        assert all(found[-1])
    assert found[0] == found[1]
