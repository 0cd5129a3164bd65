"""Prompts from rows without a length: in order, each at its place, and read no further than needed."""

from __future__ import annotations

from itertools import count

import pytest
from datasets import Dataset, DatasetDict
from tiny import json_rows, new_args

from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError
from async_rlhf.config.online import TOTAL_EPISODES
from async_rlhf.data.unsized import UnsizedPrompts, is_unsized
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import DataConfig, RunConfig
from async_rlhf.run.trainer import OnlineTrainer, formatted


class Rows:
    """Rows that count how often they were begun and how many were read."""

    def __init__(self, rows) -> None:
        self.rows, self.begun, self.read = rows, 0, 0

    def __iter__(self):
        self.begun += 1
        for row in self.rows():
            self.read += 1
            yield row


def numbered():
    return ({"query": f"row {n}", "n": n} for n in count())


def queries(prompts):
    return [prompt.columns["query"] for prompt in prompts]


def test_draws_are_the_rows_in_order(tokenizer):
    rows = Rows(numbered)
    stream = UnsizedPrompts(rows, tokenizer, window=8)
    assert rows.read == 1
    assert queries(stream.batch(1, 4)) == [f"row {n}" for n in range(4)]
    assert rows.read == 4
    batch = stream.batch(3, 4)
    assert queries(batch) == [f"row {n}" for n in range(8, 12)]
    assert [(prompt.draw, prompt.row, prompt.columns["n"]) for prompt in batch] == [(n, n, n) for n in range(8, 12)]
    assert tokenizer.decode(batch[0].tokens) == "row 8"
    assert stream.batch(3, 4) == batch
    assert (rows.read, rows.begun, stream.epoch_size) == (12, 1, None)
    assert stream.batch(2, 4)[0].row == 4  # still in the window
    assert rows.begun == 1
    assert stream.prompt(3).row == 3  # no longer: from the start
    assert rows.begun == 2
    assert stream.batch(3, 4) == batch


def test_a_window_holds_no_more_than_it_says(tokenizer):
    stream = UnsizedPrompts(Rows(numbered), tokenizer, window=5)
    stream.prompt(1000)
    assert sorted(stream._recent) == list(range(996, 1001))


def test_rows_that_end_start_again_and_long_ones_are_left_out_each_time(tokenizer, caplog):
    rows = Rows(lambda: iter([{"query": "a"}, {"query": "long" * 9}, {"query": "b"}, {"query": ""}]))
    stream = UnsizedPrompts(rows, tokenizer, window=4, max_length=10)
    assert queries(stream.batch(1, 7)) == ["a", "b"] * 3 + ["a"]
    assert [stream.prompt(n).row for n in (3, 4, 5, 6)] == [2, 0, 2, 0]
    assert [f"dropped {n} prompts so far" in caplog.text for n in (1, 2, 3, 4)] == [True, True, False, True]


def test_an_iterator_is_read_once(tokenizer):
    stream = UnsizedPrompts(iter([{"query": c} for c in "abcdef"]), tokenizer, window=2, key="train_dataset")
    assert queries(stream.batch(1, 6)) == list("abcdef")
    with pytest.raises(
        ConfigError, match=r"train_dataset: its rows have ended after 6; a list_iterator can be read on"
    ):
        stream.prompt(6)
    with pytest.raises(ConfigError, match=r"train_dataset: prompt 3 is needed again; a list_iterator can be read only"):
        stream.prompt(2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "train_dataset: got 0 rows; must have at least one"),
        (["text"], "train_dataset: row 1 is a str; must be a mapping"),
        ([{"text": "a"}], r"train_dataset: 'query' of row 1 is missing; must have a prompt there.*it has 'text'"),
        ([{"query": None}], r"train_dataset: 'query' of row 1 is null; must have a prompt there"),
        ([{"query": 3}], r"train_dataset: 'query' of row 1 is a int; must be text"),
        ([{"query": "x" * 50}] * 3, r"max_prompt_length: got 20; none of 4 rows of train_dataset, one after the other"),
    ],
)
def test_mistakes_show_at_the_start(tokenizer, rows, message):
    with pytest.raises(ConfigError, match=message):
        UnsizedPrompts(Rows(lambda: iter(rows)), tokenizer, window=4, max_length=20)


