"""Whether `async-rlhf plan` predicts what runs then measure; and its table for models and GPUs that are not here.

    python benchmarks/plan.py [--rounds 5] [--only device|cores]     real runs against predictions
    python benchmarks/plan.py --table                                410m to 8B on 1 to 64 GPUs
    python benchmarks/plan.py --paper                                the runs of arXiv 2410.18252

The real trainer with generators in processes of their own. Times come from synchronous runs with one generator alone;
what is predicted are runs with other staleness, or with more generators. Each prediction is made from the synchronous
runs right before and after the run that is predicted, so that a machine whose speed drifts treats both alike.

    device: ...   models that wait, as for a GPU (waiting.py): alike; with two epochs, so that training limits; varied,
                  where sampling varies by 0.5 (standard deviation / mean) and so does a judge, a reward that waits too
    cores: ...    the model of overlap.py, generator and learner on one core each; also with short completions

Two generators are predicted from one: `generate_fixed` comes from a run with half the prompts. Cores share caches and
memory, and what goes on at once takes longer: `overlap_slowdown` is measured without any overlap of sampling and
training, by two synchronous runs at once, against one alone.

A run on cores during which somebody waited for a core for more than 5% of the time (/proc/pressure/cpu) is not counted:
others were using the machine. It is made again, at most three times as often as rounds are asked for.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from overlap import PROMPT_TOKENS, VOCABULARY, policy, reward, tokenizer
from smallest import parse
from waiting import waiting_policy

from async_rlhf import GenerationConfig, OnlineDPOConfig, OnlineDPOTrainer
from async_rlhf.studies.plan.command import find_times, short
from async_rlhf.studies.plan.config import (
    HardwareConfig,
    ModelSizeConfig,
    PlanConfig,
    ScalingConfig,
    VariationConfig,
    WorkloadConfig,
)
from async_rlhf.studies.plan.measured import MeasuredRun, read_run
from async_rlhf.studies.plan.search import propose, search, try_split
from async_rlhf.studies.plan.times import Scaled, Split

WARM_UP = 6
JUDGE_SECONDS = 0.2


@dataclass(frozen=True)
class Setting:
    """A kind of run, and the choices of (generators, staleness) that are predicted from one generator, synchronous."""

    response_length: int
    predicted: tuple[tuple[int, int], ...]
    waiting: bool = True
    variation: float = 0.0
    epochs: int = 1


SETTINGS = {
    "device: alike": Setting(16, ((1, 1), (1, 2), (2, 1))),
    "device: two epochs": Setting(16, ((1, 1),), epochs=2),
    "device: varied": Setting(16, ((1, 1), (1, 3), (2, 0), (2, 2)), variation=0.5),
    "cores: alike": Setting(64, ((1, 1), (1, 2)), waiting=False),
    "cores: short": Setting(24, ((1, 1),), waiting=False),
}


class Judge:
    """A reward that takes its time: the same in every run, batch by batch."""

    __name__ = "judge"

    def __init__(self, variation: float) -> None:
        self.random = random.Random(0)
        self.sigma = math.sqrt(math.log1p(variation**2))

    def __call__(self, prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        time.sleep(JUDGE_SECONDS * math.exp(self.random.gauss(-(self.sigma**2) / 2, self.sigma)))
        return reward(prompts, completions, **columns)


@dataclass(frozen=True)
class Trial:
    """A real run: what it measured, and for which share of the time somebody waited for a core."""

    run: MeasuredRun
    crowded: float


def waited() -> float:
    """Seconds for which somebody has waited for a core since the machine was started; 0 where it does not say."""
    path = Path("/proc/pressure/cpu")
    return int(path.read_text().split("total=")[1].split()[0]) / 1e6 if path.is_file() else 0.0


def wait_for_quiet(crowded: float, seconds: float = 300.0, look: float = 5.0) -> None:
    """Until nobody waits for a core for more than this share of the time, or so long."""
    until = time.monotonic() + seconds
    while crowded < 1 and time.monotonic() < until:
        before = waited()
        time.sleep(look)
        if waited() - before <= crowded * look:
            return


def train(setting: Setting, workers: int, staleness: int, prompts: int, batches: int) -> Trial:
    """Run the real trainer."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    words = [f"w{i}" for i in range(1, PROMPT_TOKENS + 1)]
    rows = [{"query": " ".join([f"w{i + 20}", *words[1:]])} for i in range(256)]
    with tempfile.TemporaryDirectory() as folder:
        generation = GenerationConfig(
            response_length=setting.response_length,
            mismatch_samples=0,
            placement="process",
            workers=workers,
            num_threads=1,
        )
        args = OnlineDPOConfig(
            output_dir=folder,
            overwrite_output_dir=True,
            staleness=staleness,
            total_episodes=prompts * batches,
            per_device_train_batch_size=prompts,
            num_epochs=setting.epochs,
            non_eos_penalty=False,
            max_prompt_length=PROMPT_TOKENS,
            progress=False,
            num_threads=1,
            generation=generation,
        )
        judge = Judge(setting.variation) if setting.variation else reward
        positions = PROMPT_TOKENS + setting.response_length
        model = waiting_policy(VOCABULARY, positions, setting.variation) if setting.waiting else policy()
        trainer = OnlineDPOTrainer(model, args, rows, reward_funcs=judge, processing_class=tokenizer())
        before, started = waited(), time.monotonic()
        trainer.train()
        crowded = (waited() - before) / (time.monotonic() - started)
        return Trial(read_run(Path(folder), WARM_UP), crowded)


