"""The planner: its simulation against the real schedule and against cases worked by hand, and the command."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf import OnlineDPOConfig
from async_rlhf.cli import main
from async_rlhf.config import ConfigError, GenerationConfig
from async_rlhf.config.parsing import parse
from async_rlhf.models import head, memory
from async_rlhf.models.budget import with_least
from async_rlhf.run.config import DataConfig, RunConfig
from async_rlhf.run.schedule import RolloutSchedule
from async_rlhf.studies.plan.command import run_plan
from async_rlhf.studies.plan.config import (
    HardwareConfig,
    ModelSizeConfig,
    PlanConfig,
    ScalingConfig,
    SecondsConfig,
    VariationConfig,
    WorkloadConfig,
)
from async_rlhf.studies.plan.measured import read_run
from async_rlhf.studies.plan.one_queue import lengths, one_queue
from async_rlhf.studies.plan.roofline import Roofline, _workload, batch_of, shape_of
from async_rlhf.studies.plan.search import Choice, propose, search, try_split
from async_rlhf.studies.plan.simulate import Outcome, Work, simulate
from async_rlhf.studies.plan.times import BatchTimes, DoesNotFitError, Scaled, Split, draw
from async_rlhf.studies.plan.times import times_of as given_times
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Group, Prompt, Sample

RECIPES = Path(__file__).parents[2] / "recipes"


def constant(generate, learn, publish=0.0, other=0.0, batches=60, rewards=0.0) -> Work:
    """Batches that are all alike; ``generate`` is one number, or one for each generator."""
    shares = generate if isinstance(generate, tuple) else (generate,)
    return Work([shares] * batches, *([seconds] * batches for seconds in (learn, publish, other, rewards)))


def spans(outcome: Outcome, name: str) -> list[tuple[int, float, float]]:
    return [(span.batch, span.started, span.ended) for span in outcome.spans if span.name == name]


# The schedule


class ClockedGenerator:
    """Generators under the real schedule, on a clock that only says how late it is."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.now = self.judged = self.arrived = 0.0
        self.speeds = work.speeds or (1.0,) * len(work.generate[0])
        self.free = [0.0] * len(self.speeds)
        self.ready: dict[int, tuple[float, int]] = {}

    def publish(self, policy: object, version: int) -> None:
        self.now = max(self.now, self.arrived) + self.work.publish[version]
        self.arrived = self.now + (self.work.transfer[version] if self.work.transfer else 0.0)

    def sample(self, units: Sequence[float], unstaged: float = 0.0) -> float:
        """When the last unit is there: each goes to whoever is free first."""
        ends = []
        for seconds in units:
            when, who = min((max(free, self.now), number) for number, free in enumerate(self.free))
            waited = unstaged if self.arrived >= when else 0.0
            self.free[who] = max(when, self.arrived) + (seconds + waited) / self.speeds[who]
            ends.append(self.free[who])
        return max(ends)

    def submit(self, index: int, version: int, prompts: object) -> None:
        self.judged = max(self.judged, self.sample(self.work.generate[index - 1], self.work.unstaged))
        self.judged += self.work.rewards[index - 1] if self.work.rewards else 0.0
        self.ready[index] = (self.judged, version)

    def submit_evaluation(self, version: int, prompts: object, params: object) -> None:
        self.ready[-version] = (self.sample(self.work.evaluate), version)

    def collect(self, index: int) -> Batch:
        ready, version = self.ready.pop(index)
        self.now = max(self.now, ready)
        sample = Sample.answer([1], [1], [0.0], [version], "stop")
        return Batch(index, version, (Group(Prompt(0, 0, (1,)), (sample,)),), 0.0)

    def collect_evaluation(self, version: int) -> tuple[Group, ...]:
        return self.collect(-version).groups


class NoPrompts:
    def batch(self, index: int, size: int) -> tuple[()]:
        return ()


def ends_by_the_real_schedule(work: Work, staleness: int) -> list[float]:
    """When each batch is done, by schedule.py itself and the order of the loop in trainer.py."""
    generator, batches, asked = ClockedGenerator(work), len(work.learn), None
    rollouts = RolloutSchedule(
        generator, NoPrompts(), batch_size=1, num_batches=batches, staleness=staleness, trace=Trace()
    )
    rollouts.publish(None, version=0)
    ends = []
    for batch in rollouts:
        generator.now += work.learn[batch.index - 1]
        rollouts.publish(None, version=batch.index)
        generator.now += work.other[batch.index - 1]
        ends.append(generator.now)
        wanted = bool(work.eval_steps) and batch.index % work.eval_steps == 0 and batch.index + staleness < batches
        if asked is not None and (wanted or batch.index >= asked + min(staleness + 1, work.eval_steps)):
            rollouts.answers(asked)
            asked = None
        if wanted:
            rollouts.ask(None, asked := batch.index, (), None)
    return ends


@st.composite
def works(draw):
    batches, generators = draw(st.integers(20, 26)), draw(st.integers(1, 4))
    seconds = st.floats(0.01, 5)

    def rows(n: int) -> list[float]:
        return draw(st.lists(seconds, min_size=n, max_size=n))

    units = draw(st.integers(1, 6))
    return Work(
        [rows(units) for _ in range(batches)],
        *(rows(batches) for _ in range(4)),
        speeds=draw(st.lists(st.floats(0.3, 1), min_size=generators, max_size=generators)),
        transfer=rows(batches) if draw(st.booleans()) else (),
        evaluate=rows(units),
        eval_steps=draw(st.integers(0, 7)),
        unstaged=draw(st.sampled_from([0.0, 0.5])),
    )


@settings(max_examples=60, deadline=None)
@given(works(), st.integers(0, 4))
def test_the_simulation_is_the_real_schedule(work, staleness):
    simulated = [ended for _, _, ended in spans(simulate(work, staleness), "other")]
    assert simulated == pytest.approx(ends_by_the_real_schedule(work, staleness), rel=1e-9)


def test_synchronous_takes_the_sum_and_one_side_idles_while_the_other_works():
    outcome = simulate(constant(2.0, 3.0, publish=0.5, other=0.25), staleness=0)
    # What the learner does after publishing is hidden behind sampling even then.
    assert outcome.step_seconds == pytest.approx(5.5)
    assert outcome.learner_idle == pytest.approx(1.75 / 5.5)
    assert outcome.generator_idle == pytest.approx(3.5 / 5.5)
    alone = simulate(constant(2.0, 3.0, publish=0.5), staleness=0)
    assert alone.step_seconds == pytest.approx(5.5)
    assert alone.generator_idle + alone.learner_idle == pytest.approx(1)


