"""An evaluation sees exactly the version that it names, changes nothing that is trained, and outlives its run's end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import StopAfter, count_letters, json_rows, rare
from transformers import EarlyStoppingCallback, TrainerCallback

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.data.stream import PromptStream
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import GeneratorError, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.loading import load_policy
from async_rlhf.run.schedule import StaleWeightsError
from async_rlhf.run.summary import training_summary
from async_rlhf.run.trainer import OnlineTrainer

HELD = [{"query": f"def held{i}(x{'y' * (i % 3)}):", "name": f"h{i}", "held": True} for i in range(5)]
EVERY_TWO = {"eval_steps": 2, "eval_temperature": 0.4, "eval_samples_per_prompt": 3}


class Seen(TrainerCallback):
    """When evaluations were shown, and as of which batch."""

    def __init__(self) -> None:
        self.begun, self.shown = 0, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun = state.global_step + 1

    def on_log(self, args, state, control, logs, **kwargs):
        if "eval_objective/scores" in logs:
            self.shown.append(("log", self.begun, state.global_step, logs["batch"], logs["episode"]))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.shown.append(("evaluate", self.begun, state.global_step))


def train(make_policy, tokenizer, prompts, args, held=HELD, callbacks=(), reward=count_letters, stops=False):
    trainer = OnlineTrainer(
        make_policy(),
        args,
        prompts,
        reward_funcs=reward,
        processing_class=tokenizer,
        eval_dataset=held,
        callbacks=callbacks,
    )
    with pytest.raises(SystemExit, match=r"^0$") if stops else nullcontext():
        trainer.train()
    return trainer


def lines(args: OnlineConfig, name: str) -> list[dict]:
    rows = json_rows(Path(args.output_dir, name))
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "eval_time/")) and k != "eps"} for r in rows]


def answers_of(args: OnlineConfig, tokenizer, batch: int) -> list[tuple[str, str]]:
    """What the policy of a checkpoint answers, by the learner's own engine."""
    params = SamplingParams(3, 0.4, 12, (256,), args.seed)
    stream = PromptStream(HELD, tokenizer, shuffle=False)
    asked = [stream.prompt(draw) for draw in range(len(HELD))]
    policy = load_policy(f"{args.output_dir}/checkpoint-{batch}")
    samples = [sample for group in TransformersEngine(policy, params).generate(asked) for sample in group]
    return [(text, s.finish_reason) for s, text in zip(samples, decode_samples(tokenizer, samples), strict=True)]


@pytest.mark.parametrize("placement", ["inline", "process"])
def test_before_batch_1_the_starting_policy_answers_and_nothing_else_changes(
    make_policy, tokenizer, prompts, make_args, placement
):
    found, judged = {}, {}
    for start in (False, True):
        args = make_args(f"{start}", {"placement": placement}, staleness=int(placement == "process"),
                         eval_on_start=start, save_steps=1, metric_for_best_model="eval_objective/scores",
                         **EVERY_TWO)  # fmt: skip
        seen = Seen()
        train(make_policy, tokenizer, prompts, args, callbacks=[seen])
        judged[start] = [one for one in seen.shown if one[0] == "evaluate"]
        found[start] = lines(args, "metrics.jsonl")
    assert judged[True] == judged[False], "no checkpoint is the best by what the starting policy scored"
    early = [row for row in found[True] if row["batch"] == 0]
    assert [row["episode"] for row in early] == [0]
    assert [row for row in found[True] if row not in early] == found[False]
    params = SamplingParams(3, 0.4, 12, (256,), args.seed)
    stream = PromptStream(HELD, tokenizer, shuffle=False)
    asked = [stream.prompt(draw) for draw in range(len(HELD))]
    samples = [s for group in TransformersEngine(make_policy(), params).generate(asked) for s in group]
    table = [row for row in lines(args, "eval_samples.jsonl") if row["batch"] == 0]
    assert [row["completion"] for row in table] == list(decode_samples(tokenizer, samples))
    assert "held-out reward: " in (said := training_summary(Path(args.output_dir), "final", "metrics.jsonl", 1.0))
    assert "(before training and after batch 6)" in said


