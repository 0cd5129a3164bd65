"""Rewards are computed as soon as a batch has been sampled, beside training; what comes out does not change."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import json_rows, rare
from transformers import TrainerCallback

from async_rlhf import KLConfig
from async_rlhf.config import ConfigError, ParallelConfig
from async_rlhf.rewards.functions import RewardError
from async_rlhf.rewards.prefetch import EarlyResults
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.system.random_state import capture, equal, seed_by
from async_rlhf.types import Batch, Group, Prompt, Sample


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
    return json_rows(Path(args.output_dir) / "metrics.jsonl")


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
    assert sorted(judged) == [2, 3, 4, 5, 6], "the first one shows whether the function draws random numbers"
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


class Drawing(Slow):
    """Draws from the global generators."""

    def __call__(self, completions, **_):
        super().__call__(completions)
        return [random.random() + float(torch.rand(())) for _ in completions]


class AskAt(TrainerCallback):
    """Asks for evaluations after some batches, and may end the run after one."""

    def __init__(self, batches, last=None) -> None:
        self.batches, self.last = batches, last

    def on_step_end(self, args, state, control, **_):
        control.should_evaluate = control.should_evaluate or state.global_step in self.batches
        control.should_training_stop = state.global_step == self.last


CASES = {
    "every second": (2, 2, (), None),
    "every batch": (1, 3, (), None),
    "every third": (3, 1, (), None),
    "by a callback": (0, 2, (2, 7), None),
    "in quick succession": (0, 2, (2, 3, 7, 9), None),
    "by both": (4, 2, (3, 5), None),
    "until a callback ends it": (3, 3, (), 7),
}


class Late(TrainerCallback):
    """Holds the learner up after each batch, so that all that can be judged early is."""

    def on_step_end(self, args, state, control, **_):
        time.sleep(0.15)


@pytest.mark.parametrize("case", [case if n in (0, 3, 6) else rare(case) for n, case in enumerate(CASES)])
def test_random_rewards_are_those_that_are_drawn_in_turn(make_policy, tokenizer, prompts, make_args, monkeypatch, case):
    """Held-out answers draw between the same two batches, however early these were sampled."""
    steps, staleness, asked, last = CASES[case]
    found = []
    for name in ("early", "in turn"):
        args = asynchronous(make_args, name, num_epochs=6, eval_steps=steps)
        args = replace(args, staleness=staleness, generation=replace(args.generation, response_length=4))
        callbacks = [AskAt(asked, last), Late()] if name == "early" else [AskAt(asked, last)]
        if name == "in turn":
            monkeypatch.setattr(Scorer, "begin", lambda *_: None)
        random.seed(1)
        torch.manual_seed(1)
        held = prompts[:4]
        rows = run(make_policy(), tokenizer, prompts, args, Drawing(0.0), eval_dataset=held, callbacks=callbacks)
        found.append([{k: v for k, v in row.items() if "time/" not in k and k != "eps"} for row in rows])
        assert spans(args.output_dir, "rewards") == [], "a function that draws is never called early"
    assert len([row for row in found[0] if "eval_objective/scores" in row]) >= 2
    assert found[0] == found[1]


@pytest.mark.parametrize("checkpoints", [rare("whole"), "sharded"])
def test_a_run_with_random_rewards_and_evaluations_resumes_as_it_was(
    make_policy, tokenizer, prompts, make_args, checkpoints
):
    """Also from a checkpoint that was taken while an evaluation was under way and batches had been judged early."""
    parallel = {"parallel": ParallelConfig(strategy="fsdp")} if checkpoints == "sharded" else {}
    changes = {"num_epochs": 4, "eval_steps": 3, "save_steps": 1, "checkpoint_format": checkpoints, **parallel}
    whole = replace(asynchronous(make_args, "whole", **changes), staleness=2)
    lines = run(make_policy(), tokenizer, prompts, whole, Drawing(0.0), eval_dataset=prompts[:4], callbacks=[Late()])
    for batch in (3, 4, 5):
        again = replace(whole, output_dir=f"{whole.output_dir}-{batch}")
        again = replace(again, resume_from=f"{whole.output_dir}/checkpoint-{batch}")
        random.seed(5)
        found = run(make_policy(), tokenizer, prompts, again, Drawing(0.0), eval_dataset=prompts[:4])
        names = ("batch", "objective/scores", "eval_objective/scores")
        after = [{name: row.get(name) for name in names} for row in lines if row["batch"] > batch]
        assert [{name: row.get(name) for name in names} for row in found if row["batch"] > batch] == after


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


def test_numbers_that_are_drawn_later_are_drawn_in_turn_from_then_on():
    """What was drawn before its turn is not used: it is drawn again, as the batch's seed says."""
    groups, others, asked = [(Group(Prompt(i, i, (1,)), ()),) for i in range(5)], threading.Event(), []

    def judge(given):
        number = given[0].prompt.draw
        asked.append(number)
        if number == 2:
            others.wait(60)
        return random.random() if number >= 2 else 0.0

    expected = [0.0, 0.0]
    for index in (3, 4, 5):
        seed_by(7, index)
        expected.append(random.random())
    random.seed(1)
    before, rewards = capture(), EarlyResults(judge, seed=7)
    with rewards.running(None):
        found = [rewards.of(Batch(1, 0, groups[0], 0.0))]
        for number in (1, 2, 3):
            rewards.begin(number + 1, 0, groups[number], 1)
        found.append(rewards.of(Batch(2, 0, groups[1], 0.0)))
        others.set()
        deadline = time.monotonic() + 60
        while equal(before, capture()) and time.monotonic() < deadline:
            time.sleep(0.001)
        after = capture()
        found += [rewards.of(Batch(number + 1, 0, groups[number], 0.0)) for number in (2, 3)]
        rewards.begin(5, 0, groups[4], 1)
        time.sleep(0.1)
        assert asked == [0, 1, 2, 2, 3], "nothing before its turn any more"
        found.append(rewards.of(Batch(5, 0, groups[4], 0.0)))
    assert found == expected
    assert equal(after, capture()), "others draw as if no reward had drawn"


