"""TRL's GRPO on the sums of sums.yml, the same job: a line of its seconds and scores beside those of race.py.

    pip install --no-deps trl==1.16.0
    python recipes/smollm/trl_grpo.py --seed 0

The same model, data, reward, batches, rate, precision and number of answers as sums.yml. --rows is how many TRL trains
on in a pass; 16 was the fastest of 8, 16, 32 and 64 here. --batches ends a run early, with the rates of a whole one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import yaml
from datasets import load_dataset
from race import HERE, RESULTS, add
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl import __version__ as version

from async_rlhf.rewards import numeric_answer


class Clock(TrainerCallback):
    """The seconds of each step."""

    def __init__(self, batches: int) -> None:
        self.batches, self.start, self.seconds = batches, 0.0, list[float]()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(round(time.monotonic() - self.start, 2))
        control.should_training_stop |= len(self.seconds) == self.batches


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--dtype", default="float32", help="of TRL's weights; bfloat16 is faster, and trains otherwise")
    parser.add_argument("--batches", type=int, help="of sums.yml, if left out")
    parser.add_argument("--results", type=Path, default=RESULTS)
    wanted = parser.parse_args()
    recipe = yaml.safe_load((HERE / "sums.yml").read_text())
    ours = recipe["train"]
    end = AutoTokenizer.from_pretrained(recipe["model"]).eos_token_id

    def right(completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        texts = [chat[0]["content"] for chat in completions]
        scores = numeric_answer(prompts=texts, completions=texts, answer=answer)
        return [score if ids[-1] == end else 0.0 for score, ids in zip(scores, completion_ids, strict=True)]

    args = GRPOConfig(
        output_dir=f"runs/smollm/race/trl,{wanted.seed}",
        seed=wanted.seed,
        max_steps=ours["batches"],
        per_device_train_batch_size=wanted.rows,
        gradient_accumulation_steps=ours["completions_per_batch"] // wanted.rows,
        num_generations=ours["samples_per_prompt"],
        max_completion_length=ours["generation"]["response_length"],
        temperature=ours["generation"]["temperature"],
        learning_rate=ours["learning_rate"],
        beta=ours["kl"]["coef"],
        bf16=ours["bf16"],
        model_init_kwargs={"dtype": wanted.dtype},
        loss_type="grpo",
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    data = load_dataset("json", data_files=recipe["data"]["train"], split="train")
    data, clock = data.rename_column("messages", "prompt"), Clock(wanted.batches or ours["batches"])
    trainer = GRPOTrainer(recipe["model"], reward_funcs=right, args=args, train_dataset=data, callbacks=[clock])
    trainer.train()
    scores = [round(log["reward"], 4) for log in trainer.state.log_history if "reward" in log]
    add(
        {"task": "sums", "way": f"TRL {version}", "seed": wanted.seed, "seconds": clock.seconds, "scores": scores},
        wanted.results,
    )


if __name__ == "__main__":
    main()
