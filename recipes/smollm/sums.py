"""Sums of two numbers as questions, for a model that chats: what GRPO and online DPO train SmolLM2 on; and the same in
two turns, with a hint between them.

    python recipes/smollm/sums.py --out runs/smollm/sums

writes train.jsonl and held_out.jsonl: the question in `messages`, the sum in `answer`. No question is in both; but for
three in four of those that are held out, a + b, the question b + a is in train.jsonl.
"""

from __future__ import annotations

import argparse
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

from async_rlhf import Observation
from async_rlhf.commands.stage import json_lines
from async_rlhf.system.files import whole_file

QUESTION = "What is {} + {}? Answer with the number only."


class Hints:
    """Says "Too low." or "Too high." to a wrong sum, once. The right one pays 1, after the hint 0.6."""

    async def reset(self, row, seed):
        self.sum, self.hinted = int(row["answer"]), False

    async def step(self, message):
        numbers = [int(digits) for digits in re.findall(r"\d+", message["content"])]
        right = numbers[-1:] == [self.sum]
        pay, done = right * (0.6 if self.hinted else 1.0), right or self.hinted
        hint = "Give a number." if not numbers else "Too low." if numbers[-1] < self.sum else "Too high."
        found = {"first": right and not self.hinted, "right": right}
        self.hinted = True
        return Observation([] if done else [{"role": "user", "content": hint}], pay, done, found)

    def close(self):
        pass


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/smollm/sums"), help="a folder")
    parser.add_argument("--largest", type=int, default=40, help="the largest number that is added")
    parser.add_argument("--held_out", type=int, default=400, help="pairs that are only evaluated")
    wanted = parser.parse_args()
    pairs = list(product(range(1, wanted.largest + 1), repeat=2))
    if not 0 < wanted.held_out < len(pairs):
        parser.error(f"--held_out: got {wanted.held_out}; must be at least 1 and less than the {len(pairs)} pairs")
    random.Random(0).shuffle(pairs)
    wanted.out.mkdir(parents=True, exist_ok=True)
    for name, some in (("held_out", pairs[: wanted.held_out]), ("train", pairs[wanted.held_out :])):
        with whole_file(wanted.out / f"{name}.jsonl") as file:
            file.write(json_lines(map(row, some)))
        print(f"{len(some)} sums in {wanted.out / name}.jsonl")


def row(pair: tuple[int, int]) -> dict[str, Any]:
    """A question and its answer."""
    return {"messages": [{"role": "user", "content": QUESTION.format(*pair)}], "answer": str(sum(pair))}


if __name__ == "__main__":
    main()
