"""Where asynchrony pays on cores that both sides share: S = 1 against the fastest S = 0, by what a batch waits for.

    python benchmarks/pays.py [--json] [--rounds 3] [--batches 12]

The real trainer on a GPT-NeoX of 1.3M parameters, RLOO, 64 completions a batch. At S = 0 one process samples and trains
in turn, with both cores for each; at S = 1 a generator process has one core, and the learner the other. They alternate.
For each case seconds a batch, and their ratio (median, lowest and highest of the rounds). Leave the machine idle: two
threads wait for each other where other programs compute, too.

    cores only     answers of 48 tokens: all that is gained is what a second core would not have sped up
    long tails     answers of 1 to 200 tokens, of which one in forty ends at each token: the last rows are decoded alone
    slow rewards   a function that waits for a second, as for a judge
    environments   two turns, between which an environment takes half a second on average (lognormal, sigma 1)
"""

from __future__ import annotations

import logging
import statistics
from typing import Any

import waits
from waits_environment import Waits
from waits_rewards import slow_reward
from workload import PROMPT_TOKENS, VOCABULARY, WARM_UP, neox, prompts, train

PROMPTS, SAMPLES = 16, 4
SMALLEST = {"batches": WARM_UP + 2, "rounds": 1, "seconds": 0.02, "tokens": 4}
LONGEST, ENDS = 200, VOCABULARY // 40


def run(case: str, staleness: int, batches: int, seconds: float, tokens: int) -> float:
    """Seconds of a batch, the mean of those after the warm-up."""
    generation: dict[str, Any] = {"response_length": tokens}
    judged: dict[str, Any] = {"reward_funcs": slow_reward(seconds if case == "slow rewards" else 0.0)}
    if case == "long tails":
        generation = {"response_length": LONGEST, "stop_token_ids": [*range(ENDS)]}
    if case == "environments":
        generation |= {"max_turns": 2, "episode_length": 2 * (tokens + 3)}
        judged = {"environment": lambda: Waits(seconds / 2)}
    generation |= {} if staleness else {"placement": "inline", "num_threads": None}
    options = {
        **{
            "staleness": staleness,
            "batches": batches,
            "samples_per_prompt": SAMPLES,
            "max_prompt_length": PROMPT_TOKENS,
        },
        **{"completions_per_batch": PROMPTS * SAMPLES, "per_device_train_batch_size": PROMPTS},
        "num_threads": 1 if staleness else 2,
    }
    model = neox(VOCABULARY, 128, 4, 4, PROMPT_TOKENS + max(LONGEST, 2 * tokens) + 8)
    return train("rloo", model, prompts(), generation, options, **judged).mean_times(WARM_UP)["batch"]


def measure(batches: int = 12, rounds: int = 3, seconds: float = 1.0, tokens: int = 48) -> dict[str, dict[str, float]]:
    """Of each case."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = {}
    for case in ("cores only", "long tails", "slow rewards", "environments"):
        pairs = [[run(case, staleness, batches, seconds, tokens) for staleness in (0, 1)] for _ in range(rounds)]
        factors = [synchronous / asynchronous for synchronous, asynchronous in pairs]
        walls = {f"S{staleness}": statistics.median(each) for staleness, each in enumerate(zip(*pairs, strict=True))}
        found[case] = {**walls, "factor": statistics.median(factors), "lowest": min(factors), "highest": max(factors)}
    return found


if __name__ == "__main__":
    waits.main(__doc__, measure, SMALLEST)