def test_what_a_callback_draws_beside_is_not_drawn_again(caplog):
    caplog.set_level("INFO", "async_rlhf")
    begun, goes_on = threading.Event(), threading.Event()
    goes_on.set()
    rewards = EarlyResults(lambda _: (begun.set(), goes_on.wait(60)))
    groups = (Group(Prompt(0, 0, (1,)), ()),)
    random.seed(1)
    expected = [random.random() for _ in range(2)]
    random.seed(1)
    with rewards.running(None):
        rewards.of(Batch(1, 0, groups, 0.0))
        begun.clear()
        goes_on.clear()
        rewards.begin(2, 0, groups, 1)
        assert begun.wait(60)
        drawn = [random.random()]
        goes_on.set()
        rewards.of(Batch(2, 0, groups, 0.0))
        assert [*drawn, random.random()] == expected
    assert "rewards: random numbers are drawn; from here on each batch is judged in its turn" in caplog.text


def test_what_is_judged_beyond_the_end_takes_nothing_back():
    """Whoever draws then draws on, such as the next run of the same process."""
    goes_on, judged = threading.Event(), threading.Event()
    rewards, groups = (
        EarlyResults(lambda _: (judged.set(), goes_on.wait(60)), name="beyond"),
        (Group(Prompt(0, 0, (1,)), ()),),
    )
    with rewards.running(None):
        goes_on.set()
        rewards.of(Batch(1, 0, groups, 0.0))
        goes_on.clear()
        judged.clear()
        rewards.begin(2, 0, groups, 1)
        judged.wait(60)
        (thread,) = (each for each in threading.enumerate() if each.name == "early beyond")
    drawn = random.random()
    goes_on.set()
    thread.join(60)
    assert random.random() != drawn


def test_only_the_very_completions_that_were_judged_are_taken():
    groups = tuple(Group(Prompt(i, i, (1,)), ()) for i in range(2))
    others = tuple(replace(group, samples=(None,)) for group in groups)  # a share that was sampled again
    asked: list[object] = []

    def judge(given):
        asked.append(given)
        return len(asked)

    rewards = EarlyResults(judge)
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


# The scorer, without a run


def answers(config) -> tuple[Group, ...]:
    """As many as a batch has."""
    sample = Sample.answer([65], [66, 256], [-0.5] * 2, [0] * 2, "stop")
    return tuple(Group(Prompt(i, i, (65,), {"query": "A"}), (sample, sample)) for i in range(config.batch_size))