@pytest.mark.parametrize(("staleness", "due"), [(0, (3, 5, 6)), (1, (4, 6, 6)), (2, (4, 6, 6))])
def test_generators_answer_with_just_that_version_and_at_a_fixed_moment(
    make_policy, tokenizer, prompts, make_args, staleness, due
):
    args = make_args("run", {"placement": "process"}, staleness=staleness, save_steps=2, **EVERY_TWO)
    seen = Seen()
    train(make_policy, tokenizer, prompts, args, callbacks=[seen])
    table = lines(args, "eval_samples.jsonl")
    assert [(r["batch"], r["row"], r["sample"]) for r in table] == [
        (b, i, k) for b in (2, 4, 6) for i in range(5) for k in range(3)
    ]
    for batch in (2, 4, 6):
        found = [(row["completion"], row["finish_reason"]) for row in table if row["batch"] == batch]
        assert found == answers_of(args, tokenizer, batch)
    evaluated = [row for row in lines(args, "metrics.jsonl") if "eval_objective/scores" in row]
    assert [(row["batch"], row["episode"]) for row in evaluated] == [(2, 16), (4, 32), (6, 48)]
    for row in evaluated:
        part = [r["score"] for r in table if r["batch"] == row["batch"]]
        assert row["eval_objective/scores"] == pytest.approx(sum(part) / 15, rel=1e-6)
    told = zip(due, (2, 4, 6), strict=True)
    assert seen.shown == [one for d, v in told for one in (("log", d, v, float(v), 8.0 * v), ("evaluate", d, v))]


def test_the_learner_decodes_nothing(make_policy, tokenizer, prompts, make_args, monkeypatch):
    args = make_args(staleness=1, **EVERY_TWO)
    monkeypatch.setattr(TransformersEngine, "generate", None)  # in this process; the generators have their own
    train(make_policy, tokenizer, prompts, args)
    assert len(lines(args, "eval_samples.jsonl")) == 45
    spans = [
        json.loads(line.rstrip(",")) for line in Path(args.output_dir, "trace.json").read_text().splitlines()[1:-1]
    ]
    waited = [one["args"]["evaluation"] for one in spans if one["name"] == "wait" and "evaluation" in one["args"]]
    assert waited == [2, 4, 6]


def come_late(monkeypatch) -> list[tuple[int, int]]:
    """Hand evaluations to the generators only when they are waited for; returns each one's version and the newest."""
    found, waiting = [], []
    submit, collect = ProcessGenerator.submit_evaluation, ProcessGenerator.collect_evaluation

    def submit_and_collect(self, version):
        submit(self, *waiting.pop())
        self.publisher.thread.finish()
        found.append((version, self.snapshots.newest))
        return collect(self, version)

    monkeypatch.setattr(ProcessGenerator, "submit_evaluation", lambda _, *given: waiting.append(given))
    monkeypatch.setattr(ProcessGenerator, "collect_evaluation", submit_and_collect)
    return found


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_newer_versions_do_not_reach_an_evaluation_that_comes_late(
    make_policy, tokenizer, prompts, make_args, monkeypatch, staleness
):
    """As late as it can come: S + 1 newer versions are there."""
    options = {"staleness": staleness, "eval_steps": 3, "batches": 9, "total_episodes": 72}
    whole = make_args("whole", {"placement": "process"}, **options)
    train(make_policy, tokenizer, prompts, whole)
    found = come_late(monkeypatch)
    args = make_args("late", {"placement": "process"}, **options)
    train(make_policy, tokenizer, prompts, args)
    assert found[0] == (3, 4 + staleness)
    assert lines(args, "eval_samples.jsonl") == lines(whole, "eval_samples.jsonl")
    assert lines(args, "metrics.jsonl") == lines(whole, "metrics.jsonl")


