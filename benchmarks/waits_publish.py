"""How long the learner waits for publishing, where publishing takes 20% of a batch.

    python benchmarks/waits_publish.py [--json] [--batches 12] [--share 0.2] [--rounds 3]

The real trainer with a generator process, staleness 1. Models wait instead of computing (waiting.py), and a copy of the
weights waits on its way to the generator, as one of a large model does on the bus and for its checksums. For each way:

    wall      seconds per batch, start to start
    publish   seconds of it in which the learner is within publish()
    wait      seconds in which it waits for completions
    stall     publish / wall
    predicted wall by async-rlhf plan, from the times of the run with nothing

"nothing" has no such copy; "in publish()" makes it wait there, in the learner's own thread; "beside" is what the code
does. The generator waits for its weights as long in either. Medians over batches and rounds, in which they take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import waits
from torch import nn

from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.publish import Later, SnapshotRing, Work, run_now

RESPONSE_TOKENS = 12
SMALLEST = {"batches": 8, "rounds": 1, "prompts": 2}


@contextmanager
def copies_that_take(seconds: float, in_publish: bool) -> Iterator[None]:
    """Within, every version is so long on its way; ``in_publish`` has the learner's thread bring it there."""
    publish = SnapshotRing.publish

    def publish_late(
        ring: SnapshotRing, model: nn.Module, version: int, parallel: Parallel = ALONE, later: Later = run_now
    ) -> None:
        def late(work: Work) -> Future[None]:
            return (run_now if in_publish else later)(lambda: (time.sleep(seconds), work())[1])

        publish(ring, model, version, parallel, late)

    with patch.object(SnapshotRing, "publish", publish_late):
        yield


def run(batches: int, prompts: int) -> dict[str, float]:
    """Seconds of each phase of a batch, means over those after the warm-up and before the last two: after the last but
    one nothing is published.
    """
    options = {"staleness": 1, "batches": batches, "per_device_train_batch_size": prompts, "num_epochs": 2}
    return waits.waiting_run("online_dpo", RESPONSE_TOKENS, options).mean_times(last=-2)


def measure(batches: int = 12, share: float = 0.2, rounds: int = 3, prompts: int = 32) -> dict[str, dict[str, float]]:
    """By the way of publishing; ``share`` of a batch is how long it takes where training waits for it."""
    found: dict[str, list[dict[str, float]]] = {"nothing": [], "in publish()": [], "beside": []}
    seconds = 0.0
    for _ in range(rounds):
        for name, runs in found.items():
            with copies_that_take(0.0 if name == "nothing" else seconds, name == "in publish()"):
                runs.append(run(batches, prompts))
            seconds = seconds or runs[0]["batch"] * share / (1 - share)
    middle = {
        name: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for name, runs in found.items()
    }
    nothing = waits.seconds_of(middle["nothing"], score=middle["nothing"]["score"])
    more = {"nothing": {}, "in publish()": {"publish": seconds}, "beside": {"transfer": seconds}}
    return {
        name: {
            **{"wall": mean["batch"], "publish": mean["publish"], "wait": mean["wait"]},
            "stall": mean["publish"] / mean["batch"],
            "predicted": waits.predicted(replace(nothing, **more[name]), 1),
        }
        for name, mean in middle.items()
    }


if __name__ == "__main__":
    waits.main(__doc__, measure, SMALLEST)