def test_what_may_be_judged_before_its_turn(tokenizer, make_args):
    """All but the first batch; not what a function with a state judges."""
    config = asynchronous(make_args, "run")
    early = {(Slow(0.0), 1): True, (Slow(0.0), -2): True, (Stateful(0.0), 1): False}
    early |= {(ByPrompt(0.0), 2): True, (ByPrompt(0.0), -2): True}
    groups = answers(config)
    with ExitStack() as stack:
        for function, index in early:
            scorer = Scorer(tokenizer, config, None, [function])
            stack.enter_context(scorer.started())
            scorer(Batch(99, 0, groups, 0.0))
            function.calls.clear()
            scorer.begin(index, 0, groups)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not all(f.calls for (f, _), expected in early.items() if expected):
            time.sleep(0.01)
        time.sleep(0.3)
    found = {(type(function).__name__, index): bool(function.calls) for function, index in early}
    assert found == {(type(function).__name__, index): expected for (function, index), expected in early.items()}


def test_a_function_that_has_drawn_sees_each_batch_in_its_turn(tokenizer, make_args):
    config, function = asynchronous(make_args, "run"), Drawing(0.0)
    scorer, groups = Scorer(tokenizer, config, None, [function]), answers(config)
    expected = {}
    for batch in (1, 2, -2):
        seed_by(config.seed, batch)
        expected[batch] = function(["x"] * 2 * len(groups))
    function.calls.clear()
    before = capture()
    with scorer.started():
        for batch in (2, -2, 1, 2):
            scorer.begin(batch, 0, groups)
            time.sleep(0.3)
            found = scorer(Batch(batch, 0, groups, 0.0)).rewards["Drawing"]
            assert found.tolist() == expected[batch], "of the seed and the batch, in whatever order"
    assert len(function.calls) == 4
    assert equal(capture(), before)


def test_states_of_functions_are_restored_by_name(tokenizer, make_args):
    first, second = Stateful(0.0), Slow(0.0)
    scorer = Scorer(tokenizer, asynchronous(make_args, "run"), None, [first, second])
    assert scorer.state() == {"Stateful": {"calls": 0}}
    scorer.restore({"Stateful": {"calls": 7}, "of another run": {"calls": 8}})
    assert first.before == 7


def test_parts_are_not_judged_apart_where_a_reward_model_elsewhere_has_to_see_them_all(
    tokenizer, make_args, make_reward_model
):
    class Elsewhere(Scorer):
        model_elsewhere = True

    config, found = asynchronous(make_args, "run"), []
    groups, model, passes = answers(config), make_reward_model(), []
    model.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    for kind in (Scorer, Elsewhere):
        scorer = kind(tokenizer, config, model, [ByPrompt(0.0)])
        with scorer.started():
            for first in (0, 4):
                scorer.begin(1, first, groups[first : first + 4])
            scored = scorer(Batch(1, 0, groups, 0.0))
        found.append((scored.scores_PK.tolist(), scored.metrics["reward/model"]))
    assert found[0] == found[1]
    assert len(passes) == 2  # one of each


def test_a_state_that_does_not_fit_a_file_is_refused_at_the_start(tokenizer, make_args):
    class Holds(Stateful):
        def state_dict(self):
            return {"seen": {1, 2}}

    with pytest.raises(ConfigError, match=r"^reward_funcs: state_dict\(\) must return what JSON can hold: .*set"):
        Scorer(tokenizer, asynchronous(make_args, "run"), None, [Holds()])


@pytest.mark.parametrize("hangs", [False, True])
def test_the_end_waits_for_what_computes_and_not_for_what_may_hang(hangs):
    """A thread that is amid a kernel when the interpreter ends can abort the process."""
    begun, goes_on, done = threading.Event(), threading.Event(), []

    def judge(given):
        begun.set()
        goes_on.wait(60 if hangs else 0.3)
        done.append(given)

    results = EarlyResults(judge, functions=hangs)
    groups = (Group(Prompt(0, (1,), {}), ()),)
    goes_on.set()
    results.of(Batch(1, 0, groups, 0.0))
    for event in (begun, goes_on):
        event.clear()
    done.clear()
    with results.running(None):
        results.begin(2, 0, groups, 1)
        assert begun.wait(60)
    assert bool(done) is not hangs
    goes_on.set()
