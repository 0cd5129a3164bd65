"""Rewards are computed as soon as a batch has been sampled, beside training; what comes out does not change."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from async_rlhf import KLConfig
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.scoring import Scorer
from async_rlhf.scoring.early import EarlyRewards
from async_rlhf.scoring.functions import RewardError
from async_rlhf.types import Batch, Group, Prompt

EARLY = "early rewards"


class Slow:
    """Takes a while, and notes who called it and when."""

    def __init__(self, seconds: float = 0.3) -> None:
        self.seconds, self.at_once, self.most = seconds, 0, 0
        self.calls: list[float] = []

    def __call__(self, completions, **_):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.calls.append(time.monotonic())
        time.sleep(self.seconds)
        self.at_once -= 1
        return [float(len(set(text))) for text in completions]


class Stateful(Slow):
    """Counts its calls in a checkpoint."""

    def state_dict(self):
        return {"calls": len(self.calls)}

    def load_state_dict(self, state):
        self.before = state["calls"]


def run(policy, tokenizer, prompts, args, function, **more) -> list[dict[str, float]]:
    trainer = OnlineTrainer(policy, args, prompts, reward_funcs=function, processing_class=tokenizer, **more)
    trainer.train()
    return [json.loads(line) for line in (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()]


def spans(folder: str, name: str) -> list[tuple[int, float, float]]:
    """Batch, start and end."""
    found = []
    for line in (Path(folder) / "trace.json").read_text().splitlines():
        if f'"name": "{name}", "ph": "X"' in line:
            event = json.loads(line.rstrip(","))
            found.append((event["args"]["batch"], event["ts"], event["ts"] + event["dur"]))
    return found


def asynchronous(make_args, name, **changes):
    return make_args(name, {"placement": "process"}, "grpo", samples_per_prompt=2, staleness=1,
                     kl=KLConfig(coef=0.02), **changes)  # fmt: skip


def test_rewards_overlap_training_and_change_nothing(make_policy, tokenizer, prompts, make_args, monkeypatch):
    early = asynchronous(make_args, "early", num_epochs=3)
    fast = run(make_policy(), tokenizer, prompts, early, Slow())
    judged = {batch: (start, end) for batch, start, end in spans(early.output_dir, "rewards")}
    assert sorted(judged) == [1, 2, 3, 4, 5, 6]
    trained = spans(early.output_dir, "train")
    assert any(start < judged[batch + 1][1] and judged[batch + 1][0] < end for batch, start, end in trained[:-1])
    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "begin", lambda *_: None)
        slow = run(make_policy(), tokenizer, prompts, asynchronous(make_args, "late", num_epochs=3), Slow())
    for one, other in zip(fast, slow, strict=True):
        timed = {name for name in one if name.startswith("time/") or name == "eps"}
        assert {n: x for n, x in one.items() if n not in timed} == {n: x for n, x in other.items() if n not in timed}
    waited = [sum(line["time/score"] for line in lines[1:]) for lines in (fast, slow)]
    assert waited[0] < waited[1]
    assert all(line["time/reward_funcs"] >= 0.3 for line in fast)


def test_a_function_with_a_state_sees_each_batch_in_its_turn(make_policy, tokenizer, prompts, make_args):
    args, function = asynchronous(make_args, "run", save_steps=2), Stateful(0.0)
    run(make_policy(), tokenizer, prompts, args, function)
    assert spans(args.output_dir, "rewards") == []
    state = json.loads((Path(args.output_dir) / "checkpoint-2" / "resume" / "state.json").read_text())
    assert state["values"]["rewards"] == {"Stateful": {"calls": 2}}


def test_a_batch_before_which_an_evaluation_is_due_waits_for_it(make_policy, tokenizer, prompts, make_args):
    """So the functions are called in the order that they always had, and never beside themselves."""
    args, function = asynchronous(make_args, "run", eval_steps=2), Slow(0.1)
    run(make_policy(), tokenizer, prompts, args, function, eval_dataset=prompts[:4])
    # The answers of version 2 are scored after batch 4, those of version 4 after batch 6.
    assert sorted(batch for batch, *_ in spans(args.output_dir, "rewards")) == [1, 2, 3, 4, 6]
    assert function.most == 1
    assert len(function.calls) == 9


def test_an_error_stops_the_run_when_its_batch_has_its_turn(make_policy, tokenizer, prompts, make_args):
    args, calls = asynchronous(make_args, "run"), []

    def fails_third(completions, **_):
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            raise ValueError("no more")
        return [float(len(text)) for text in completions]

    with pytest.raises(RewardError, match="fails_third"):
        run(make_policy(), tokenizer, prompts, args, fails_third)
    lines = [json.loads(line) for line in (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines] == [1, 2]


class Drawing(Slow):
    """Draws from the global generators."""

    def __call__(self, completions, **_):
        super().__call__(completions)
        return [random.random() + float(torch.rand(())) for _ in completions]


class WaitForTheNext(TrainerCallback):
    """Holds each batch up until the next one has been judged."""

    def __init__(self, function: Slow) -> None:
        self.function = function

    def on_step_end(self, args, state, control, **_):
        deadline = time.monotonic() + 60
        while len(self.function.calls) <= state.global_step < state.max_steps and time.monotonic() < deadline:
            time.sleep(0.01)


def test_a_checkpoint_has_the_random_numbers_that_the_next_batch_was_judged_with(
    make_policy, tokenizer, prompts, make_args
):
    whole, function = asynchronous(make_args, "whole", save_steps=1), Drawing(0.0)
    lines = run(make_policy(), tokenizer, prompts, whole, function, callbacks=[WaitForTheNext(function)])
    assert len(function.calls) == 6
    again = replace(whole, output_dir=f"{whole.output_dir}-again", resume_from=f"{whole.output_dir}/checkpoint-3")
    random.seed(5)
    found = run(make_policy(), tokenizer, prompts, again, Drawing(0.0))
    assert [line["objective/scores"] for line in found][-3:] == [line["objective/scores"] for line in lines][3:]


class ByPrompt(Slow):
    """May be called with some prompts of a batch."""

    by_prompt = True

    def __init__(self, seconds: float = 0.05) -> None:
        super().__init__(seconds)
        self.sizes: list[int] = []

    def __call__(self, completions, **more):
        self.sizes.append(len(completions))
        return super().__call__(completions, **more)


def test_a_function_that_may_is_called_while_other_prompts_are_sampled(make_policy, tokenizer, prompts, make_args):
    """With all completions of each prompt; what comes out is what it says of whole batches."""
    rows, judged, judges = {}, {}, {False: Slow(0.05), True: ByPrompt()}
    for by_prompt, function in judges.items():
        function.__name__ = "judge"
        args = asynchronous(make_args, f"by prompt: {by_prompt}")
        args = replace(args, generation=replace(args.generation, prompts_per_request=2, response_length=30))
        found = run(make_policy(), tokenizer, prompts, args, function)
        rows[by_prompt] = [{k: v for k, v in row.items() if not k.startswith("time/") and k != "eps"} for row in found]
        judged[by_prompt] = spans(args.output_dir, "rewards")
    assert rows[True] == rows[False]
    assert set(judges[True].sizes) == {4}
    assert len(judges[True].sizes) == 4 * len(judges[False].calls) == 24
    assert [batch for batch, _, _ in judged[True]] == [batch for batch in range(1, 7) for _ in range(4)]
    sampled = spans(args.output_dir, "generate")
    last = {batch: max(end for other, _, end in sampled if other == batch) for batch in range(1, 7)}
    assert any(min(start for other, start, _ in judged[True] if other == batch) < last[batch] for batch in last)


def test_so_are_held_out_answers_and_the_batches_after_them(make_policy, tokenizer, prompts, make_args):
    rows, judges = {}, {False: Slow(0.05), True: ByPrompt()}
    for by_prompt, function in judges.items():
        function.__name__ = "judge"
        args = asynchronous(make_args, f"held out, by prompt: {by_prompt}", eval_steps=2)
        args = replace(args, generation=replace(args.generation, prompts_per_request=2))
        found = run(make_policy(), tokenizer, prompts, args, function, eval_dataset=prompts[:4])
        times = ("time/", "eval_time/")
        rows[by_prompt] = [{k: v for k, v in row.items() if not k.startswith(times) and k != "eps"} for row in found]
    assert rows[True] == rows[False]
    assert sum("eval_objective/scores" in row for row in rows[True]) == 3
    text = (Path(args.output_dir) / "trace.json").read_text().splitlines()
    events = [json.loads(line.rstrip(","))["args"] for line in text if '"name": "rewards", "ph": "X"' in line]
    assert sorted(event["batch"] for event in events if "batch" in event) == [b for b in range(1, 7) for _ in range(4)]
    assert sorted(event["evaluation"] for event in events if "evaluation" in event) == [2, 2, 4, 4, 6, 6]


def test_the_error_of_a_part_is_raised_in_the_turn_of_its_batch(make_policy, tokenizer, prompts, make_args):
    class Breaks(ByPrompt):
        def __call__(self, completions, **more):
            if len(self.sizes) == 9:
                raise ArithmeticError("the tenth")
            return super().__call__(completions, **more)

    args = asynchronous(make_args, "run")
    args = replace(args, generation=replace(args.generation, prompts_per_request=2))
    with pytest.raises(RewardError, match="the tenth"):
        run(make_policy(), tokenizer, prompts, args, Breaks())
    lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines] == [1, 2]


def test_only_the_very_completions_that_were_judged_are_taken():
    groups = tuple(Group(Prompt(i, i, (1,)), ()) for i in range(2))
    others = tuple(replace(group, samples=(None,)) for group in groups)  # a share that was sampled again
    asked: list[object] = []

    def judge(given):
        asked.append(given)
        return len(asked)

    rewards = EarlyRewards(judge)
    with rewards.running(None):
        rewards.begin(1, 1, groups[1:], 2)
        rewards.begin(1, 0, groups[:1], 2)
        assert rewards.of(Batch(1, 0, groups, 0.0)) == 1
        rewards.begin(2, 0, groups, 2)
        deadline = time.monotonic() + 60
        while len(asked) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert rewards.of(Batch(2, 0, others, 0.0)) == 3
        assert rewards.of(Batch(3, 0, groups, 0.0)) == 4
    assert asked == [groups, groups, others, groups]