def test_what_goes_on_at_once_is_slower():
    # Both always busy: everything takes 1.5 times as long.
    assert simulate(constant(1.0, 1.0), 1, slowdown=1.5).step_seconds == pytest.approx(1.5)
    # The generator's second takes 1.5; the learner has done 1 of 2 by then, and does the other alone.
    assert simulate(constant(1.0, 2.0), 1, slowdown=1.5).step_seconds == pytest.approx(2.5)
    assert simulate(constant(1.0, 2.0), 0, slowdown=1.5).step_seconds == pytest.approx(3.0)


def test_too_few_batches_to_see_a_full_pipeline():
    with pytest.raises(ValueError, match="6 batches are too few for staleness 1; more than 6"):
        simulate(constant(1.0, 1.0, batches=6), 1)


# Times


def test_measured_times_scale_with_the_devices():
    row = BatchTimes((4.0,), 6.0, 0.5, 0.25)
    times = Scaled([row], Split(1, 1), ScalingConfig(generate_fixed=0.25, learn_fixed=0.5), prompts=8)
    assert times.batches(Split(1, 1)) == [row]
    assert times.batches(Split(2, 3)) == [BatchTimes((2.5, 2.5), 4.0, 0.5, 0.25)]
    assert times.batches(Split(2, 2, in_turn=True))[0].publish == 0
    with pytest.raises(DoesNotFitError, match="9 generators are more than the 8 prompts"):
        times.batches(Split(9, 1))


def test_generators_keep_what_tells_them_apart():
    times = Scaled([BatchTimes((2.0, 4.0), 1.0, 0.0)], Split(2, 1), ScalingConfig(generate_fixed=0.0))
    assert times.batches(Split(4, 1))[0].generate == (1.0, 2.0, 1.0, 2.0)
    # One generator for all prompts takes as long as both did together.
    assert times.batches(Split(1, 1))[0].generate == (6.0,)


def test_generators_beyond_those_measured_vary_apart():
    rows = [BatchTimes((seconds,), 1.0, 0.0) for seconds in (2.0, 4.0, 6.0)]
    times = Scaled(rows, Split(1, 1), ScalingConfig(generate_fixed=1.0))
    assert [row.generate for row in times.batches(Split(2, 1))] == [(2.0, 4.0), (4.0, 6.0), (6.0, 2.0)]
    # Each as fast as one alone, but a batch is there with the slower of them.
    one, two = (try_split(times, Split(g, 1), PlanConfig()).outcomes[0].step_seconds for g in (1, 2))
    assert one == pytest.approx(5, rel=0.02)
    assert two == pytest.approx(1 + 16 / 3, rel=0.02)


def test_measured_batches_come_again_each_as_often_as_any_other():
    rows = [BatchTimes((float(i), 10.0 + i), 20.0 + i, 30.0 + i, 40.0 + i) for i in range(5)]
    work = draw(rows, VariationConfig(), 20, seed=3)
    assert sorted(work.learn) == sorted([20.0 + i for i in range(5)] * 4)
    for generate, learn, publish, other in zip(work.generate, work.learn, work.publish, work.other, strict=True):
        i = learn - 20  # a batch stays together
        assert (generate, publish, other) == ([i, 10 + i], 30 + i, 40 + i)
    assert draw(rows, VariationConfig(), 20, seed=3) == work
    assert draw(rows, VariationConfig(), 20, seed=4) != work


def test_given_variation_has_the_mean_and_the_deviation_asked_for():
    work = draw([BatchTimes((2.0, 5.0), 3.0, 1.0)], VariationConfig(generate=0.4, learn=0.2), 4000, seed=0)
    for seconds, mean, deviation in (
        ([row[0] for row in work.generate], 2.0, 0.4),
        ([row[1] for row in work.generate], 5.0, 0.4),
        (work.learn, 3.0, 0.2),
    ):
        assert statistics.fmean(seconds) == pytest.approx(mean)
        assert statistics.stdev(seconds) / mean == pytest.approx(deviation, rel=0.1)
    assert set(work.publish) == {1.0}
    first, second = ([row[g] for row in work.generate] for g in (0, 1))
    assert abs(statistics.correlation(first, second)) < 0.1


def test_splits_are_compared_on_the_same_batches():
    rows = [[BatchTimes((1.0,) * generators, 1.0, 0.0)] for generators in (1, 3)]
    one, three = (draw(row, VariationConfig(0.3, 0.3), 50, seed=0) for row in rows)
    assert one.learn == three.learn
    assert [row[0] for row in one.generate] == [row[0] for row in three.generate]


# Measured runs


def write_run(folder: Path, work: Work, staleness: int, traced: bool = True) -> Outcome:
    """What a run with these times leaves: the metrics that the loop logs, and its trace."""
    outcome = simulate(work, staleness)
    folder.mkdir()
    began = 0.0
    with closing(Trace()) as trace, (folder / "metrics.jsonl").open("w") as metrics:
        if traced:
            trace.write_to(folder / "trace.json")
        for span in outcome.spans:
            if span.name == "generate":
                name, loaded = f"generator {span.track}", span.started + (span.ended - span.started) / 4
                trace.add("load", span.started, loaded, name, version=0)
                trace.add("generate", loaded, span.ended, name, batch=span.batch, version=0)
        for batch in range(1, len(work.learn) + 1):
            # The loop looks at the clock after publishing: what it does then counts to the next batch.
            _, started, ended = spans(outcome, "learn")[batch - 1]
            publish = work.publish[batch] if batch + staleness < len(work.learn) else 0.0
            other = work.other[batch - 2] if batch > 1 else 0.0
            learn, until = work.learn[batch - 1], ended + publish
            row = {"batch": batch, "eps": 16 / (until - began), "time/batch": until - began}
            # Comparing with the engine is a part of the waiting.
            row |= {"time/wait": started - began - other + learn / 4, "time/mismatch": learn / 4}
            row |= {"time/score": learn / 4, "time/annotate": 0.0, "time/train": learn / 2, "time/publish": publish}
            row |= {"time/generate": max(work.generate[batch - 1]), "schedule/lag": min(batch - 1, staleness)}
            metrics.write(json.dumps(row) + "\n")
            began = until
    return outcome


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("generators", [1, 3])
def test_a_run_is_predicted_from_its_own_files(tmp_path, staleness, generators):
    rows = [BatchTimes((1.0 + 0.1 * staleness,) * generators, 1.2, 0.05, 0.02)]
    work = draw(rows, VariationConfig(0.1, 0.1), 40, seed=1)
    outcome = write_run(tmp_path / "run", work, staleness)
    run = read_run(tmp_path / "run", warm_up=4)
    assert (run.split, run.staleness, run.prompts) == (Split(generators, 1), staleness, 16)
    assert len(run.rows) == 40 - 4 - 1 - staleness
    for row, generate, learn, publish, other in zip(
        run.rows, work.generate[4:], work.learn[4:], work.publish[5:], work.other[3:], strict=False
    ):
        assert sorted(row.generate) == pytest.approx(sorted(generate), abs=1e-6)
        assert (row.learn, row.publish, row.other) == pytest.approx((learn, publish, other))
    again = try_split(Scaled(run.rows, run.split, ScalingConfig()), run.split, PlanConfig()).outcomes[staleness]
    assert again.step_seconds == pytest.approx(outcome.step_seconds, rel=0.03)


