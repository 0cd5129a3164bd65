"""How long the learner waits for publishing, where publishing takes 20% of a batch.

    python benchmarks/waits_publish.py [--json] [--batches 12] [--share 0.2] [--rounds 3]

The real trainer with a generator process, staleness 1. Models wait instead of computing (waiting.py), and a copy of the
weights waits on its way to the generator, as one of a large model does on the bus and for its checksums. For each way:

    wall      seconds per batch, start to start
    publish   seconds of it in which the learner is within publish()
    wait      seconds in which it waits for completions
    stall     publish / wall

"nothing" has no such copy; "in publish()" makes it wait there, in the learner's own thread; "beside" is what the code
does. The generator waits for its weights as long in either. Medians over batches and rounds, in which they take turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from overlap import PROMPT_TOKENS, VOCABULARY, WARM_UP, reward, tokenizer
from waiting import waiting_policy

from async_rlhf import GenerationConfig, OnlineDPOConfig, OnlineDPOTrainer
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.models.leaving import Handle, Work, at_once
from async_rlhf.models.snapshots import SnapshotRing

PROMPTS, RESPONSE_TOKENS = 32, 12


@contextmanager
def copies_that_take(seconds: float, in_publish: bool) -> Iterator[None]:
    """Within, every version is so long on its way."""
    finish = SnapshotRing._finish

    def finish_late(ring: SnapshotRing, version: int) -> None:
        time.sleep(seconds)
        finish(ring, version)

    def at_once_instead(generator: RemoteGenerator, version: int, work: Work) -> Handle:
        return at_once(work)

    with patch.object(SnapshotRing, "_finish", finish_late):
        if not in_publish:
            yield
            return
        with patch.object(RemoteGenerator, "_beside", at_once_instead):
            yield


def run(batches: int) -> dict[str, float]:
    """Medians over the batches after the warm-up."""
    words = " ".join(f"w{i}" for i in range(1, PROMPT_TOKENS))
    rows = [{"query": f"w{i + 20} {words}"} for i in range(256)]
    with tempfile.TemporaryDirectory() as folder:
        generation = GenerationConfig(
            response_length=RESPONSE_TOKENS, placement="process", num_threads=1, mismatch_samples=0, probe_steps=0
        )
        args = OnlineDPOConfig(
            output_dir=folder,
            staleness=1,
            total_episodes=PROMPTS * batches,
            per_device_train_batch_size=PROMPTS,
            num_epochs=2,
            non_eos_penalty=False,
            max_prompt_length=PROMPT_TOKENS,
            progress=False,
            num_threads=1,
            generation=generation,
        )
        model = waiting_policy(VOCABULARY, PROMPT_TOKENS + RESPONSE_TOKENS, 0.0)
        OnlineDPOTrainer(model, args, rows, reward_funcs=reward, processing_class=tokenizer()).train()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    logs = [json.loads(line) for line in lines][WARM_UP:-2]  # after the last but one nothing is published
    middle = {name: statistics.median(log[f"time/{name}"] for log in logs) for name in ("batch", "publish", "wait")}
    return {"wall": middle["batch"], "publish": middle["publish"], "wait": middle["wait"]}


def measure(batches: int = 12, share: float = 0.2, rounds: int = 3) -> dict[str, dict[str, float]]:
    """Seconds of a batch and the learner's stall in it, by the way of publishing."""
    found: dict[str, list[dict[str, float]]] = {"nothing": [], "in publish()": [], "beside": []}
    for _ in range(rounds):
        for name, figures in found.items():
            # The naive way's batch is as much longer.
            seconds = 0.0 if name == "nothing" else found["nothing"][0]["wall"] * share / (1 - share)
            with copies_that_take(seconds, name == "in publish()"):
                figures.append(run(batches))
    medians = {
        name: {key: statistics.median(one[key] for one in figures) for key in figures[0]}
        for name, figures in found.items()
    }
    return {name: {**figures, "stall": figures["publish"] / figures["wall"]} for name, figures in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--share", type=float, default=0.2, help="of a batch that publishing takes")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = measure(options.batches, options.share, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    columns = ["wall", "publish", "wait", "stall"]
    print(f"{'publishing':<14}" + "".join(f"{name:>10}" for name in columns))
    for name, figures in found.items():
        print(f"{name:<14}" + "".join(f"{figures[column]:>10.4f}" for column in columns))


if __name__ == "__main__":
    main()
