"""Bugs that others have reported (docs/fail_loudly.md), planted here one by one: how each becomes known, and when."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import planted_faults
import pytest
import torch
from planted import Fault, planted
from planted_faults import PARAMS, HereGenerator, answered_by, batches_until_found, each, peaked_policy, prompts_of
from test_episodes import episode_args
from test_episodes import run_trainer as play
from test_laws import accumulated_gradients, require_same, run_trainer
from tiny import all_drawn, answered

from async_rlhf import GenerationConfig, GRPOConfig, LoRAConfig, OffPolicyConfig
from async_rlhf.config import ConfigError
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.episodes.episode import Episode
from async_rlhf.generation.protocol import GeneratorError
from async_rlhf.generation.worker import build_handler
from async_rlhf.models.adapters import add_adapters
from async_rlhf.models.publish import SnapshotRing
from async_rlhf.run.schedule import RolloutSchedule, StaleWeightsError
from async_rlhf.studies.diff.command import run_diff
from async_rlhf.studies.diff.config import DiffConfig
from async_rlhf.system.trace import Trace

RUNS = (f"run_{number}" for number in count())
"""Names of folders."""


def require_known(
    act: Callable[[], object], bug: AbstractContextManager[object], error: type[Exception], message: str
) -> None:
    """Nothing is raised without the bug, and just this with it."""
    act()
    with bug, pytest.raises(error, match=message):
        act()


# What an engine returns


def shifted(patch, engine):
    """One log-probability is missing, and the list was filled up."""
    answered_by(patch, engine, each(lambda one, k: one._replace(logprobs=(*one.logprobs[1:], 0.0))))


def begun_twice(patch, engine):
    """Prompts get a second token of the kind that begins a text."""
    generate = engine.generate

    def generate_from_more(prompts, progress=None):
        return answered(prompts, all_drawn(generate([replace(p, tokens=(256, *p.tokens)) for p in prompts])))

    patch.setattr(engine, "generate", generate_from_more)


def ended(patch, engine):
    """Each answer counts as ended, as if the end token in the prompt were its own."""
    answered_by(patch, engine, each(lambda one, k: one._replace(finish_reason="stop")))


OTHER = "the engine has the weights of version 0, but computes other log-probabilities with them"
ENDED = "finish_reason is 'stop' and the last token"


@pytest.mark.parametrize("counter_based", [True, False])
@pytest.mark.parametrize(
    ("plant", "message"),
    [(planted_faults.unscaled, OTHER), (shifted, OTHER), (begun_twice, OTHER), (ended, ENDED)],
    ids=["temperature", "off_by_one", "begun_twice", "cut_off"],
)
def test_what_an_engine_returns_is_checked_in_the_first_batch(plant, message, counter_based):
    """A temperature that is missing, log-probabilities off by one, two tokens that begin, answers that were cut off."""

    def found(do: Callable[..., None], batches: int) -> tuple[int | None, str]:
        return batches_until_found(planted_faults.Fault("", "", do, 1, 1), counter_based, batches)

    assert found(lambda patch, engine: None, 2) == (None, "")
    batch, told = found(plant, 1)
    assert batch == 1
    assert message in told


def test_a_temperature_that_the_learner_leaves_out_moves_ratios_that_are_one(
    make_policy, tokenizer, prompts, make_args
):
    """With the very weights that sampled. The run itself goes on: its metrics say so."""
    sizes = {"total_episodes": 8, "per_device_train_batch_size": 8, "num_mini_batches": 1, "samples_per_prompt": 2}

    def require_one():
        args = make_args(next(RUNS), algorithm="grpo", **sizes)
        assert run_trainer(make_policy, tokenizer, prompts, args)[1][0]["val/ratio_max"] < 1.0001

    fault = Fault("learner.learner:Learner._backward", "config.generation.temperature,", "1.0,")
    require_known(require_one, planted(fault), AssertionError, r"assert 1[.]\d+ < 1[.]0001")


# Weights


def test_adapters_that_are_never_delivered_are_found_by_the_probe_of_version_10():
    """The frozen weights are published again and again, and generators prove that they have loaded them."""
    assert GenerationConfig().probe_steps == 10
    seen = list[int]()

    def twelve_batches():
        policy, generator = add_adapters(peaked_policy(), LoRAConfig(rank=2), seed=0), torch.Generator().manual_seed(0)
        adapters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        with closing(HereGenerator(policy, True)) as here, torch.no_grad():
            here.config, here.publisher._probe_steps = replace(here.config, probe_steps=10), 10
            for batch in range(1, 13):
                here.publish(policy, batch - 1)
                seen.append(here.sample(batch).version)
                for parameter in adapters:
                    parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator))

    fault = Fault("models.adapters:_merged", "sum(deltas, numbers(weight))", "numbers(weight)")
    message = "holds the weights of version 10, but computes other log-probabilities with them: .* on the probe"
    require_known(twelve_batches, planted(fault), GeneratorError, message)
    assert seen == [*range(12), *range(10)]


class Roomy(HereGenerator):
    """Keeps one version more than the schedule needs, as runs with evaluations do."""

    def prepare(self, config, policy):
        ring = SnapshotRing.for_model(policy, torch.float32, 2)
        spec = ModelSpec(type(policy), policy.config, torch.float32, "cpu")
        self.handler = build_handler(spec, PARAMS, ring, heartbeat=lambda: None)
        return ring, 1


def test_staleness_0_that_is_one_step_off_stops_the_run():
    def two_batches():
        policy, prompts = peaked_policy(), SimpleNamespace(batch=lambda index, size: prompts_of(index))
        with closing(Roomy(policy, True)) as here:
            rollouts = RolloutSchedule(here, prompts, batch_size=16, num_batches=2, staleness=0, trace=Trace())
            rollouts.publish(policy, 0)
            for batch in rollouts:
                rollouts.publish(policy, batch.index)

    fault = Fault("run.schedule:batches_for", "first = ", "staleness += 1\n    first = ")
    message = r"batch 2 must be sampled by version 1 \(staleness 0\); its tokens come from version 0"
    require_known(two_batches, planted(fault), StaleWeightsError, message)


# Episodes


def test_observations_that_count_as_sampled_are_refused(tmp_path, tokenizer, prompts):
    fault = Fault(
        "generation.episodes.episode:Episode.sample", "sampled[span], logprobs", "sampled[self._opening :], logprobs"
    )

    def one_batch():
        play(tokenizer, prompts, episode_args(tmp_path, next(RUNS), {"response_length": 40}, total_episodes=8))

    message = r"the engine answered batch 1 wrongly: .*token \d+ is the stop token \d+, and \d+ follow it"
    require_known(one_batch, planted(fault), GeneratorError, message)


def test_turns_that_are_tokenised_again_are_refused(tmp_path, tokenizer, prompts):
    turn = Episode.turn

    def encoded_again(episode):
        asked = turn(episode)
        text = tokenizer.decode(list(asked.tokens))
        return replace(asked, past=None, tokens=tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))

    def one_batch():
        play(tokenizer, prompts, episode_args(tmp_path, next(RUNS), total_episodes=8))

    message = r"the engine answered batch 1 wrongly: .*the answer before token \d+ ends with \d+; stop tokens are"
    require_known(one_batch, mock.patch.object(Episode, "turn", encoded_again), GeneratorError, message)


# Data


def test_a_resume_that_repeats_data_is_named_by_diff(make_policy, tokenizer, prompts, make_args, capsys):
    def told(bug: AbstractContextManager[object]) -> str:
        whole, part = (make_args(next(RUNS), total_episodes=32) for _ in range(2))
        run_trainer(make_policy, tokenizer, prompts, whole)
        run_trainer(make_policy, tokenizer, prompts, part, stop_after=2)
        with bug:
            run_trainer(make_policy, tokenizer, prompts, replace(part, resume=True))
        with suppress(SystemExit):
            run_diff(DiffConfig([whole.output_dir, part.output_dir]))
        return capsys.readouterr().out

    right, wrong = (f"self.prompts.batch({index}, " for index in ("index", "index - 1"))
    fault = Fault("run.schedule:RolloutSchedule.publish", right, wrong)
    assert "EQUAL" in told(nullcontext())
    assert "THEY PART in batch 3; what differs first: prompts" in told(planted(fault))


# The loss


def test_a_loss_that_depends_on_the_size_of_passes_breaks_the_law_of_micro_batches(
    make_policy, tokenizer, prompts, make_args
):
    def compare_sizes():
        found = []
        for rows, accumulated in ((8, 1), (3, 3)):
            sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated}
            sizes |= {"total_episodes": rows * accumulated, "num_mini_batches": 1, "samples_per_prompt": 2}
            args = make_args(algorithm="grpo", max_grad_norm=0.0, **sizes)
            found.append(accumulated_gradients(make_policy, tokenizer, prompts, args, "grpo"))
        require_same(found[1], found[0])

    wrong = "loss.loss_sum / micro_batch.loss_weights_U.sum() / len(passes) if"
    fault = Fault("learner.learner:Learner._backward", "loss.loss_sum / weight if", wrong)
    require_known(compare_sizes, planted(fault), AssertionError, "Tensor-likes are not close")


def test_a_ratio_that_cannot_be_clipped_breaks_the_oracle_of_the_loss(monkeypatch):
    """Old log-probabilities are those of the policy that is being trained."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "unit")
    oracles = import_module("test_policy_objectives")
    wrong = "return output.logprobs_BT.detach()"
    right = f"{wrong} if rows.old_logprobs_BT is None else rows.old_logprobs_BT"
    fault = Fault("algorithms.policy:_old_logprobs", right, wrong)
    require_known(
        lambda: oracles.test_loss_and_metrics_are_their_formulas("grpo"), planted(fault), AssertionError, "grpo"
    )


CUT_OFF = (
    'penalty_reward_value: got 1.0; must be at most 0 with non_eos_penalty "add": what is cut off would be rewarded'
)
REFUSED = {
    "off_policy.importance: got 'truncated'; must be \"none\" with generation.top_p below 1 or generation.top_k": {
        "generation": GenerationConfig(top_p=0.9)
    },
    "off_policy.old_logprobs: got 'behaviour'; must be \"proximal\" with generation.top_p below 1": {
        "generation": GenerationConfig(top_k=50),
        "off_policy": OffPolicyConfig(old_logprobs="behaviour"),
    },
    "cliprange: got 1.0; must be below 1": {"cliprange": 1.0},
    CUT_OFF: {"non_eos_penalty": "add", "penalty_reward_value": 1.0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_configuration_that_would_be_wrong_in_silence_is_refused(message):
    GRPOConfig()
    with pytest.raises(ConfigError, match=re.escape(message)):
        GRPOConfig(**REFUSED[message])
