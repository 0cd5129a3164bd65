"""Do episodes teach? Guessing by hints and arithmetic with a calculator: success on held-out prompts, before and after.

    python benchmarks/episodes.py --out runs/episodes

Makes the data and the tiny SFT model of each task of recipes/episodes, trains by each recipe with every seed and
staleness, one run after another, all in one process and on one thread, and prints the table. What is done already is
skipped. Success is a reward above 0 in the run's own evaluation at its end, one episode for each held-out prompt, with
Wilson's 95% interval; before, the same of the SFT model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from smallest import parse

from async_rlhf.commands.evaluation.statistics import wilson
from async_rlhf.commands.sft import run_sft
from async_rlhf.commands.train import make_trainer, run_train
from async_rlhf.config import SFTConfig
from async_rlhf.config.parsing import parse as configured
from async_rlhf.run.config import RunConfig
from async_rlhf.run.held_out import evaluate

RECIPES = Path("recipes") / "episodes"


def made(out: Path, task: str, rows: Sequence[str], num_epochs: float | None) -> Path:
    """The folder with a task's data and SFT model, which are made unless they are there."""
    folder = out / task
    if not (folder / "demonstrations.jsonl").exists():
        subprocess.run([sys.executable, RECIPES / f"{task}.py", folder, *rows], check=True)
    words = ["--config", f"{RECIPES}/sft.yml", "--train", f"{folder}/demonstrations.jsonl"]
    words += ["--output_dir", f"{folder}/sft"] + ([] if num_epochs is None else ["--num_epochs", str(num_epochs)])
    run_sft(configured(SFTConfig, "sft", words)[0])
    return folder


def trained(folder: Path, task: str, algorithm: str, staleness: int, seed: int, sizes: Sequence[str]) -> list[str]:
    """Train, unless that is done. Returns success before and after, and the seconds of a run."""
    run = folder / f"{algorithm}_staleness_{staleness}_seed_{seed}"
    words = ["--config", f"{RECIPES}/{task}_{algorithm}.yml", "--model", f"{folder}/sft", "--train.save_steps", "0"]
    words += ["--data.train", f"{folder}/prompts.jsonl", "--data.eval", f"{folder}/held_out.jsonl"]
    words += ["--train.output_dir", f"{run}", "--train.staleness", f"{staleness}", "--train.seed", f"{seed}"]
    if not (run / "train.json").exists():
        words += ["--train.overwrite_output_dir", "true"]
    config = configured(RunConfig, "train", [*words, *sizes])[0]
    run_train(config)
    before = folder / f"before_seed_{seed}.json"
    if not before.exists():
        trainer = make_trainer(config)
        with trainer.run.scorer.started():
            scores = evaluate(trainer.run)[1].scores_PK.flatten().tolist()
        before.write_text(json.dumps(scores))
    rows = [json.loads(line) for line in (run / "eval_samples.jsonl").read_text().splitlines()]
    seconds = sum(json.loads(line).get("time/batch", 0.0) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [success(json.loads(before.read_text())), success([row["score"] for row in rows]), f"{seconds:.0f}"]


def success(scores: Sequence[float]) -> str:
    """The share above 0, with its interval."""
    found = wilson(sum(score > 0 for score in scores), len(scores))
    return f"{found.estimate:.1%} [{found.low:.1%}, {found.high:.1%}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/episodes"), help="a folder")
    parser.add_argument("--tasks", nargs="+", default=["guess", "sums"], choices=["guess", "sums"])
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "ppo"], choices=["grpo", "ppo"])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parse(parser, algorithms=["grpo"], staleness=[1], seeds=[0])
    os.chdir(Path(__file__).parents[1])  # recipes name files as seen from there
    with tempfile.TemporaryDirectory() as folder:
        show(arguments, Path(folder) if arguments.smallest else arguments.out)


def show(arguments: argparse.Namespace, out: Path) -> None:
    """Make what is missing, and print the table."""
    sizes = ["--train.batches", "2", "--train.completions_per_batch", "16"] if arguments.smallest else []
    rows, num_epochs = (["240"], 0.1) if arguments.smallest else ([], None)
    lines = ["| task | algorithm | S | seed | before | after | seconds |", "|---|---|---|---|---|---|---|"]
    with redirect_stdout(sys.stderr):
        for task in arguments.tasks:
            folder = made(out, task, rows, num_epochs)
            for algorithm in arguments.algorithms:
                for staleness in arguments.staleness:
                    for seed in arguments.seeds:
                        found = trained(folder, task, algorithm, staleness, seed, sizes)
                        cells = [task, algorithm, str(staleness), str(seed), *found]
                        lines.append(f"| {' | '.join(cells)} |")
                        print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