@pytest.mark.parametrize("waited", [0.5, 0.1])
def test_rewards_are_told_from_the_work_of_the_learner(tmp_path, waited):
    """Functions in their turn, and beside training, where "score" is only what was waited for them."""
    rows = [
        {"batch": b, "eps": 8.0, "time/batch": 2.0, "time/wait": 0.3, "time/score": waited, "time/reward_funcs": 0.5}
        | {"time/annotate": 0.2, "time/train": 0.6, "time/publish": 0.1, "time/generate": 1.0, "schedule/lag": 1}
        for b in range(1, 20)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path, warm_up=4)
    assert run.rows[0].rewards == 0.5
    assert run.rows[0].learn == pytest.approx(0.8)


def test_a_run_without_its_trace_is_read_too(tmp_path):
    work = draw([BatchTimes((1.0,), 2.0, 0.1)], VariationConfig(0.1, 0.1), 20, seed=1)
    write_run(tmp_path / "run", work, 1, traced=False)
    run = read_run(tmp_path / "run", warm_up=4)
    assert [row.generate for row in run.rows] == [tuple(row) for row in work.generate[4:18]]


def test_a_trace_of_a_killed_run_counts_as_far_as_it_goes(tmp_path):
    work = draw([BatchTimes((1.0, 2.0), 2.0, 0.1)], VariationConfig(0.1, 0.1), 20, seed=1)
    write_run(tmp_path / "run", work, 1)
    path = tmp_path / "run" / "trace.json"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    run = read_run(tmp_path / "run", warm_up=4)
    assert run.split == Split(1, 1)  # the whole batch's seconds, for all batches alike
    assert [row.generate for row in run.rows] == [(max(row),) for row in work.generate[4:18]]


def test_a_run_that_sampled_inline_took_turns(tmp_path):
    write_run(tmp_path / "run", constant(1.0, 2.0, batches=20), 0)
    path = tmp_path / "run" / "trace.json"
    path.write_text(path.read_text().replace("generator 0", "learner"))
    assert read_run(tmp_path / "run", warm_up=4).split == Split(1, 1, in_turn=True)


# Hardware


PLAIN = HardwareConfig(
    tflops=1.0,  # 1e12 operations a second
    memory_gb=20.0,
    memory_share=1.0,
    memory_gbs=100.0,
    train_mfu=0.5,
    forward_mfu=1.0,
    decode_share=0.5,
    step_seconds=0.001,
    reduce_gbs=10.0,
    reduce_seconds=0.0001,
    copy_gbs=8.0,
    weights_gbs=4.0,
)
SMALL = ModelSizeConfig(
    parameters=1e9, layers=10, kv_width=100, hidden=1000, reward_parameters=5e8, activations_gb=1.0, frozen_bytes=2.0
)
SEEN = 4 * 10 * 1000
"""Operations of attention for each token that is seen."""
BATCH = batch_of(
    WorkloadConfig(
        prompts=8, samples_per_prompt=4, prompt_tokens=100, response_length=50, response_tokens=20, trained_per_prompt=2
    ),
    None,
)


def operations(prompts: float, completions: int) -> float:
    """Of a forward pass, in which each prompt of 100 tokens is there once; completions have 20."""
    return (2e9 + SEEN * 50) * prompts * 100 + (2e9 + SEEN * 110) * completions * 20


def test_seconds_of_the_learner_worked_by_hand():
    line = Roofline(PLAIN, SMALL, BATCH)
    forward = 1.5 * operations(8, 32) / 1e12
    update = 3 * operations(8, 16) / 0.5e12
    assert line.learn_seconds(1) == pytest.approx(forward + update)
    # All but one part of 4 bytes a parameter goes round twice.
    assert line.learn_seconds(4) == pytest.approx((forward + update) / 4 + 2 * 0.75 * 4e9 / 10e9)
    half = Roofline(PLAIN, SMALL, replace(BATCH, trained_prompts=4))  # of 8 prompts
    assert half.learn_seconds(1) == pytest.approx(forward + update / 2)
    twice = Roofline(PLAIN, replace(SMALL, recompute=True), replace(BATCH, num_epochs=2, num_mini_batches=3))
    # Both completions of a prompt are in the same third of a batch by a chance of 1 / 3.
    update = 3 * operations(8 * (1 / 3 + 2 * 2 / 3), 16) / 0.5e12
    assert twice.learn_seconds(2) == pytest.approx((forward + 2 * update * 8 / 6) / 2 + 6 * 2 * 0.5 * 4e9 / 10e9)
    # Padded rows, as in float32 on a GPU, have a prompt each.
    padded = Roofline(PLAIN, replace(SMALL, bf16=False), BATCH)
    forward, update = 1.5 * operations(32, 32) / 1e12, 3 * operations(16, 16) / 0.5e12
    assert padded.learn_seconds(1) == pytest.approx(forward + update)


def test_frozen_models_on_devices_of_their_own_worked_by_hand():
    """The reference policy has 1e9 parameters, the reward model half of them; the learner keeps the update."""
    forward = operations(8, 32) / 1e12
    for count, seconds in ((1, 1.5 * forward), (2, forward)):
        line = Roofline(PLAIN, replace(SMALL, frozen_devices=count), BATCH)
        (row,) = line.batches(Split(1, 1))
        assert row.rewards == pytest.approx(seconds)
        assert row.learn == pytest.approx(3 * operations(8, 16) / 0.5e12)
    assert line.learner_bytes(1)[0] == pytest.approx(16e9)  # without theirs
    assert Roofline(PLAIN, SMALL, BATCH).frozen_seconds() == 0
    few = replace(PLAIN, memory_gb=2.5)
    with pytest.raises(DoesNotFitError, match=r"need 3 GB for their weights, and 1 of model.frozen_devices has 2"):
        Roofline(few, replace(SMALL, frozen_devices=1), BATCH).frozen_seconds()
    assert Roofline(few, replace(SMALL, frozen_devices=2), BATCH).frozen_seconds() > 0


