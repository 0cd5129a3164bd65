"""All algorithms on the docstring task after equal numbers of completions, synchronous and asynchronous.

    for s in 0 1 2; do async-rlhf quickstart --out runs/seed$s --seed $s; done
    python benchmarks/algorithms.py runs/seed0 runs/seed1 runs/seed2

Trains recipes/docstrings/*.yml from each quickstart's SFT and reward model, evaluates everything on the held-out
prompts, and prints a table. What is done already is skipped, so several of these may run at once, each with some of the
folders, before one has all of them. Each folder has models and prompts of its own; the seed of training is the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smallest import parse

from async_rlhf.algorithms.table import BUILT_IN

RECIPES = Path(__file__).parents[1] / "recipes" / "docstrings"


def async_rlhf(command: str, **options: object) -> None:
    words = [word for key, value in options.items() for word in (f"--{key.replace('__', '.')}", str(value))]
    subprocess.run([sys.executable, "-m", "async_rlhf.cli", command, *words], check=True)


def train(base: Path, name: str, algorithm: str, staleness: int, **changes: object) -> None:
    async_rlhf(
        "train",
        config=RECIPES / f"{algorithm}.yml",
        model=base / "sft",
        reward_model=base / "reward",
        data__train=base / "data" / "rl.jsonl",
        data__eval="null",
        train__output_dir=base / "algorithms" / name,
        # What an interrupted run left is not whole.
        train__overwrite_output_dir=not (base / "algorithms" / name / "train.json").exists(),
        train__staleness=staleness,
        **changes,
    )


def evaluate(base: Path, names: list[str], response_length: int, max_prompt_length: int) -> dict[str, Any]:
    models = {"sft": str(base / "sft"), **{n: str(base / "algorithms" / n / "final") for n in names}}
    folder = base / "algorithms" / "evaluation"
    async_rlhf(
        "evaluate",
        models=json.dumps(models),
        data=base / "data" / "heldout.jsonl",
        output_dir=folder,
        max_prompts=1000,
        reward_funcs="async_rlhf.tasks.docstrings.reward:gold_rewards",
        response_length=response_length,
        max_prompt_length=max_prompt_length,
    )
    return json.loads((folder / "evaluation.json").read_text())["results"]["models"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bases", nargs="*", type=Path, help="folders of quickstarts")
    parser.add_argument("--algorithms", nargs="+", default=[*BUILT_IN], choices=BUILT_IN)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1])
    arguments = parse(parser, algorithms=["grpo"], staleness=[1])
    if arguments.smallest:
        from tiny_inputs import PROMPT_TOKENS, RESPONSE_TOKENS, make_base

        sizes = {"train__max_prompt_length": PROMPT_TOKENS, "train__generation__response_length": RESPONSE_TOKENS}
        with tempfile.TemporaryDirectory() as folder:
            bases = [make_base(Path(folder) / "seed0")]
            compare(arguments, bases, RESPONSE_TOKENS, PROMPT_TOKENS, train__total_episodes=32, **sizes)
    elif arguments.bases:
        compare(arguments, arguments.bases, response_length=32, max_prompt_length=128)
    else:
        parser.error("bases: got none; must be the folders of one quickstart or more")


def compare(
    arguments: argparse.Namespace,
    bases: Sequence[Path],
    response_length: int,
    max_prompt_length: int,
    **changes: object,
) -> None:
    """Train, evaluate, and print the table; ``changes`` are made to every recipe."""
    runs = [(f"{a}_staleness_{s}", a, s) for a in arguments.algorithms for s in arguments.staleness]
    found = []
    for base in bases:
        for name, algorithm, staleness in runs:
            train(base, name, algorithm, staleness, **changes)
        found.append(evaluate(base, [name for name, _, _ in runs], response_length, max_prompt_length))
    print(table([("sft", "SFT", ""), *((n, a, str(s)) for n, a, s in runs)], found))


def table(rows: list[tuple[str, str, str]], seeds: list[dict[str, Any]]) -> str:
    """Means over starts, their spread, and for how many the interval lies above that of SFT."""
    lines = [
        "| algorithm | S | gold reward | of each start | win-rate vs. SFT | KL to SFT | above SFT |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, algorithm, staleness in rows:
        gold = [models[name]["gold_mean"] for models in seeds]
        cells = [algorithm, staleness, spread([g["estimate"] for g in gold], 3)]
        cells.append(", ".join(f"{g['estimate']:.3f} [{g['low']:.3f}, {g['high']:.3f}]" for g in gold))
        if name == "sft":
            cells += [""] * 3
        else:
            wins = [100 * models[name]["win_rate_vs_sft"]["estimate"] for models in seeds]
            kl = [models[name]["kl_to_reference"]["estimate"] for models in seeds]
            above = sum(g["low"] > m["sft"]["gold_mean"]["high"] for g, m in zip(gold, seeds, strict=True))
            cells += [spread(wins, 1) + "%", spread(kl, 2), f"{above} of {len(seeds)}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"


if __name__ == "__main__":
    main()
