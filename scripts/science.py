"""The tables and pictures of docs/science.md, docs/stale_batches.md and recipes/smollm/README.md from docs/science.

python scripts/science.py                                             # print every table
python scripts/science.py keep robustness runs/science/robustness/results.jsonl    # take a sweep's results over
python scripts/science.py keep certificate runs/science/certificate                # or a certificate's
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from scipy.special import expit, logit

from async_rlhf.commands.evaluation.statistics import (
    Interval,
    clustered_mean_interval,
    crossed_mean_interval,
    mean_interval,
    t_quantile,
)
from async_rlhf.config.parsing import parse
from async_rlhf.studies.certify.certificate import in_order, looks, summary_of
from async_rlhf.studies.certify.certificate import verdict_text as words
from async_rlhf.studies.certify.command import question_of
from async_rlhf.studies.certify.config import CertifyConfig
from async_rlhf.studies.sweep.pictures import draw
from async_rlhf.studies.sweep.results import Summary, summaries, table

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "science"
SMOLLM = DOCS.parent / "recipes" / "smollm" / "README.md"
PAGES = DOCS / "science.md", DOCS / "stale_batches.md", DATA / "tables.txt", SMOLLM
CERTIFY = DOCS.parent / "recipes" / "science" / "certify.yml"
PRIMARY = ("online_dpo", "online_dpo, anchored")
"""What one loses to staleness less what the other does: named in recipes/science/robustness.yml before the runs."""


class Judged(NamedTuple):
    """One run."""

    setting: Mapping[str, str]
    seed: int
    kl: float
    """To the starting model, nats a completion."""
    scores: tuple[float, ...]
    """Of each held-out prompt."""
    ess: float | None = None
    """Of completions, at the end of training; not kept for all studies."""
    training: float | None = None
    """Mean score at the end of training, where that is another one than the held-out prompts'."""


def read(name: str) -> list[Judged]:
    """The runs of a study."""
    rows = map(json.loads, (DATA / f"{name}.jsonl").read_text().splitlines())
    return [Judged(**row | {"scores": tuple(map(float, row["scores"]))}) for row in rows]


def keep(name: str, results: Path) -> None:
    """Write results as compact lines: those of a sweep or a certificate, a run each, or of impulse.py and drift.py."""
    if name in ("impulse", "drift"):
        rows = map(json.loads, results.read_text().splitlines())
        DATA.joinpath(f"{name}.jsonl").write_text("".join(f"{json.dumps(compact(row))}\n" for row in rows))
        return
    lines = []
    for row in results_in(results):
        right_or_wrong = set(row["scores"]) <= {0.0, 1.0}
        kept = {"setting": row["setting"], "seed": row["seed"], "kl": round(row["kl"]["estimate"], 4)}
        kept["ess"] = round(row["metrics"]["val/ess_sequence"], 4)
        if right_or_wrong:
            kept["scores"] = "".join(str(int(score)) for score in row["scores"])
        else:
            kept["training"] = round(row["metrics"]["objective/scores"], 4)
            kept["scores"] = [round(score, 4) for score in row["scores"]]
        lines.append(json.dumps(kept))
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def results_in(place: Path) -> list[dict[str, Any]]:
    """Of all runs, in the order of their seeds where they are a certificate's."""
    if place.is_file():
        return [json.loads(line) for line in place.read_text().splitlines()]
    found = [json.loads(file.read_text())["results"] for file in place.glob("runs/*/trial.json")]
    return sorted(found, key=lambda row: (row["seed"], row["setting"]["staleness"]))


def compact(row: dict[str, Any]) -> dict[str, Any]:
    """A row of recipes/science/impulse.py or drift.py; of a whole run only its end."""
    right = row.get("right", {})
    last = {} if row.get("kind") == "branch" else dict(list(right.items())[-1:])
    return {**row, "right": last or right} if right else row


