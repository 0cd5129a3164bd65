"""What workers that differ in speed wait for: units that each free worker takes, against fixed shares.

    python benchmarks/waits_shares.py [--json]

Real generator processes, four of them, with a model that sleeps as long as a device would compute: three are alike, the
fourth is half as fast. Exact staleness 1, and a learner that takes no time, so that sampling is all there is. Wall is
that of some batches after a first one, which starts the processes. It is compared with the best assignment of whole
prompts, when the next batch may begin before the last one has ended: all work / all speed.

    units           one prompt a request (generation.prompts_per_request: 1)
    whole_shares    a quarter of the batch a request (null), and a free worker takes the next
    fixed_shares    the same, and each quarter waits for its own worker, as it would without the queue
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from waiting import sleeping_policy

from async_rlhf import GenerationConfig, OnlineDPOConfig
from async_rlhf.generation.dispatch import Dispatcher
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.reports.trace import Trace
from async_rlhf.run.schedule import RolloutSchedule
from async_rlhf.types import Prompt

SPEEDS = (1.0, 1.0, 1.0, 0.5)
PROMPTS, BATCHES = 28, 4
"""In a batch; and batches that are timed."""
TOKENS, TOKEN_SECONDS = 8, 0.05
"""Of each completion; and what one of a prompt takes at speed 1, whatever it is decoded with."""
VOCABULARY = 64


class UnequalWorkers(ProcessGenerator):
    """Processes that differ in speed."""

    def _make(self, number: int) -> Any:
        spec = self._worker.keywords["spec"]
        config = copy.deepcopy(spec.config)
        config.speed = SPEEDS[number]
        return self._worker(number, self._device(number), spec=replace(spec, config=config))


class FixedShares(Dispatcher):
    """Gives each worker the part of its own number, and no other."""

    def _hand_out(self) -> None:
        queue = self._queue
        for worker in self._there:
            self._queue = [request for request in queue if request.unit == worker.number][:1]
            taken = list(self._queue)
            busy = bool(worker.open)
            there, self._there = self._there, [worker]
            super()._hand_out()
            self._there = there
            queue = queue if busy else [request for request in queue if request not in taken]
        self._queue = queue


class Prompts:
    """Prompts of some tokens."""

    def batch(self, index: int, size: int) -> list[Prompt]:
        """Those of a batch."""
        return [Prompt(draw, draw, (1 + draw % 9, 2, 3)) for draw in range((index - 1) * size, index * size)]


def wall(size: int | None, fixed: bool = False) -> tuple[float, float]:
    """Seconds a batch, and the mean share of them in which workers had nothing."""
    generation = GenerationConfig(
        workers=len(SPEEDS), prompts_per_request=size, num_threads=1, mismatch_samples=0, probe_steps=0
    )
    config = OnlineDPOConfig(
        staleness=1, batches=BATCHES, per_device_train_batch_size=PROMPTS, generation=generation, num_threads=1
    )
    model, trace = sleeping_policy(VOCABULARY, TOKENS + 8, TOKEN_SECONDS), Trace()
    with closing(UnequalWorkers(config, model, SamplingParams(1, 1.0, TOKENS, (), 0), trace)) as generator:
        if fixed:
            generator.dispatcher = FixedShares(generator.workers)
        generator.publish(model, 0)
        generator.submit(0, 0, Prompts().batch(1, PROMPTS))
        generator.collect(0)  # the processes are up
        rollouts = RolloutSchedule(
            generator,
            Prompts(),
            batch_size=PROMPTS,
            num_batches=BATCHES,
            staleness=1,
            trace=trace,
        )
        started, idle = time.monotonic(), []
        rollouts.publish(model, 0)
        for batch in rollouts:
            idle.append(batch.metrics["time/generate_idle_share"])
            rollouts.publish(model, batch.index)
        return (time.monotonic() - started) / BATCHES, sum(idle) / BATCHES


def measure() -> dict[str, float]:
    """Seconds a batch in each way, and of the best assignment; by how much each is longer; idle shares."""
    best = PROMPTS * TOKENS * TOKEN_SECONDS / sum(SPEEDS)
    found = {"best": best}
    for name, arguments in {"units": (1,), "whole_shares": (None,), "fixed_shares": (None, True)}.items():
        found[name], found[f"{name}_idle"] = wall(*arguments)
        found[f"{name}_over_best"] = found[name] / best
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    as_json = parser.parse_args().json
    found = measure()
    if as_json:
        print(json.dumps(found))
        return
    print(f"{'best assignment':16} {found['best']:6.3f} s a batch of {PROMPTS} prompts, speeds {SPEEDS}")
    for name in ("units", "whole_shares", "fixed_shares"):
        ratio, idle = found[f"{name}_over_best"], found[f"{name}_idle"]
        print(f"{name:16} {found[name]:6.3f} s, {ratio:.3f} of the best; workers idle {idle:.1%}")


if __name__ == "__main__":
    main()
