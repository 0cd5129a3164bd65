"""Evaluation during training: a table of every answer at a temperature of its own, and the same from Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny import count_letters, json_rows

from async_rlhf.config import ConfigError
from async_rlhf.run.trainer import OnlineTrainer


def trainer(make_policy, tokenizer, prompts, args, held=None, **options) -> OnlineTrainer:
    given = {"reward_funcs": count_letters, "processing_class": tokenizer, "eval_dataset": held, **options}
    return OnlineTrainer(make_policy(), args, prompts, **given)


def rows(args) -> list[dict]:
    return json_rows(Path(args.output_dir, "eval_samples.jsonl"))


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_answer_is_in_the_table_at_every_evaluation(make_policy, tokenizer, prompts, make_args, staleness):
    args = make_args(staleness=staleness, eval_steps=2, eval_temperature=0.001)
    held = prompts[:5]
    trainer(make_policy, tokenizer, prompts, args, held).train()
    table = rows(args)
    assert [(row["batch"], row["row"]) for row in table] == [(b, i) for b in (2, 4, 6) for i in range(5)]
    metrics = json_rows(Path(args.output_dir, "metrics.jsonl"))
    means = [line["eval_objective/scores"] for line in metrics if "eval_objective/scores" in line]
    for batch, mean in zip((2, 4, 6), means, strict=True):
        part = [row for row in table if row["batch"] == batch]
        assert sum(row["score"] for row in part) / 5 == pytest.approx(mean, rel=1e-6)
        for row, prompt in zip(part, held, strict=True):
            assert (row["prompt"], row["temperature"]) == (prompt["query"], 0.001)
            (score,) = count_letters([row["prompt"]], [row["completion"]])
            assert row["score"] == pytest.approx(score)
            assert row["finish_reason"] in ("stop", "length")


def test_without_a_temperature_of_its_own_it_is_that_of_training(make_policy, tokenizer, prompts, make_args):
    args = make_args(eval_steps=0)
    run = trainer(make_policy, tokenizer, prompts, args, prompts[:3])
    run.train()
    assert [(row["batch"], row["temperature"]) for row in rows(args)] == [(6, 0.7)] * 3
    trainer(make_policy, tokenizer, prompts, make_args("none")).train()
    assert not Path(make_args("none").output_dir, "eval_samples.jsonl").exists()


def test_a_resumed_run_has_the_table_once(make_policy, tokenizer, prompts, make_args):
    whole = make_args("whole", eval_steps=2, eval_temperature=0.01)
    trainer(make_policy, tokenizer, prompts, whole, prompts[:4]).train()
    first = make_args("part", eval_steps=2, eval_temperature=0.01, save_steps=2)
    trainer(make_policy, tokenizer, prompts, first, prompts[:4]).train()
    for name in ("checkpoint-4", "checkpoint-6", "final"):  # as if it had been stopped after batch 3
        shutil.rmtree(Path(first.output_dir, name))
    again = make_args("part", eval_steps=2, eval_temperature=0.01, save_steps=2, resume=True)
    trainer(make_policy, tokenizer, prompts, again, prompts[:4]).train()
    assert rows(again) == rows(whole)


@pytest.mark.parametrize("value", [0.0, -1.0, 5000.0])
def test_temperatures_that_are_none_are_refused(make_args, value):
    with pytest.raises(ConfigError, match="eval_temperature: got"):
        make_args(eval_temperature=value)
