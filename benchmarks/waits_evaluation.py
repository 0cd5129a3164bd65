"""What an evaluation every 10 batches costs, where generator and learner have devices of their own.

    python benchmarks/waits_evaluation.py [--json] [--batches 24]

The real trainer with one generator process, at staleness 1, on models that sleep as long as a device would compute
(benchmarks/waiting.py): the learner is the slower side, and the generator has nothing to do for a part of each batch.
The same run three times: without evaluations, with evaluations by the generator, and by the learner, which samples
itself while everything else waits. Seconds per batch, after the first four:

    wall      start to start, all logging included
    sampling  of the batches alone, not of the evaluations
    training  score, annotate, update
    ratio     wall / max(sampling, training): 1 is an evaluation for nothing
    waited    of the learner for the generator
    predicted wall by async-rlhf plan, from the times of the run without evaluations
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import waits
import workload
from transformers import PreTrainedModel

from async_rlhf import OnlineConfig
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.studies.plan.config import WorkloadConfig
from async_rlhf.types import Group, Prompt

EVERY, RESPONSE_TOKENS = 10, 24
SMALLEST = {"batches": 12, "prompts": 2}
KINDS = ("none", "generators", "learner")


@contextmanager
def by_the_learner() -> Iterator[None]:
    """Evaluations as they are where nobody else can sample: at once, and everything else waits."""
    asked: dict[int, tuple[Sequence[Prompt], SamplingParams]] = {}
    publish, models = ProcessGenerator.publish, []

    def note(self: Any, policy: PreTrainedModel, version: int) -> None:
        models[:] = [policy]
        publish(self, policy, version)

    def submit(self: Any, version: int, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        asked[version] = prompts, params

    def collect(self: Any, version: int) -> tuple[Group, ...]:
        prompts, params = asked.pop(version)
        engine = TransformersEngine(models[0], params, version)
        return tuple(Group(p, c) for p, c in zip(prompts, engine.generate(prompts), strict=True))

    with (
        patch.object(OnlineConfig, "evaluation_delay", property(lambda config: 0)),
        patch.multiple(ProcessGenerator, publish=note, submit_evaluation=submit, collect_evaluation=collect),
    ):
        yield


def run(kind: str, batches: int, prompts: int) -> dict[str, float]:
    """Seconds of each phase of a batch, means over those after the warm-up."""
    evaluates, size = kind != "none", 2 * prompts
    options = {
        **{"staleness": 1, "batches": batches, "samples_per_prompt": 2, "completions_per_batch": size},
        **{"per_device_train_batch_size": size, "num_epochs": 2, "eval_steps": EVERY if evaluates else 0},
    }
    with by_the_learner() if kind == "learner" else nullcontext():
        held = workload.prompts()[:size] if evaluates else None
        found = waits.waiting_run("grpo", RESPONSE_TOKENS, options, eval_dataset=held)
    evaluations = sum("eval_objective/scores" in line for line in found.logs)
    assert evaluations == (batches // EVERY + 1 if evaluates else 0)
    return found.mean_times()


def figures(mean: dict[str, float], predicted: float) -> dict[str, float]:
    """What is shown of a run."""
    sampling, training = mean["generate"], mean["score"] + mean["annotate"] + mean["train"]
    shown = {"wall": mean["batch"], "sampling": sampling, "training": training, "waited": mean["wait"]}
    return {**shown, "ratio": mean["batch"] / max(sampling, training), "predicted": predicted}


def measure(batches: int = 24, prompts: int = 32) -> dict[str, dict[str, float]]:
    """By who evaluates. An evaluation has as many completions as a batch."""
    found = {kind: run(kind, batches, prompts) for kind in KINDS}
    size = WorkloadConfig(prompts, 2)
    evaluated = replace(size, eval_completions=2 * prompts, eval_steps=EVERY)
    none = waits.seconds_of(found["none"], score=found["none"]["score"])
    by_learner = replace(none, other=none.other + found["none"]["generate"] / EVERY)
    by_plan = {
        "none": waits.predicted(none, 1, size),
        "generators": waits.predicted(none, 1, evaluated),
        "learner": waits.predicted(by_learner, 1, size),
    }
    return {kind: figures(mean, by_plan[kind]) for kind, mean in found.items()}


if __name__ == "__main__":
    waits.main(__doc__, measure, SMALLEST)