def test_seconds_of_a_generator_worked_by_hand():
    line = Roofline(PLAIN, SMALL, BATCH)
    token = 2 * 10 * 100 * 2  # bytes of keys and values
    prefill = (2e9 + SEEN * 50) * 8 * 100 / 1e12
    traffic = (50 * 2e9 + 32 * 20 * 110 * token) / 50e9
    assert line.generate_seconds(1) == pytest.approx(prefill + traffic + 50 * 0.001)
    # 3 generators: one has 3 prompts, and reads all weights as often.
    traffic = (50 * 2e9 + 12 * 20 * 110 * token) / 50e9
    assert line.generate_seconds(3) == pytest.approx(prefill * 3 / 8 + traffic + 50 * 0.001)
    # Where arithmetic is slower than memory, it counts.
    slow = Roofline(replace(PLAIN, memory_gbs=1e6), SMALL, BATCH)
    assert slow.generate_seconds(1) == pytest.approx(prefill + 32 * 20 * (2e9 + SEEN * 110) / 1e12 + 50 * 0.001)
    # 4 devices share all of it, and sum 2 x 10 times a step what each token has, over all but one of them twice.
    traffic = (50 * 2e9 + 32 * 20 * 110 * token) / 200e9
    summed = 50 * 20 * 0.0001 + 20 * 2 * (3 / 4) * 1000 * 2 * (8 * 100 + 32 * 20) / 10e9
    assert line.generate_seconds(1, devices=4) == pytest.approx(prefill / 4 + traffic + 50 * 0.001 + summed)


def test_completions_run_in_waves_where_their_keys_and_values_have_no_room():
    line = Roofline(PLAIN, SMALL, BATCH)
    completion = 2 * 10 * 100 * 2 * 120  # of mean length: they never hold more together
    whole = line.generate_seconds(1, room=2e9 + 32 * completion)
    waves = line.generate_seconds(1, room=2e9 + 31 * completion)
    assert whole == line.generate_seconds(1)
    assert waves == pytest.approx(whole + 50 / 31 * (2e9 / 50e9 + 0.001))
    with pytest.raises(DoesNotFitError, match="more for a completion, and finds 2 on 2 devices"):
        line.generate_seconds(1, room=1e9, devices=2)
    with pytest.raises(DoesNotFitError, match="a generator needs 2 GB for weights and more for a completion"):
        line.generate_seconds(1, room=2e9)


def test_weights_are_moved_to_generators_elsewhere_and_into_engines_that_take_turns():
    line = Roofline(PLAIN, SMALL, BATCH)
    (apart,) = line.batches(Split(2, 2))
    # The next version waits in the generator's memory, of which 2 GB are then read or written six times.
    assert apart.generate == (pytest.approx(6 * 2e9 / 100e9 + line.generate_seconds(2)),) * 2
    assert apart.unstaged == pytest.approx(2e9 / 4e9 - 6 * 2e9 / 100e9)
    (full,) = Roofline(
        replace(PLAIN, memory_gb=20 / 3), replace(SMALL, activations_gb=0.0), replace(BATCH, longest_prompt=1)
    ).batches(Split(2, 9))
    assert full.generate == (0.5 + line.generate_seconds(2),) * 2, "no room"
    # The learner copies 4 + 2 bytes a parameter in its memory, reads these again for checksums, and gets half of the
    # weights from its other device.
    assert (apart.publish, apart.transfer) == (pytest.approx(8e9 / 100e9 + 0.5 * 2e9 / 10e9), 0.25)
    (turns,) = line.batches(Split(2, 2, in_turn=True))
    assert (turns.generate, turns.publish) == ((0.5 + line.generate_seconds(2),) * 2, 0.0)


def test_each_server_gets_its_copy_from_one_network_card():
    """After the copy to the host, and none waits in a server's memory; 50e9 bytes a second if a recipe says no more."""
    for servers in (1, 3):
        (row,) = Roofline(replace(PLAIN, network_gbs=2.0), SMALL, BATCH).batches(Split(servers, 2))
        assert row.transfer == pytest.approx(0.25 + servers * 1.0)
        assert (row.load, row.unstaged) == (0.5, 0.0)
    (row,) = Roofline(PLAIN, SMALL, replace(BATCH, network=True)).batches(Split(3, 2))
    assert row.transfer == pytest.approx(0.25 + 3 * 2e9 / 50e9)


@pytest.mark.parametrize(
    ("lines", "network", "stages"),
    [
        ("generation: {engine: vllm}", False, True),
        ("generation: {engine: transformers}", False, False),
        ("generation: {engine: vllm, placement: server, urls: ['http://a:1']}", False, False),
        (
            "generation: {engine: vllm, placement: server, urls: ['http://a:1'], weights_transport: network}",
            True,
            False,
        ),
        ("launch: ray\n  generation: {engine: vllm}", False, False),
        ("lora: {rank: 4, publish: adapter}\n  generation: {engine: vllm}", False, False),
    ],
)
def test_a_recipe_says_how_weights_arrive(tmp_path, lines, network, stages):
    path = tmp_path / "recipe.yml"
    models = "algorithm: rloo\nmodel: m\nreward_model: r\ndata: {train: d}\n"
    path.write_text(f"{models}train:\n  staleness: 1\n  {lines}\n")
    recipe = parse(RunConfig, "train", ["--config", str(path)])[0]
    batch = batch_of(WorkloadConfig(prompt_tokens=100.0), recipe)
    assert (batch.network, batch.stages) == (network, stages)
    assert Roofline(PLAIN, SMALL, batch).stages(Split(1, 1)) is stages


def test_weights_wait_in_a_generators_memory_only_if_they_come_while_it_samples():
    """Where training limits, each version comes when its generator waits for it; where sampling does, before."""
    for learn, staleness, seconds in ((1.0, 0, 1 + 10 + 2), (20.0, 1, 20.0), (1.0, 1, 10.0), (9.0, 1, 10.0)):
        work = replace(constant(10.0, learn), unstaged=2.0)
        assert simulate(work, staleness).step_seconds == pytest.approx(seconds)
        taken = [end - start for _, start, end in spans(simulate(work, staleness), "generate")][4:40]
        assert taken == pytest.approx([12.0 if staleness == 0 or learn > 10 else 10.0] * 36)


def test_keys_of_a_pass_are_shown_and_counted():
    """4 completions of 50 tokens have 600 keys for 300 tokens; of longer prompts no more than eight a token."""
    line = Roofline(PLAIN, replace(SMALL, activations_gb=None), replace(BATCH, trained_per_prompt=4))
    update, annotate = line.memory(2, False).update, line.memory(2, False).annotate
    assert (update.tokens, update.keys) == (8 * 150, 8 * 150 * 2)
    assert annotate.keys == 2 * annotate.tokens
    many = replace(line, batch=replace(line.batch, samples_per_prompt=64, longest_prompt=9000))
    assert many.memory(2, False).annotate.keys == 8 * many.memory(2, False).annotate.tokens
    alone = replace(line, model=replace(line.model, bf16=False))
    assert alone.memory(2, False).update.keys == 0


