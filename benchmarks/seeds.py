"""The quickstart over several seeds, as one table.

    for s in 0 1 2; do async-rlhf quickstart --out runs/seed$s --seed $s; done
    python benchmarks/seeds.py runs/seed0 runs/seed1 runs/seed2

For each run: gold reward with its 95% interval, win-rate against the starting model, KL to it; whether each policy's
interval lies above the starting model's, and whether the asynchronous mean lies within the synchronous interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from smallest import parse


def tiny_summary(folder: Path) -> Path:
    """Have tiny models evaluated as a quickstart's are. Returns the folder."""
    from tiny_inputs import PROMPT_TOKENS, RESPONSE_TOKENS, make_base

    from async_rlhf.commands.evaluate import run_evaluate
    from async_rlhf.config import EvaluateConfig

    policy = str(make_base(folder) / "sft")
    config = EvaluateConfig(
        models=dict.fromkeys(("sft", "synchronous", "asynchronous"), policy),
        data=str(folder / "data" / "heldout.jsonl"),
        output_dir=str(folder / "evaluation"),
        reward_funcs=["async_rlhf.tasks.docstrings.reward:gold_rewards"],
        response_length=RESPONSE_TOKENS,
        max_prompt_length=PROMPT_TOKENS,
        device="cpu",
    )
    with redirect_stdout(sys.stderr):
        (folder / "summary.json").write_text(json.dumps({"results": {"evaluate": run_evaluate(config)}}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="of quickstarts")
    options = parse(parser)
    if options.smallest:
        with tempfile.TemporaryDirectory() as folder:
            show([tiny_summary(Path(folder) / "seed0")] * 2)
    elif options.folders:
        show(options.folders)
    else:
        parser.error("folders: got none; must be those of one quickstart or more")


def show(folders: Sequence[Path]) -> None:
    """Print the table."""
    means: dict[str, list[float]] = {}
    print("| run | model | gold reward | wins vs. sft | KL to sft | above sft | async within sync |")
    print("|---|---|---|---|---|---|---|")
    for folder in folders:
        models = json.loads((folder / "summary.json").read_text())["results"]["evaluate"]["models"]
        for name, found in models.items():
            gold, base = found["gold_mean"], models["sft"]["gold_mean"]
            means.setdefault(name, []).append(gold["estimate"])
            cells = [folder.name, name, interval(gold)]
            if name == "sft":
                cells += [""] * 4
            else:
                synchronous = models["synchronous"]["gold_mean"]
                within = synchronous["low"] <= gold["estimate"] <= synchronous["high"]
                cells += [
                    f"{found['win_rate_vs_sft']['estimate']:.1%}",
                    f"{found['kl_to_reference']['estimate']:.2f}",
                    "yes" if gold["low"] > base["high"] else "no",
                    "" if name == "synchronous" else "yes" if within else "no",
                ]
            print("| " + " | ".join(cells) + " |")
    for name, values in means.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"| all {len(values)} | {name} | {statistics.fmean(values):.3f} (sd {spread:.3f} over seeds) | | | | |")


def interval(found: dict[str, float]) -> str:
    return f"{found['estimate']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


if __name__ == "__main__":
    main()