def _send(pipe: multiprocessing.connection.Connection, work: Callable[[], Trial]) -> None:
    pipe.send(work())


def slowdown(prompts: int, batches: int, crowded: float, rounds: int) -> float:
    """How much longer a synchronous run takes beside another one than alone; median over rounds."""
    context = multiprocessing.get_context("spawn")
    work = partial(train, SETTINGS["cores: alike"], 1, 0, prompts, batches)

    def at_once(count: int) -> float:
        wait_for_quiet(crowded)
        pipes = [context.Pipe() for _ in range(count)]
        processes = [context.Process(target=_send, args=(theirs, work)) for _, theirs in pipes]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()  # else a process that fails would be waited for
        trials = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
        return statistics.fmean(median_step(trial.run) for trial in trials)

    found, alone = [], at_once(1)
    for _ in range(rounds):
        together, after = at_once(2), at_once(1)
        found.append(2 * together / (alone + after))
        alone = after
    return max(1.0, statistics.median(found))


def median_step(run: MeasuredRun) -> float:
    """Of the work of a batch, so that what disturbed one of them does not count."""
    return statistics.median(max(row.generate) + row.learn + row.publish + row.other for row in run.rows)


def fixed_share(prompts: int, batches: int) -> float:
    """Share of sampling that stays however few the prompts, from two synchronous runs."""
    setting = SETTINGS["device: alike"]
    whole, half = (train(setting, 1, 0, count, batches).run for count in (prompts, prompts // 2))
    seconds = [statistics.median(row.generate[0] for row in run.rows) for run in (whole, half)]
    return min(1.0, max(0.0, 2 * seconds[1] / seconds[0] - 1))


def predict(runs: list[MeasuredRun], choice: tuple[int, int], slower: float, fixed: float) -> float:
    """Seconds a batch of a choice, from synchronous runs: what `async-rlhf plan --run` does."""
    generators, staleness = choice
    rows = [row for run in runs for row in run.rows]
    times = Scaled(rows, runs[0].split, ScalingConfig(generate_fixed=fixed))
    config = PlanConfig(overlap_slowdown=slower, batches=400)
    return try_split(times, Split(generators, 1), config).outcomes[staleness].step_seconds


Key = tuple[str, int, int]


def against_runs(rounds: int, batches: int, prompts: int, only: str, crowded: float) -> str:
    """Markdown: medians over rounds, and the range of the error."""
    chosen = {name: setting for name, setting in SETTINGS.items() if name.startswith(only)}
    slower = (
        slowdown(prompts, batches, crowded, min(3, rounds))
        if any(not setting.waiting for setting in chosen.values())
        else 1.0
    )
    fixed = fixed_share(prompts, batches) if any(setting.waiting for setting in chosen.values()) else 0.0
    found: dict[Key, list[tuple[float, ...]]] = {
        (name, *choice): [] for name, setting in chosen.items() for choice in setting.predicted
    }
    left_out = 0
    for _ in range(3 * rounds):
        for name, setting in chosen.items():
            missing = [choice for choice in setting.predicted if len(found[(name, *choice)]) < rounds]
            for choice, row, share in _round(setting, missing, prompts, batches, slower, fixed, crowded):
                print(name, choice, *(f"{x:.3f}" for x in (*row, share)), file=sys.stderr, flush=True)
                counts = setting.waiting or share <= crowded
                left_out += not counts
                if counts:
                    found[(name, *choice)].append(row)
    figures = f"overlap_slowdown {slower:.3f} (cores), generate_fixed {fixed:.2f} (device), {prompts} prompts"
    return f"{_markdown(found)}\n\n{figures}; {left_out} left out: others used the machine"


def _round(
    setting: Setting,
    choices: list[tuple[int, int]],
    prompts: int,
    batches: int,
    slower: float,
    fixed: float,
    crowded: float,
) -> Iterator[tuple[tuple[int, int], tuple[float, ...], float]]:
    """For each choice: synchronous, measured and predicted seconds a batch, predicted without slowdown; how crowded."""
    before = None
    for choice in choices:
        if before is None or (before.crowded > crowded and not setting.waiting):
            if not setting.waiting:
                wait_for_quiet(crowded)
            before = train(setting, 1, 0, prompts, batches)
        trial = train(setting, *choice, prompts, batches)
        after = train(setting, 1, 0, prompts, batches)
        runs = [before.run, after.run]
        guesses = [predict(runs, choice, factor, fixed) for factor in (1.0 if setting.waiting else slower, 1.0)]
        synchronous = statistics.fmean(run.step_seconds for run in runs)
        share = max(before.crowded, trial.crowded, after.crowded)
        yield choice, (synchronous, trial.run.step_seconds, *guesses), share
        before = after


def _markdown(found: dict[Key, list[tuple[float, ...]]]) -> str:
    titles = ("run", "generators", "S", "rounds", "synchronous", "measured", "predicted", "error (range)", "unslowed")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for key, rows in found.items():
        if not rows:
            continue
        seconds = [f"{statistics.median(row[i] for row in rows):.3f}" for i in range(3)]
        errors, plain = ([row[i] / row[1] - 1 for row in rows] for i in (2, 3))
        spread = f"{statistics.median(errors):+.1%} ({min(errors):+.1%} to {max(errors):+.1%})"
        cells = (*key, len(rows), *seconds, spread, f"{statistics.median(plain):+.1%}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


TLDR = WorkloadConfig(
    prompts=512, samples_per_prompt=2, prompt_tokens=350, response_length=53, response_tokens=45, trained_per_prompt=2
)
CHAT = WorkloadConfig(
    prompts=256,
    samples_per_prompt=2,
    prompt_tokens=200,
    response_length=1024,
    response_tokens=400,
    trained_per_prompt=2,
)


def pythia(parameters: float, layers: int, hidden: int) -> ModelSizeConfig:
    return ModelSizeConfig(
        parameters=parameters, layers=layers, kv_width=hidden, hidden=hidden, vocabulary=50_304, block="gpt_neox"
    )


SIZES = {
    "410m": (pythia(4.05e8, 24, 1024), TLDR),
    "1B": (pythia(1.01e9, 16, 2048), TLDR),
    "2.8B": (pythia(2.78e9, 32, 2560), TLDR),
    "8B": (ModelSizeConfig(parameters=8.03e9, layers=32, kv_width=1024, hidden=4096), CHAT),
}
"""Pythia, and Llama 3.1: of the last, keys and values have 8 heads of 128."""
A100 = HardwareConfig(name="A100 80GB SXM", tflops=312.0, memory_gbs=2039.0, reduce_gbs=200.0)


def sized(name: str, devices: int, hardware: HardwareConfig) -> PlanConfig:
    model, workload = SIZES[name]
    variation = VariationConfig(generate=0.1, learn=0.05)
    return PlanConfig(devices=devices, model=model, workload=workload, hardware=hardware, variation=variation)


def size_table(counts: Sequence[int]) -> str:
    """Markdown: what is proposed for every size and these numbers of H100s."""
    lines = [
        "| model | GPUs | generators + learners | S | seconds a batch | prompts/s | generators idle | learners idle "
        "| / same split, S = 0 | / all GPUs in turn |",
        "|---" * 10 + "|",
    ]
    for name in SIZES:
        for devices in counts:
            config = sized(name, devices, HardwareConfig())
            source = find_times(config)
            choices = search(source.times, devices, config)
            proposal = propose(choices, config.tolerance, config.in_turn)
            if proposal is None:
                lines.append(f"| {name} | {devices} | does not fit |{' |' * 7}")
                continue
            assert source.prompts is not None
            split, outcome = proposal.choice.split, proposal.outcome
            turns = next((c.fastest for c in choices if c.split.in_turn and c.outcomes), math.nan)
            gains = [seconds / outcome.step_seconds for seconds in (proposal.choice.outcomes[0].step_seconds, turns)]
            idle = ("", "") if split.in_turn else (f"{outcome.generator_idle:.0%}", f"{outcome.learner_idle:.0%}")
            cells = [
                name,
                devices,
                "in turn" if split.in_turn else f"{split.generators} + {split.learners}",
                proposal.staleness,
                f"{outcome.step_seconds:.3g}",
                short(source.prompts / outcome.step_seconds),
                *idle,
                *("does not fit" if math.isnan(gain) else f"{gain:.2f}" for gain in gains),
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def paper_table() -> str:
    """Markdown: the paper's machines and splits, one generator and the rest learning."""
    lines = ["| run | S = 0 | S = 1 | less time | all in turn | less time |", "|---" * 6 + "|"]
    for name, devices, hardware in (("410m", 4, A100), ("1B", 4, A100), ("2.8B", 4, A100), ("8B", 8, HardwareConfig())):
        config = replace(sized(name, devices, hardware), max_staleness=1)
        times = find_times(config).times
        split = try_split(times, Split(1, devices - 1), config).outcomes
        turns = try_split(times, Split(devices, devices, in_turn=True), config).outcomes[0].step_seconds
        seconds = [split[0].step_seconds, split[1].step_seconds]
        cells = [f"{name}, {devices} x {hardware.name}, 1 + {devices - 1}", *(f"{s:.1f}" for s in seconds)]
        cells += [f"{1 - seconds[1] / seconds[0]:.0%}", f"{turns:.1f}", f"{1 - seconds[1] / turns:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="the table of sizes and GPUs")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="of that table")
    parser.add_argument("--paper", action="store_true", help="the paper's machines")
    parser.add_argument("--only", choices=["device", "cores"], default="", help="kinds of runs; default: both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=26)
    parser.add_argument("--prompts", type=int, default=16, help="of a batch")
    parser.add_argument("--crowded", type=float, default=0.05, help="share of waiting beyond which no run is counted")
    options = parse(parser, rounds=1, batches=14, prompts=2, only="device: two", crowded=1.0, gpus=[1, 4])
    if options.table or options.paper:
        tables = [size_table(options.gpus)] if options.table else []
        print("\n\n".join([*tables, *([paper_table()] if options.paper else [])]))
        return
    print(against_runs(options.rounds, options.batches, options.prompts, options.only, options.crowded))


if __name__ == "__main__":
    main()
