"""What is held out is the same in every command; the first words of a plain text are its prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from tiny import json_rows, new_args

from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.generate import run_generate
from async_rlhf.commands.sft import run_sft
from async_rlhf.commands.stage import json_lines
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError, EvaluateConfig, GenerateConfig, RewardConfig, SFTConfig
from async_rlhf.data.formats import first_words, identity, prompt_identity
from async_rlhf.data.held_out import hold_out
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import DataConfig, RunConfig

TEXTS = [{"text": f"one {i % 20} two {'word ' * (i % 4)}end.", "score": i % 5} for i in range(40)]


def write_rows(path: Path, rows) -> str:
    path.write_text(json_lines(rows))
    return str(path)


def said(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


# ---------------------------------------------------------------- what is held out


@pytest.mark.parametrize(("count", "fraction", "expected"), [(2, 0.001, 1), (3, 0.999, 2)])
def test_both_sides_have_a_prompt(count, fraction, expected):
    rows = [{"text": f"t{i}"} for i in range(count)]
    training, held = hold_out(rows, fraction, "train")
    assert (len(training), len(held)) == (count - expected, expected)
    with pytest.raises(ConfigError, match="train: got rows of 1 prompt; must be of 2 at least, to hold one out"):
        hold_out(rows[:1] * 5, 0.5, "train")


def test_one_prompt_in_every_format():
    """A question is held out as a prompt, a demonstration, a rating, a chat and a pair, or as none of them."""
    rows = [
        {"query": "q", "query_reference_response": "q a"},
        {"prompt": "q", "completion": "a", "score": 1},
        {"messages": said("q", "a")},
        {"prompt": said("q", "a")[:1], "completion": "a"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"chosen": said("q", "a"), "rejected": said("q", "b")},
        {"prompt": "q", "chosen": said("q", "a"), "rejected": said("q", "b")},
        {"text": "q"},
    ]
    assert {identity(row, "row") for row in rows} == {"q"}
    assert {prompt_identity(value, "row") for value in ("q", said("q", "a"), said("q", "a")[:1])} == {"q"}
    longer = said("q", "a") + said("r", "b")
    assert identity({"messages": longer}, "row") == prompt_identity(longer[:3], "row") != "r"
    assert identity({"chosen": "x", "rejected": "y"}, "row") == "x"
    with pytest.raises(ConfigError, match="row is a int; must be text"):
        identity({"prompt": 3, "completion": "a"}, "row")


def test_a_data_set_stays_one():
    data = Dataset.from_list([{"query": f"q{i}"} for i in range(40)])
    training, held = hold_out(data, 0.3, "data", "query")
    assert isinstance(training, Dataset)
    assert sorted(training["query"][:] + held["query"][:]) == sorted(data["query"][:])
    listed = hold_out([dict(row) for row in data], 0.3, "data", "query")
    assert [dict(row) for row in held] == listed[1]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: SFTConfig("a", output_dir="o", eval="b", eval_fraction=0.1), "eval_fraction: got 0.1"),
        (lambda: RewardConfig("a", output_dir="o", eval="b", eval_fraction=0.1, model="m"), "eval_fraction: got 0.1"),
        (lambda: DataConfig("a", eval="b", eval_fraction=0.1), "data.eval_fraction: got 0.1"),
    ],
)
def test_held_out_data_and_a_share_of_it(make, key):
    with pytest.raises(ConfigError, match=rf"^{key}; must be null with (data\.)?eval, which names the held-out data"):
        make()


def test_a_share_is_one():
    for share in (0.0, 1.0, -0.5):
        with pytest.raises(ConfigError, match=r"eval_fraction: got .*; must be between 0 and 1"):
            DataConfig("a", eval_fraction=share)
    with pytest.raises(ConfigError, match=r"train.eval_steps: got 1; must be 0 .* data.eval or data.eval_f"):
        RunConfig("m", DataConfig("d"), reward_funcs=["a:b"], train=new_args(Path(), eval_steps=1))
    RunConfig("m", DataConfig("d", eval_fraction=0.1), reward_funcs=["a:b"], train=new_args(Path(), eval_steps=1))


# ---------------------------------------------------------------- the first words


def test_the_first_words_are_the_prompt(caplog):
    rows = [{"text": " a  b\nc d", "score": 1}, {"text": "a b", "score": 2}, {"text": "a b c", "n": 3}]
    assert first_words(rows, 2, "train") == [
        {"score": 1, "query": " a  b", "query_reference_response": " a  b\nc d"},
        {"n": 3, "query": "a b", "query_reference_response": "a b c"},
    ]
    assert "train: dropped 1 of 3 texts: no more than 2 words" in caplog.text
    with pytest.raises(
        ConfigError, match=r"prompt_words: got 9; no text of train has more words \(the longest has 4\)"
    ):
        first_words(rows, 9, "train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "a"}, "train: row 1 has 'query'; must have `text` with prompt_words"),
        ({"text": "a b", "prompt": "c"}, "train: row 1 has 'prompt' beside `text`; must have no other prompt with"),
        ({"text": 3}, "train: row 1: `text` is a int; must be text"),
    ],
)
def test_rows_without_first_words(row, message):
    with pytest.raises(ConfigError, match=message):
        first_words([row], 1, "train")


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataConfig("d", prompt_field="text", prompt_words=3),
        lambda: GenerateConfig(models={"a": "b"}, data="d", output_dir="o", prompt_field="text", prompt_words=3),
    ],
)
def test_no_column_is_named_beside_them(make):
    with pytest.raises(ConfigError, match=r"prompt_field: got 'text'; must be left out with (data\.)?prompt_words"):
        make()


# ---------------------------------------------------------------- every command


REWARD = """
def length(prompts, completions, query_reference_response, **columns):
    assert all(text.startswith(prompt) for prompt, text in zip(prompts, query_reference_response))
    return [float(len(text)) for text in completions]
