"""Data of reasoning-gym tasks as JSON lines, for `async-rlhf train` with reward async_rlhf.rewards.reasoning_gym:score.

    pip install 'async-rlhf[reasoning-gym]'
    python recipes/reasoning_gym/make_data.py --task leg_counting --size 5000 \
        --output runs/reasoning_gym/train.jsonl
    python recipes/reasoning_gym/make_data.py --task leg_counting --size 200 --seed 1 \
        --output runs/reasoning_gym/eval.jsonl

--task may be given several times. Rows have `query`, the same as a chat in `messages`, and what the reward reads:
`task`, `answer` and `metadata`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

from async_rlhf.commands.stage import json_lines
from async_rlhf.config import ConfigError
from async_rlhf.rewards.reasoning_gym import INSTRUCTION, make_rows
from async_rlhf.system.files import whole_file


def main() -> None:
    """Write the rows of every task, or say what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--task", action="append", required=True, help="name in reasoning-gym; may be given again")
    parser.add_argument("--size", type=int, default=1000, help="rows of each task")
    parser.add_argument("--seed", type=int, default=0, help="decides the rows; take another one for held-out data")
    parser.add_argument("--option", action="append", default=[], help="of the tasks, such as max_animals=4")
    parser.add_argument("--instruction", default=INSTRUCTION, help="what the prompt says after the question")
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    wanted = parser.parse_args()
    try:
        options = dict(map(read_option, wanted.option))
        rows = [
            {**row, "messages": [{"role": "user", "content": row["query"].strip()}]}
            for task in wanted.task
            for row in make_rows(task, wanted.size, wanted.seed, options, wanted.instruction)
        ]
    except ConfigError as error:
        sys.exit(f"make_data.py: error: {error}")
    with whole_file(wanted.output) as file:
        file.write(json_lines(rows))
    print(f"{len(rows)} rows in {wanted.output}")


def read_option(text: str) -> tuple[str, Any]:
    """ "key=value" with a value of Python, such as 3 or [1, 2]; anything else is text."""
    key, _, value = text.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value


if __name__ == "__main__":
    main()