def within(interval: Interval) -> Interval:
    """An interval of a share that stays between 0 and 1: symmetric in the share's logit, by the delta method."""
    share = min(max(interval.estimate, 1e-4), 1 - 1e-4)
    half = (interval.high - interval.low) / 2 / (share * (1 - share))
    low, high = (float(expit(logit(share) + side * min(half, 20.0))) for side in (-1, 1))
    return Interval(interval.estimate, low, high)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm, 1979), in the order given."""
    found, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        found[i] = largest
    return found


Runs = dict[tuple[str, str], dict[tuple[str, int], Judged]]
"""By algorithm and staleness, by starting model and seed."""


def grouped(runs: Sequence[Judged], axis: str = "algorithm") -> Runs:
    """Runs of a study with this axis, staleness, and perhaps starting models."""
    found: Runs = defaultdict(dict)
    for run in runs:
        found[run.setting[axis], run.setting["train.staleness"]][run.setting.get("start", ""), run.seed] = run
    return found


def lost(groups: Runs, algorithm: str, staleness: str, bases: Runs | None = None) -> np.ndarray:
    """(runs, prompts): scores less those of the same start and seed at S = 0, of others if given."""
    here, base = groups[algorithm, staleness], (bases or groups)[algorithm, "0"]
    return np.array([np.subtract(here[key].scores, base[key].scores) for key in here if key in base])


def head(titles: str) -> Iterator[str]:
    """Of a table, whose titles are a line."""
    yield titles
    yield f"{'| --- ' * (titles.count('|') - 1)}|"


def told(interval: Interval, form: str) -> str:
    """An interval in the table."""
    return f"{interval.estimate:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def p_of(means: Sequence[float]) -> float:
    """Two-sided, of a mean of 0, over runs."""
    return float(stats.ttest_1samp(means, 0.0).pvalue)


def effects(groups: Runs, name: str, ages: Sequence[int], bases: Runs | None = None) -> list[str]:
    """Cells of a row: accuracy at S = 0, of others if given, and what larger S change."""
    level = within(crossed_mean_interval([run.scores for run in (bases or groups)[name, "0"].values()]))
    changes = [crossed_mean_interval(lost(groups, name, str(age), bases).tolist()) for age in ages]
    return [name, told(level, ".3f"), *(told(change, "+.3f") for change in changes)]


def kls(groups: Runs, name: str, oldest: int) -> str:
    """To the starting model, at S = 0 and the largest S."""
    return ", ".join(f"{fmean(run.kl for run in groups[name, age].values()):.2f}" for age in ("0", str(oldest)))


def places(groups: Runs) -> tuple[list[str], list[int]]:
    """What is compared, and the staleness above 0."""
    return list(dict.fromkeys(name for name, _ in groups)), sorted({int(age) for _, age in groups} - {0})


def robustness(*names: str) -> Iterator[str]:
    """Of each algorithm: accuracy at S = 0, and what larger S change; of the runs of some studies."""
    groups = grouped([run for name in names for run in read(name)])
    algorithms, ages = places(groups)
    corrected = holm([p_of(lost(groups, name, str(ages[-1])).mean(axis=1).tolist()) for name in algorithms])
    stale = " | ".join(f"S = {age}" for age in ages)
    yield from head(f"| algorithm | S = 0 | {stale} | p, Holm | KL, S = 0 and {ages[-1]} | runs |")
    for name, p in zip(algorithms, corrected, strict=True):
        last = [f"{p:.2g}", kls(groups, name, ages[-1]), str(len(groups[name, "0"]))]
        yield f"| {' | '.join([*effects(groups, name, ages), *last])} |"


def primary(name: str) -> Iterator[str]:
    """The comparison that was named beforehand."""
    groups = grouped(read(name))
    first, second = (lost(groups, algorithm, "16") for algorithm in PRIMARY)
    more = crossed_mean_interval((first - second).tolist())
    yield f"{told(more, '+.3f')}, p = {p_of((first - second).mean(axis=1).tolist()):.1g}, {len(first)} pairs of runs"


def studies() -> Iterator[str]:
    """How large each study is. A run on sorting takes 12 seconds of one core, one on docstrings 90."""
    yield from head("| data | runs | seeds | starting models | hours of one core |")
    whole = ("rates", "robustness", "between", "second", "time", "pair_losses", "certificate", *SWEPT)
    for name, runs in ((name, read(name)) for name in whole):
        seeds, starts = {run.seed for run in runs}, {run.setting.get("start") for run in runs}
        hours = len(runs) * (90 if name == "docstrings" else 12) / 3600
        yield f"| [{name}](science/{name}.jsonl) | {len(runs)} | {len(seeds)} | {len(starts)} | {hours:.1f} |"


def certificate() -> Iterator[str]:
    """What `certify` says of the pairs of recipes/science/certify.yml."""
    arrivals = [
        (int(run.setting["staleness"]), run.seed, {"scores": run.scores, "kl": {"estimate": run.kl}})
        for run in read("certificate")
    ]
    question = question_of(parse(CertifyConfig, "certify", ["--config", str(CERTIFY)])[0])
    pairs = in_order(arrivals, sorted({seed for _, seed, _ in arrivals}), question.staleness)
    yield from (f"- {line}" for line in words(summary_of([*looks(pairs, question)], question)).splitlines())


def equal_time() -> Iterator[str]:
    """Of each algorithm: accuracy at S = 0 after as long as larger S take, and what these change."""
    groups, bases = grouped([*read("robustness"), *read("between")]), grouped(read("time"))
    ages = places(groups)[1]
    yield from head(f"| algorithm | S = 0 | {' | '.join(f'S = {age}' for age in ages)} |")
    for algorithm, _ in bases:
        yield f"| {' | '.join(effects(groups, algorithm, ages, bases))} |"


SWEPT = {
    "staleness": {"train.staleness": "0"},
    "docstrings": {"train.staleness": "0"},
    "mini_batches": {"N": "1"},
    "corrections": {},
    "original_schedule": {"schedule": "per step"},
    "epochs_and_samples": {"epochs and samples": "T 1, K 2"},
}
"""Studies that are shown as sweeps show them, and their baselines."""


def swept(name: str) -> list[Summary]:
    """The settings of a sweep, without axes that have one value."""
    runs = read(name)
    axes = [axis for axis in runs[0].setting if len({run.setting[axis] for run in runs}) > 1]
    results = [
        {
            "name": "",
            "setting": {axis: run.setting[axis] for axis in axes},
            "seed": run.seed,
            "scores": run.scores,
            "kl": {"estimate": run.kl},
            "metrics": {
                name: value
                for name, value in (("objective/scores", run.training), ("val/ess_sequence", run.ess))
                if value is not None
            },
        }
        for run in runs
    ]
    return summaries(results, {}, SWEPT[name])


def table_of(name: str) -> Iterator[str]:
    """The table of a sweep."""
    yield from table(swept(name), SWEPT[name]).splitlines()


def rates() -> Iterator[str]:
    """Accuracy at S = 0 by learning rate."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in read("rates"):
        found[run.setting["algorithm"]][run.setting["train.learning_rate"]].append(fmean(run.scores))
    names = list(next(iter(found.values())))
    yield from head(f"| algorithm | {' | '.join(f'{float(name):.0e}'.replace('e-0', 'e-') for name in names)} |")
    for algorithm, by_rate in found.items():
        yield f"| {algorithm} | {' | '.join(f'{fmean(by_rate[name]):.3f}' for name in names)} |"


