"""docs/own_data.md does what it says: its commands run as they stand there, on rated sentences that are made here."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from rated_sentences import rating, sentences, write
from tiny import json_rows

from async_rlhf.cli import main
from async_rlhf.config import ConfigError
from async_rlhf.data.formats import first_words
from async_rlhf.data.held_out import hold_out
from async_rlhf.data.ratings import read_ratings, require_different

PAGE = (Path(__file__).parents[2] / "docs" / "own_data.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(command) for command in re.findall(r"^    \$ async-rlhf (.*)$", PAGE.replace("\\\n", " "), re.MULTILINE)
]
"""What stands on the page, in order."""


def results(place: str) -> dict:
    return json.loads(Path(place).read_text())["results"]


@pytest.mark.rare
def test_the_page_from_a_file_of_ratings_to_a_better_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("ratings.jsonl"), 1500)
    assert [words[0] for words in COMMANDS] == ["sft", "reward", "train", "pairs", "reward", "evaluate"]
    for words in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0, words

    assert json.loads(Path("runs/sft/config.json").read_text())["model_type"] == "llama"
    reward, judge = results("runs/reward/reward.json"), results("runs/judge/reward.json")
    assert reward["eval_r2"] > 0.6
    assert judge["eval_accuracy"] > 0.8
    rows = first_words(sentences(1500), 6, "train")
    held = hold_out(rows, 0.1, "train")[1]
    assert reward["eval_rows"] == results("runs/evaluation/evaluation.json")["prompts"] == len(held)

    answers = json_rows(Path("runs/evaluation/samples.jsonl"))
    assert {answer["query"] for answer in answers} == {row["query"] for row in held}
    # Not by a reward model, but by what the sentences really deserve.
    deserved = {
        name: sum(rating(answer["query"] + answer["models"][name]["completion"]) for answer in answers) / len(answers)
        for name in ("sft", "policy")
    }
    assert deserved["policy"] > deserved["sft"] + 0.3


def test_the_data_on_the_page_are_those_that_are_made():
    shown = [json.loads(line) for line in re.findall(r"^    (\{\"text\".*\})$", PAGE, re.MULTILINE)]
    assert shown == sentences(1500)[:3]


def test_the_errors_on_the_page_are_those_that_are_raised():
    def check(rows):
        require_different(read_ratings(rows, "score", "train"), "score", "train")

    text = {"text": "a"}
    cases = [
        [{**text, "score": 1}, {**text, "score": 2}, text],
        [{**text, "score": 1}, {**text, "score": "4 stars"}],
        [{**text, "score": 1}, {**text, "score": float("nan")}],
        [{**text, "score": 3}] * 3,
        [{**text, "score": 3}],
    ]
    for rows in cases:
        with pytest.raises(ConfigError) as caught:
            check(rows)
        assert f"`{caught.value}`" in PAGE
    with pytest.raises(ConfigError) as caught:
        first_words(sentences(1500), 40, "train")
    assert f"`{caught.value}`" in PAGE
