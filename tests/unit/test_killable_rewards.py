"""Time limits hold against reward functions that keep Python's lock, and what cannot be stopped is said."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import alive, call_reward_function

from async_rlhf import OnlineDPOConfig
from async_rlhf.config import RayConfig
from async_rlhf.rewards import numeric_answer, regex
from async_rlhf.rewards.functions import RewardError, load_reward_functions
from async_rlhf.rewards.sandbox import loader_of
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.types import Batch, Group, Prompt, Sample

EOS = 256
FOREVER = "a" * 60 + "!"  # for (a|aa)+$
REWARDS = """
import asyncio, os, random, re, sys, time
from pathlib import Path
import numpy, torch

def spins(prompts, completions, **columns):
    print("spinning", flush=True)
    if any(text == "spin" for text in completions):
        re.match(r"(a|aa)+$", "a" * 40 + "!")
    return [float(len(text)) for text in completions]

def draws(prompts, completions, **columns):
    numbers = [random.random(), float(numpy.random.random()), float(torch.rand(1, dtype=torch.float64))]
    return [sum(numbers) + i for i in range(len(completions))]

def raises(prompts, completions, **columns):
    raise KeyError("no such key here")

def odd(prompts, completions, **columns):
    return [object() for _ in completions]

def dies(prompts, completions, **columns):
    os._exit(7)

def exits(prompts, completions, **columns):
    sys.exit(3)

def process(prompts, completions, **columns):
    return [float(os.getpid())] * len(completions)

def sums(prompts, completions, **columns):
    numbers = torch.linspace(-1, 3, 100_001)
    return [float((numbers * len(text)).exp().sum()) for text in completions]

def has_a_child(prompts, completions, **columns):
    import subprocess
    child = subprocess.Popen(["sleep", "300"])
    Path("child.pid").write_text(str(child.pid))
    child.wait()

async def polite(prompts, completions, **columns):
    await asyncio.sleep(300 if completions[0] == "spin" else 0)
    return [float(os.getpid())] * len(completions)

def plus(number):
    return lambda prompts, completions, **columns: [number + len(text) for text in completions]

class Keeps:
    __name__ = "keeps"
    calls = 0
    def __call__(self, prompts, completions, **columns):
        self.calls += 1
        return [float(self.calls)] * len(completions)
    def state_dict(self):
        return {"calls": self.calls}
    def load_state_dict(self, state):
        self.calls = state["calls"]

