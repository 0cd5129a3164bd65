"""Branches of recipes/science/impulse.py are the run, bit for bit, but for the batches that are to be old; drift.py."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from tiny import PROMPTS, byte_tokenizer, json_rows, new_policy

from async_rlhf.models.saving import write_model

PLACE = Path(__file__).parents[2] / "recipes" / "science"


def recipe(name):
    spec = importlib.util.spec_from_file_location(name, PLACE / f"{name}.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


impulse = recipe("impulse")
drift = recipe("drift")
REWARD = """
def letters(prompts, completions, **columns):
    return [sum(c.isascii() and c.isalpha() for c in text) + 0.01 * len(text) for text in completions]
"""
BATCHES = range(1, 7)


@pytest.fixture
def study(tmp_path):
    write_model(new_policy(), byte_tokenizer(), tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    held_out = [{"query": row["query"], "answer": "ab"} for row in PROMPTS]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    (tmp_path / "reward.py").write_text(REWARD)
    base = {
        "model": str(tmp_path / "policy"),
        "data": {"train": str(tmp_path / "prompts.jsonl")},
        "reward_funcs": [f"{tmp_path / 'reward.py'}:letters"],
        "train": {
            "output_dir": "replaced",
            "staleness": 0,
            "completions_per_batch": 8,
            "samples_per_prompt": 2,
            "batches": len(BATCHES),
            "per_device_train_batch_size": 8,
            "learning_rate": 1.0e-3,
            "lr_scheduler_type": "constant",
            "generation": {"response_length": 6, "placement": "inline"},
        },
    }
    (tmp_path / "base.yml").write_text(yaml.safe_dump(base))
    keys = {"algorithm": "rloo"}
    return impulse.Study(tmp_path / "base.yml", "rloo", keys, 0, tmp_path / "held_out.jsonl", tmp_path / "out")


def run(study, branch=impulse.AS_IT_IS, known=None, **changes):
    """The weights after each batch."""
    versions = dict(known or {})
    study.run("other" if known else "base", branch, BATCHES, versions, **changes)
    return versions


def same(ours, theirs) -> bool:
    return all(map(torch.equal, ours, theirs))


def test_a_run_whose_batches_are_all_old_is_the_run_at_that_staleness(study):
    assert study.run("base", impulse.Branch(1, 6, age=2), BATCHES, {}).keys() == set(BATCHES)
    ours, theirs = run(study, impulse.Branch(1, 6, age=2)), run(study, staleness=2)
    assert all(same(ours[batch], theirs[batch]) for batch in range(7))
    assert not same(ours[6], run(study)[6])


def test_a_branch_is_the_run_but_for_what_is_exchanged(study):
    whole = run(study, save_steps=2)
    start = {"resume_from": str(study.out / "base" / "checkpoint-2")}
    again = run(study, known=whole, **start)
    assert all(same(again[batch], whole[batch]) for batch in range(7))
    for branch in (impulse.Branch(4, age=2), impulse.Branch(4, other=True)):
        other = run(study, branch, whole, **start)
        assert [same(other[batch], whole[batch]) for batch in range(3, 7)] == [True, False, False, False]
    one, two = (run(study, impulse.Branch(4, count, other=True), whole, **start) for count in (1, 2))
    assert same(one[4], two[4])
    assert not same(one[5], two[5])  # the next batch of the first has its own random numbers again
    # What is old is sampled by the weights of the run itself: batch 5 by version 2, which the branch shares.
    two, one = (run(study, impulse.Branch(4, count, age=2), whole, **start) for count in (2, 1))
    assert same(two[4], one[4])
    assert not same(two[5], one[5])


def test_every_batch_has_branches_that_end_in_time():
    found = list(impulse.branches(128))
    assert len(set(map(str, map(asdict, found)))) == len(found)
    assert {branch.first for branch in found if branch.count == 1} == {25, 37, 49, 61, 73, 85, 97, 109, 121}
    assert {branch.count for branch in found} == {1, *impulse.IN_A_ROW}
    assert all(branch.first + branch.count - 1 + 16 <= 128 for branch in found if branch.count > 1)


def test_the_probability_of_an_answer_is_the_model_s(study):
    trainer = impulse.make_trainer(study.config("base", {}))
    rows = json_rows(study.held_out)
    found = []
    for row in rows:
        tokens = [*byte_tokenizer()(row["query"] + " ab")["input_ids"], 256]
        with torch.no_grad():
            logits_TV = trainer.model(torch.tensor([tokens])).logits[0] / trainer.args.generation.temperature
        asked = range(len(tokens) - 4, len(tokens))
        found.append(sum(logits_TV[t - 1].log_softmax(-1)[tokens[t]].item() for t in asked))
    expected = sum(torch.tensor(found).exp()) / len(rows)
    assert impulse.Answers(rows, trainer).probability(trainer) == pytest.approx(expected.item(), rel=1e-4)


def test_a_policy_that_hardly_moves_has_ratios_of_1(study, monkeypatch):
    monkeypatch.setattr(drift, "AGES", (1, 4))
    still, moved = (
        list(drift.drifts(replace(study, keys={**study.keys, "train.learning_rate": r}))) for r in (1e-9, 0.01)
    )
    assert [row["batches"] for row in moved] == [5, 2]
    assert all(abs(row["kl"]) < 1e-3 and row["ess"] > 0.999 for row in still)
    assert 0.01 < moved[0]["kl"] < moved[1]["kl"]
    assert moved[1]["ess"] < 0.9


def test_measures_of_ratios_are_those_of_the_model_s_probabilities(study):
    trainer = impulse.make_trainer(study.config("base", {"learning_rate": 0.01}))
    seen = drift.Seen(trainer)
    trainer.add_callback(seen)
    drift.train(replace(trainer.run, scorer=seen))
    samples = seen._samples[-1]
    changes, squares = [], []
    for sample in samples:
        tokens, temperature = torch.tensor(sample.tokens[None].tolist()), trainer.args.generation.temperature
        with torch.no_grad():
            logprobs_TV = (trainer.model(tokens).logits[0].double() / temperature).log_softmax(-1)
        places = [t for t, drawn in enumerate(sample.sampled) if drawn]
        ratios = [(logprobs_TV[t - 1, tokens[0, t]] - float(sample.logprobs[t])).item() for t in places]
        changes.append(sum(ratios))
        squares += [math.exp(2 * ratio) for ratio in ratios]
    weights = [math.exp(change) for change in changes]
    ess = sum(weights) ** 2 / sum(weight**2 for weight in weights) / len(weights)
    expected = (-sum(changes) / len(changes), ess, sum(squares) / len(squares))
    assert drift.ratios(trainer, samples) == pytest.approx(expected, rel=1e-4)


def test_what_is_seen_again_was_sampled_so_many_updates_ago(study, monkeypatch):
    monkeypatch.setattr(drift, "AGES", (1, 2))

    def run(batches):
        trainer = impulse.make_trainer(study.config("base", {"batches": batches, "learning_rate": 0.01}))
        seen = drift.Seen(trainer)
        trainer.add_callback(seen)
        drift.train(replace(trainer.run, scorer=seen))
        return trainer, seen

    _, three = run(3)
    one, samples = run(1)  # the policy after the first batch, and what was sampled before it
    assert three.found[1][0] == pytest.approx(drift.ratios(one, samples._samples[-1]))
    two, samples = run(2)
    assert three.found[1][1] == pytest.approx(drift.ratios(two, samples._samples[-1]))
    assert three.found[2] == [pytest.approx(drift.ratios(two, samples._samples[-2]))]
