"""How much of generation and training happens at the same time.

    python benchmarks/overlap.py [--json] [--rounds 3] [--batches 14] [--hidden 128] [--layers 4] [--bf16]
    python benchmarks/overlap.py --engine vllm ...
    python benchmarks/overlap.py --waiting [--json]

The real trainer, on a GPT-NeoX of 1.3M parameters: generator and learner on one core each, with so many prompts a
batch that generation and training take about equal time (found by trying). Staleness 0, 1 and 2 take turns, round by
round, so that a machine whose speed drifts treats them alike. For each:

    wall        seconds per batch, start to start, all logging included
    generate    seconds the generator was busy for a batch, loading weights included
    train       seconds the learner was busy: score, annotate, update
    efficiency  max(generate, train) / wall: 1 is perfect overlap
    speed-up    wall of staleness 0 / wall

Staleness 0 is as fast as it can be: one process samples and trains in turn, each with both cores (docs/decisions.md).

Where there are GPUs, the learner is on the first and the generator on the last; on a single one they share it.

With --waiting: what rewards, publishing, evaluations, unlike workers and long answers add, each beside the naive way.
Models sleep as long as a device would compute, so that the cores of this machine do not matter; the files waits_*.py
have more figures of each. About 15 minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import workload
from smallest import parse
from workload import PROMPT_TOKENS, VOCABULARY, WARM_UP, neox, reward, train

from async_rlhf.config import VLLMConfig

RESPONSE_TOKENS = 64


@dataclass(frozen=True)
class Size:
    """Of the policy, the precision of its arithmetic, and what samples."""

    hidden: int = 128
    layers: int = 4
    bf16: bool = False
    engine: str = "transformers"


def measure(staleness: int, prompts: int, batches: int, size: Size = Size()) -> dict[str, float]:
    """Seconds per batch of one run, means over the batches after the warm-up."""
    memory = VLLMConfig(kv_cache_gb=None if torch.cuda.is_available() else 0.1, gpu_memory_utilization=0.4)
    apart = {} if staleness else {"placement": "inline", "num_threads": None}
    generation = {"response_length": RESPONSE_TOKENS, "engine": size.engine, "vllm": memory, **apart}
    options = {
        **{"staleness": staleness, "batches": batches, "per_device_train_batch_size": prompts, "bf16": size.bf16},
        **{"max_prompt_length": PROMPT_TOKENS, "num_threads": 1 if staleness else 2},
    }
    model = neox(VOCABULARY, size.hidden, size.layers, size.hidden // 32, PROMPT_TOKENS + RESPONSE_TOKENS)
    mean = train("online_dpo", model, workload.prompts(), generation, options, reward_funcs=reward).mean_times()
    shown = {"wall": mean["batch"], "generate": mean["generate"]}
    shown["train"] = mean["score"] + mean["annotate"] + mean["train"]
    return shown | {"publish": mean["publish"], "wait": mean["wait"]}


def balanced_batch(size: Size, tried: Sequence[int]) -> int:
    """So many prompts that generation and training, while they overlap, take about equal time."""
    found = {}
    for prompts in tried:
        run = measure(1, prompts, WARM_UP + 4, size=size)
        found[prompts] = abs(run["generate"] / run["train"] - 1)
    return min(found, key=lambda prompts: found[prompts])


def run(rounds: int, batches: int, prompts: int, size: Size) -> dict[str, dict[str, float]]:
    """Medians over rounds, by staleness."""
    every: dict[str, list[dict[str, float]]] = {"0": [], "1": [], "2": []}
    for _ in range(rounds):
        for name, found in every.items():
            figures = measure(int(name), prompts, batches, size=size)
            figures["efficiency"] = max(figures["generate"], figures["train"]) / figures["wall"]
            figures["publish share"] = figures["publish"] / figures["wall"]
            found.append(figures)
            figures["speed-up"] = every["0"][-1]["wall"] / figures["wall"]
    return {name: {key: statistics.median(f[key] for f in found) for key in found[0]} for name, found in every.items()}


WAITS = (
    ("rewards of half a batch, S = 2: wall / longer side", "rewards", "rewards beside training, S = 2",
     "rewards in their turn, S = 2", "ratio", "at most 1.03"),
    ("evaluation every 10 batches: wall / longer side", "evaluation", "generators", "learner", "ratio", "at most 1.03"),
    ("publishing of 20% of a batch: wall / wall without", "publish", "beside", "in publish()", "wall", "at most 1.03"),
    ("the same: share of a batch within publish()", "publish", "beside", "in publish()", "stall", "under 0.01"),
    ("workers of speeds 1, 1, 1, 0.5: wall / best", "shares", "units", "fixed shares", "over_best", "at most 1.05"),
    ("lognormal lengths, S = 2: places that are busy", "queue", "one queue", "batch by batch", "places",
     "at least 0.95"),
)  # fmt: skip
"""Of each line: the file waits_*.py, its results for our way and the naive one, and which figure of them."""


def waits(smallest: bool) -> Iterator[dict[str, Any]]:
    """What each of them adds to a batch."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for what, name, ours, naive, figure, target in WAITS:
        if name not in found:
            part = importlib.import_module(f"waits_{name}")
            found[name] = part.measure(**part.SMALLEST if smallest else {})
        without = found[name]["nothing"]["wall"] if figure == "wall" else 1.0
        ratio, other = (found[name][way][figure] / without for way in (ours, naive))
        yield {"what": what, "ratio": ratio, "naive": other, "target": target}


def print_waits(as_json: bool, smallest: bool) -> None:
    """A line for each."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if as_json:
        print(json.dumps([*waits(smallest)]))
        return
    print(f"{'':<54}{'ours':>8}{'naive':>8}  target")
    for wait in waits(smallest):
        print(f"{wait['what']:<54}{wait['ratio']:>8.3f}{wait['naive']:>8.3f}  {wait['target']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--prompts", type=int, help="prompts per batch; found by trying where not given")
    parser.add_argument(
        "--tried", type=int, nargs="+", default=[8, 12, 16, 24, 32, 48], help="numbers of prompts to try"
    )
    parser.add_argument("--hidden", type=int, default=128, help="the policy's width; a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers", help="that samples")
    parser.add_argument("--waiting", action="store_true", help="what else could be waited for, with devices that sleep")
    options = parse(parser, rounds=1, batches=8, hidden=64, layers=1, prompts=4)
    if options.waiting:
        print_waits(options.json, options.smallest)
        return
    logging.getLogger("transformers").setLevel(logging.ERROR)
    size = Size(options.hidden, options.layers, options.bf16, options.engine)
    prompts = options.prompts or balanced_batch(size, options.tried)
    results = run(options.rounds, options.batches, prompts, size)
    if options.json:
        print(json.dumps({"prompts": prompts, "staleness": results}))
        return
    columns = ["wall", "generate", "train", "publish", "wait", "publish share", "efficiency", "speed-up"]
    print(f"{prompts} prompts x 2 completions x {RESPONSE_TOKENS} tokens a batch; seconds per batch")
    print(f"{'staleness':<14}" + "".join(f"{name:>14}" for name in columns))
    for name, figures in results.items():
        print(f"{name:<14}" + "".join(f"{figures.get(column, float('nan')):>14.3f}" for column in columns))


if __name__ == "__main__":
    main()
