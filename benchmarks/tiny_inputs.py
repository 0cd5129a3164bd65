"""What a quickstart leaves, of tiny models with random weights: for benchmarks that read it, at their smallest size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import tiny

from async_rlhf.models.saving import write_model

PROMPT_TOKENS, RESPONSE_TOKENS = 32, 8
"""At most."""


def make_base(folder: Path) -> Path:
    """Models and prompts, in the places of a quickstart. Returns the folder."""
    (folder / "data").mkdir(parents=True)
    write_model(tiny.new_policy(), tiny.byte_tokenizer(), folder / "sft")
    write_model(tiny.new_reward_model(), tiny.byte_tokenizer(), folder / "reward")
    rows = "".join(json.dumps({**row, "prompt": row["query"], "reference": "words"}) + "\n" for row in tiny.PROMPTS)
    for name in ("rl", "heldout"):
        (folder / "data" / f"{name}.jsonl").write_text(rows)
    return folder