def pair_losses() -> Iterator[str]:
    """Of each loss on pairs: accuracy at S = 0, and what larger S change, over the same seeds and prompts."""
    groups = grouped(read("pair_losses"), "loss")
    losses, ages = places(groups)
    stale = " | ".join(f"S = {age}" for age in ages)
    yield from head(f"| loss | S = 0 | {stale} | KL, S = 0 and {ages[-1]} | seeds |")
    for loss in losses:
        last = [kls(groups, loss, ages[-1]), str(len(groups[loss, "0"]))]
        yield f"| {' | '.join([*effects(groups, loss, ages), *last])} |"


class Branches(NamedTuple):
    """Of one kind: some batches in a row that are sampled otherwise."""

    objective: str
    count: int
    age: int
    other: bool
    rows: list[dict[str, Any]]

    def change(self, later: int) -> Interval:
        """Of right answers, so many batches after the last of those; the seeds are the clusters."""
        values = [row["right"][str(row["first"] + self.count - 1 + later)] for row in self.rows]
        return clustered_mean_interval(values, [row["seed"] for row in self.rows])


def branches() -> Iterator[Branches]:
    """All of recipes/science/impulse.py that are followed for 16 batches after the last old one."""
    rows = [json.loads(line) for line in (DATA / "impulse.jsonl").read_text().splitlines()]
    groups: dict[tuple[str, int, int, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "branch" and str(row["first"] + row["count"] + 15) in row["right"]:
            groups[row["objective"], row["count"], row["age"], row["other"]].append(row)
    order = list(dict.fromkeys(row["objective"] for row in rows))
    for kind in sorted(groups, key=lambda kind: (order.index(kind[0]), *kind[1:])):
        yield Branches(*kind, groups[kind])


def impulse() -> Iterator[str]:
    """What some old batches in a row change, just after them and later."""
    yield from head("| objective | batches in a row | sampled by | just after | 4 later | 16 later | branches |")
    for kind in branches():
        how = "the same weights, other random numbers" if kind.other else f"weights of {kind.age} batches before"
        changes = (told(kind.change(later), "+.3f") for later in (0, 4, 16))
        yield f"| {' | '.join([kind.objective, str(kind.count), how, *changes, str(len(kind.rows))])} |"


def draw_impulse(out: Path) -> None:
    """What old batches in a row have changed just after them, against their number."""
    from async_rlhf.studies.report.charts import Axis, Key, Series, curves, figure, render_png

    rows = []
    for kind in branches():
        if kind.age == 16:
            change = kind.change(0)
            places = {"low": change.low, "high": change.high, "change": change.estimate, "batches": str(kind.count)}
            rows.append({"series": kind.objective, **places})
    key = Key(Series(name, name, says=name) for name in dict.fromkeys(row["series"] for row in rows))
    numbers = Axis(
        "batches", "batches in a row sampled by the weights of 16 before", values=("1", "2", "4", "8", "16", "32")
    )
    change = Axis("change", "change of right answers just after", format="+.1f", domain=(-0.7, 0.2))
    render_png(figure([curves(rows, key, numbers, change)], key), out)


def whole_runs() -> Iterator[str]:
    """The runs that branches are taken from, and those in which every batch is old."""
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in map(json.loads, (DATA / "impulse.jsonl").read_text().splitlines()):
        if row["kind"] != "branch":
            (found[row["objective"], row["kind"]][row["seed"]],) = row["right"].values()
    single = {(kind.objective, kind.age): kind for kind in branches() if kind.count == 1 and not kind.other}
    yield from head("| objective | S = 0 | S = 4 | sum of single batches | S = 16 | sum of single batches | seeds |")
    for objective in dict.fromkeys(objective for objective, _ in found):
        base = found[objective, "base"]
        cells = [objective, told(mean_interval([*base.values()]), ".3f")]
        for age in (4, 16):
            change = mean_interval([end - base[seed] for seed, end in found[objective, f"S = {age}"].items()])
            cells += [told(change, "+.3f"), f"{summed(single[objective, age]):+.2f}"]
        yield f"| {' | '.join([*cells, str(len(base))])} |"


def summed(kind: Branches) -> float:
    """What single batches in the last 17 of a run have changed at its end, together: means at 0, 1, 2, 4, 8 and 16
    batches later, and straight lines between them.
    """
    known = (0, 1, 2, 4, 8, 16)
    return float(np.interp(range(17), known, [kind.change(later).estimate for later in known]).sum())


def drift() -> Iterator[str]:
    """How far a synchronous policy moves in S batches, beside what staleness S cost."""
    moved: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    for row in map(json.loads, (DATA / "drift.jsonl").read_text().splitlines()):
        moved[row["objective"], row["age"]].append(row)
    groups = grouped([*read("robustness"), *read("between")])
    ages = [age for age in sorted({age for _, age in moved}) if any(int(known) == age for _, known in groups)]
    yield from head("| objective | S | KL | ESS | second moment | minus S = 0 |")
    told_of: dict[int, list[tuple[float, float, float, float]]] = defaultdict(list)
    for (objective, age), rows in moved.items():
        if age in ages:
            kl, ess, second = (fmean(row[name] for row in rows) for name in ("kl", "ess", "second_moment"))
            change = crossed_mean_interval(lost(groups, objective, str(age)).tolist())
            told_of[age].append((kl, ess, second, -change.estimate))
            yield f"| {objective} | {age} | {kl:.2f} | {ess:.2f} | {second:.2f} | {told(change, '+.3f')} |"
    for age, found in told_of.items():
        *measures, losses = zip(*found, strict=True)
        ranks = (f"{stats.spearmanr(measure, losses).statistic:+.2f}" for measure in measures)
        yield f"| rank correlation with what is lost | {age} | {' | '.join(ranks)} | |"


HEAD, TAIL = slice(10), slice(10, None)
"""Batches of a race's run in which weights are first published and memory is first touched, and the others."""


def raced(file: str) -> dict[str, dict[str, dict[int, dict[str, Any]]]]:
    """Runs of recipes/smollm/race.py by task, way and seed."""
    tasks: dict[str, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for run in map(json.loads, (DATA / file).read_text().splitlines()):
        tasks[run["task"]][run["way"]][run["seed"]] = run
    return tasks


def smollm() -> Iterator[str]:
    """Right answers to held-out questions, with intervals over seeds and questions."""
    early = "ESS of completions, batches 1 to 10"
    yield from head(f"| task | | seeds | right held-out answers | minus S = 0 | {early} | after |")
    for task, ways in raced("smollm.jsonl").items():
        for way, runs in sorted(ways.items()):
            base = {} if way == "S = 0" else {seed: ways["S = 0"][seed] for seed in runs if seed in ways["S = 0"]}
            if not all("right" in run for run in runs.values()):
                continue
            share = told(within(crossed_mean_interval([run["right"] for run in runs.values()])), ".1%")
            pairs = [np.subtract(runs[seed]["right"], base[seed]["right"]).tolist() for seed in base]
            lost = told(crossed_mean_interval(pairs), "+.1%") if len(pairs) > 1 else ""
            parts = [[x for run in runs.values() for x in run.get("ess", [])[part] if x] for part in (HEAD, TAIL)]
            ess = [f"{fmean(part):.2f}" if part else "" for part in parts]
            yield f"| {' | '.join([task, way, str(len(runs)), share, lost, *ess])} |"


def smollm_seconds() -> Iterator[str]:
    """Seconds a batch, and how many times as fast as S = 0 in its fastest placement: of all batches, of the first ten,
    in which answers are long, and of those after; with intervals over seeds, or of one.
    """
    parts = {"all batches": slice(0, None), "the first ten": HEAD, "after": TAIL}
    yield from head(f"| task | | seeds | {' | '.join(f'{part}, s | times as fast' for part in parts)} |")
    for task, ways in raced("smollm_seconds.jsonl").items():
        for way, runs in sorted(ways.items()):
            cells = [task, way, str(len(runs))]
            for part in parts.values():
                base = {} if way == "S = 0" else {seed: ways["S = 0"][seed] for seed in runs if seed in ways["S = 0"]}
                factors = [pace(base[seed], part, runs[seed]) / pace(runs[seed], part) for seed in base]
                mean = fmean(pace(run, part) for run in runs.values())
                fast = told(mean_interval(factors), ".2f") if len(factors) > 1 else "".join(f"{x:.2f}" for x in factors)
                cells += [f"{mean:.2f}", fast]
            yield f"| {' | '.join(cells)} |"


def pace(run: Mapping[str, Any], part: slice, other: Mapping[str, Any] | None = None) -> float:
    """Seconds a batch in a part of a run, of as many batches as another one has."""
    return float(np.diff([0.0, *run["seconds"]])[: len((other or run)["seconds"])][part].mean())


@cache
def detectable(seeds: int, power: float = 0.8, draws: int = 200_000) -> float:
    """The smallest effect, in standard deviations of a difference, that a two-sided t-test at 5% finds so often: from
    the noncentral t distribution, by simulation of its definition.
    """
    chance = np.random.default_rng(0)
    means = chance.standard_normal(draws) / np.sqrt(seeds)
    deviations = np.sqrt(chance.chisquare(seeds - 1, draws) / (seeds - 1))
    # Found where (effect + mean) sqrt(n) / deviation exceeds the quantile; the other tail is negligible here.
    return float(np.quantile(t_quantile(seeds - 1) * deviations / np.sqrt(seeds) - means, power))


def power() -> Iterator[str]:
    """Of each setting against S = 0: how far the difference varies over seeds, and what is found with 80% power."""
    scores: dict[tuple[tuple[str, str], ...], dict[int, float]] = defaultdict(dict)
    for run in read("robustness"):
        scores[tuple(run.setting.items())][run.seed] = fmean(run.scores)
    yield from head(
        "| setting | seeds | sd of the difference, paired | unpaired | found with 80%: these seeds | 3 | 6 | 12 |"
    )
    for setting, ours in scores.items():
        base = scores.get(tuple({**dict(setting), "train.staleness": "0"}.items()), {})
        seeds = sorted(ours.keys() & base.keys())
        if base is not ours and len(seeds) > 1:
            paired = stdev(ours[seed] - base[seed] for seed in seeds)
            unpaired = sum(stdev(side[seed] for seed in seeds) ** 2 for side in (ours, base)) ** 0.5
            found = (f"{detectable(n) * paired:.3f}" for n in (len(seeds), 3, 6, 12))
            cells = [", ".join(f"{axis.rpartition('.')[2]} {label}" for axis, label in setting), str(len(seeds))]
            yield f"| {' | '.join([*cells, f'{paired:.4f}', f'{unpaired:.4f}', *found])} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "studies": studies,
    "rates": rates,
    "robustness": partial(robustness, "robustness", "between"),
    "primary": partial(primary, "robustness"),
    "second": partial(robustness, "second"),
    "primary_second": partial(primary, "second"),
    "equal_time": equal_time,
    **{name: partial(table_of, name) for name in SWEPT},
    "certificate": certificate,
    "pair_losses": pair_losses,
    "smollm": smollm,
    "smollm_seconds": smollm_seconds,
    "impulse": impulse,
    "whole_runs": whole_runs,
    "drift": drift,
    "power": power,
}


def page(path: Path) -> str:
    """A page with each table after the line that names it."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"<!-- (?!end)(\w+) -->", text):
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"{path} has no end of {name}"
        text = f"{before}{mark}\n" + "\n".join(TABLES[name]()) + f"\n\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="keep NAME RESULTS", help="take results of a sweep over")
    words = parser.parse_args().what
    if words:
        _, name, results = words
        keep(name, Path(results))
    for path in PAGES:
        path.write_text(page(path), encoding="utf-8")
    draw_impulse(DATA / "impulse.png")
    for name in ("staleness", "mini_batches", "corrections"):
        draw(swept(name), None, DATA / f"{name}.png")


if __name__ == "__main__":
    main()