"""


def test_every_command_holds_out_the_same_prompts(tmp_path, make_policy, tokenizer, caplog):
    """Plain texts through sft, train, generate and evaluate, with the first three words as the prompt."""
    caplog.set_level("INFO")
    write_model(make_policy(), tokenizer, tmp_path / "base")
    data = write_rows(tmp_path / "texts.jsonl", TEXTS)
    expected = {row["query"] for row in hold_out(first_words(TEXTS, 3, "train"), 0.3, "train")[1]}
    assert 2 <= len(expected) <= 10

    split = {"prompt_words": 3, "eval_fraction": 0.3}
    config = SFTConfig(data, str(tmp_path / "sft"), model=str(tmp_path / "base"), num_epochs=1, **split)
    found = run_sft(config)
    held = [row for row in TEXTS if " ".join(row["text"].split()[:3]) in expected]
    assert (found["rows"], found["dropped"]) == (40 - len(held), 0)
    assert found["eval_loss"] > 0

    (tmp_path / "reward.py").write_text(REWARD)
    reward = [f"{tmp_path / 'reward.py'}:length"]
    train = new_args(tmp_path, total_episodes=8, num_mini_batches=1, eval_steps=1, num_samples_logged=8)
    run_train(RunConfig(str(tmp_path / "sft"), DataConfig(data, **split), reward_funcs=reward, train=train))
    samples = json_rows(tmp_path / "run" / "samples.jsonl")
    trained = {sample["prompt"] for sample in samples}
    assert trained
    assert not trained & expected
    assert all(prompt.startswith("one ") and prompt.endswith(" two") for prompt in trained)
    metrics = json_rows(tmp_path / "run" / "metrics.jsonl")
    assert any("eval_objective/scores" in line for line in metrics)
    assert yaml.safe_load((tmp_path / "run" / "run.yml").read_text())["data"]["eval_fraction"] == 0.3

    models = {"models": {"a": str(tmp_path / "sft")}, "data": data, "response_length": 4, "device": "cpu", **split}
    found = run_generate(GenerateConfig(output_dir=str(tmp_path / "said"), **models))
    assert found["prompts"] == len(held)
    lines = json_rows(tmp_path / "said" / "a.jsonl")
    assert {line["query"] for line in lines} == expected
    found = run_evaluate(EvaluateConfig(output_dir=str(tmp_path / "judged"), reward_funcs=reward, **models))
    rest = [len(row["text"]) - len(" ".join(row["text"].split()[:3])) for row in held]
    assert found["reference_response"]["reward_mean"]["estimate"] == pytest.approx(sum(rest) / len(rest))
