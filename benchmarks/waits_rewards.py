"""What rewards add to a batch, if they are computed beside training or in their turn.

    python benchmarks/waits_rewards.py [--json] [--batches 16]

The real trainer with a generator process. Models wait as on devices of their own (waiting.py), so that cores do not
matter, and the reward function waits for half of a batch's time, as a remote judge does. For each:

    ratio       wall / max(sampling, training) of a batch, scoring not included; 1 is perfect
    bound       the same by the schedule alone: a batch passes through all three while S + 1 batches are under way, so
                wall is at least (sampling + rewards + training) / (S + 1)
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from overlap import PROMPT_TOKENS, VOCABULARY, reward, tokenizer
from waiting import waiting_policy

from async_rlhf import GenerationConfig, OnlineDPOConfig, OnlineDPOTrainer
from async_rlhf.scoring.scorer import Scorer

WARM_UP = 5
PROMPTS, RESPONSE_TOKENS, REWARD_SECONDS = 24, 24, 0.5


def slow_reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Half of a batch's time."""
    time.sleep(REWARD_SECONDS)
    return reward(prompts, completions)


def run(batches: int, staleness: int, beside: bool) -> dict[str, float]:
    """Seconds of a batch, means over those after the warm-up."""
    words = [f"w{i}" for i in range(1, PROMPT_TOKENS + 1)]
    rows = [{"query": " ".join([f"w{i + 20}", *words[1:]])} for i in range(256)]
    with tempfile.TemporaryDirectory() as folder:
        args = OnlineDPOConfig(
            output_dir=folder,
            overwrite_output_dir=True,
            staleness=staleness,
            total_episodes=PROMPTS * batches,
            per_device_train_batch_size=PROMPTS,
            non_eos_penalty=False,
            max_prompt_length=PROMPT_TOKENS,
            progress=False,
            num_threads=1,
            generation=GenerationConfig(
                response_length=RESPONSE_TOKENS, mismatch_samples=0, placement="process", num_threads=1
            ),
        )
        model = waiting_policy(VOCABULARY, PROMPT_TOKENS + RESPONSE_TOKENS, 0.0)
        trainer = OnlineDPOTrainer(model, args, rows, reward_funcs=slow_reward, processing_class=tokenizer())
        with patch.object(Scorer, "begin", Scorer.begin if beside else lambda *_: None):
            trainer.train()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    logs = [json.loads(line) for line in lines][WARM_UP:]
    mean = {name: statistics.fmean(log[name] for log in logs) for name in logs[0] if name.startswith("time/")}
    wall, sampling, training = mean["time/batch"], mean["time/generate"], mean["time/annotate"] + mean["time/train"]
    longer = max(sampling, training)
    bound = max(1.0, (sampling + REWARD_SECONDS + training) / (staleness + 1) / longer)
    figures = {"wall": wall, "sampling": sampling, "training": training, "score": mean["time/score"]}
    return {**figures, "ratio": wall / longer, "bound": bound}


def measure(batches: int = 16) -> dict[str, dict[str, float]]:
    """Beside training, and in turn."""
    return {
        f"rewards {'beside training' if beside else 'in their turn'}, S = {staleness}": run(batches, staleness, beside)
        for staleness in (1, 2)
        for beside in (True, False)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    parser.add_argument("--batches", type=int, default=16)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = measure(options.batches)
    if options.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(f"{name:<34}" + "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
