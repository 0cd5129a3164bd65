"""How full a generator's places are: batch by batch, or with one queue over batches.

    python benchmarks/waits_queue.py [--json] [--batches 7]

The real trainer, S = 2, one generator process with 32 places and 512 rows a batch, whose lengths are lognormal
(sigma 1). Its model waits for each step of decoding as on a device of its own (waiting.py), so that cores do not
matter.
For each, means over the batches after the first two and before the last two:

    places      share of the places that were taken, over all steps of decoding
    wall        seconds from a batch to the next
    predicted   the same by async-rlhf plan, from the time that batch by batch takes to sample
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import waits
from waiting import counting_policy
from workload import reward, train

from async_rlhf.studies.plan.config import WorkloadConfig

PLACES, SAMPLES = 32, 2
MEDIAN, LONGEST, PROMPT_TOKENS = 12, 96, 4
TOKEN_SECONDS = 1e-6
SMALLEST = {"batches": 6, "rows": 64, "step_seconds": 0.001}
EDGE = 2  # batches at either end that do not count


def run(batches: int, total: int, step_seconds: float, one_queue: bool) -> dict[str, float]:
    """Means over batches of the times of each phase."""
    rows = [{"query": f"w{LONGEST + 1} w{LONGEST + 2} w{LONGEST + 3} w{length}"} for length in lengths(batches, total)]
    generation = {"in_flight": one_queue, "response_length": LONGEST + 1, "batch_size": PLACES}
    options = {
        **{"staleness": 2, "samples_per_prompt": SAMPLES, "batches": batches},
        **{"per_device_train_batch_size": 32, "completions_per_batch": total},
    }
    model = counting_policy(LONGEST + 8, PROMPT_TOKENS + LONGEST + 1, step_seconds, TOKEN_SECONDS)
    found = train("rloo", model, rows, generation, options, LONGEST + 8, reward_funcs=reward)
    written = statistics.fmean(line["val/response_length"] for line in found.logs)
    assert math.isclose(written, statistics.fmean(lengths(batches, total)), rel_tol=1e-3), written
    return found.mean_times(EDGE, -EDGE)


def lengths(batches: int, total: int) -> list[int]:
    """Of the answers to each prompt; both have the same."""
    draw = random.Random(0)
    drawn = (draw.lognormvariate(0, 1) * MEDIAN for _ in range(batches * total // SAMPLES))
    return [min(LONGEST, max(1, round(length))) for length in drawn]


def measure(batches: int = 7, rows: int = 512, step_seconds: float = 0.025) -> dict[str, dict[str, float]]:
    """With one queue, and with a barrier after each batch."""
    ways = {"one queue": True, "batch by batch": False}
    means = {name: run(batches, rows, step_seconds, one_queue) for name, one_queue in ways.items()}
    drawn = {"response_length": LONGEST, "response_tokens": statistics.fmean(lengths(batches, rows))}
    size = WorkloadConfig(prompts=rows // SAMPLES, samples_per_prompt=SAMPLES, places=PLACES, **drawn)
    found = {}
    for name, mean in means.items():
        seconds, workload = waits.seconds_of(means["batch by batch"]), replace(size, in_flight=name == "one queue")
        predicted = waits.predicted(seconds, 2, workload)
        found[name] = {"places": mean["generate_places_taken"], "wall": mean["batch"], "predicted": predicted}
    return found


if __name__ == "__main__":
    waits.main(__doc__, measure, SMALLEST)
