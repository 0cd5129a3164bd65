"""A reward model on a device of its own: the same run, and batches that are judged while others are trained on."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from tiny import count_letters

from async_rlhf import OnlineDPOTrainer
from async_rlhf.config import ConfigError, RayConfig
from async_rlhf.learner.learner import Learner
from async_rlhf.rewards.prefetch import EarlyRewards


@pytest.fixture
def train(make_policy, make_reward_model, tokenizer, prompts, make_args, tmp_path):
    def train(name: str, **options):
        both = options.pop("with_functions", False)
        args = make_args(output_dir=str(tmp_path / name), staleness=1, annotate_batch_size=3, **options)
        trainer = OnlineDPOTrainer(
            make_policy(),
            args,
            prompts,
            reward_model=make_reward_model(),
            reward_funcs=[count_letters] if both else [],
            processing_class=tokenizer,
            eval_dataset=prompts[:3] if args.eval_steps else None,
        )
        trainer.train()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        skipped = ("time/", "eval_time/", "eps")
        logs = [{k: v for k, v in json.loads(line).items() if not k.startswith(skipped)} for line in lines]
        return logs, {k: v.clone() for k, v in trainer.model.state_dict().items()}

    return train


@pytest.mark.parametrize("options", [{}, {"with_functions": True, "eval_steps": 2}, {"eval_steps": 2, "bf16": True}])
def test_the_run_is_the_same_bit_for_bit(train, options):
    (ours, weights), (theirs, others) = train("apart", reward_model_device="cpu", **options), train("here", **options)
    assert ours == theirs
    assert all(torch.equal(weights[name], others[name]) for name in others)
    assert any("eval_objective/scores" in line for line in ours) == ("eval_steps" in options)


def test_a_batch_is_judged_while_the_one_before_is_trained_on(train, monkeypatch):
    """The update of batch 1 does not begin before batch 2 is judged: judged in its turn, it never would be."""
    judge, update, second = EarlyRewards._do, Learner.update, threading.Event()

    def noting(early, job, trace):
        judge(early, job, trace)
        if job.index == 2:
            second.set()

    def waiting(learner, experience, batch):
        assert second.wait(60), "nothing was judged beside training"
        return update(learner, experience, batch)

    monkeypatch.setattr(EarlyRewards, "_do", noting)
    monkeypatch.setattr(Learner, "update", waiting)
    logs, _ = train("run", reward_model_device="cpu")
    assert len(logs) > 2


def test_what_it_cannot_be_combined_with_is_named(make_args, train):
    right = "reward_model_device: got 'cpu'; must be null with ray.reward_workers"
    with pytest.raises(ConfigError, match=right):
        make_args(launch="ray", staleness=1, ray=RayConfig(reward_workers=1), reward_model_device="cpu")
    with pytest.raises(ConfigError, match="offload_frozen: got True; must be false with reward_model_device"):
        make_args(offload_frozen=True, reward_model_device="cpu")
    with pytest.raises(ConfigError, match="reward_model_device: got 'cuda:7'; must be a device of this host"):
        train("run", reward_model_device="cuda:7")
