"""A reward that people give: 1 to 5 stars for each completion, as 0 to 1. README.md beside this file has its limits.

    async-rlhf train ... --reward "recipes/feedback/people.py:people(folder='runs/people')"
    python recipes/feedback/people.py runs/people      # asks in this terminal

A question is a file of the folder, {"prompt": ..., "completion": ..., "stars": null}; its name is a checksum of the two
texts. Whatever writes the stars into it answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STARS = 5


def people(folder: str, patience: float = math.inf, every: float = 0.5) -> Callable[..., Awaitable[list[float]]]:
    """The reward function. It looks ``every`` so many seconds; no answer within ``patience`` seconds is a failure."""

    async def rated(prompts: Sequence[Any], completions: Sequence[str], **_columns: Any) -> list[float]:
        until = time.monotonic() + patience
        files = await asyncio.to_thread(ask, Path(folder), prompts, completions)
        while True:
            found = await asyncio.to_thread(lambda: [stars(file) for file in files])
            if None not in found or time.monotonic() >= until:
                return [math.nan if one is None else (one - 1) / (STARS - 1) for one in found]
            await asyncio.sleep(every)

    return rated


def ask(folder: Path, prompts: Sequence[Any], completions: Sequence[str]) -> list[Path]:
    """Write a file for each question that has none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for prompt, completion in zip(prompts, completions, strict=True):
        texts = json.dumps([prompt, completion])
        files.append(folder / f"{hashlib.sha256(texts.encode()).hexdigest()[:16]}.json")
        if not files[-1].exists():
            write(files[-1], {"prompt": prompt, "completion": completion, "stars": None})
    return files


def write(file: Path, row: dict[str, Any]) -> None:
    """Write a file so that nobody reads half of it."""
    half = file.with_suffix(".tmp")
    half.write_text(json.dumps(row, indent=1))
    half.replace(file)


def stars(file: Path) -> int | None:
    """The answer in a file; None if there is none yet."""
    with suppress(json.JSONDecodeError):  # somebody's editor is writing it
        said = json.loads(file.read_text())["stars"]
        if said is None or said in range(1, STARS + 1):
            return said
        raise TypeError(f"{file}: got {said!r}; stars must be a whole number from 1 to {STARS}")
    return None


if __name__ == "__main__":
    while True:
        for file in sorted(Path(sys.argv[1]).glob("*.json"), key=lambda file: file.stat().st_mtime):
            if stars(file) is None:
                row = json.loads(file.read_text())
                shown = f"{row['prompt']}\n--\n{row['completion']}"
                print("".join(c if c.isprintable() or c == "\n" else "?" for c in shown))  # nothing moves the cursor
                said = input(f"stars, 1 to {STARS}; else the question comes again: ")
                if said in list("12345"):
                    write(file, {**row, "stars": int(said)})
        time.sleep(1)