def test_what_does_not_fit_is_refused():
    # 16 bytes of 1e9 weights, 2 of the reference and the reward model's half, and 1 GB of activations: 20 GB.
    assert Roofline(PLAIN, SMALL, BATCH).batches(Split(1, 1))
    with pytest.raises(DoesNotFitError, match="a learner of 1 needs 20 GB on each device, which has 19"):
        Roofline(replace(PLAIN, memory_gb=19), SMALL, BATCH).batches(Split(1, 1))
    assert Roofline(replace(PLAIN, memory_gb=19), SMALL, BATCH).batches(Split(1, 2))
    with pytest.raises(DoesNotFitError, match="a learner of 8 needs 20 GB"):
        Roofline(replace(PLAIN, memory_gb=19), replace(SMALL, strategy="ddp"), BATCH).batches(Split(1, 8))
    with pytest.raises(DoesNotFitError, match=r"3 learners are no groups of 2 \(model.context_parallel\)"):
        Roofline(PLAIN, replace(SMALL, context_parallel=2), BATCH).batches(Split(1, 3))
    with pytest.raises(
        DoesNotFitError, match="a generator needs 2 GB for weights and more for a completion, and finds 1"
    ):
        Roofline(PLAIN, SMALL, BATCH).batches(Split(1, 1, in_turn=True))
    with pytest.raises(DoesNotFitError, match="9 generators are more than the 8 prompts"):
        Roofline(PLAIN, SMALL, BATCH).batches(Split(9, 1))


CHAT = PlanConfig(
    devices=8,
    model=ModelSizeConfig(parameters=8.03e9, layers=32, kv_width=1024, hidden=4096),
    workload=WorkloadConfig(
        prompts=256,
        samples_per_prompt=2,
        prompt_tokens=200,
        response_length=1024,
        response_tokens=400,
        trained_per_prompt=2,
    ),
)
"""8B on 8 H100s."""


def test_the_learners_that_are_proposed_have_room(capsys):
    results = run_plan(CHAT)
    refused = {row["learners"]: row["why_not"] for row in results["choices"] if "why_not" in row}
    assert refused[2] == "a learner of 2 needs 90 GB on each device, which has 72"
    assert sorted(refused) == [1, 2]
    text = capsys.readouterr().out
    assert f"parallel.ranks: {results['best']['learners']}" in text
    assert "GB at its peak, with gradient_checkpointing: selective (annotate " in text


def line_of(**model) -> Roofline:
    return Roofline(CHAT.hardware, replace(CHAT.model, **model), batch_of(CHAT.workload, None))


def test_activations_are_computed_again_only_where_there_is_no_room_for_them():
    assert line_of().recompute(8)
    assert not line_of().recompute(64) or line_of().memory(64, recompute=False).peak() > 72e9
    roomy = Roofline(replace(CHAT.hardware, memory_gb=400), CHAT.model, batch_of(CHAT.workload, None))
    assert not roomy.recompute(8)
    for kept, share, again in ((False, 1.01, False), (False, 0.99, "selective"), ("selective", 0.99, True)):
        needed = share * line_of().phases(8, kept)["update"]  # of what a run would take on such a GPU
        sized = replace(line_of(), hardware=replace(line_of().hardware, memory_gb=needed / 0.8e9))
        assert sized.recompute(8) == again
    assert sized.learn_seconds(8) > roomy.learn_seconds(8)
    assert not line_of(recompute=False).recompute(1)
    assert line_of(recompute=True).recompute(64)
    kept = line_of(recompute="selective")
    assert kept.recompute(64) == "selective"
    assert kept.learn_seconds(8) == line_of(recompute=False).learn_seconds(8) < line_of(recompute=True).learn_seconds(8)


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ({"vocabulary": 50_000}, {}),
        ({"recompute": False}, {"recompute": False, "feed_forward": 28_000}),
        ({}, {"strategy": "zero3"}),
        ({"strategy": "zero2"}, {"strategy": "zero1"}),
        ({"strategy": "zero1"}, {"strategy": "ddp"}),
        ({}, {"value_parameters": 8e9}),
        ({"context_parallel": 4}, {"context_parallel": 2}),
        ({"context_parallel": 2}, {}),
        ({"recompute": True}, {"recompute": False}),
        ({"reward_parameters": 0.0}, {}),
        ({"learner_bytes": 12.0}, {}),
        ({}, {"frozen_bytes": 4.0}),
    ],
)
def test_what_needs_more_memory(smaller, larger):
    few, more = (line_of(**{"recompute": True, **changes}).learner_bytes(8)[1] for changes in (smaller, larger))
    assert few < more


def test_ranks_that_share_rows_take_the_time_of_what_they_exchange():
    """Worked by hand: of 10 blocks, 2 x (1000 queries + 256 keys) x 2 bytes a token, half of which goes elsewhere."""
    one, two = (Roofline(PLAIN, replace(SMALL, context_parallel=size), BATCH) for size in (1, 2))
    token = 10 * 2 * (1000 + 2 * 128) * 2 / 2
    trained, scored = 8 * 100 + 16 * 20, 8 * 100 + 32 * 20
    passes = 2 * trained + scored  # trained on, and those of the reference; the reward model exchanges nothing
    assert two.learn_seconds(4) - one.learn_seconds(4) == pytest.approx(passes * token / (4 * 10e9))
    again = [replace(line, model=replace(line.model, recompute=True)) for line in (one, two)]
    gap = again[1].learn_seconds(4) - again[0].learn_seconds(4)
    assert gap == pytest.approx((passes + trained) * token / (4 * 10e9))
    exact = replace(two, model=replace(two.model, bf16=False, recompute=False, frozen_devices=2))
    alone = replace(exact, model=replace(exact.model, context_parallel=1))
    gap = exact.learn_seconds(4) - alone.learn_seconds(4)
    assert gap == pytest.approx(2 * 8 * 2 * 120 * 2 * token / (4 * 10e9))


def test_a_width_that_is_not_given_follows_from_the_parameters():
    found = shape_of(ModelSizeConfig(parameters=4.05e8, layers=24, kv_width=1024, vocabulary=50_304))
    assert found.hidden == pytest.approx(1024, rel=0.01)
    assert found.feed_forward == round(3.5 * found.hidden)
    assert shape_of(replace(CHAT.model, hidden=None)).hidden == pytest.approx(4096, rel=0.05)
    assert shape_of(replace(CHAT.model, tied=True)).outside == (128_256 + 1) * 4096


def test_a_recipe_says_how_large_passes_are():
    recipe = parse(RunConfig, "train", ["--config", str(RECIPES / "tldr" / "online_dpo_410m.yml")])[0]
    batch = batch_of(WorkloadConfig(prompt_tokens=350), recipe)
    assert (batch.train_rows, batch.annotate_rows, batch.longest_prompt) == (28, 64, 512)  # 14 pairs of full length
    assert batch.rows_of_pass == 40  # 16,384 tokens, of which a row has 403 on average
    own = batch_of(WorkloadConfig(prompt_tokens=350, train_rows=3, annotate_rows=5, longest_prompt=400), recipe)
    assert (own.train_rows, own.annotate_rows, own.longest_prompt) == (3, 5, 400)
    assert own.rows_of_pass == 3


