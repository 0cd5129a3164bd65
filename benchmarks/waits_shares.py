"""What workers that differ in speed wait for: units that each free worker takes, against fixed shares.

    python benchmarks/waits_shares.py [--json] [--batches 10]

Real generator processes, four of them, with a model that sleeps as long as a device would compute: three are alike, the
fourth is half as fast. Exact staleness 1, and a learner that takes no time, so that sampling is all there is. Wall is
from batch to batch, without the first two and the last two. It is compared with the best assignment of whole
prompts, when the next batch may begin before the last one has ended: all work / all speed; and with what
async-rlhf plan predicts of such a run without an end.

    units         one prompt a request (generation.prompts_per_request: 1)
    whole shares  a quarter of the batch a request (null), and a free worker takes the next
    fixed shares  the same, and each quarter waits for its own worker, as it would without the queue
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise

import waits
from waiting import sleeping_policy

from async_rlhf import GenerationConfig, OnlineDPOConfig
from async_rlhf.generation.dispatch import Utilisation, Worker
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import Request, SamplingParams
from async_rlhf.run.schedule import RolloutSchedule
from async_rlhf.studies.plan.config import SecondsConfig, WorkloadConfig
from async_rlhf.system.trace import Trace
from async_rlhf.types import Prompt

SPEEDS = (1.0, 1.0, 1.0, 0.5)
PROMPTS = 28
"""In a batch."""
EDGE = 2  # batches at either end that do not count
TOKENS, VOCABULARY = 8, 64
"""Tokens of each completion."""
SMALLEST = {"batches": 6, "token_seconds": 0.002}


class FixedShares:
    """Gives each worker the part of its own number, and no other: a dispatcher where none dies or leaves."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.lock, self.times = threading.RLock(), Utilisation(list(workers))
        self.waiting: dict[int, deque[Request]] = {worker.number: deque() for worker in workers}
        self.workers, self.open, self.idle = workers, Counter[int](), dict[int, float]()

    def is_there(self, worker: Worker) -> bool:
        return True

    def join(self, worker: Worker) -> None:
        """It is ready, and was counted on already."""

    def add(self, requests: Sequence[Request]) -> None:
        with self.lock:
            for request in requests:
                self.waiting[request.number].append(request)
                self.open[request.batch] += 1
            self.hand_out()

    def answered(self, worker: Worker, batch: int, unit: int) -> Request:
        with self.lock:
            self.times.until(time.monotonic())
            request = worker.answered(0)
            self.open[batch] -= 1
            if not self.open[batch]:
                self.idle[batch] = self.times.idle_share(batch, time.monotonic())
            self.hand_out()
            return request

    def idle_share(self, batch: int) -> float:
        with self.lock:
            return self.idle.pop(batch)

    def hand_out(self) -> None:
        """Give each free worker its next part."""
        for worker in self.workers:
            if self.waiting[worker.number] and not worker.open:
                request = self.waiting[worker.number].popleft()
                self.times.began(request.batch, time.monotonic())
                worker.submit(request)


class Prompts:
    """Prompts of some tokens."""

    def batch(self, index: int, size: int) -> list[Prompt]:
        """Those of a batch."""
        return [Prompt(draw, draw, (1 + draw % 9, 2, 3)) for draw in range((index - 1) * size, index * size)]


def wall(batches: int, token_seconds: float, size: int | None, fixed: bool = False) -> tuple[float, float]:
    """Seconds a batch, and the mean share of them in which workers had nothing."""
    generation = GenerationConfig(
        workers=len(SPEEDS), prompts_per_request=size, num_threads=1, mismatch_samples=0, probe_steps=0
    )
    config = OnlineDPOConfig(
        staleness=1, batches=batches, per_device_train_batch_size=PROMPTS, generation=generation, num_threads=1
    )
    model, trace = sleeping_policy(VOCABULARY, TOKENS + 8, token_seconds, SPEEDS), Trace()
    with closing(ProcessGenerator(config, model, SamplingParams(1, 1.0, TOKENS, (), 0), trace)) as generator:
        if fixed:
            generator.supervisor.dispatcher = FixedShares(generator.workers)  # type: ignore[assignment]
        generator.publish(model, 0)
        generator.submit(0, 0, Prompts().batch(1, PROMPTS))
        generator.collect(0)  # the processes are up
        rollouts = RolloutSchedule(
            generator, Prompts(), batch_size=PROMPTS, num_batches=batches, staleness=1, trace=trace
        )
        ends, idle = [], []
        rollouts.publish(model, 0)
        for batch in rollouts:
            ends.append(time.monotonic())
            idle.append(batch.metrics["time/generate_idle_share"])
            rollouts.publish(model, batch.index)
        return statistics.fmean(b - a for a, b in pairwise(ends[EDGE - 1 : -EDGE])), statistics.fmean(idle[EDGE:-EDGE])


def measure(batches: int = 10, token_seconds: float = 0.05) -> dict[str, dict[str, float]]:
    """Seconds a batch in each way, over those of the best assignment, and how much of the time workers are idle.

    Args:
        batches: of each way.
        token_seconds: what a token of a prompt's completions takes at speed 1, whatever it is decoded with.
    """
    work = PROMPTS * TOKENS * token_seconds
    best, found = work / sum(SPEEDS), {}
    seconds = SecondsConfig(generate=work / len(SPEEDS), train=1e-6)
    for name, size, fixed in (("units", 1, False), ("whole shares", None, False), ("fixed shares", None, True)):
        took, idle = wall(batches, token_seconds, size, fixed)
        found[name] = {"wall": took, "best": best, "over_best": took / best, "idle": idle}
        if not fixed:  # the code has no such thing any more
            shares = {"generators": len(SPEEDS), "generate_fixed": 0.0, "speeds": list(SPEEDS)}
            workload = WorkloadConfig(prompts=PROMPTS, prompts_per_request=size)
            found[name]["predicted"] = waits.predicted(seconds, 1, workload, **shares)
    return found


if __name__ == "__main__":
    waits.main(__doc__, measure, SMALLEST)
