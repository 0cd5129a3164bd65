"""Data of a small verifiable task: sort digits. Answers can be checked, and a model of 100,000 weights can learn it.

    python recipes/science/make_sorting.py --output runs/science/sorting

Writes sft.jsonl, whose answers are right only as often as --right says, so that the model that is fine-tuned on them
knows how to sort but often does not, as a pretrained one would; rl.jsonl and heldout.jsonl, with the right `answer`.
No list of digits is in two files.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from async_rlhf.system.files import whole_file


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--digits", type=int, default=5, help="digits of a list")
    parser.add_argument("--right", type=float, default=0.3, help="share of right answers in sft.jsonl")
    parser.add_argument("--sizes", type=int, nargs=3, default=[8000, 8000, 500], help="rows of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    wanted = parser.parse_args()
    chance = random.Random(wanted.seed)
    lists = chance.sample(range(10**wanted.digits), sum(wanted.sizes))
    wanted.output.mkdir(parents=True, exist_ok=True)
    for name, size in zip(("sft", "rl", "heldout"), wanted.sizes, strict=True):
        rows = [row_of(f"{lists.pop():0{wanted.digits}d}", name, wanted.right, chance) for _ in range(size)]
        with whole_file(wanted.output / f"{name}.jsonl") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def row_of(digits: str, name: str, right: float, chance: random.Random) -> dict[str, str]:
    """A list and its sorted digits; in sft.jsonl maybe with two of them exchanged."""
    query, answer = f"sort {' '.join(digits)} :", sorted(digits)
    if name != "sft":
        return {"query": query, "answer": " ".join(answer)}
    if chance.random() > right:
        i, j = chance.sample(range(len(answer)), 2)
        answer[i], answer[j] = answer[j], answer[i]
    return {"query": query, "query_reference_response": f"{query} {' '.join(answer)}"}


if __name__ == "__main__":
    main()
