"""The docstring task for a model that chats: questions instead of beginnings of docstrings, with the same gold reward.

    async-rlhf data --out runs/smollm/data
    python recipes/smollm/docstrings.py --data runs/smollm/data

writes rl_chat.jsonl and heldout_chat.jsonl beside what is there: the question in `messages`, what the reward reads in
`signature`, and of held-out functions the human answer in `reference_response`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rlhf.commands.stage import json_lines
from async_rlhf.config import ConfigError
from async_rlhf.data.loading import load_rows
from async_rlhf.system.files import whole_file
from async_rlhf.tasks.docstrings import reward as docstring_reward

QUESTION = "Say in one short sentence what this Python function does. Answer with the sentence alone.\n\n{signature}"


def gold_rewards(prompts: list[str], completions: list[str], signature: list[str], **columns: Any) -> list[float]:
    """The gold reward of the docstring task. It reads the signature alone, and the prompt is a chat around it."""
    return docstring_reward.gold_rewards(signature, completions)


def main() -> None:
    """Write the chats, or say what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("runs/smollm/data"), help="the folder of async-rlhf data")
    folder = parser.parse_args().data
    for name in ("rl", "heldout"):
        try:
            rows = load_rows(str(folder / f"{name}.jsonl"), columns=["query"])
        except ConfigError as error:
            sys.exit(f"docstrings.py: error: {error}; make it by async-rlhf data --out {folder}")
        with whole_file(folder / f"{name}_chat.jsonl") as file:
            file.write(json_lines(map(chat_row, rows)))
        print(f"{len(rows)} rows in {folder / name}_chat.jsonl")


def chat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the docstring task with a question instead of the beginning of a docstring."""
    signature = row["query"].strip().removesuffix('"""').strip()
    chat = [{"role": "user", "content": QUESTION.replace("{signature}", signature)}]
    kept = {key: row[key] for key in ("name", "reference_response") if key in row}
    return {"messages": chat, "signature": signature, **kept}


if __name__ == "__main__":
    main()
