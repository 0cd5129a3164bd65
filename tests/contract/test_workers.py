"""Generators come and go as they like: the run stays the same, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from environments import Echo
from faulty_worker import run_slow_worker
from tiny import After, count_letters, json_rows, rare

from async_rlhf.config import ConfigError
from async_rlhf.generation import process
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.run import factory
from async_rlhf.run.trainer import OnlineTrainer

SEEDS = int(os.environ.get("TEST_SEEDS", "1"))
"""How many runs whose workers come and go; more take longer."""


@pytest.fixture
def generators(monkeypatch) -> list[ProcessGenerator]:
    """Those of the runs of this test, the newest last. Their workers take 10 ms for a token."""
    made = []

    class Known(ProcessGenerator):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(factory, "ProcessGenerator", Known)
    monkeypatch.setattr(process, "run_worker", run_slow_worker)
    return made


@pytest.fixture
def train(generators, make_policy, tokenizer, prompts, make_args):
    """Trains on 10 batches of 8 prompts; returns the weights, the metrics apart from times, and the samples."""

    def run(name, workers, callbacks=(), size=2, episodes=False, **generation):
        generation |= {"max_turns": 3, "episode_length": 36, "stop_token_ids": list(range(60))} if episodes else {}
        judged = {"environment": Echo} if episodes else {"reward_funcs": count_letters}
        generation |= {"workers": workers, "prompts_per_request": size, "probe_steps": 2}
        args = make_args(name, generation, staleness=2, total_episodes=80)
        policy = make_policy()
        OnlineTrainer(policy, args, prompts, processing_class=tokenizer, callbacks=list(callbacks), **judged).train()
        folder = Path(args.output_dir)
        rows = json_rows(folder / "metrics.jsonl")
        assert all(0 <= row["time/generate_idle_share"] < 1 for row in rows)
        metrics = [{k: v for k, v in row.items() if not k.startswith("time/") and k != "eps"} for row in rows]
        return policy.state_dict(), metrics, (folder / "samples.jsonl").read_text()

    return run


def assert_same(ours, theirs) -> None:
    assert ours[1] == theirs[1]
    assert ours[2] == theirs[2]
    for name, tensor in ours[0].items():
        assert torch.equal(tensor, theirs[0][name]), name


@contextmanager
def coming_and_going(generators, seed: int):
    """Within, workers of the newest generator are killed, added and stopped at random moments. Yields what was done."""
    draw, ended, done = random.Random(seed), threading.Event(), []

    def act(generator: ProcessGenerator) -> None:
        worker, kind = draw.choice(generator.workers), draw.choice(["kill", "add", "stop"])
        if kind == "kill" and worker.process.pid is not None:
            os.kill(worker.process.pid, signal.SIGKILL)
        elif kind == "add" and len(generator.workers) < 4:
            generator.supervisor.add_worker()
        elif kind == "stop" and len(generator.workers) > 1:
            generator.supervisor.stop_worker(worker.number)
        else:
            return
        done.append(kind)

    def go_on() -> None:
        before = len(generators)
        while not ended.wait(draw.uniform(0.0, 0.15)):
            if len(generators) > before:
                try:
                    act(generators[-1])
                except (ProcessLookupError, ConfigError):  # it has just ended, or is the last one that stays
                    continue

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("episodes", [False, rare(True)], ids=["answers", "episodes"])
def test_workers_that_come_go_and_die_at_random_change_no_bit(train, generators, episodes):
    one = train("one", 1, episodes=episodes)
    assert_same(train("three", 3, episodes=episodes), one)
    for seed in range(SEEDS):
        with coming_and_going(generators, seed) as done:
            elastic = train(f"elastic-{seed}", 2, max_restarts=1000, episodes=episodes)
        assert set(done) == {"kill", "add", "stop"}
        assert generators[-1].supervisor.restarts > 0
        assert_same(elastic, one)


def test_requests_of_another_size_are_another_run(train):
    """What is decoded together rounds alike: so the comparison above can fail."""
    assert train("eight", 1, size=8)[1] != train("two", 1, size=2)[1]


def test_when_restarts_are_used_up_the_others_go_on(train, generators, caplog):
    undisturbed = train("undisturbed", 2, size=None)

    def kill() -> None:
        os.kill(generators[-1].workers[0].process.pid, signal.SIGKILL)

    survived = train("survived", 2, [After(3, kill)], size=None, max_restarts=0)
    assert (
        "generator process 0 died (exit code -9) after 0 restarts (generation.max_restarts); the run goes on with 1: g"
        in (caplog.text)
    )
    assert_same(survived, undisturbed)


@pytest.mark.rare
def test_a_worker_that_hangs_as_it_stops_is_not_started_again(train, generators, caplog):
    """It was asked to stop while it had a unit, and never gave it back."""

    def freeze_and_stop() -> None:
        generator = generators[-1]
        worker, deadline = generator.workers[0], time.monotonic() + 60
        while not worker.open:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(worker.process.pid, signal.SIGSTOP)
        generator.supervisor.stop_worker(0)

    one = train("one", 1)
    assert_same(train("stopped", 2, [After(3, freeze_and_stop)], heartbeat_timeout=2.0, max_restarts=0), one)
    assert [worker.number for worker in generators[-1].workers] == [1]


def test_the_command_says_and_changes_how_many_there_are(train, generators, tmp_path):
    def command(*words: str, folder: str = "run") -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "async_rlhf.cli", "workers", str(tmp_path / folder), *words],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    told = []
    actions = [(2, []), (3, ["3"]), (5, ["1"]), (6, ["0"])]
    one = train("one", 1)
    told_by = [After(batch, partial(lambda words: told.append(command(*words)), words)) for batch, words in actions]
    assert_same(train("run", 1, told_by), one)
    assert told[:3] == [(0, "1 generators: 0\n"), (0, "3 generators: 0, 1, 2\n"), (0, "1 generators: 0\n")]
    assert told[3][0] == 2
    assert "workers: got 0; must be at least 1" in told[3][1]
    assert not list((tmp_path / "run").glob("*workers*"))
    code, error = command()
    assert code == 2
    assert "must be the output folder of a run that is training, with" in error


def test_a_worker_that_is_not_there_and_the_last_one_cannot_be_stopped(train, generators):
    said = []

    def stop() -> None:
        for number in (7, 0):
            with pytest.raises(ConfigError) as caught:
                generators[-1].supervisor.stop_worker(number)
            said.append(str(caught.value))

    train("run", 1, [After(1, stop)])
    assert said == ["worker: got 7; must be one of 0", "worker: got 0; must leave another one"]
