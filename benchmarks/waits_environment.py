"""How full a generator's places are while episodes wait for their environments.

    python benchmarks/waits_environment.py [--json] [--batches 24]

The real trainer, one generator process with 64 places, 128 episodes a batch of four turns each. An answer has 12
tokens; its model waits for each step of decoding as on a device of its own (waiting.py), and an environment for a
lognormal time (sigma 1) whose mean is half an answer's. For each way, means over the batches after the first four and
before the last four:

    places      share of the places that were taken, over all steps of decoding
    wall        seconds from a batch to the next
    bound       in flight: all decoding, with every place taken; exact: all decoding, and the longest wait of each turn
    over        wall / bound

In flight a place is taken again as soon as an episode waits; exact episodes take turns together (docs/episodes.md).
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Mapping
from typing import Any

import waits
from waiting import counting_policy
from workload import train

from async_rlhf import Observation
from async_rlhf.generation.sampling import request_seeds
from async_rlhf.types import Prompt

PLACES, SAMPLES, TURNS, TOKENS = 64, 2, 4, 12
SMALLEST = {"batches": 10, "episodes": 16, "step_seconds": 0.002}
EDGE = 4  # batches at either end that do not count
PROMPT = "w21 w22 w23"


def waited(seed: int, turn: int, mean: float) -> float:
    """Seconds that the environment of a prompt takes in a turn: the same in every run, and for all its samples."""
    return mean * math.exp(random.Random(seed + turn).gauss(-0.5, 1))


class Waits:
    """Asks for another answer of so many tokens, four times."""

    def __init__(self, mean: float) -> None:
        self.mean = mean

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self.seed, self.turn = seed, 0

    async def step(self, message: Mapping[str, Any]) -> Observation:
        await asyncio.sleep(waited(self.seed, self.turn, self.mean))
        self.turn += 1
        return Observation([{"role": "user", "content": f" w{TOKENS}"}], float(self.turn == 1), self.turn == TURNS)

    def close(self) -> None:
        pass


def run(batches: int, episodes: int, step_seconds: float, in_flight: bool) -> dict[str, float]:
    """Means over batches of the times of each phase."""
    rows = [{"query": f"{PROMPT} w{TOKENS}"}] * (batches * episodes // SAMPLES)
    length, mean = TURNS * (TOKENS + 3), TOKENS * step_seconds / 2
    generation = {
        **{"in_flight": in_flight, "response_length": TOKENS + 1, "max_turns": TURNS, "episode_length": length},
        "batch_size": min(PLACES, episodes // 2),
    }
    options = {
        **{"staleness": 2, "samples_per_prompt": SAMPLES, "batches": batches},
        **{"completions_per_batch": episodes, "per_device_train_batch_size": episodes // 4},
    }
    policy = counting_policy(40, 8 + length, step_seconds, 1e-6)
    found = train("rloo", policy, rows, generation, options, 40, environment=lambda: Waits(mean))
    as_long = {(line["episode/turns"], line["val/response_length"]) for line in found.logs}
    assert as_long == {(TURNS, TURNS * TOKENS)}
    return found.mean_times(EDGE, -EDGE)


def bounds(batches: int, episodes: int, step_seconds: float) -> tuple[float, float]:
    """Seconds of a batch, means over those that count: in flight, and if all episodes of a batch take turns."""
    places, prompts, mean = min(PLACES, episodes // 2), episodes // SAMPLES, TOKENS * step_seconds / 2
    decoding = TURNS * (TOKENS - 1) * step_seconds * episodes / places  # a pass over the prompt draws the first token
    of_batches = []
    for batch in range(EDGE, batches - EDGE):
        drawn = [Prompt(draw, 0, ()) for draw in range(batch * prompts, (batch + 1) * prompts)]
        seeds = request_seeds(0, drawn)
        of_batches.append(sum(max(waited(seed, turn, mean) for seed in seeds) for turn in range(TURNS)))
    return decoding, decoding + statistics.fmean(of_batches)


def measure(batches: int = 24, episodes: int = 128, step_seconds: float = 0.02) -> dict[str, dict[str, float]]:
    """In flight, and exact."""
    found = {}
    for name, bound in zip(("in flight", "exact"), bounds(batches, episodes, step_seconds), strict=True):
        mean = run(batches, episodes, step_seconds, name == "in flight")
        places, wall = mean["generate_places_taken"], mean["batch"]
        found[name] = {"places": places, "wall": wall, "bound": bound, "over": wall / bound}
    return found


if __name__ == "__main__":
    waits.main(__doc__, measure, SMALLEST)