def test_answers_of_other_weights_stop_the_run(make_policy, tokenizer, prompts, make_args, monkeypatch):
    """Planted: the version that is the newest when a generator comes to it, and a slot that was overwritten."""
    come_late(monkeypatch)
    submit, slots = ProcessGenerator._submit, OnlineConfig.snapshots

    def newest(self, index, version, prompts, params=None):
        submit(self, index, version if params is None else None, prompts, params)

    options = {"eval_steps": 3, "batches": 9, "total_episodes": 72}
    with monkeypatch.context() as patch:
        patch.setattr(ProcessGenerator, "_submit", newest)
        wrong = r"the evaluation after batch 3 must be of version 3; its tokens come from version 5"
        with pytest.raises(StaleWeightsError, match=wrong):
            train(make_policy, tokenizer, prompts, make_args("newest", staleness=1, **options))
    monkeypatch.setattr(OnlineConfig, "snapshots", property(lambda config: slots.fget(config) - 1))
    wrong = "sampled the evaluation of version 3 with weights that are not those of version 3: there is none"
    with pytest.raises(GeneratorError, match=wrong):  # there is no such version any more to compare with
        train(make_policy, tokenizer, prompts, make_args("overwritten", staleness=1, **options))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_run_is_the_same_with_and_without_evaluations(make_policy, tokenizer, prompts, make_args, staleness):
    plain = make_args("plain", {"placement": "process"}, staleness=staleness)
    without = train(make_policy, tokenizer, prompts, plain, held=None)
    args = make_args("run", {"placement": "process"}, staleness=staleness, **{**EVERY_TWO, "eval_steps": 1})
    evaluated = train(make_policy, tokenizer, prompts, args)
    training = [row for row in lines(args, "metrics.jsonl") if "objective/scores" in row]
    assert training == lines(plain, "metrics.jsonl")
    assert lines(args, "samples.jsonl") == lines(plain, "samples.jsonl")
    for name, tensor in without.model.state_dict().items():
        assert torch.equal(tensor, evaluated.model.state_dict()[name]), name


def test_in_flight_an_evaluation_still_has_one_version(make_policy, tokenizer, prompts, make_args):
    options = {"staleness": 2, "save_steps": 2, **EVERY_TWO}
    args = make_args("run", {"in_flight": True}, **options)
    train(make_policy, tokenizer, prompts, args)
    table = lines(args, "eval_samples.jsonl")
    for batch in (2, 4, 6):
        found = [(row["completion"], row["finish_reason"]) for row in table if row["batch"] == batch]
        assert found == answers_of(args, tokenizer, batch)


@pytest.mark.parametrize(("staleness", "stop"), [rare(0, 2), (1, 2), rare(1, 3), (2, 4)])
def test_a_run_resumes_bit_for_bit_around_an_evaluation(
    make_policy, tokenizer, prompts, make_args, monkeypatch, staleness, stop
):
    """Stopped right after it was asked for, and while it is under way."""
    submit, behind = ProcessGenerator.submit_evaluation, {}

    def noted(self, version, *rest):
        behind.setdefault(version, set()).add(self._submitted)
        submit(self, version, *rest)

    monkeypatch.setattr(ProcessGenerator, "submit_evaluation", noted)
    how = {"metric_for_best_model": "eval_objective/scores", "greater_is_better": False, "save_steps": 1}
    options = {"staleness": staleness, "batches": 7, "total_episodes": 56, "eval_steps": 3 if stop == 4 else 2, **how}
    whole = make_args("whole", {"placement": "process"}, **options)
    best = train(make_policy, tokenizer, prompts, whole).callbacks.state.best_model_checkpoint
    stopped = make_args("stopped", {"placement": "process"}, **options)
    first = train(make_policy, tokenizer, prompts, stopped, callbacks=[StopAfter(stop)], stops=True)
    assert first.callbacks.pending_eval is not None
    held = json.loads((Path(stopped.output_dir) / f"checkpoint-{stop}/resume/evaluation.jsonl").read_text())
    asked = 3 if stop == 4 else 2
    assert (held["version"], len(held["groups"])) == (asked, 0 if stop == asked else 5)
    assert not [row for row in lines(stopped, "metrics.jsonl") if "eval_objective/scores" in row]
    again = make_args("stopped", {"placement": "process"}, resume=True, **options)
    resumed = train(make_policy, tokenizer, prompts, again)
    for name in ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl"):
        assert lines(again, name) == lines(whole, name)
    assert Path(resumed.callbacks.state.best_model_checkpoint).name == Path(best).name
    for name, tensor in load_policy(f"{whole.output_dir}/final").state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert behind == {version: {min(version + 1 + staleness, 7)} for version in behind}  # also in the resumed run


