"""What the quickstart says of asynchrony, on made-up times."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from tiny import PROMPTS, new_args

from async_rlhf.commands.train import run_train
from async_rlhf.generation.placement import shared_cores, threads_side_by_side
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import DataConfig, RunConfig
from async_rlhf.run.summary import asynchrony, better_threads, read_rows
from async_rlhf.tasks.docstrings.config import QuickstartConfig
from async_rlhf.tasks.docstrings.quickstart import RUNS, _gold_difference, _report, stage_configs


def rows(batch: float, generate: float, warm_up: float = 9.0) -> list[dict[str, float]]:
    first = [{"time/batch": warm_up, "time/generate": warm_up}] * 2
    return first + [{"time/batch": batch, "time/generate": generate}] * 5


def test_a_gain_is_said_in_numbers_and_what_is_possible_elsewhere():
    said = asynchrony(rows(1.0, 0.6), rows(0.8, 0.7), cores=2, gpus=0)
    assert said.startswith(
        "Asynchrony: a batch took 0.80 s one step off-policy and 1.00 s in turn, 1.25 times as fast."
    )
    assert "share 2 CPU cores: in turn each has all of it, 0.60 s to sample and 0.40 s to score and learn" in said
    assert "a batch would take 0.60 s: 1.67 times as fast" in said


def test_no_gain_is_said_to_be_none_and_why():
    said = asynchrony(rows(1.0, 0.5), rows(0.98, 0.9), cores=1, gpus=0)
    assert "1.00 s in turn: no gain. Here both sides share 1 CPU core:" in said
    assert "share one GPU" in asynchrony(rows(1.0, 0.5), rows(1.1, 0.9), cores=16, gpus=1)
    assert "share" not in asynchrony(rows(1.0, 0.5), rows(0.6, 0.5), cores=16, gpus=2)


def test_lines_of_evaluations_are_left_out(tmp_path):
    lines = [{"time/batch": 1.0, "time/generate": 0.5}, {"eval_objective/scores": 0.3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_rows(tmp_path / "metrics.jsonl") == lines[:1]


def test_a_quickstart_resumes_only_what_has_begun(tmp_path):
    """Else its first sentence about training would be that there is nothing to resume."""
    (tmp_path / "asynchronous").mkdir()
    stages = stage_configs(QuickstartConfig(str(tmp_path)))
    assert [stages[name].train.resume for name in ("synchronous", "asynchronous")] == [False, True]
    assert not stage_configs(QuickstartConfig(str(tmp_path), overwrite=True))["asynchronous"].train.resume


@pytest.mark.parametrize(
    ("scale", "batches", "prompts"), [(0.01, 2, 100), (0.5, 30, 250), (1, 60, 500), (4, 240, 1000)]
)
def test_scale_multiplies_the_work(tmp_path, scale, batches, prompts):
    stages = stage_configs(QuickstartConfig(str(tmp_path), scale=scale))
    assert (stages["synchronous"].train.batches, stages["evaluate"].max_prompts) == (batches, prompts)


def test_a_quickstart_ends_with_its_summary_whatever_its_page_does(tmp_path, capsys, caplog):
    for name in RUNS:
        (tmp_path / name).mkdir()
        lines = [{"batch": i, "objective/scores": 1.0, "objective/kl": 0.1 * i, **rows(1.0, 0.5)[i]} for i in range(7)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    gold = {"estimate": 0.5, "low": 0.4, "high": 0.6}
    model = {"reward_mean": gold, "kl_to_reference": gold, "mean_length": 9.0, "ended_share": 1.0}
    results = {"reference": "sft", "reference_response": None, "prompts": 2, "dropped": 0, "models": {"sft": model}}
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "evaluation.json").write_text(json.dumps({"config": {}, "results": results}))
    judged = [{"query": query, "models": {name: {"score": 0.5} for name in RUNS}} for query in "ab"]
    (tmp_path / "evaluation" / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in judged))
    (tmp_path / "report.html").write_text("my own")
    summary = {"results": {"evaluate": results, "reward": {"eval_accuracy": 0.75}}, "seconds": {"sft": 1.0}}
    assert _report(tmp_path, summary) == summary
    assert "is no page of async-rlhf report" in caplog.text
    said = capsys.readouterr().out
    assert "75.0% of held-out pairs right" in said
    assert "Gold reward: +0.000" in said
    assert f"summary: {tmp_path / 'summary.json'}" in said
    assert (tmp_path / "report.html").read_text() == "my own"


def test_threads_should_go_where_the_other_side_waits():
    """8 cores, 4 each; the learner computes for 0.2 s of a batch that takes as long as sampling, 1 s."""
    waiting = [{"time/batch": 1.0, "time/generate": 1.0, "time/wait": 0.8}] * 5
    assert better_threads(waiting, 4, 1, 4) == (
        "The learner waits for the other side: with generation.num_threads 6 and num_threads 2 instead of 4 and 4, a "
        "batch might take 0.67 s instead of 1.00 s."
    )
    idle = [{"time/batch": 1.0, "time/generate": 0.2, "time/wait": 0.0}] * 5
    assert "Generators wait for the other side: with generation.num_threads 1 and num_threads 6" in better_threads(
        idle, 2, 2, 4
    )
    even = [{"time/batch": 1.0, "time/generate": 1.0, "time/wait": 0.05}] * 5
    assert better_threads(even, 4, 1, 4) == ""
    assert better_threads([], 4, 1, 4) == ""  # nothing was logged
    assert better_threads(waiting, 1, 1, 1) == ""  # two cores cannot be divided otherwise


def test_only_runs_that_share_one_cpu_are_told_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("async_rlhf.generation.placement.available_cores", lambda: 8)
    cpu, together = torch.device("cpu"), {"staleness": 1, "num_threads": None}
    args = new_args(tmp_path, generation={"placement": "process", "num_threads": 2, "workers": 2}, **together)
    assert threads_side_by_side(args, cpu, ranks=1) == (2, 2, 4)
    with shared_cores(args, cpu) as each:
        assert (each, torch.get_num_threads()) == (2, 4)
    with shared_cores(replace(args, staleness=0, generation=replace(args.generation, num_threads=None)), cpu) as each:
        assert (each, torch.get_num_threads()) == (4, 8)  # they take turns
    assert threads_side_by_side(args, torch.device("cuda"), ranks=1) is None
    assert threads_side_by_side(args, cpu, ranks=2) is None
    assert threads_side_by_side(new_args(tmp_path), cpu, ranks=1) is None


@pytest.mark.rare
def test_the_command_says_it_at_the_end(tmp_path, make_policy, tokenizer, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr("async_rlhf.commands.train.better_threads", lambda *given: asked.append(given) or "Do this.")
    write_model(make_policy(), tokenizer, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "gold.py").write_text("def gold(completions, **_):\n    return [float(len(x)) for x in completions]\n")
    args = new_args(tmp_path, generation={"placement": "process"}, staleness=1, total_episodes=16)
    data = DataConfig(str(tmp_path / "rows.jsonl"))
    with caplog.at_level(logging.INFO):
        run_train(RunConfig(str(tmp_path / "model"), data, reward_funcs=[f"{tmp_path}/gold.py:gold"], train=args))
    assert "Do this." in caplog.messages
    ((rows, *threads),) = asked
    assert [row["batch"] for row in rows] == [1, 2]
    assert threads == [1, 1, 1]


def test_gold_rewards_are_compared_by_prompt(tmp_path):
    """Asynchronous less synchronous: pairs, so what is harder in some prompts than in others cancels."""
    scores = [(0.1, 0.2), (0.9, 0.98), (0.5, 0.62)]
    lines = (
        {"query": f"q{n}", "models": {"synchronous": {"score": one}, "asynchronous": {"score": other}}}
        for n, (one, other) in enumerate(scores)
    )
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = _gold_difference(tmp_path / "samples.jsonl")
    assert said.startswith("Gold reward: +0.100 (+0.050 to +0.150, 95%) one step off-policy")
    assert "3 held-out prompts" in said