def test_a_recipe_says_what_the_workload_leaves_open():
    recipe = parse(PlanConfig, "plan", ["--run", str(RECIPES / "tldr" / "online_dpo_410m.yml")])[0].run
    results = run_plan(
        PlanConfig(run=recipe, devices=4, model=replace(SMALL, parameters=4e8), workload=WorkloadConfig(prompts=64))
    )
    (at,) = [row for row in results["choices"] if row["generators"] == 1 and row["staleness"] == 1]
    assert at["prompts_per_second"] * at["step_seconds"] == pytest.approx(64)
    whole = run_plan(PlanConfig(run=recipe, devices=4, model=replace(SMALL, parameters=4e8)))
    (at,) = [row for row in whole["choices"] if row["generators"] == 1 and row["staleness"] == 1]
    assert at["prompts_per_second"] * at["step_seconds"] == pytest.approx(512)


# Free generators, publishing beside training, evaluations and one queue


def test_a_free_generator_takes_the_next_request_whatever_its_speed():
    """28 prompts of 1 s by speeds 1, 1, 1, 1/2: at best 8 s, and 14 s if each has a quarter and nothing is in store."""
    times = Scaled(
        [BatchTimes((7.0,) * 4, 0.0, 0.0)],
        Split(4, 1),
        ScalingConfig(generate_fixed=0.0),
        prompts=28,
        workload=WorkloadConfig(prompts=28, prompts_per_request=1),
    )
    row = times.batches(Split(4, 1))[0]
    assert row.generate == pytest.approx((1.0,) * 28)
    assert times.batches(Split(2, 1))[0].generate == row.generate  # whoever takes them
    scaling = ScalingConfig(speeds=[1, 1, 1, 0.5])
    config = PlanConfig(scaling=scaling, workload=times.workload)
    seconds = try_split(times, Split(4, 1), config).outcomes[1].step_seconds
    assert 8.0 <= seconds * (1 + 1e-9) < 8.2
    quarters = replace(times, workload=WorkloadConfig())
    at_once = try_split(quarters, Split(4, 1), PlanConfig(scaling=scaling)).outcomes[0].step_seconds
    assert at_once == pytest.approx(14.0)


def test_an_evaluation_is_as_long_as_its_share_of_a_batch():
    workload = WorkloadConfig(prompts=8, samples_per_prompt=4, eval_completions=16, eval_steps=5)
    times = Scaled([BatchTimes((4.0, 4.0), 1.0, 0.0)], Split(2, 1), ScalingConfig(generate_fixed=0.25), 8, workload)
    assert times.batches(Split(2, 1))[0].evaluate == (4.0 * (0.25 + 0.75 / 2),) * 2
    (row,) = Roofline(PLAIN, SMALL, replace(BATCH, eval_completions=16)).batches(Split(2, 2))
    assert row.evaluate == (Roofline(PLAIN, SMALL, BATCH).sample_seconds(2),) * 2


def test_places_that_ended_answers_leave_are_taken_at_once():
    """Groups of 4 of 16 wait for the longest of 4; in one queue nobody waits, and a step takes as long."""
    workload = WorkloadConfig(
        prompts=8, samples_per_prompt=2, response_length=100, response_tokens=20, in_flight=True, places=4
    )
    work = replace(constant(10.0, 0.0, batches=200), speeds=[1.0])
    queued = one_queue(work, workload, sigma=1.0, seed=0)
    assert {len(units) for units in queued.generate} == {16}
    assert len(queued.speeds) == 4
    rng = np.random.default_rng(0)
    lengths_BR = lengths(rng, (200, 16), 20, 1.0, 100)
    assert lengths_BR.mean() == pytest.approx(20)
    assert lengths_BR.max() == 100
    longest = lengths_BR.reshape(200, 4, 4).max(axis=2).sum(axis=1).mean()  # steps of a batch
    assert queued.generate[3][5] == pytest.approx(lengths_BR[3, 5] * 10.0 / longest)
    outcome = simulate(queued, 2)
    assert outcome.step_seconds == pytest.approx(10.0 * 20 * 4 / longest, rel=0.05)
    assert outcome.generator_idle < 0.05


# What is proposed


def outcome(seconds: float) -> Outcome:
    return Outcome(seconds, 0.0, 0.0, [])


def test_the_smallest_staleness_within_the_tolerance_is_proposed():
    choices = [
        Choice(Split(4, 4, in_turn=True), {0: outcome(1.0)}),
        Choice(Split(1, 3), {0: outcome(3.0), 1: outcome(1.5), 2: outcome(1.31), 3: outcome(1.30)}),
        Choice(Split(2, 2), {0: outcome(2.8), 1: outcome(1.4), 2: outcome(1.32), 3: outcome(1.32)}),
        Choice(Split(3, 1), why_not="too small"),
    ]
    proposal = propose(choices, 0.02, in_turn=False)
    assert (proposal.choice.split, proposal.staleness) == (Split(1, 3), 2)
    assert proposal.speed_up == pytest.approx(1.0 / 1.31)  # against all in turn
    assert propose(choices, 0.0, in_turn=False).staleness == 3
    assert propose(choices, 0.1, in_turn=False).choice.split == Split(2, 2)  # at 1, which is within 10%
    assert propose(choices, 0.02, in_turn=True).choice.split == Split(4, 4, in_turn=True)
    assert propose(choices[3:], 0.02, in_turn=True) is None
    assert propose([choices[0], choices[3]], 0.02, in_turn=False).staleness == 0  # there is nothing else


def test_the_search_tries_every_split_at_every_staleness():
    times = given_times(SecondsConfig(generate=3.0, train=2.0), ScalingConfig(generate_fixed=0, learn_fixed=0), None)
    choices = search(times, 5, PlanConfig(max_staleness=2))
    assert [c.split for c in choices] == [Split(5, 5, in_turn=True), *(Split(g, 5 - g) for g in range(1, 5))]
    assert [c.outcomes.keys() for c in choices] == [{0}, *[{0, 1, 2}] * 4]
    assert choices[0].outcomes[0].step_seconds == pytest.approx(1.0)
    proposal = propose(choices, 0.02, in_turn=False)
    assert (proposal.choice.split, proposal.staleness) == (Split(3, 2), 1)
    assert proposal.outcome.step_seconds == pytest.approx(1.0)


# The command


