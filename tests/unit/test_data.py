"""Any common format takes the same way, and the prompt stream is a pure function of (seed, draw)."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict

from async_rlhf.config import ConfigError
from async_rlhf.data.loading import load_rows
from async_rlhf.data.stream import PromptStream

ROWS = [{"query": f"def f{i}():", "label": i} for i in range(7)]


@pytest.fixture
def sources(tmp_path) -> dict[str, str]:
    """The same rows in every format."""
    data = Dataset.from_list(ROWS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    data.to_csv(str(tmp_path / "rows.csv"))
    data.save_to_disk(str(tmp_path / "folder"))
    DatasetDict({"train": data, "validation": data.select(range(2))}).save_to_disk(str(tmp_path / "splits"))
    return {path.name: str(path) for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.csv", "folder", "splits"])
def test_every_format_gives_the_same_rows(sources, name):
    rows = load_rows(sources[name], columns=["query", "label"])
    assert [dict(row) for row in rows] == ROWS


def test_a_split_is_chosen_and_a_missing_one_is_named(sources):
    assert len(load_rows(sources["splits"], "validation")) == 2
    with pytest.raises(ConfigError, match=r"data: .*splits' has no split 'test'; it has train, validation"):
        load_rows(sources["splits"], "test")


def test_a_source_that_is_nothing_says_what_would_be_right(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty' could not be read .*; must be a .jsonl, .json, .parquet or .csv"):
        load_rows(str(tmp_path / "empty"))


def test_each_epoch_is_a_permutation_and_every_draw_is_repeatable(tokenizer):
    stream = PromptStream(ROWS, tokenizer, seed=3)
    epochs = [[stream.prompt(7 * e + i).row for i in range(7)] for e in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = PromptStream(ROWS, tokenizer, seed=3)
    assert [again.prompt(n) for n in (20, 3, 11)] == [stream.prompt(n) for n in (20, 3, 11)]
    assert [p.draw for p in stream.batch(3, 4)] == [8, 9, 10, 11]
    assert [PromptStream(ROWS, tokenizer, seed=4).prompt(i).row for i in range(7)] != epochs[0]
    assert [PromptStream(ROWS, tokenizer, shuffle=False).prompt(i).row for i in range(9)] == [*range(7), 0, 1]
    assert stream.prompt(0).columns == ROWS[epochs[0][0]]
    assert tokenizer.decode(stream.prompt(0).tokens) == ROWS[epochs[0][0]]["query"]


def test_prompts_over_the_limit_are_left_out_of_every_epoch(tokenizer):
    rows = [*ROWS, {"query": "x" * 50, "label": 9}]
    stream = PromptStream(rows, tokenizer, max_length=20)
    assert (len(stream), stream.dropped) == (7, 1)
    assert 7 not in {stream.prompt(n).row for n in range(70)}