keeps = Keeps()
"""


@pytest.fixture(autouse=True)
def rewards(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARDS)
    return tmp_path


def make_batch(tokenizer, *texts: str) -> Batch:
    groups = []
    for number, text in enumerate(texts):
        tokens = (*tokenizer(text)["input_ids"], EOS)
        sample = Sample.answer([65], tokens, [-0.5] * len(tokens), [0] * len(tokens), "stop")
        groups.append(Group(Prompt(number, number, (65,), {"query": "A"}), (sample, sample)))
    return Batch(1, 0, tuple(groups), 0.0)


def scorer(tokenizer, *names: str, limit: float | None = 60.0, **changes) -> Scorer:
    changes = {"non_eos_penalty": False, "reward_timeout": limit} | changes
    return Scorer(tokenizer, OnlineDPOConfig(**changes), None, load_reward_functions(names))


def scores(judge: Scorer, tokenizer, *texts: str) -> list[float]:
    return judge(make_batch(tokenizer, *texts)).scores_PK[:, 0].tolist()


def wait_until(true, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_function_that_keeps_the_lock_is_killed_and_back_for_the_next_batch(tokenizer, caplog):
    judge = scorer(tokenizer, "mine.py:spins", "mine.py:process", limit=3.0, reward_errors="skip")
    with judge.started():
        before = judge(make_batch(tokenizer, "ok")).metrics
        assert before["reward/spins"] == 2
        started = time.monotonic()
        found = judge(make_batch(tokenizer, "ok", "spin"))
        assert time.monotonic() - started < 30
        assert found.scores_PK.isnan().all()
        assert found.metrics["reward/process"] == before["reward/process"]  # which was done in time
        assert "reward function spins was not done after 3 s" in caplog.text
        assert judge(make_batch(tokenizer, "fine")).metrics["reward/spins"] == 4
    assert not alive(int(before["reward/process"]))


def test_an_async_function_is_cancelled_and_keeps_its_process(tokenizer):
    judge = scorer(tokenizer, "mine.py:polite", limit=1.0)
    with judge.started():
        (first,) = scores(judge, tokenizer, "x")
        with pytest.raises(RewardError, match="polite was not done after 1 s"):
            scores(judge, tokenizer, "spin")
        assert first == judge(make_batch(tokenizer, "x")).metrics["reward/polite"]


@pytest.mark.parametrize("workers", [0, 1])
def test_with_ray_a_function_has_a_process_here_unless_actors_call_it(tokenizer, workers):
    ray = RayConfig(reward_workers=workers)
    judge = scorer(tokenizer, "mine.py:process", launch="ray", staleness=1, ray=ray)
    others = set(multiprocessing.active_children())
    with judge.started():
        assert bool(set(multiprocessing.active_children()) - others) == (workers == 0)  # before it is needed
        (found,) = scores(judge, tokenizer, "x")
    assert (found == os.getpid()) == bool(workers)


def test_what_is_called_elsewhere_is_bitwise_what_is_called_here(tokenizer):
    """Also what draws from global generators, whose states go there and back."""
    names = (
        "mine.py:sums",
        "mine.py:plus(number=0.1)",
        "async_rlhf.rewards:length(unit='characters')",
        "mine.py:draws",
    )
    found = []
    for limit in (None, 60.0):
        torch.manual_seed(0)
        __import__("random").seed(0)
        __import__("numpy").random.seed(0)
        judge = scorer(tokenizer, *names, limit=limit)
        assert len(judge._processes) == (0 if limit is None else 4)
        with judge.started():
            found.append([judge(replace(make_batch(tokenizer, "a", "bcd"), index=index)) for index in range(3)])
    for here, there in zip(*found, strict=True):
        assert torch.equal(here.scores_PK, there.scores_PK)
        times = {"time/reward_funcs"}
        assert {k: v for k, v in here.metrics.items() if k not in times} == {
            k: v for k, v in there.metrics.items() if k not in times
        }
    assert not torch.equal(found[0][0].scores_PK, found[0][1].scores_PK)


def test_errors_are_told_as_if_they_had_been_raised_here(tokenizer):
    with pytest.raises(RewardError, match="reward function raises raised KeyError: 'no such key here'") as error:
        scores(scorer(tokenizer, "mine.py:raises"), tokenizer, "x")
    assert 'raise KeyError("no such key here")' in str(error.value.__cause__)
    assert "in raises" in str(error.value.__cause__)
    with pytest.raises(RewardError, match=r"odd returned <object object at .*must be a finite number.*Completion: 'x'"):
        scores(scorer(tokenizer, "mine.py:odd"), tokenizer, "x")
    judge = scorer(tokenizer, "mine.py:dies")
    for _ in range(2):  # the second time in another process
        with pytest.raises(RewardError, match=r"reward function dies: its process died \(exit code 7\)"):
            scores(judge, tokenizer, "x")
    with pytest.raises(RewardError, match=r"reward function exits raised ExitError: sys.exit\(3\) was called"):
        scores(scorer(tokenizer, "mine.py:exits"), tokenizer, "x")


def test_what_a_function_has_started_is_killed_with_it(tokenizer):
    with (judge := scorer(tokenizer, "mine.py:has_a_child", limit=3.0)).started(), pytest.raises(RewardError):
        scores(judge, tokenizer, "x")
    wait_until(lambda: not alive(int(Path("child.pid").read_text())))


def test_what_cannot_be_stopped_stays_here_and_is_warned_about(tokenizer, caplog):
    judge = scorer(tokenizer, "mine.py:keeps", "mine.py:plus(number=1)")
    judge.reward_funcs |= {"local": lambda prompts, completions, **columns: [0.0] * len(completions)}
    with judge.started():
        warned = [record.getMessage() for record in caplog.records]
        assert [text.split(":")[1].split(" ")[3] for text in warned] == ["keeps", "local"]
        assert "keeps a state (state_dict)" in warned[0]
        assert "is made within another function" in warned[1] or "lambda" in warned[1]
        assert scores(judge, tokenizer, "x") == [3.0]
        assert judge.state() == {"keeps": {"calls": 1}}
        judge.restore({"keeps": {"calls": 7}})
        assert scores(judge, tokenizer, "x") == [10.0]


def module_function(prompts, completions, **columns):
    return [1.0] * len(completions)


def test_where_functions_come_from():
    assert loader_of(module_function)() is module_function
    assert loader_of(numeric_answer(tolerance=0.5))() == numeric_answer(tolerance=0.5)
    for function in (lambda **columns: [], [].append, print):
        assert isinstance(loader_of(function), str)


# Of a whole program

PROGRAM = """
import signal, sys
from async_rlhf.rewards.functions import load_reward_functions
from async_rlhf.rewards.functions import call_reward_functions
from async_rlhf.rewards.sandbox import StoppableFunction, loader_of

def terminate(*_):
    sys.exit(143)

signal.signal(signal.SIGTERM, terminate)
signal.signal(signal.SIGINT, signal.default_int_handler)
(function,) = load_reward_functions(["mine.py:spins"])
spins = StoppableFunction("spins", function, loader_of(function), 1000.0)
for _ in range(3):
    spins.start()
    spins.wait()
    print(spins._process.pid, flush=True)
    try:
        call_reward_functions({"spins": spins}, ["p"], ["spin"], {}, timeout=1000.0)
    except BaseException as error:
        print(type(error).__name__, flush=True)
"""


@pytest.mark.rare
def test_a_function_that_spins_holds_up_no_signal_and_outlives_nobody():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        for number, raised in ((signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SystemExit")):
            int(process.stdout.readline())
            assert process.stdout.readline() == "spinning\n"
            time.sleep(0.3)  # it spins most likely by now
            process.send_signal(number)
            assert process.stdout.readline() == f"{raised}\n"
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "spinning\n"
        assert alive(pid)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        wait_until(lambda: not alive(pid))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("function", [regex(pattern="(a|aa)+$", full=True), regex(column="own")])
def test_a_pattern_that_never_ends_is_an_error_without_any_limit(function, monkeypatch):
    monkeypatch.setattr("async_rlhf.rewards.text.MATCH_SECONDS", 0.5)
    with pytest.raises(RewardError, match=r"pattern '\(a\|aa\)\+\$' was not done with .*aaa.* after 0.5 s"):
        call_reward_function(function, ["p"], [FOREVER], {"own": ["(a|aa)+$"]})
