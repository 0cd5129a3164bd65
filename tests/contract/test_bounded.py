"""Bounded staleness: the newest weights when a worker starts, never too old, recorded, and repeated exactly."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from faulty_worker import run_slow_worker
from tiny import count_letters, json_rows, rare
from transformers import TrainerCallback

from async_rlhf.config import ConfigError
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation import process
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.run import trainer as trainers
from async_rlhf.run.schedule import RolloutSchedule, read_schedule
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


def uneven():
    """A reward whose time varies, so that what is newest when a worker starts does too."""
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(1)
        time.sleep(0.2 if len(calls) % 3 == 0 else 0.0)
        return count_letters(prompts, completions)

    reward.__name__ = "uneven"
    return reward


@pytest.mark.parametrize(
    ("staleness", "workers", "size", "requests"),
    [(1, 1, None, 1), rare(3, 1, None, 1), rare(2, 2, None, 2), (2, 2, 3, 3)],
)
def test_versions_are_within_the_bound_and_the_replay_is_identical(
    make_policy, tokenizer, prompts, make_args, staleness, workers, size, requests
):
    options = {"staleness": staleness, "staleness_mode": "bounded", "total_episodes": 96}
    generation = {"placement": "process", "workers": workers, "prompts_per_request": size}
    args = make_args("bounded", generation, **options)
    weights, metrics, samples = run(make_policy, tokenizer, prompts, args, reward=uneven())
    schedule = read_schedule(Path(args.output_dir) / "schedule.jsonl", args.generation, 8, 12)
    assert list(schedule) == list(range(1, 13))
    for batch, versions in schedule.items():
        assert len(versions) == requests
        assert all(max(0, batch - 1 - staleness) <= version <= batch - 1 for version in versions)
    assert [m["schedule/version"] for m in metrics] == [min(versions) for versions in schedule.values()]

    record = str(Path(args.output_dir) / "schedule.jsonl")
    replay_args = make_args("replay", generation, replay_from=record, **options)
    again = run(make_policy, tokenizer, prompts, replay_args)
    assert again[1] == [{k.replace("uneven", "count_letters"): v for k, v in row.items()} for row in metrics]
    assert again[2] == samples
    for name, tensor in weights.items():
        assert torch.equal(tensor, again[0][name]), name
    assert read_schedule(Path(replay_args.output_dir) / "schedule.jsonl", args.generation, 8, 12) == schedule


def test_a_replay_takes_the_versions_of_the_record(tmp_path, make_policy, tokenizer, prompts, make_args):
    """A record that says the newest weights for each batch makes a run with staleness 2 the synchronous one."""
    record = tmp_path / "schedule.jsonl"
    record.write_text("".join(json.dumps({"batch": b, "versions": [b - 1]}) + "\n" for b in range(1, 7)))
    fresh = make_args("fresh", staleness=2, staleness_mode="bounded", replay_from=str(record))
    weights, metrics, _ = run(make_policy, tokenizer, prompts, fresh)
    assert [m["schedule/version"] for m in metrics] == list(range(6))
    synchronous, _, _ = run(make_policy, tokenizer, prompts, make_args("synchronous"))
    for name, tensor in synchronous.items():
        assert torch.equal(tensor, weights[name]), name


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
    args = make_args("flight", generation, staleness=2, staleness_mode="bounded", total_episodes=64)
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
    args = make_args("killed", generation, staleness=2, staleness_mode="bounded", total_episodes=64)
    _, metrics, _ = run(make_policy, tokenizer, prompts, args, callbacks=[Killed()])
    assert [row["batch"] for row in metrics] == list(range(1, 9))
    assert len(held) == 2
    assert max(map(len, held)) > 1, "requests of more than one batch were under way"
    for row in metrics:
        assert row["engine/logprob_difference_max"] < 1e-4
        assert row["schedule/lag"] <= 2


def test_a_record_that_does_not_fit_is_named(tmp_path, make_policy, tokenizer, prompts, make_args):
    def error(text: str, **generation: int) -> str:
        (tmp_path / "schedule.jsonl").write_text(text)
        args = make_args(
            generation=generation, staleness=1, staleness_mode="bounded", replay_from=str(tmp_path / "schedule.jsonl")
        )
        with pytest.raises(ConfigError) as caught:
            run(make_policy, tokenizer, prompts, args)
        return str(caught.value)

    whole = "".join(json.dumps({"batch": b, "versions": [0]}) + "\n" for b in range(1, 7))
    assert "must be the schedule.jsonl of a run" in error("{")
    assert "has 5 batches; must have all 6" in error(whole[: whole.rindex('{"batch": 6')])
    assert "generation.workers: got 2; must be 1" in error(whole, workers=2)
    other = "generation.prompts_per_request: got 3, which makes 3 requests of each batch; must make 1 requests of each"
    assert other in error(whole, prompts_per_request=3)
    with pytest.raises(ConfigError, match=r'replay_from: [\s\S]* with staleness_mode "exact"'):
        make_args(staleness=1, replay_from="somewhere")
