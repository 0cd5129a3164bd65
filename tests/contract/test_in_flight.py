"""Weights that come in flight: the newest when a worker starts, and each newer one meanwhile; none is too old."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from faulty_worker import run_slow_worker
from tiny import count_letters, json_rows
from transformers import TrainerCallback

from async_rlhf.data.stream import PromptStream
from async_rlhf.generation import process
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.run import trainer as trainers
from async_rlhf.run.schedule import RolloutSchedule
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.system.trace import Trace
from async_rlhf.types import drawn_versions


def run(make_policy, tokenizer, prompts, args, algorithm="online_dpo", reward=count_letters, callbacks=()):
    policy = make_policy()
    OnlineTrainer(
        policy, args, prompts, reward_funcs=reward, processing_class=tokenizer, callbacks=list(callbacks)
    ).train()
    folder = Path(args.output_dir)
    rows = json_rows(folder / "metrics.jsonl")
    metrics = [{k: v for k, v in row.items() if not k.startswith("time/") and k != "eps"} for row in rows]
    return policy.state_dict(), metrics, (folder / "samples.jsonl").read_text()


def test_a_worker_takes_the_newest_weights_when_it_starts(make_policy, tokenizer, prompts, make_args):
    """Stopped before it can start on batch 2, it finds version 1 when it goes on."""
    args, policy = make_args(generation={"placement": "process"}, staleness=1), make_policy()
    stream = PromptStream(prompts, tokenizer)
    generator = ProcessGenerator(args, policy, SamplingParams(2, 0.7, 8, (256,), 0), Trace())
    try:
        generator.publish(policy, 0)
        generator.submit(1, None, stream.batch(1, 4))
        assert generator.collect(1).shares == (0,)
        pid = generator.workers[0].process.pid
        os.kill(pid, signal.SIGSTOP)
        generator.submit(2, None, stream.batch(2, 4))
        generator.publish(make_policy(1), 1)
        while generator.snapshots.newest < 1:  # on its way
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
        batch = generator.collect(2)
    finally:
        generator.close()
    assert batch.shares == (1,)
    assert drawn_versions(batch.samples) == {1}


@pytest.mark.parametrize("workers", [1, 2])
def test_in_flight_weights_draw_the_tokens_after_them_within_the_bound(
    make_policy, tokenizer, prompts, make_args, monkeypatch, workers
):
    """New weights come while a batch is sampled: no completion goes back, none is too old, and all add up."""
    monkeypatch.setattr(process, "run_worker", run_slow_worker)
    seen = {}

    class Watched(RolloutSchedule):
        def _check(self, batch):
            seen[batch.index] = batch
            super()._check(batch)

    monkeypatch.setattr(trainers, "RolloutSchedule", Watched)
    generation = {"placement": "process", "in_flight": True, "response_length": 30, "workers": workers}
    generation["mismatch_steps"] = 1
    args = make_args("flight", generation, staleness=2, total_episodes=64)
    _, metrics, _ = run(make_policy, tokenizer, prompts, args)
    mixed = 0
    for index, batch in seen.items():
        for sample in batch.samples:
            versions = sample.versions[sample.sampled].tolist()
            assert versions == sorted(versions)
            assert max(0, index - 3) <= versions[0] <= versions[-1] < index
            mixed += len(set(versions)) > 1
    assert mixed > 0
    for row in metrics:
        assert row["engine/logprob_difference_max"] < 1e-4  # each token by the weights it is recorded with
        assert 0 <= row["schedule/lag_mean"] <= row["schedule/lag"] <= 2
    assert any(row["schedule/lag_mean"] < row["schedule/lag"] for row in metrics)


def test_a_worker_that_dies_in_flight_has_its_completions_sampled_again(
    make_policy, tokenizer, prompts, make_args, monkeypatch
):
    """With several requests of several batches under way: none is lost, and none is answered twice."""
    monkeypatch.setattr(process, "run_worker", run_slow_worker)
    held = []

    class Killed(TrainerCallback):
        def on_step_begin(self, arguments, state, control, **_):
            worker = made[0].workers[0]
            if state.global_step in (2, 4):
                held.append({request.batch for request in worker.open})
                os.kill(worker.process.pid, signal.SIGKILL)

    made = []
    build = process.ProcessGenerator.__init__
    monkeypatch.setattr(
        process.ProcessGenerator, "__init__", lambda self, *a, **k: made.append(self) or build(self, *a, **k)
    )
    generation = {"placement": "process", "in_flight": True, "response_length": 30, "workers": 2, "mismatch_steps": 1}
    args = make_args("killed", generation, staleness=2, total_episodes=64)
    _, metrics, _ = run(make_policy, tokenizer, prompts, args, callbacks=[Killed()])
    assert [row["batch"] for row in metrics] == list(range(1, 9))
    assert len(held) == 2
    assert max(map(len, held)) > 1, "requests of more than one batch were under way"
    for row in metrics:
        assert row["engine/logprob_difference_max"] < 1e-4
        assert row["schedule/lag"] <= 2
