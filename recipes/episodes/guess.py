"""Guess a number from 1 to 7 in three turns, by hints: the environment, and the data for it.

    python recipes/episodes/guess.py runs/guess

Writes prompts.jsonl and held_out.jsonl, a game each, and demonstrations.jsonl, a guess each by somebody who heeds the
hints only sometimes. Whoever bisects always wins.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from async_rlhf import Observation
from async_rlhf.commands.stage import json_lines
from async_rlhf.system.files import whole_file

HIGHEST, TURNS = 7, 3


class Guess:
    """Says "higher" or "lower" until the guess is right. That pays 1, less 0.05 for each guess before it."""

    async def reset(self, row, seed):
        self.number, self.turns = random.Random(seed).randint(1, HIGHEST), 0

    async def step(self, message):
        text, self.turns = message["content"].strip(), self.turns + 1
        guess = int(text) if text.isdecimal() else None
        if guess == self.number:
            return Observation(reward=1.05 - 0.05 * self.turns, done=True, metrics={"right": 1})
        hint = "no number" if guess is None else "higher" if guess < self.number else "lower"
        return Observation([{"role": "user", "content": f"{hint}\n"}], metrics={"right": 0})

    def close(self):
        pass


def demonstration(query: str, chance: random.Random) -> dict[str, str]:
    """The start of a game and the next guess; every other guess heeds the hints."""
    number, prompt, low, high = chance.randint(1, HIGHEST), query, 1, HIGHEST
    for _ in range(chance.randrange(TURNS)):
        guess = chance.choice([one for one in range(1, HIGHEST + 1) if one != number])
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        prompt += f"{guess}\n{'higher' if guess < number else 'lower'}\n"
    guess = chance.randint(low, high) if chance.random() < 0.5 else chance.randint(1, HIGHEST)
    return {"prompt": prompt, "completion": f"{guess}\n"}


def main() -> None:
    """Write the three files."""
    folder, chance, games = Path(sys.argv[1]), random.Random(0), int((*sys.argv[2:], 24_000)[0])
    folder.mkdir(parents=True, exist_ok=True)
    names = map("".join, chance.sample([*itertools.product("abcdefghijklm", repeat=4)], games))
    queries = [f"Game {name}: guess 1 to {HIGHEST}\n" for name in names]
    rows = {"prompts": [{"query": one} for one in queries[: games // 6]]}
    rows["held_out"] = [{"query": one} for one in queries[games // 6 : games // 5]]
    rows["demonstrations"] = [demonstration(one, chance) for one in queries[games // 5 :]]
    for name, each in rows.items():
        with whole_file(folder / f"{name}.jsonl") as file:
            file.write(json_lines(each))


if __name__ == "__main__":
    main()
