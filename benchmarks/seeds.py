"""The quickstart over several seeds, as one table.

    for s in 0 1 2; do async-rlhf quickstart --out runs/seed$s --seed $s; done
    python benchmarks/seeds.py runs/seed0 runs/seed1 runs/seed2

For each run: gold reward with its 95% interval, win-rate against the starting model, KL to it; whether each policy's
interval lies above the starting model's, and whether the asynchronous mean lies within the synchronous interval.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path


def main(folders: list[str]) -> None:
    means: dict[str, list[float]] = {}
    print("| run | model | gold reward | wins vs. sft | KL to sft | above sft | async within sync |")
    print("|---|---|---|---|---|---|---|")
    for folder in folders:
        models = json.loads((Path(folder) / "summary.json").read_text())["results"]["evaluate"]["models"]
        for name, found in models.items():
            gold, base = found["gold_mean"], models["sft"]["gold_mean"]
            means.setdefault(name, []).append(gold["estimate"])
            cells = [Path(folder).name, name, interval(gold)]
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
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
