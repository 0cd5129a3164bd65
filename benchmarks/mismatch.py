"""What comparing the engine with the learner costs, by the planner's formulas: a share of the learner's time.

    python benchmarks/mismatch.py

Before: 8 completions of every batch, and a snapshot loaded for them. After: `generation.mismatch_steps: auto`. GPUs are
the planner's default (H100); a core of a CPU does 0.05e12 operations a second. A batch is 1,024 completions of 200 +
1,000 tokens, all trained on (1.3M: 48 of 16 + 64); reference and reward model are as large as the policy. At S = 0 the
generator's weights are the policy's own, float32; at S = 1 those of a GPU are bfloat16.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

from smallest import parse

from async_rlhf.generation.audit import share, steps_for
from async_rlhf.studies.plan.config import HardwareConfig, ModelSizeConfig
from async_rlhf.studies.plan.roofline import Batch, Roofline

COMPARED = 8
CORE = HardwareConfig(name="a core", tflops=0.05, weights_gbs=2.0)


class Case(NamedTuple):
    """A run."""

    name: str
    parameters: float
    ranks: int
    hardware: HardwareConfig = HardwareConfig()
    rows: int = 1024
    prompt: int = 200
    response: int = 1000
    snapshot_bytes: float = 2.0


CASES = [
    Case("1.3M, one core", 1.3e6, 1, CORE, 48, 16, 64, 4.0),
    Case("1B, 1 GPU", 1e9, 1),
    Case("8B, 8 GPUs", 8e9, 8),
    Case("70B, 64 GPUs", 70e9, 64),
]


def figures(case: Case, loads: bool) -> tuple[float, int]:
    """The share of a batch's computing that a comparison takes, and the batches between two."""
    tokens, loaded = case.prompt + case.response, case.snapshot_bytes if loads else 0.0
    batch = Batch(case.rows, 1, case.prompt, case.response, case.response, 1, 1, 1, case.prompt, 8, 64, False)
    model = ModelSizeConfig(case.parameters, 32, 1024)
    seconds = Roofline(case.hardware, model, batch).learn_seconds(case.ranks)
    updates = Roofline(case.hardware, replace(model, reference_parameters=0, reward_parameters=0), batch)
    one = share(case.rows, COMPARED, tokens, case.ranks, loaded, "cpu" if case.hardware is CORE else "cuda")
    alone = updates.learn_seconds(1) / case.ranks
    return one * alone / seconds, steps_for(one)


def main() -> None:
    parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    print("| model | S | before: every batch | `mismatch_steps` | after |\n|---|---|---|---|---|")
    for case in CASES:
        for staleness in (0, 1):
            before, _ = figures(case, loads=True)
            each, steps = figures(case, loads=staleness > 0)
            print(f"| {case.name} | {staleness} | {before:.2%} | {steps} | {each / steps:.2%} |")


if __name__ == "__main__":
    main()
