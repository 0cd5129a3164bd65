"""What the learner's own code holds at its peak, and what the planner says of it."""

from __future__ import annotations

from dataclasses import replace

import planted_leaks
import pytest
from memory import CASES, PHASES, llama, phases, planned
from shared_prompts import SharedCase, measure_kernel, planned_with_keys
from tiny import rare, rare_unless

from async_rlhf.studies.plan.command import run_plan
from async_rlhf.studies.plan.config import ModelSizeConfig, PlanConfig, WorkloadConfig

CLOSE = 0.1
GRID = [
    "1.4B, DDP on 4",
    "1.4B, DDP on 4, all activations",
    "8B, FSDP on 4",
    "8B, FSDP on 8, products kept",
    "8B, FSDP on 8, all activations",
    "8B, FSDP on 4, rows of 131,072 on 4",
    "70B, FSDP on 32",
]
WIDE = CASES["8B, FSDP on 4"].of_depth(4)
"""The widths of 8B with few layers."""


def require_agreement(case, found) -> None:
    plan = planned(case).phases()
    off = {phase: plan[phase] / found[phase].total - 1 for phase in PHASES}
    assert all(abs(share) <= CLOSE for share in off.values()), off


@pytest.mark.parametrize("name", rare_unless(lambda i: i in (0, 5, 6), [(name,) for name in GRID]))
def test_the_planner_agrees_with_what_the_learner_holds(of_all_layers, name):
    require_agreement(CASES[name], phases(of_all_layers(CASES[name])))


@pytest.mark.parametrize("name", [GRID[1], rare(GRID[2])])
def test_few_layers_tell_of_more_to_the_byte(measured, of_all_layers, name):
    case = CASES[name].of_depth(6)
    whole, line = measured(case), of_all_layers(case)
    for part, peak in line.items():  # DDP frees a norm's gradient at moments of its own
        assert peak.total == pytest.approx(whole[part].total, rel=1e-5), part
    highest = {phase: peak.total for phase, peak in phases(whole).items()}
    assert {phase: peak.total for phase, peak in phases(line).items()} == highest


def test_what_is_held_all_the_time_is_as_it_must_be(measured):
    """4 bytes a weight, 4 a gradient, 8 for AdamW, over the ranks; and every byte has a kind."""
    shared = planned(WIDE).shape.parameters / WIDE.ranks
    found = measured(WIDE)
    for peak in found.values():
        assert sum(peak.kinds.values()) == peak.total
        assert peak.kinds["weights"] == 4 * shared
        assert 8 * shared <= peak.kinds["optimiser"] <= 8 * shared + 1000  # and each parameter's number of steps
    assert found["step"].kinds["gradients"] == 4 * shared
    assert found["publish"].kinds.get("gradients", 0) == 0
    rounded = 2 * WIDE.model.vocab_size * WIDE.model.hidden_size
    norm = 2 * WIDE.model.hidden_size  # the tensor before, which goes when this one is whole
    # This rank's share of the head, rounded, and the whole.
    assert found["publish"].kinds["gathered"] == rounded // WIDE.ranks + rounded + norm


def test_a_planted_leak_is_found_where_without_it_all_is_well(measured):
    require_agreement(WIDE, phases(measured(WIDE)))
    for leak, phase in (
        (planted_leaks.logits_are_kept, "update"),
        (planted_leaks.gathered_weights_are_kept, "publish"),
    ):
        found = phases(measured(WIDE, leak))
        assert found[phase].total > (1 + CLOSE) * planned(WIDE).phases()[phase]
        with pytest.raises(AssertionError):
            require_agreement(WIDE, found)


def test_8b_on_8_gpus_is_planned_with_learners_that_fit(of_all_layers):
    """The largest number that it refuses does not fit, the next does, by the measurement too."""
    case = CASES["8B, FSDP on 4"]
    sizes = {"prompt_tokens": case.prompt, "response_length": case.response, "annotate_rows": case.annotate_rows}
    model = ModelSizeConfig(parameters=8.03e9, layers=32, kv_width=1024, hidden=4096)
    workload = WorkloadConfig(prompts=256, samples_per_prompt=2, response_tokens=400, trained_per_prompt=2, **sizes)
    results = run_plan(PlanConfig(devices=8, model=model, workload=workload))
    refused = {row["learners"]: row["why_not"] for row in results["choices"] if "why_not" in row}
    assert all("a learner of" in why for why in refused.values())
    most = max(refused)
    for learners, fits in ((most, False), (most + 1, True)):
        found = phases(of_all_layers(replace(case, ranks=learners)))
        assert (max(peak.total for peak in found.values()) <= 72e9) == fits, learners


def test_8_rows_of_4096_tokens_a_pass_fit_8b_on_8_gpus_of_80_gb(of_all_layers):
    case = CASES["8B, FSDP on 8, rows of 4,096"]
    assert (case.rows, case.prompt + case.response) == (8, 4096)
    found = phases(of_all_layers(case))
    require_agreement(case, found)
    assert max(peak.total for peak in found.values()) < 0.9 * 80e9


@pytest.mark.parametrize("checkpointing", rare_unless(lambda i: i == 1, [(False,), (True,), ("selective",)]))
def test_keys_that_samples_of_a_prompt_share_are_copied_for_the_kernel_as_planned(measured, checkpointing):
    """64 samples of a prompt of 8,064 tokens: far more keys than a pass may have, so that they decide its peak."""
    case = SharedCase(llama(4), 4, rows=64, prompt=8064, response=128, checkpointing=checkpointing, passes=1)
    found, memory = phases(measured(case, measure_kernel)), planned(case)
    plan = planned_with_keys(case, memory)
    assert abs(plan["update"] / found["update"].total - 1) <= CLOSE
    assert abs(plan["annotate"] / found["annotate"].total - 1) <= CLOSE
    assert planned_with_keys(case, memory, keys=0)["update"] < (1 - CLOSE) * found["update"].total
