"""Guess a number by hints, for a model that chats: what GRPO trains SmolLM2 on over several turns.

    python recipes/smollm/guess.py --out runs/smollm/guess

writes train.jsonl and held_out.jsonl, a game each: the question in `messages`, and `number`, which the model never
sees. Whoever halves what is left always wins.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

from async_rlhf import Observation
from async_rlhf.commands.stage import json_lines
from async_rlhf.system.files import whole_file

HIGHEST, TURNS = 10, 4
QUESTION = f"I think of a number from 1 to {HIGHEST}. You have {TURNS} guesses. Answer with a number only."


class Guess:
    """Says "Higher." or "Lower." until the guess is right: 0.9, less 0.05 for each guess before it.

    To begin with a number pays 0.1: a model that never does has nothing to learn from.
    """

    async def reset(self, row, seed):
        self.number, self.turns = row["number"], 0

    async def step(self, message):
        numbers, self.turns = [int(digits) for digits in re.findall(r"\d+", message["content"])], self.turns + 1
        guess = numbers[0] if len(numbers) == 1 and 1 <= numbers[0] <= HIGHEST else None
        begun = 0.1 if self.turns == 1 and guess else 0.0
        if guess is None:
            hint = f"That is not a number from 1 to {HIGHEST}."
        elif guess == self.number:
            return Observation(reward=begun + 0.95 - 0.05 * self.turns, done=True, metrics={"right": 1})
        else:
            hint = "Higher." if guess < self.number else "Lower."
        return Observation([{"role": "user", "content": hint}], reward=begun, metrics={"right": 0})

    def close(self):
        pass


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/smollm/guess"), help="a folder")
    parser.add_argument("--games", type=int, default=2000, help="to train on")
    parser.add_argument("--held_out", type=int, default=200, help="games that are only evaluated; each number as often")
    wanted, chance = parser.parse_args(), random.Random(0)
    numbers = {
        "train": [chance.randint(1, HIGHEST) for _ in range(wanted.games)],
        "held_out": [1 + game % HIGHEST for game in range(wanted.held_out)],
    }
    wanted.out.mkdir(parents=True, exist_ok=True)
    for name, each in numbers.items():
        rows = [{"messages": [{"role": "user", "content": QUESTION}], "number": number} for number in each]
        with whole_file(wanted.out / f"{name}.jsonl") as file:
            file.write(json_lines(rows))
        print(f"{len(rows)} games in {wanted.out / name}.jsonl")


if __name__ == "__main__":
    main()