def test_an_evaluation_of_other_prompts_is_left_out_on_resuming(make_policy, tokenizer, prompts, make_args, caplog):
    options = {"staleness": 1, "eval_steps": 2}
    stopped = make_args("stopped", **options)
    train(make_policy, tokenizer, prompts, stopped, callbacks=[StopAfter(3)], stops=True)
    again = make_args("stopped", resume=True, **options)
    train(make_policy, tokenizer, prompts, again, held=HELD[2:])
    told = "the evaluation that was under way is left out: eval_dataset is another, or none"
    assert caplog.text.count(told) == 1
    assert [r["batch"] for r in lines(again, "metrics.jsonl") if "eval_objective/scores" in r] == [4, 6]
    shutil.rmtree(again.output_dir)
    train(make_policy, tokenizer, prompts, stopped, callbacks=[StopAfter(2)], stops=True)
    train(make_policy, tokenizer, prompts, replace(again, eval_steps=0), held=None)
    assert caplog.text.count(told) == 2


def test_a_generator_killed_while_it_evaluates_changes_nothing(make_policy, tokenizer, prompts, make_args, monkeypatch):
    whole = make_args("whole", staleness=1, **EVERY_TWO)
    train(make_policy, tokenizer, prompts, whole)
    submit, killed = ProcessGenerator.submit_evaluation, []

    def submit_and_kill(self, version, *rest):
        submit(self, version, *rest)
        if version == 4:
            killed.append(self.workers[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(ProcessGenerator, "submit_evaluation", submit_and_kill)
    args = make_args("killed", staleness=1, **EVERY_TWO)
    train(make_policy, tokenizer, prompts, args)
    assert len(killed) == 1
    for name in ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl"):
        assert lines(args, name) == lines(whole, name)


class Rising:
    """A reward of held-out answers that rises and falls again, from one evaluation to the next."""

    __name__ = "rising"

    def __init__(self, values=(1.0, 3.0, 2.0, 2.5, 0.0, 0.0, 9.0)) -> None:
        self.values, self.evaluations = values, 0

    def __call__(self, prompts, completions, held=None, **columns):
        if not (held and held[0]):
            return count_letters(prompts, completions)
        self.evaluations += 1
        return [self.values[self.evaluations - 1]] * len(completions)

    def state_dict(self):
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state):
        self.evaluations = state["evaluations"]


STOPS = {"metric_for_best_model": "eval_reward/rising", "early_stopping_patience": 2, "eval_steps": 1}
STOPS |= {"save_steps": 1, "save_total_limit": 1}


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_ends_when_it_is_past_its_peak(make_policy, tokenizer, prompts, make_args, caplog, staleness):
    """The checkpoint of the peak is the best one, and is kept; two evaluations later the run ends."""
    caplog.set_level("INFO")
    args = make_args(staleness=staleness, **STOPS)
    trainer = train(make_policy, tokenizer, prompts, args, reward=Rising())
    state = trainer.callbacks.state
    assert state.global_step == 4 + staleness
    assert (state.best_metric, Path(state.best_model_checkpoint).name) == (3.0, "checkpoint-2")
    kept = sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*"))
    assert kept == ["checkpoint-2", f"checkpoint-{4 + staleness}"]
    told = "stopped: eval_reward/rising peaked at batch 2 with 3; 2 evaluations since were no better"
    assert caplog.text.count(told) == 1
    evaluated = [row["batch"] for row in lines(args, "metrics.jsonl") if "eval_reward/rising" in row]
    assert evaluated == list(range(1, 5 + staleness))  # the policy at the end, too


def test_a_resumed_run_ends_at_the_same_batch(make_policy, tokenizer, prompts, make_args):
    whole = make_args("whole", staleness=1, **STOPS)
    train(make_policy, tokenizer, prompts, whole, reward=Rising())
    stopped = make_args("stopped", staleness=1, **STOPS)
    train(make_policy, tokenizer, prompts, stopped, reward=Rising(), callbacks=[StopAfter(4)], stops=True)
    again = make_args("stopped", staleness=1, resume=True, **STOPS)
    state = train(make_policy, tokenizer, prompts, again, reward=Rising()).callbacks.state
    assert (state.global_step, Path(state.best_model_checkpoint).name) == (5, "checkpoint-2")
    assert lines(again, "metrics.jsonl") == lines(whole, "metrics.jsonl")


def test_the_callback_of_transformers_stops_as_well(make_policy, tokenizer, prompts, make_args):
    """It compares with the best checkpoint."""
    args = make_args(staleness=1, eval_steps=1, save_steps=1, metric_for_best_model="eval_reward/rising")
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    state = train(make_policy, tokenizer, prompts, args, reward=Rising(), callbacks=[stopping]).callbacks.state
    assert (state.global_step, Path(state.best_model_checkpoint).name) == (4, "checkpoint-2")


def test_smaller_can_be_better(make_policy, tokenizer, prompts, make_args):
    values = tuple(-value for value in Rising().values)
    args = make_args(greater_is_better=False, **STOPS)
    state = train(make_policy, tokenizer, prompts, args, reward=Rising(values)).callbacks.state
    assert (state.global_step, Path(state.best_model_checkpoint).name) == (4, "checkpoint-2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"metric_for_best_model": "objective/kl", "early_stopping_patience": 1, "eval_steps": 1},
            "metric_for_best_model: got 'objective/kl'; must be a result of evaluations",
        ),
        (
            {"metric_for_best_model": "eval_objective/scores", "early_stopping_patience": 1},
            "eval_steps: got 0; must be at least 1 with early_stopping_patience",
        ),
        (
            {"early_stopping_patience": 2},
            "early_stopping_patience: got 2; must be left out without metric_for_best_model",
        ),
        ({"greater_is_better": False}, "greater_is_better: got False; must be left out without metric_for_best_model"),
        (
            {"generation": {"engine": "vllm"}, "eval_temperature": 0.001},
            'eval_temperature: got 0.001; must be at least 0.01 with generation.engine "vllm"',
        ),
        ({"eval_samples_per_prompt": 0}, "eval_samples_per_prompt: got 0; must be at least 1"),
    ],
)
def test_keys_that_cannot_be_are_refused(make_args, changes, message):
    changes = dict(changes)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_args("run", changes.pop("generation", {}), **changes)


def test_a_result_that_no_evaluation_has_is_refused_before_anything_is_loaded(tokenizer, prompts, make_args):
    args = make_args(metric_for_best_model="eval_reward/gold", early_stopping_patience=1, eval_steps=1)
    names = ["objective/scores", "objective/scores_std", "reward/model", "reward/count_letters"]
    names += ["val/num_eos_tokens", "val/ended_share", "val/response_length"]
    right = (
        f"metric_for_best_model: got 'eval_reward/gold'; must be one of {', '.join(f'eval_{name}' for name in names)}"
    )
    with pytest.raises(ConfigError, match=re.escape(right)):
        OnlineTrainer("no/model", args, prompts, reward_model="no/model", reward_funcs=count_letters, eval_dataset=HELD)


def test_every_name_that_can_be_stopped_at_is_measured(make_policy, tokenizer, prompts, make_args):
    args = make_args(eval_steps=3)
    trainer = train(make_policy, tokenizer, prompts, args)
    from async_rlhf.rewards.scorer import metric_names

    assert {f"eval_{name}" for name in metric_names([count_letters], False)} <= trainer.callbacks.state.newest.keys()
