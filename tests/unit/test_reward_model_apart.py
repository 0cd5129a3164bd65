"""Frozen models on devices of their own: the same run, and batches that they see while others are trained on."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from tiny import count_letters

from async_rlhf import OnlineDPOTrainer
from async_rlhf.config import ConfigError, LoRAConfig, RayConfig
from async_rlhf.learner.learner import Learner
from async_rlhf.rewards.prefetch import EarlyResults
from async_rlhf.rewards.scorer import ApartScorer
from async_rlhf.run.factory import frozen_device


@pytest.fixture
def train(make_policy, make_reward_model, tokenizer, prompts, make_args, tmp_path):
    def train(name: str, generation=None, **options):
        both, model = options.pop("with_functions", False), options.pop("reward_model", True)
        held_out = options.pop("held_out", 3)
        args = make_args(name, generation, **{"staleness": 1, "annotate_batch_size": 3, **options})
        trainer = OnlineDPOTrainer(
            make_policy(),
            args,
            prompts,
            reward_model=make_reward_model() if model else None,
            reward_funcs=[count_letters] if both else [],
            processing_class=tokenizer,
            eval_dataset=prompts[:held_out] if args.eval_steps else None,
        )
        trainer.train()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        skipped = ("time/", "eval_time/", "eps")
        logs = [{k: v for k, v in json.loads(line).items() if not k.startswith(skipped)} for line in lines]
        return logs, {k: v.clone() for k, v in trainer.model.state_dict().items()}

    return train


APART, IN_TURN = (dict.fromkeys(("reward_model_device", "reference_device"), value) for value in ("cpu", "learner"))


@pytest.mark.parametrize("options", [{}, {"with_functions": True, "eval_steps": 2}, {"eval_steps": 2, "bf16": True}])
def test_the_run_is_the_same_bit_for_bit(train, options):
    (ours, weights), (theirs, others) = train("apart", **APART, **options), train("here", **IN_TURN, **options)
    assert ours == theirs
    assert all(torch.equal(weights[name], others[name]) for name in others)
    assert any("eval_objective/scores" in line for line in ours) == ("eval_steps" in options)


@pytest.mark.parametrize("name", ["rewards", "reference"])
def test_a_batch_is_judged_while_the_one_before_is_trained_on(train, monkeypatch, name):
    """The update of batch 1 does not begin before batch 2 is judged: judged in its turn, it never would be."""
    judge, update, second = EarlyResults._do, Learner.update, threading.Event()
    devices = {**IN_TURN, "reward_model_device" if name == "rewards" else "reference_device": "cpu"}

    def noting(early, job, trace):
        judge(early, job, trace)
        if job.index == 2:
            second.set()

    def waiting(learner, experience, batch):
        assert second.wait(60), "nothing was judged beside training"
        return update(learner, experience, batch)

    monkeypatch.setattr(EarlyResults, "_do", noting)
    monkeypatch.setattr(Learner, "update", waiting)
    logs, _ = train("run", **devices)
    assert len(logs) > 2


@pytest.mark.parametrize("held_out", [3, 8, 9, 16])  # a batch has 8 prompts
def test_held_out_answers_are_scored_once(train, monkeypatch, held_out):
    scored, score, early = [], ApartScorer.score_batches, []
    begin = EarlyResults.begin
    counted = lambda scorer, batches: scored.append(sum(map(len, batches))) or score(scorer, batches)  # noqa: E731
    monkeypatch.setattr(ApartScorer, "score_batches", counted)
    monkeypatch.setattr(EarlyResults, "begin", lambda *given: early.append(given[1]) or begin(*given))
    train("run", {"prompts_per_request": 4}, eval_steps=2, held_out=held_out, reward_model_device="cpu")
    assert sorted(scored) == sorted([16] * 6 + [held_out] * 3)
    assert {index for index in early if index < 0} == {-2, -4, -6}


def test_a_prompt_without_a_reward_is_left_out_of_what_the_reference_says(train, monkeypatch):
    """Its rows would have shared passes with others; those are computed again, as in turn."""
    calls = []

    def fails(completions, **columns):
        calls.append(len(completions))
        return [float("nan") if "a" in text else float(len(text)) for text in completions]

    monkeypatch.setitem(globals(), "count_letters", fails)
    options = {"with_functions": True, "reward_errors": "skip", "reward_model": False}
    beside = {"reference_device": "cpu"}
    (ours, weights), (theirs, others) = train("apart", **beside, **options), train("here", **IN_TURN, **options)
    assert calls
    assert ours == theirs
    assert any(line["reward/skipped"] > 0 for line in ours)
    assert all(torch.equal(weights[name], others[name]) for name in others)


@pytest.mark.parametrize(
    ("given", "beside"),
    [({}, True), ({"staleness": 0}, False), ({"offload_frozen": True}, False), (IN_TURN, False), (APART, True)],
)
def test_by_default_they_compute_beside_training_where_that_shares_a_cpu(train, monkeypatch, given, beside):
    """Both of them."""
    done, work = set(), EarlyResults._do

    def noting(early, job, trace):
        work(early, job, trace)
        found = job.done.result()
        done.add("reference" if torch.is_tensor(found) else found.by_model_R is not None and "rewards")

    monkeypatch.setattr(EarlyResults, "_do", noting)
    train("run", **given)
    assert done - {False} == ({"rewards", "reference"} if beside else set())


def test_what_it_cannot_be_combined_with_is_named(make_args, train):
    right = "reward_model_device: got 'cpu'; must be null with ray.reward_workers"
    with pytest.raises(ConfigError, match=right):
        make_args(launch="ray", staleness=1, ray=RayConfig(reward_workers=1), reward_model_device="cpu")
    with pytest.raises(ConfigError, match="offload_frozen: got True; must be false with reward_model_device"):
        make_args(offload_frozen=True, reward_model_device="cpu")
    with pytest.raises(ConfigError, match="offload_frozen: got True; must be false with reward_model_device and ref"):
        make_args(offload_frozen=True, reference_device="cpu")
    for key in APART:
        with pytest.raises(ConfigError, match=f"{key}: got 'cuda:7'; must be a device of this host"):
            train("run", **{key: "cuda:7"})
        with pytest.raises(ConfigError, match=f"{key}: got 'gpu'; must be .*; or \"learner\""):
            make_args(**{key: "gpu"})
    with pytest.raises(ConfigError, match="reference_device: got 'cpu'; must be null: this run has no reference"):
        train("run", reference_device="cpu", lora=LoRAConfig(rank=2))
    with pytest.raises(ConfigError, match="reward_model_device: got 'cpu'; must be null: there is no reward model"):
        train("run", reward_model_device="cpu", with_functions=True, reward_model=False)


def test_what_shares_no_cpu_or_was_not_tried_is_computed_in_turn(make_args):
    cpu = torch.device("cpu")
    assert frozen_device("reference_device", make_args(staleness=1), cpu) == cpu
    for changes in ({"torch_compile": True}, {"staleness": 0}, {"generation": {"placement": "inline"}}):
        assert frozen_device("reference_device", make_args(**{"staleness": 1, **changes}), cpu) is None
    assert frozen_device("reference_device", make_args(staleness=1), torch.device("cuda")) is None