def test_the_fingerprint_is_of_the_first_prompt_alone(tokenizer):
    def fingerprint(*texts):
        return UnsizedPrompts(Rows(lambda: iter([{"query": t} for t in texts])), tokenizer, window=4).fingerprint()

    assert fingerprint("a", "b") == fingerprint("a", "c") != fingerprint("b", "b")


def test_what_has_no_length():
    data = Dataset.from_list([{"query": "a"}])
    assert is_unsized(data.to_iterable_dataset())
    assert is_unsized(Rows(numbered))
    assert not any(is_unsized(rows) for rows in (data, [], {}, 3, None))


def test_formatting_keeps_the_kind(tokenizer):
    def upper(row):
        return row["text"].upper()

    rows = [{"text": "a"}, {"text": "b"}]
    again = formatted(Rows(lambda: iter(rows)), upper, "query")
    assert [*again] == [*again] == formatted(rows, upper, "query") == [{**r, "query": r["text"].upper()} for r in rows]
    once = formatted(iter(rows), upper, "query")
    assert ([*once], [*once]) == ([*again], [])


def test_epochs_need_a_length(make_policy, tokenizer, make_args):
    args = make_args(num_train_epochs=2.0, total_episodes=TOTAL_EPISODES)
    with pytest.raises(ConfigError, match=r"num_train_epochs: got 2.0; must be left out with a train_dataset without"):
        OnlineTrainer(make_policy(), args, Rows(numbered), reward_funcs=[len], processing_class=tokenizer)


def test_held_out_prompts_need_a_length(make_policy, tokenizer, make_args):
    with pytest.raises(ConfigError, match=r"eval_dataset: got a Rows; must be a list of rows, or one split of a data"):
        OnlineTrainer(
            make_policy(),
            make_args(),
            Rows(numbered),
            eval_dataset=Rows(numbered),
            reward_funcs=[len],
            processing_class=tokenizer,
        )


REWARD = """
def length(prompts, completions, name, **columns):
    return [float(len(text)) for text in completions]
"""


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "saved"])
def test_the_command_takes_prompts_as_they_come(tmp_path, make_policy, tokenizer, kind):
    write_model(make_policy(), tokenizer, tmp_path / "base")
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"query": f"def f{i}():", "name": f"f{i}"} for i in range(5)]
    data = Dataset.from_list(rows)
    path = {
        "jsonl": tmp_path / "rows.jsonl",
        "parquet": tmp_path / "rows.parquet",
        "folder": tmp_path / "folder",
        "saved": tmp_path / "saved",
    }[kind]
    if kind == "folder":
        path.mkdir()
        data.to_parquet(str(path / "train-00000-of-00001.parquet"))
    elif kind == "saved":
        DatasetDict({"train": data, "test": data}).save_to_disk(str(path))
    else:
        (data.to_json if kind == "jsonl" else data.to_parquet)(str(path))
    args = new_args(tmp_path, total_episodes=8, num_mini_batches=1, num_samples_logged=100)
    source = DataConfig(str(path), streaming=True)
    run_train(RunConfig(str(tmp_path / "base"), source, reward_funcs=[f"{tmp_path / 'reward.py'}:length"], train=args))
    samples = json_rows(tmp_path / "run" / "samples.jsonl")
    assert [one["prompt"] for one in samples[::2]] == [row["query"] for row in (rows * 2)[:8]]


@pytest.mark.parametrize(
    ("data", "train", "message"),
    [
        ({"eval_fraction": 0.1}, {}, "data.eval_fraction: got 0.1; must be left out with data.streaming"),
        ({"prompt_words": 3}, {}, "data.prompt_words: got 3; must be left out with data.streaming"),
        (
            {},
            {"num_train_epochs": 2.0, "total_episodes": TOTAL_EPISODES},
            "train.num_train_epochs: got 2.0; must be left out with data.streaming",
        ),
    ],
)
def test_what_does_not_go_with_streaming(tmp_path, data, train, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig("m", DataConfig("d", streaming=True, **data), reward_funcs=["a:b"], train=new_args(tmp_path, **train))
