r"""GSM8K as JSON lines, with the prompt that realtreetune/rho-1b-sft-GSM8K was trained on (or a template of your own).

    python recipes/gsm8k/make_data.py
    python recipes/gsm8k/make_data.py --template 'Q: {question}\nA:' --output_dir runs/gsm8k/plain

Writes train.jsonl and test.jsonl with `query` (the prompt) and `answer` (the worked solution, which ends "#### 18"),
and for supervised fine-tuning `prompt` and `completion`, the solution without <<calculator calls>>.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from async_rlhf.commands.stage import json_lines
from async_rlhf.config import ConfigError
from async_rlhf.data.loading import load_rows
from async_rlhf.system.files import whole_file

TEMPLATE = r"[MATH_TASK] Problem:\n{question}\n\nSolution:"


def main() -> None:
    """Write both splits, or say what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--source", default="openai/gsm8k:main", help="rows with `question` and `answer`, in splits")
    parser.add_argument("--template", default=TEMPLATE, help=r"the prompt, with {question}; \n is a new line")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/gsm8k"), help="where the files go")
    wanted = parser.parse_args()
    template = wanted.template.replace(r"\n", "\n")
    if "{question}" not in template:
        sys.exit(f"make_data.py: error: --template: got {wanted.template!r}; must have {{question}} in it")
    try:
        splits = {name: load_rows(wanted.source, name, columns=["question", "answer"]) for name in ("train", "test")}
    except ConfigError as error:
        sys.exit(f"make_data.py: error: {error}")
    for name, rows in splits.items():
        written = []
        for row in rows:
            prompt, solution = template.replace("{question}", row["question"]), re.sub(r"<<[^>]*>>", "", row["answer"])
            written.append({"query": prompt, "answer": row["answer"], "prompt": prompt, "completion": f" {solution}"})
        with whole_file(wanted.output_dir / f"{name}.jsonl") as file:
            file.write(json_lines(written))
        print(f"{len(written)} rows in {wanted.output_dir / name}.jsonl")


if __name__ == "__main__":
    main()
