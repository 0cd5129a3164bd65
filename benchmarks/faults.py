"""Runs that are killed with kill -9 again and again, at random moments, and must end as if they never had been.

    python benchmarks/faults.py [--kills 20] [--algorithms online_dpo ppo] [--staleness 0 1 3] [--seed 0]

For each algorithm and staleness, a tiny policy is trained once without interruption, and once in as many parts as there
are kills, each resumed from what the last one left. Phases take turns; which occurrence of a phase, and how far into
it, is random, but equal for equal seeds. At the end the weights, the metrics (but for seconds) and the samples of both
runs are compared byte by byte. The kills are those of tests/contract/killed_run.py. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "contract")]

from killed_run import OPTIONS, PHASES, Kill  # noqa: E402
from test_kill import BrokenPromise, Program, difference  # noqa: E402

from async_rlhf.checkpoint import CheckpointError  # noqa: E402

LATEST = 3
"""The last occurrence of a phase to kill in. Checkpoints are 2 batches apart, so the first two rarely get further."""


@dataclass
class Chain:
    """One algorithm and staleness."""

    algorithm: str
    staleness: int
    kills: Counter[str] = field(default_factory=Counter)
    outcome: str = ""
    seconds: float = 0.0

    def run(self, folder: Path, count: int, seed: int) -> None:
        """The uninterrupted run, the killed one, and their comparison."""
        started = time.monotonic()
        try:
            with Program(folder, forked=False) as program:
                self.outcome = self._compare(program, folder, count, seed) or "identical"
        except (BrokenPromise, CheckpointError, ValueError) as error:  # the last are logs with half a line
            self.outcome = f"{type(error).__name__}: {error}"
        self.seconds = time.monotonic() - started
        print(f"{self.algorithm} S={self.staleness}: {self.outcome}; {self.seconds:.0f} s")

    def _compare(self, program: Program, folder: Path, count: int, seed: int) -> str | None:
        whole, out = folder / "whole", folder / "killed"
        # A kill while saving gets 6 batches further at most, any other 2: so none comes after the end.
        options = (self.algorithm, self.staleness, 3 * count + 4 + self.staleness)
        chance = random.Random(f"{seed} {self.algorithm} {self.staleness}")
        program.run(whole, *options)
        for number in range(count):
            kill = Kill(PHASES[number % len(PHASES)], chance.randint(1, LATEST), chance.random())
            begun = time.monotonic()
            note = program.run(out, *options, kill, f"{whole}.phases.json")
            self.kills[kill.phase] += 1
            where = [f"{name} {note[name]}" for name in ("batch", "version", "folder", "newest") if name in note]
            place = ", ".join([note["at"], *where])
            took = time.monotonic() - begun
            print(f"{self.algorithm} S={self.staleness} {number + 1}/{count} {kill} {place}; {took:.1f} s")
        program.run(out, *options)
        return difference(out, whole, options[-1])

    def row(self) -> str:
        """Of the table."""
        kills = ", ".join(f"{phase} {self.kills[phase]}" for phase in PHASES)
        outcome = shorten(self.outcome, 100)
        cells = (self.algorithm, self.staleness, f"{self.kills.total()} ({kills})", outcome, f"{self.seconds:.0f}")
        return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each run")
    parser.add_argument("--algorithms", nargs="+", default=["online_dpo", "ppo"], choices=OPTIONS)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 3])
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    chains = [Chain(algorithm, s) for algorithm in arguments.algorithms for s in arguments.staleness]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    for chain in chains:
        place = folder / f"{chain.algorithm}-{chain.staleness}"
        place.mkdir()
        chain.run(place, arguments.kills, arguments.seed)
        if chain.outcome == "identical":
            shutil.rmtree(place)
    print("\n| algorithm | S | kills | outcome | seconds |\n|---|---|---|---|---|")
    print("\n".join(chain.row() for chain in chains))
    if any(chain.outcome != "identical" for chain in chains):
        sys.exit(f"what differs is left in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