def plan(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    return ended.value.code


def recipe(name: str) -> PlanConfig:
    return parse(PlanConfig, "plan", ["--config", str(RECIPES / "plan" / f"{name}.yml")])[0]


def estimate(config: PlanConfig, **hardware) -> Roofline:
    return Roofline(replace(config.hardware, **hardware), config.model, batch_of(config.workload, None))


@pytest.mark.parametrize(("name", "billions"), [("mixtral_8x7b_32_gpus", 12.9), ("qwen3_30b_a3b_32_gpus", 3.35)])
def test_of_a_mixture_arithmetic_counts_what_a_token_meets_and_memory_everything(name, billions):
    """The numbers of active parameters are those that the models' makers state: 12.9 and 3.3 billion."""
    config = recipe(name)
    mixture, dense = estimate(config, reduce_gbs=1e9), replace(config, model=replace(config.model, experts_per_token=1))
    assert mixture._active / 1e9 == pytest.approx(billions, rel=0.01)
    dense = estimate(replace(dense, model=replace(dense.model, experts=1)), reduce_gbs=1e9)
    assert dense.learn_seconds(32) / mixture.learn_seconds(32) == pytest.approx(
        dense._active / mixture._active, rel=0.25
    )
    assert mixture.memory(32, True).held() == dense.memory(32, True).held()
    # Few operations and all weights to gather: then the network decides.
    assert estimate(config, reduce_gbs=10).learn_seconds(32) > 3 * mixture.learn_seconds(32)


@pytest.mark.parametrize(("longer", "share"), [(16_384, 1.27), (32_768, 1.54)])
def test_attention_grows_with_the_length(longer, share):
    config = recipe("llama_8b_16k_32_gpus")
    tokens = replace(config.workload, prompt_tokens=1, response_length=longer - 1, response_tokens=longer - 1)
    line = estimate(replace(config, workload=tokens))
    assert line._forward(8.03e9, (0, 1)) / (2 * 8.03e9) == pytest.approx(share, rel=0.01)


def test_the_update_takes_about_as_long_as_others_report():
    """torchtitan trains 5,762 tokens a second and GPU, 6,667 compiled, on 8 H100s; verl needs 111 s, 92 compiled, for
    the 4.8 million tokens of a step. docs/commands/plan.md has the sources.
    """
    whole = WorkloadConfig(prompts=16, samples_per_prompt=1, prompt_tokens=1, response_length=8191, train_rows=2)
    model = replace(recipe("llama_8b_8_gpus").model, reference_parameters=0, reward_parameters=0, recompute=False)
    titan = Roofline(HardwareConfig(), model, batch_of(whole, None))
    assert 5762 < 16 * 8192 / 8 / titan.learn_seconds(8) < 6667
    verl = replace(whole, prompts=4824, prompt_tokens=400, response_length=600)
    step = Roofline(HardwareConfig(), replace(model, recompute=True), batch_of(verl, None))
    assert 92 < step.learn_seconds(8) < 130


def test_zero_3_holds_float32_and_copies_to_compute_with():
    config = recipe("llama_8b_64_gpus")
    fsdp, zero = (
        estimate(replace(config, model=replace(config.model, strategy=name))).memory(8, True)
        for name in ("fsdp", "zero3")
    )
    assert zero.block_whole() == 2 * fsdp.block_whole()
    assert zero.cast_weights() == 2 * 32 * zero.shape.one_block
    assert zero.held() - fsdp.held() == pytest.approx(4 * 8.03e9 / 8 + 4 * 5e8)  # what it updates, and its bucket


def test_a_value_model_is_trained_in_the_same_passes():
    critic = line_of(value_parameters=8.03e9, recompute=True)
    assert critic.learn_seconds(8) > 1.5 * line_of(recompute=True).learn_seconds(8)
    assert critic.learner_bytes(8)[0] == pytest.approx(line_of().learner_bytes(8)[0] + 12 * 8.03e9 / 8)
    ppo = parse(RunConfig, "train", ["--config", str(RECIPES / "tldr" / "ppo_410m.yml")])[0]
    assert batch_of(WorkloadConfig(), ppo).values


def test_devices_of_a_generator_may_be_given(capsys):
    work = replace(recipe("llama_70b_64_gpus").workload, tensor_parallel=8)
    results = run_plan(replace(recipe("llama_70b_64_gpus"), workload=work, batches=24))
    assert {row["tensor_parallel"] for row in results["choices"]} == {8}
    assert all(row["in_turn"] or 8 * row["generators"] + row["learners"] == 64 for row in results["choices"])


def test_in_one_queue_all_places_wait_while_weights_are_loaded():
    workload = WorkloadConfig(prompts=8, samples_per_prompt=2, response_length=100, response_tokens=20, places=4)
    work = replace(constant(10.0, 0.0, batches=200), speeds=[1.0])
    seconds = [simulate(one_queue(work, workload, 0.0, 0, load), 2).step_seconds for load in (0.0, 4.0, 10.0)]
    assert seconds == pytest.approx([10.0, 10.0, 10.0], rel=0.05)  # nothing but the longest is shortened
    shorter = [simulate(one_queue(work, workload, 1.0, 0, load), 2).step_seconds for load in (0.0, 4.0, 10.0)]
    assert shorter == pytest.approx([shorter[0], 4 + 0.6 * shorter[0], 10.0], rel=0.05)


def test_the_command_says_what_to_set_and_writes_it_down(tmp_path, capsys):
    words = ["--seconds.generate=3", "--seconds.score=0.5", "--seconds.train=3.5", "--seconds.publish=0.5"]
    words += ["--devices=2", "--workload.prompts=90", "--max_staleness=2", f"--output_dir={tmp_path}"]
    assert plan(*words) == 0
    text = capsys.readouterr().out
    assert "seconds as given, for 1 generator and 1 learner" in text
    assert (
        "Set staleness: 1, generation.workers: 1 (or so many servers), parallel.ranks: 1: 4.5 s a batch, 20 prompts/s"
        in text
    )
    assert "Training limits: generators idle 33%, learners 0% of the time." in text
    # In turn, on two devices: 3 x 0.65 + 4 x 0.525, and nothing to publish.
    assert "0.90 times as fast as the fastest synchronous choice, 2 devices in turn" in text
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["config"]["seconds"]["train"] == 3.5
    assert {key: written["best"][key] for key in ("generators", "learners", "staleness")} == {
        "generators": 1,
        "learners": 1,
        "staleness": 1,
    }
    seconds = {(row["in_turn"], row["staleness"]): row["step_seconds"] for row in written["choices"]}
    assert seconds[(False, 0)] == pytest.approx(7.5)
    assert seconds[(False, 1)] == pytest.approx(4.5)
    assert seconds[(True, 0)] == pytest.approx(written["synchronous"]["step_seconds"]) == pytest.approx(4.05)
    events = json.loads((tmp_path / "trace.json").read_text())
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tracks == {"learner", "generator 0"}
    (learn,) = [e for e in events if e["name"] == "learn" and e["args"]["batch"] == 1]
    assert (learn["ts"], learn["dur"]) == (3.5e6, 4e6)


def test_the_command_reads_a_run_and_shows_its_own_error(tmp_path, capsys):
    work = draw([BatchTimes((2.0,), 1.8, 0.05)], VariationConfig(0.2, 0.2), 60, seed=2)
    write_run(tmp_path / "run", work, 1)
    assert plan("--run", str(tmp_path / "run")) == 0
    text = capsys.readouterr().out
    assert "55 batches" not in text
    assert "54 batches measured with 1 generator and 1 learner at staleness 1" in text
    off = float(text.split("simulated,")[1].split("(")[1].split("%")[0])
    assert abs(off) < 5
    assert "num_threads" not in text
    write_run(tmp_path / "uneven", draw([BatchTimes((2.0,), 0.4, 0.05)], VariationConfig(0.2, 0.2), 60, seed=2), 1)
    (tmp_path / "uneven" / "environment.json").write_text('[{"async_rlhf": {}, "device": "cpu", "ranks": 1}]')
    sizes = "output_dir: x, staleness: 1, num_threads: 4, generation: {num_threads: 4}"
    recipe = f"algorithm: grpo\nmodel: m\nreward_model: r\ndata: {{train: d}}\ntrain: {{{sizes}}}\n"
    (tmp_path / "uneven" / "run.yml").write_text(recipe)
    assert plan("--run", str(tmp_path / "uneven")) == 0
    text = capsys.readouterr().out
    assert "On one CPU: The learner waits for the other side: with generation.num_threads 6 and num_threads 2" in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "run: got None; must be the folder of a run"),
        (["--run=nowhere"], "run: got 'nowhere'; must be the output folder of a run, or the YAML file of one"),
        (["--run=RUN"], "must be the output folder of a run, with its metrics.jsonl"),
        (["--seconds.generate=3"], "seconds.generate: got 3.0; must be given together with train"),
        (["--seconds.generate=-1", "--seconds.train=1"], "generate: got -1.0; must be above 0"),
        (["--seconds.generate=1", "--seconds.train=1", "--run=RUN"], "must be a YAML file, or null, with seconds"),
        (["--model.parameters=1e9"], "model.layers: got 0; must be at least 1 with model.parameters"),
        (["--model.parameters=1e9", "--model.layers=2", "--model.kv_width=9"], "devices: got None; must be given"),
        (
            ["--model.parameters=1e9", "--model.layers=2", "--model.kv_width=9", "--devices=2"],
            "workload.prompts: got None; must be given with model.parameters",
        ),
        (["--scaling.generate_fixed=2"], "scaling.generate_fixed: got 2.0; must be at most 1: a share of the time"),
        (["--hardware.train_mfu=0"], "hardware.train_mfu: got 0.0; must be above 0 and at most 1"),
        (["--batches=20"], "batches: got 20; must be at least 40"),
        (["--overlap_slowdown=0.5"], "overlap_slowdown: got 0.5; must be at least 1"),
        (["--variation.learn=-1"], "learn: got -1.0; must be at least 0"),
        (["--model.experts_per_token=2"], "model.experts_per_token: got 2; must be at most the 1 experts of a block"),
        (["--model.experts=8"], "model.hidden: got None; must be given with model.experts"),
    ],
)
def test_bad_input_is_named(tmp_path, capsys, words, named):
    assert plan(*(word.replace("RUN", str(tmp_path)) for word in words)) == 2
    assert named in capsys.readouterr().err


