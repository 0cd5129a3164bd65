"""How often an engine is compared with the learner, and that this costs as little as is promised."""

from __future__ import annotations

import pytest
import torch
from tiny import count_letters

from async_rlhf.generation.audit import FIRST, MOST, Comparisons, rows_of_batch, share, steps_for, steps_of
from async_rlhf.models.snapshots import SnapshotRing
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.studies.plan.config import HardwareConfig, ModelSizeConfig
from async_rlhf.studies.plan.roofline import Batch, Roofline


@pytest.mark.parametrize("rows", [8, 64, 1024, 16_384])
@pytest.mark.parametrize("ranks", [1, 8, 256])
@pytest.mark.parametrize("parameters", [1.3e6, 1e9, 8e9, 70e9])
def test_by_the_planner_comparing_takes_less_than_half_a_percent_of_a_batch(rows, ranks, parameters):
    """At every size; and one batch less between two comparisons would be too many."""
    prompt, response = 200, 1000
    batch = Batch(rows, 1, prompt, response, response, 1, 1, 1, prompt, 8, 64)
    model = ModelSizeConfig(parameters, 32, 1024, reference_parameters=0, reward_parameters=0, recompute=False)
    seconds = Roofline(HardwareConfig(), model, batch).learn_seconds(ranks)
    forward = 2 * parameters * 8 * (prompt + response) / (989e12 * 0.5)
    loading = 2.0 * parameters / (10e9)
    steps = steps_for(share(rows, 8, prompt + response, ranks, 2.0, "cuda"))
    assert (forward + loading) / steps <= MOST * seconds
    if ranks == 1:  # else summing gradients takes time as well
        assert steps == 1 or (forward + loading) / (steps - 1) > MOST * seconds


def test_the_share_is_that_of_the_formula():
    # A weight: forward 2 x 4 x 10 operations at half of 989e12 a second, update 6 x 16 x 10 at 0.4 of it, loaded 2
    # bytes at 10e9 a second.
    forward, update = 80 / (0.5 * 989e12), 960 / (0.4 * 989e12)
    assert share(16, 4, 10, 1, 0.0, "cuda") == pytest.approx(forward / update)
    assert share(16, 4, 10, 1, 2.0, "cuda") == pytest.approx((forward + 2 / 10e9) / update)
    assert share(16, 4, 10, 4, 0.0, "cuda") == pytest.approx(4 * forward / update)


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_first_batches_are_compared_and_then_every_nth(steps, staleness):
    compared = Comparisons(steps, staleness)
    batches = [batch for batch in range(1, 60) if compared.has(batch)]
    first = FIRST + staleness
    assert batches[:first] == list(range(1, first + 1))
    assert batches[first:] == [batch for batch in range(first + 1, 60) if batch % steps == 0]
    assert [compared.number(batch) for batch in batches] == list(range(1, len(batches) + 1))
    looked_at = {row for batch in batches for row in rows_of_batch(compared.number(batch), 96, 8)}
    assert looked_at == set(range(96)) or len(batches) < 12


def test_the_configuration_decides_or_its_sizes_do(make_args):
    def steps(ranks=1, on_gpu=True, samples=8, **changes):
        generation = {"placement": "process", "mismatch_samples": samples, **changes.pop("generation", {})}
        args = make_args(generation=generation, num_mini_batches=1, **{"per_device_train_batch_size": 512, **changes})
        return steps_of(args, 2, ranks, torch.device("cuda" if on_gpu else "cpu"))

    assert steps(generation={"mismatch_steps": 7}, total_episodes=5120) == 7
    large = {"staleness": 1, "total_episodes": 5120}
    assert steps(**large, on_gpu=False) == steps_for(share(1024, 8, 44, 1, 4.0, "cpu"))
    assert steps(**large) == steps_for(share(1024, 8, 44, 1, 4.0, "cuda"))
    assert steps(**large, ranks=8) > steps(**large)
    assert steps(**large, generation={"dtype": "bfloat16"}) == steps_for(share(1024, 8, 44, 1, 2.0, "cuda"))
    synchronous = {"staleness": 0, "total_episodes": 5120}
    assert steps(**synchronous) == steps_for(share(1024, 8, 44, 1, 0.0, "cuda"))
    assert steps(**synchronous, generation={"placement": "inline"}) == steps(**synchronous)


@pytest.mark.parametrize(("staleness", "dtype", "loads"), [(0, "float32", 0), (0, "bfloat16", 2), (1, "float32", 1)])
def test_weights_that_the_policy_still_has_are_not_loaded(
    make_policy, tokenizer, prompts, make_args, monkeypatch, staleness, dtype, loads
):
    """With staleness 1 only those of the first batch; rounded ones are others."""
    views, read = SnapshotRing.views, []
    monkeypatch.setattr(SnapshotRing, "views", lambda ring, version: read.append(version) or views(ring, version))
    generation = {"placement": "process", "mismatch_steps": 1, "dtype": dtype}
    args = make_args(generation=generation, staleness=staleness, total_episodes=16)
    OnlineTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer).train()
    published = 2 * 2 if staleness == 0 else 2 * 1  # versions, each written and read back for its digests
    assert len(read) == published + loads
