"""Labels that come late: a batch waits for them while others are trained on, exactly."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from annotators import Annotator, late, more_letters, open_questions, random_times
from forked import fork_the_fork_server, start_forked
from tiny import PROMPTS, StopAfter, byte_tokenizer, count_letters, json_rows, new_args, new_policy, rare
from transformers import TrainerCallback

from async_rlhf.algorithms.table import find
from async_rlhf.commands.replay import run_replay
from async_rlhf.commands.train import run_train
from async_rlhf.config import FeedbackConfig
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.learner.learner import Learner
from async_rlhf.models.loading import load_policy
from async_rlhf.models.saving import write_model
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.run.config import DataConfig, ReplayConfig, RunConfig
from async_rlhf.run.feedback import FEEDBACK, read_labels
from async_rlhf.run.folder import Checkpoints
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.studies.explain.command import run_explain
from async_rlhf.studies.explain.config import ExplainConfig
from async_rlhf.types import Batch, Group


def train(make_policy, tokenizer, prompts, args, callbacks=(), **more):
    policy = make_policy()
    OnlineTrainer(policy, args, prompts, processing_class=tokenizer, callbacks=list(callbacks), **more).train()
    return policy.state_dict()


def rows_of(args, name: str) -> list[dict]:
    return json_rows(Path(args.output_dir) / name)


def metrics_of(args) -> list[dict]:
    return [
        {k: x for k, x in row.items() if not k.startswith("time/") and k != "eps"}
        for row in rows_of(args, "metrics.jsonl")
    ]


def order_of(args) -> list[int]:
    return [row["sampled_as"] for row in rows_of(args, FEEDBACK)]


def assert_same(ours, theirs) -> None:
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("ask", ["compare", "rate"])
def test_labels_given_late_equal_the_same_labels_given_at_once(make_policy, tokenizer, prompts, make_args, ask):
    args = make_args(staleness=2, samples_per_prompt=2, feedback=FeedbackConfig(ask))
    with late(Path(args.output_dir), {2: 5}).working():
        ours = train(make_policy, tokenizer, prompts, args)
    order = order_of(args)
    assert sorted(order) == [1, 2, 3, 4, 5, 6]
    assert order != sorted(order)
    assert order.index(2) > 1
    lags = [row["schedule/lag"] for row in metrics_of(args)]
    assert lags == [step - 1 - max(0, batch - 3) for step, batch in enumerate(order, 1)]
    # At once: the labels are known before the run begins.
    labels = str(Path(args.output_dir) / FEEDBACK)
    again = replace(args, output_dir=args.output_dir + "-again", feedback=replace(args.feedback, labels_from=labels))
    assert_same(ours, train(make_policy, tokenizer, prompts, again))
    assert metrics_of(args) == metrics_of(again)
    assert rows_of(args, FEEDBACK) == rows_of(again, FEEDBACK)
    assert open_questions(Path(args.output_dir)) == []


def test_a_run_with_late_labels_is_its_sequential_oracle(make_policy, tokenizer, prompts, make_args):
    args = make_args(staleness=2, feedback=FeedbackConfig("compare"))
    with late(Path(args.output_dir), {1: 4, 4: 6}).working():
        ours = train(make_policy, tokenizer, prompts, args)
    said = read_labels(Path(args.output_dir) / FEEDBACK)
    assert order_of(args) != sorted(order_of(args))
    policy = make_policy()
    learner, scorer = Learner(policy, None, find("online_dpo"), args), Scorer(tokenizer, args)
    stream = PromptStream(prompts, tokenizer, max_length=args.max_prompt_length, seed=args.seed)
    params = SamplingParams(args.samples_per_prompt, 1.0, 12, seed=args.seed, stop_token_ids=(256,))
    params = replace(params, temperature=args.generation.temperature)
    past = [copy.deepcopy(policy)]
    for step in range(1, args.num_batches + 1):
        number = said[step].sampled_as
        sampler = past[max(0, number - 1 - args.staleness)]
        drawn = [stream.prompt(n) for n in range((number - 1) * args.batch_size, number * args.batch_size)]
        completions = EpisodeSampler(TransformersEngine(sampler, params)).generate(drawn)
        groups = tuple(Group(p, c) for p, c in zip(drawn, completions, strict=True))
        experience, _ = learner.annotate(scorer(Batch(step, 0, groups, 0.0, labels=said[step])))
        learner.update(experience, step)
        past.append(copy.deepcopy(policy))
    assert_same(ours, policy.state_dict())


def test_the_labels_are_what_people_said(make_policy, tokenizer, prompts, make_args):
    args = make_args(staleness=1, total_episodes=24, samples_per_prompt=3, feedback=FeedbackConfig("compare"))
    folder, asked = Path(args.output_dir), {}

    def opinion(question):
        asked[question.id] = question
        return more_letters(question)

    with Annotator(folder, opinion=opinion).working():
        train(make_policy, tokenizer, prompts, args)
    assert {question.batch for question in asked.values()} == {1, 2, 3}
    shown = {row["completion"] for row in rows_of(args, "samples.jsonl")}
    assert shown <= {text for question in asked.values() for text in question.completions}
    letters = [{text: count(text) for text in question.completions} for question in asked.values()]
    assert len(letters) > 20
    # The share of the others that a completion beats, ties half.
    by_prompt = [labels for row in rows_of(args, FEEDBACK) for labels in row["labels"]]
    assert all(sum(labels) == 1.5 and set(labels) <= {0, 0.25, 0.5, 0.75, 1} for labels in by_prompt)
    scores = {row["completion"]: row["score"] for row in rows_of(args, "samples.jsonl")}
    for question in asked.values():
        first, second = question.completions
        if {first, second} <= scores.keys() and count(first) > count(second):
            assert scores[first] > scores[second]


def count(text: str) -> int:
    return sum(c.isascii() and c.isalpha() for c in text)


def test_what_is_too_old_is_trained_on_with_the_labels_that_it_has(make_policy, tokenizer, prompts, make_args):
    args = make_args(staleness=1, feedback=FeedbackConfig("compare", max_lag=3))
    folder = Path(args.output_dir)

    def ready(question, _newest) -> bool:  # of batch 2 only the first question that is seen is answered
        return first.setdefault(question.batch, question.id) == question.id or question.batch != 2

    first: dict[int, str] = {}
    with Annotator(folder, ready).working():
        train(make_policy, tokenizer, prompts, args)
    order, metrics = order_of(args), metrics_of(args)
    assert order.index(2) + 1 == 4  # of version 0, so its lag at step 4 is 3
    lags = [row["schedule/lag"] for row in metrics]
    assert max(lags) == 3
    missing = [row["feedback/unlabelled"] for row in metrics]
    assert missing == [2.0 * (args.batch_size - 1) if number == 2 else 0.0 for number in order]
    assert metrics[3]["reward/feedback"] == 0.5


def stop_after(folder: Path, batches: int) -> None:
    """SIGTERM, a little after that many batches have been trained on: the run waits for people then."""
    while not (folder / FEEDBACK).is_file() or (folder / FEEDBACK).read_text().count("\n") < batches:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("checkpoint", ["whole", "sharded"])
def test_stopped_amid_waiting_and_resumed_it_is_the_run_that_was_recorded(
    make_policy, tokenizer, prompts, make_args, checkpoint
):
    feedback = FeedbackConfig("compare", max_lag=5)
    args = make_args(staleness=2, save_steps=2, checkpoint_format=checkpoint, feedback=feedback)
    folder = Path(args.output_dir)
    silent = Annotator(folder, lambda question, newest: question.batch in (1, 3))
    stopper = threading.Thread(target=stop_after, args=(folder, 2))
    stopper.start()
    with silent.working(), pytest.raises(SystemExit, match=r"^0$"):
        train(make_policy, tokenizer, prompts, args)
    stopper.join()
    assert [path.name for path in Checkpoints(folder).all()] == ["checkpoint-2"]
    before = order_of(args)
    assert before == [1, 3]
    assert open_questions(folder)  # people may go on while the run does not
    with Annotator(folder).working():
        ours = train(make_policy, tokenizer, prompts, replace(args, resume=True))
    assert order_of(args)[: len(before)] == before
    again = replace(args, output_dir=args.output_dir + "-again", save_steps=0)
    again = replace(again, feedback=replace(feedback, labels_from=str(folder / FEEDBACK)))
    assert_same(ours, train(make_policy, tokenizer, prompts, again))
    assert metrics_of(args) == metrics_of(again)


def test_what_was_trained_on_after_the_last_checkpoint_is_repeated(make_policy, tokenizer, prompts, make_args):
    """After a kill, labels that have come meanwhile must not change what the run had done."""
    args = make_args(staleness=2, save_steps=2, feedback=FeedbackConfig("rate"))
    folder = Path(args.output_dir)
    with late(folder, {1: 4, 4: 6}).working():
        ours = train(make_policy, tokenizer, prompts, args)
    order = order_of(args)
    assert order[2:] != sorted(order[2:])
    for stops in (True, False):  # killed again before it is there
        shutil.rmtree(folder / "final", ignore_errors=True)
        shutil.rmtree(folder / "checkpoint-4")
        shutil.rmtree(folder / "checkpoint-6", ignore_errors=True)
        again = replace(args, resume=True)
        with pytest.raises(SystemExit) if stops else nullcontext():
            weights = train(make_policy, tokenizer, prompts, again, [StopAfter(4)] if stops else [])
        assert order_of(args) == order
    assert_same(ours, weights)


def test_nobody_is_asked_any_more_when_a_callback_has_ended_the_run(make_policy, tokenizer, prompts, make_args):
    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    args = make_args(staleness=2, feedback=FeedbackConfig("compare"))
    with Annotator(Path(args.output_dir), lambda question, newest: question.batch <= 2).working():
        train(make_policy, tokenizer, prompts, args, [Enough()])
    assert order_of(args) == [1, 2]
    assert open_questions(Path(args.output_dir)) == []


def test_batches_that_are_passed_over_are_measured_in_the_same_order(make_policy, tokenizer, prompts, make_args):
    """Also in a checkpoint that is written while the run waits, with one more batch than it needs."""
    args = make_args(staleness=2, total_episodes=64, feedback=FeedbackConfig("rate"))
    folder = Path(args.output_dir)
    stopper = threading.Thread(target=stop_after, args=(folder, 3))
    stopper.start()
    some = Annotator(folder, lambda question, newest: question.batch in (3, 4, 5))
    with some.working(), pytest.raises(SystemExit, match=r"^0$"):
        train(make_policy, tokenizer, prompts, args)
    stopper.join()
    assert order_of(args) == [3, 4, 5]
    with Annotator(folder).working():
        ours = train(make_policy, tokenizer, prompts, replace(args, resume=True))
    again = replace(args, output_dir=args.output_dir + "-again")
    again = replace(again, feedback=replace(args.feedback, labels_from=str(folder / FEEDBACK)))
    assert_same(ours, train(make_policy, tokenizer, prompts, again))
    assert metrics_of(args) == metrics_of(again)


def test_inline_with_other_rewards_and_chosen_prompts(make_policy, tokenizer, prompts, make_args):
    feedback = FeedbackConfig("compare")
    args = make_args(algorithm="rloo", staleness=0, total_episodes=24, trained_prompts=6, feedback=feedback)
    with Annotator(Path(args.output_dir)).working():
        train(make_policy, tokenizer, prompts, args, reward_funcs=[count_letters])
    rows = metrics_of(args)
    assert all({"reward/feedback", "reward/count_letters"} <= row.keys() for row in rows)
    assert order_of(args) == [1, 2, 3]
    total = [row["reward/feedback"] + row["reward/count_letters"] for row in rows]
    assert [row["objective/scores"] for row in rows] == pytest.approx(total, rel=1e-5)


@pytest.fixture
def trained(tmp_path):
    """A run of the command that people have labelled late, its folder."""
    write_model(new_policy(), byte_tokenizer(), tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    args = new_args(tmp_path, staleness=2, save_steps=2, feedback=FeedbackConfig("compare"))
    config = RunConfig(str(tmp_path / "policy"), DataConfig(str(tmp_path / "prompts.jsonl")), train=args)
    with late(Path(args.output_dir), {1: 4, 4: 6}).working():
        run_train(config)
    return args


def test_a_labelled_run_is_replayed_and_explained_wherever_its_folder_is(trained):
    folder = Path(trained.output_dir).rename(Path(trained.output_dir).with_name("moved"))
    trained = replace(trained, output_dir=str(folder))
    run_replay(ReplayConfig(trained.output_dir))
    assert (folder / "replay" / FEEDBACK).read_bytes() == (folder / FEEDBACK).read_bytes()
    found = run_explain(ExplainConfig(trained.output_dir, batch=4, top=1))
    assert found["repeated"]["compared"] == [3, 4, 5, 6]
    assert [lag["lag"] for lag in found["lags"]] == [metrics_of(trained)[3]["schedule/lag"]]


def killed_run(folder: str) -> None:
    """In a process of its own."""
    feedback = FeedbackConfig("compare", max_lag=4)
    args = new_args(Path(folder), staleness=2, total_episodes=96, save_steps=2, resume=True, feedback=feedback)
    OnlineTrainer(new_policy(), args, PROMPTS, processing_class=byte_tokenizer()).train()


def be_killed_run(folder: str) -> None:
    fork_the_fork_server()
    killed_run(folder)


@pytest.mark.parametrize("seed", [0, *(rare(seed) for seed in range(1, 8))])
def test_killed_at_any_moment_it_is_the_run_that_was_recorded(
    make_policy, tokenizer, prompts, make_args, tmp_path, seed
):
    """kill -9 of all processes at random moments, while people answer at random times: what the run had trained on
    before stays, and the whole is one run that nobody has stopped.
    """
    feedback = FeedbackConfig("compare", max_lag=4)
    args = make_args(staleness=2, total_episodes=96, feedback=feedback)
    folder, drawn = Path(args.output_dir), random.Random(seed)
    kept: list[int] = []
    kills = 0
    with Annotator(folder, random_times(seed, 1.5)).working():
        while True:
            process = start_forked(be_killed_run, str(folder.parent), log=tmp_path / "log", OMP_NUM_THREADS="1")
            saved = Checkpoints(folder).all()
            while process.poll() is None and Checkpoints(folder).all() == saved:  # each gets so far
                time.sleep(0.02)
            try:
                code = process.wait(drawn.uniform(0, 2)) if kills < 3 else process.wait(120)
                assert code == 0, (tmp_path / "log").read_text()
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
            text = (folder / FEEDBACK).read_text()
            now = [json.loads(line)["sampled_as"] for line in text[: text.rfind("\n") + 1].splitlines()]
            assert now[: len(kept)] == kept[: len(now)]
            kept = max(now, kept, key=len)
    order = order_of(args)
    assert order[: len(kept)] == kept
    assert sorted(order) == list(range(1, 13))
    again = replace(args, output_dir=args.output_dir + "-again")
    again = replace(again, feedback=replace(feedback, labels_from=str(folder / FEEDBACK)))
    weights = train(make_policy, tokenizer, prompts, again)
    assert metrics_of(args) == metrics_of(again)
    assert_same(weights, load_policy(str(folder / "final"), torch.device("cpu"), "model").state_dict())
