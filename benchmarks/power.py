"""How many seeds a comparison of a sweep needs: what its runs so far say of the spread between seeds.

    python benchmarks/power.py docs/science/robustness.jsonl '{"train.staleness": "0"}'
    python benchmarks/power.py runs/science/staleness '{"train.staleness": 0}'

The first reads a study whose results the repository has, the second a sweep. For every setting, against the one with
the labels given: the standard deviation over seeds of the difference of gold rewards, paired (equal seeds) and
unpaired, and the smallest true difference that a two-sided t-test at 5% finds with 80% power, with as many seeds as
there are and with 3, 6 and 12. The last is from the noncentral t distribution, by simulation of its definition with a
fixed seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
from smallest import parse

from async_rlhf.commands.evaluation.statistics import t_quantile
from async_rlhf.studies.sweep.trials import labels_of

POWER = 0.8


@cache
def detectable(seeds: int, draws: int) -> float:
    """The smallest effect, in standard deviations of a difference, that is found with 80% power."""
    chance = np.random.default_rng(0)
    means = chance.standard_normal(draws) / math.sqrt(seeds)
    deviations = np.sqrt(chance.chisquare(seeds - 1, draws) / (seeds - 1))
    # Found where (effect + mean) sqrt(n) / deviation exceeds the quantile; the other tail is negligible here.
    needed = t_quantile(seeds - 1) * deviations / math.sqrt(seeds) - means
    return float(np.quantile(needed, POWER))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="a sweep's output_dir, or a file of docs/science")
    parser.add_argument("--draws", type=int, default=200_000, help="of the noncentral t distribution")
    parser.add_argument("baseline", type=json.loads, help="labels of what is compared with, as JSON")
    wanted = parse(parser, draws=2000)
    gold: defaultdict[tuple[tuple[str, str], ...], dict[int, float]] = defaultdict(dict)
    results = wanted.sweep if wanted.sweep.is_file() else wanted.sweep / "results.jsonl"
    with results.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            reward = row["gold"]["estimate"] if "gold" in row else statistics.fmean(map(int, row["scores"]))
            gold[tuple(row["setting"].items())][row["seed"]] = reward
    print("| setting | seeds | sd of the difference, paired | unpaired | found with 80%: these seeds | 3 | 6 | 12 |")
    print("|---|---|---|---|---|---|---|---|")
    for setting, ours in gold.items():
        base = gold.get(tuple({**dict(setting), **labels_of(wanted.baseline)}.items()), {})
        seeds = sorted(ours.keys() & base.keys())
        if base is ours or len(seeds) < 2:
            continue
        sides = [[side[seed] for seed in seeds] for side in (ours, base)]
        paired = statistics.stdev(a - b for a, b in zip(*sides, strict=True))
        unpaired = math.sqrt(sum(statistics.variance(side) for side in sides))
        told = ", ".join(f"{axis.rpartition('.')[2]} {label}" for axis, label in setting)
        cells = [told, str(len(seeds)), f"{paired:.4f}", f"{unpaired:.4f}"]
        cells += [f"{detectable(n, wanted.draws) * paired:.3f}" for n in (len(seeds), 3, 6, 12)]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