def test_a_model_that_fits_nowhere_is_an_error_that_says_what_it_lacks():
    with pytest.raises(ConfigError, match=r"devices: got 2; no split is possible: .*a learner of 1 needs 191 GB"):
        run_plan(
            PlanConfig(
                devices=2,
                model=ModelSizeConfig(parameters=8e9, layers=32, kv_width=1024, frozen_bytes=3),
                workload=WorkloadConfig(prompts=8, samples_per_prompt=2, prompt_tokens=10, response_length=10),
            )
        )


def test_a_run_of_too_few_batches_is_refused(tmp_path):
    write_run(tmp_path / "run", constant(1.0, 1.0, batches=9), 1)
    with pytest.raises(ConfigError, match="has logged 9 batches; must be at least 10: the first 4"):
        read_run(tmp_path / "run", warm_up=4)


PROPOSED = {
    "llama_8b_8_gpus": ("parallel.ranks: 7, generation.vllm.gpu_memory_utilization: 0.76: ", "tensor_parallel"),
    "llama_70b_32_gpus": ("parallel.ranks: 28, generation.vllm.tensor_parallel_size: 4: ", "in_flight"),
    "llama_70b_64_gpus": ("parallel.ranks: 40, generation.vllm.tensor_parallel_size: 8: ", "in_flight"),
    "llama_8b_16k_32_gpus": ("generation.in_flight: true, ", "tensor_parallel"),
}
"""What is proposed for a recipe, and what is not: several devices and one queue only where they are needed."""


PLANS = sorted((RECIPES / "plan").glob("*.yml"))


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[pytest.mark.rare] * (path.stem not in PROPOSED)) for path in PLANS]
)
def test_the_recipes_are_plans(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(RECIPES.parent)
    config, _ = parse(PlanConfig, "plan", ["--config", str(path)])
    if config.run is not None and not config.run.endswith(".yml"):  # a run that a user has made
        write_run(tmp_path / "run", constant(1.0, 1.2), 1)
        config = replace(config, run=str(tmp_path / "run"))
    results = run_plan(replace(config, batches=8 * (config.max_staleness + 1)))
    open_to = [row for row in results["choices"] if "step_seconds" in row and (config.in_turn or not row["in_turn"])]
    fastest = min(row["step_seconds"] for row in open_to)
    assert 0 < results["best"]["step_seconds"] <= fastest * (1 + config.tolerance)
    assert not math.isnan(results["best"]["speed_up"])
    text = capsys.readouterr().out
    said, unsaid = PROPOSED.get(path.stem, ("Set staleness: ", "\0"))
    assert said in text, text
    assert unsaid not in text, text


def test_the_planner_knows_how_large_a_chunk_of_the_head_is():
    assert (memory._CHUNK_BYTES, memory._LEAST_ROWS) == (head.CHUNK_BYTES, head.LEAST_ROWS_ON_GPU)


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({}, (16, 64)),
        ({"per_device_train_batch_size": 3, "annotate_batch_size": 5}, (6, 5)),
        ({"max_tokens_per_pass": 700, "annotate_max_tokens": 300}, (7, 3)),
        ({"max_tokens_per_pass": 50, "annotate_max_tokens": 50}, (2, 1)),
        ({"max_tokens_per_pass": 700, "per_device_train_batch_size": 1}, (2, 64)),
        ({"max_tokens_per_pass": "auto", "annotate_max_tokens": "auto"}, (2, 1)),
    ],
)
def test_rows_of_a_pass_are_those_of_the_recipe(keys, rows):
    """Pairs of rows of at most 100 tokens."""
    generation = GenerationConfig(response_length=40)
    train = OnlineDPOConfig(max_prompt_length=60, generation=generation, batches=1, **keys)
    train = with_least(train, rows_per_unit=2)
    workload = _workload(RunConfig(model="m", data=DataConfig(train="d"), reward_funcs=["m:f"], train=train))
    assert (workload.train_rows, workload.annotate_rows) == rows
