"""Runs and commands that are killed with kill -9 again and again, at random moments, and must end as if never touched.

    python benchmarks/faults.py [--kills 20] [--algorithms online_dpo ppo] [--staleness 0 1 3] [--seed 0]
    python benchmarks/faults.py --long [--jobs 2]           # a thousand: every algorithm, S = 0 to 3, every command

For each algorithm and staleness, a tiny policy is trained once without interruption, and once in as many parts as there
are kills, each resumed from what the last one left. Phases take turns. Which occurrence of a phase, how far into it,
and who is killed is random, but equal for equal seeds: the whole group, or the learner alone; and before that, every
other time, what the run must survive: its generators, the server that forks them, or both. At the end the weights,
the metrics (but for seconds) and the samples of both runs are compared byte by byte.

With --long the other commands are killed too, after random shares of the time that they take, and started again; their
output folders must be those of an undisturbed one, byte for byte. Every run is a fork of one interpreter then, and a
kill costs a second instead of ten. The kills are those of tests/contract/killed_run.py.

Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "contract")]

from killed_run import ENDING, OPTIONS, PHASES, SPANS, SURVIVED, Kill  # noqa: E402
from smallest import parse  # noqa: E402
from test_kill import BrokenPromise, Program, difference  # noqa: E402
from tiny import PROMPTS, byte_tokenizer, tiny_config  # noqa: E402

from async_rlhf.run.manifest import CheckpointError  # noqa: E402

LATEST = 3
"""The last occurrence of a phase to kill in. Checkpoints are 2 batches apart, so the first two rarely get further."""
COMMANDS = {
    "sft": "--model base --train demonstrations.jsonl --output_dir {out} --num_epochs 2 --learning_rate 1e-3",
    "pairs": "--model sft --prompts prompts.jsonl --output {out}/pairs.jsonl --reward reward.py:letters --device cpu "
    "--max_prompt_length 32 --response_length 12",
    "reward": "--model sft --train pairs/pairs.jsonl --output_dir {out} --learning_rate 1e-3",
    "generate": "--models.sft sft --models.base base --data prompts.jsonl --output_dir {out} --device cpu "
    "--max_prompt_length 32 --response_length 24 --batch_size 2",
    "evaluate": "--generations generate --output_dir {out} --reward_model reward --device cpu",
}
"""The words of each command; each needs the output of those before it."""


@dataclass
class Chain:
    """One algorithm and staleness."""

    algorithm: str
    staleness: int
    kills: Counter[str] = field(default_factory=Counter)
    outcome: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.algorithm}, S = {self.staleness}"

    def run(self, folder: Path, count: int, seed: int, forked: bool) -> None:
        """The uninterrupted run, the killed one, and their comparison."""
        started = time.monotonic()
        folder.mkdir()
        try:
            with Program(folder, forked, patience=60) as program:
                self.outcome = self._compare(program, folder, count, seed) or "identical"
        except (BrokenPromise, CheckpointError, ValueError) as error:  # the last are logs with half a line
            self.outcome = f"{type(error).__name__}: {error}"
        self.seconds = time.monotonic() - started
        print(f"{self.name}: {self.outcome}; {self.seconds:.0f} s")
        if self.outcome == "identical":
            shutil.rmtree(folder)

    def _compare(self, program: Program, folder: Path, count: int, seed: int) -> str | None:
        whole, out = folder / "whole", folder / "killed"
        # A kill while saving gets 6 batches further at most, any other 2: so none comes after the end.
        options = (self.algorithm, self.staleness, 3 * count + 4 + self.staleness)
        chance = random.Random(f"{seed} {self.algorithm} {self.staleness}")
        program.run(whole, *options)
        for number in range(count):
            phase = PHASES[number % len(PHASES)]
            kill = Kill(phase, chance.randint(1, LATEST), chance.random(), chance.choice(ENDING))
            disturb = None
            if self.staleness > 0 and number % 2:
                disturb = Kill(chance.choice([*SPANS.values()]), 1, chance.random(), chance.choice(SURVIVED))
            begun = time.monotonic()
            note = program.run(out, *options, kill, f"{whole}.phases.json", disturb)
            self.kills[kill.phase] += 1
            where = [f"{name} {note[name]}" for name in ("batch", "version", "folder", "newest") if name in note]
            place = ", ".join([note["at"], *where])
            took = time.monotonic() - begun
            print(f"{self.name} {number + 1}/{count} {kill} {place}; {took:.1f} s")
        program.run(out, *options)
        struck = Path(f"{out}.struck")
        lines = struck.read_text().splitlines() if struck.exists() else []
        self.kills["survived"] = sum(int(line.split()[1]) for line in lines)
        return difference(out, whole, options[-1])


@dataclass
class Command:
    """One command that is no training."""

    name: str
    kills: Counter[str] = field(default_factory=Counter)
    outcome: str = ""
    seconds: float = 0.0

    def run(self, program: Program, folder: Path, count: int, seed: int) -> None:
        """The undisturbed command, which later ones read; then killed ones, each started again until it ends."""
        started, chance = time.monotonic(), random.Random(f"{seed} {self.name}")
        program.command(folder, self._words(self.name))
        length = time.monotonic() - started
        out, self.outcome = folder / f"{self.name}-killed", "identical"
        while self.kills["command"] < count and self.outcome == "identical":
            # Killed once to three times in a row, so that what is left by one meets the next.
            for _ in range(chance.randint(1, 3)):
                self.kills["command"] += program.command(
                    folder, self._words(out.name), chance.uniform(0.05, 1) * length
                )
            program.command(folder, self._words(out.name))
            self.outcome = self._difference(out, folder / self.name) or "identical"
            if self.outcome == "identical":
                shutil.rmtree(out)
        self.seconds = time.monotonic() - started
        print(f"{self.name}: {self.kills['command']} kills, {self.outcome}; {self.seconds:.0f} s")

    def _words(self, out: str) -> list[str]:
        return [self.name, *COMMANDS[self.name].format(out=out).split()]

    def _difference(self, ours: Path, theirs: Path) -> str | None:
        names = [
            {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} for folder in (ours, theirs)
        ]
        if names[0] != names[1]:
            return f"files in one folder only: {sorted(names[0] ^ names[1])}"
        for name in sorted(names[0]):
            left, right = ((folder / name).read_bytes() for folder in (ours, theirs))
            # Markers and results say where they lie.
            if left.replace(ours.name.encode(), theirs.name.encode()) != right:
                return name
        return None


def make_inputs(folder: Path) -> None:
    """A model, data and a reward function for the commands."""
    import torch
    from transformers import GPTNeoXForCausalLM

    from async_rlhf.models.saving import write_model

    torch.manual_seed(0)
    write_model(GPTNeoXForCausalLM(tiny_config()), byte_tokenizer(), folder / "base")
    rows = [{**row, "query_reference_response": f"{row['query']} ab{i}"} for i, row in enumerate(PROMPTS * 4)]
    for name in ("demonstrations", "prompts"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def letters(prompts, completions, **columns):\n"
        "    return [sum(c.isascii() and c.isalpha() for c in text) + 0.01 * len(text) for text in completions]\n"
    )


def kill_commands(folder: Path, count: int, seed: int) -> list[Command]:
    """Every command, one after the other."""
    commands = [Command(name) for name in COMMANDS]
    folder.mkdir()
    make_inputs(folder)
    with Program(folder, forked=True, patience=60) as program:
        for command in commands:
            try:
                command.run(program, folder, count, seed)
            except BrokenPromise as error:
                command.outcome = f"BrokenPromise: {error}"
                print(f"{command.name}: {command.outcome}")
                break
    return commands


def row_of(one: Chain | Command) -> str:
    """Of the table."""
    ends = one.kills.total() - one.kills["survived"]
    cells = (one.name, ends, one.kills["survived"] or "", shorten(one.outcome or "not reached", 100))
    return "| " + " | ".join(map(str, cells)) + f" | {one.seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, help="of each run or command; 20, with --long 40")
    parser.add_argument("--algorithms", nargs="+", default=["online_dpo", "ppo"], choices=OPTIONS)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 3])
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--long", action="store_true", help="every algorithm, S = 0 to 3, and the other commands")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parse(parser, kills=1, algorithms=["online_dpo"], staleness=[1])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    algorithms, staleness = (OPTIONS, range(4)) if arguments.long else (arguments.algorithms, arguments.staleness)
    kills = arguments.kills or (40 if arguments.long else 20)
    chains = [Chain(algorithm, s) for algorithm in algorithms for s in staleness]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    commands: list[Command] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = [pool.submit(kill_commands, folder / "commands", kills, arguments.seed)] if arguments.long else []
        for chain in chains:
            place = folder / chain.name.replace(", S = ", "-")
            pool.submit(chain.run, place, kills, arguments.seed, arguments.long)
        commands = [command for one in found for command in one.result()]
    every = [*chains, *commands]
    ended = sum(one.kills.total() - one.kills["survived"] for one in every)
    survived = sum(one.kills["survived"] for one in every)
    print(
        "\n| run | kills that ended it | processes killed that it survived | outcome | seconds |\n|---|---|---|---|---|"
    )
    print("\n".join(map(row_of, every)))
    print(f"\n{ended} kills that ended a run, {survived} that it survived")
    if any(one.outcome != "identical" for one in every):
        sys.exit(f"what differs is left in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
