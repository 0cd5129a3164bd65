"""How full a generator's places are: batch by batch, or with one queue over batches.

    python benchmarks/waits_queue.py [--json] [--batches 9]

The real trainer, S = 2, one generator process with 32 places and 512 rows a batch, whose lengths are lognormal
(sigma 1). Its model waits for each step of decoding as on a device of its own (waiting.py), so that cores do not matter.
For each, means over the batches after the first two and before the last two:

    places      share of the places that were taken, over all steps of decoding
    sampled     rows per second, from a batch to the next
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import tempfile
from pathlib import Path

from overlap import tokenizer
from waiting import counting_policy

from async_rlhf import GenerationConfig, RLOOConfig, RLOOTrainer

PLACES, ROWS, SAMPLES = 32, 512, 2
MEDIAN, LONGEST, PROMPT_TOKENS = 12, 96, 4
STEP_SECONDS, TOKEN_SECONDS = 0.01, 1e-6
EDGE = 2  # batches at either end that do not count


def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [1.0] * len(completions)


def run(batches: int, one_queue: bool) -> dict[str, float]:
    """Of one run."""
    draw, prompts = random.Random(0), ROWS // SAMPLES
    lengths = [min(LONGEST, max(1, round(draw.lognormvariate(0, 1) * MEDIAN))) for _ in range(prompts * batches)]
    rows = [{"query": f"w{LONGEST + 1} w{LONGEST + 2} w{LONGEST + 3} w{length}"} for length in lengths]
    where = {"placement": "process", "num_threads": 1, "in_flight": one_queue}
    with tempfile.TemporaryDirectory() as folder:
        args = RLOOConfig(
            output_dir=folder,
            overwrite_output_dir=True,
            staleness=2,
            staleness_mode="bounded",
            samples_per_prompt=SAMPLES,
            batches=batches,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=ROWS // 32,
            non_eos_penalty=False,
            progress=False,
            num_threads=1,
            generation=GenerationConfig(response_length=LONGEST + 1, batch_size=PLACES, mismatch_samples=0, **where),
        )
        made = tokenizer(LONGEST + 8)
        model = counting_policy(LONGEST + 8, PROMPT_TOKENS + LONGEST + 1, STEP_SECONDS, TOKEN_SECONDS)
        RLOOTrainer(model, args, rows, reward_funcs=reward, processing_class=made).train()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    logs = [json.loads(line) for line in lines][EDGE:-EDGE]
    return {
        "places": statistics.fmean(log["time/generate_places_taken"] for log in logs),
        "sampled": ROWS / statistics.fmean(log["time/batch"] for log in logs),
    }


def measure(batches: int = 9) -> dict[str, dict[str, float]]:
    """With one queue, and with a barrier after each batch."""
    return {"one queue": run(batches, one_queue=True), "batch by batch": run(batches, one_queue=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    parser.add_argument("--batches", type=int, default=9)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = measure(options.batches)
    if options.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(f"{name:<16}" + "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
