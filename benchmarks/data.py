"""What data sets larger than memory cost: the first start, a later one, the fingerprint, and the memory of each.

Writes a file of that many prompts (or demonstrations, pairs, rated rows), reads it in processes of their own, with an
empty cache and with a full one, and prints a line for each.

    python benchmarks/data.py --rows 5000000 --folder /somewhere/with/space
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from smallest import parse

KINDS = ("prompts", "sft", "pairs", "ratings")


def main() -> None:
    """Measure one kind of rows, in processes of their own."""
    options = _options()
    if options.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            run(options, Path(folder))
    else:
        run(options, Path(options.folder))


def run(options: argparse.Namespace, folder: Path) -> None:
    """With the file and the cache in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{options.kind}-{options.rows}-{options.words}.jsonl"
    if options.measure is not None:
        print(json.dumps(_measured(path, options.kind, options.measure == "held-out")))
        return
    if not path.exists():
        _write(path, options.kind, options.rows, options.words)
    print(f"{options.rows} {options.kind}, {path.stat().st_size / 1e6:.0f} MB, cache in {folder / 'cache'}")
    environment = {**os.environ, "ASYNC_RLHF_CACHE": str(folder / "cache")}
    for start in ("first", "cached", *(["held-out"] * 2 if options.held_out else [])):
        program = [sys.executable, *sys.argv, "--folder", str(folder), "--measure", start]
        done = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        print(f"{start:>9}: " + ", ".join(f"{name} {value}" for name, value in found.items()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--words", type=int, default=12, help="of each text")
    parser.add_argument("--kind", choices=KINDS, default="prompts")
    parser.add_argument("--held-out", action="store_true", help="measure with a fifth held out, too")
    parser.add_argument("--folder", help="for the file and the cache; by default one that is removed at the end")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parse(parser, rows=100)


def _write(path: Path, kind: str, count: int, words: int) -> None:
    draw = random.Random(0)
    known = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]

    def text() -> str:
        return " ".join(draw.choices(known, k=words))

    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for number in range(count):
            asked = f"{number} {text()}"
            row: dict[str, Any] = {
                "prompts": lambda asked=asked, number=number: {"query": asked, "number": number},
                "sft": lambda asked=asked: {"prompt": asked, "completion": text()},
                "pairs": lambda asked=asked: {"prompt": asked, "chosen": text(), "rejected": text()},
                "ratings": lambda asked=asked: {"prompt": asked, "completion": text(), "score": draw.random()},
            }[kind]()
            file.write(json.dumps(row) + "\n")
    temporary.replace(path)


def _measured(path: Path, kind: str, held_out: bool) -> dict[str, Any]:
    """Seconds of each step, and megabytes beyond what the imports take."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from async_rlhf.commands.ratings import encode_ratings
    from async_rlhf.commands.reward import encode_pairs
    from async_rlhf.commands.sft import encode_rows
    from async_rlhf.commands.stage_loop import steps_of
    from async_rlhf.data.held_out import hold_out
    from async_rlhf.data.loading import load_rows
    from async_rlhf.data.stream import PromptStream
    from async_rlhf.models.chats import ChatTemplate

    # Letters as tokens: the time of a real tokenizer depends on it alone.
    letters = {letter: i for i, letter in enumerate("?abcdefghijklmnopqrstuvwxyz0123456789 $")}
    raw = Tokenizer(models.WordLevel(letters, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="$", pad_token="$", unk_token="?")
    torch.randperm(10)
    imports = _megabytes()
    found: dict[str, Any] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        found[name] = f"{time.perf_counter() - clock:.2f} s"
        clock = time.perf_counter()

    rows = load_rows(str(path), columns=["query"] if kind == "prompts" else [], key="data")
    lap("open")
    if held_out:
        rows = hold_out(rows, 0.2, "data", "query" if kind == "prompts" else None)[0]
        lap("hold out")
    if kind == "prompts":
        stream = PromptStream(rows, tokenizer, max_length=2048)
        lap("tokens")
        stream.fingerprint()
        lap("fingerprint")
        stream.batch(1, 64)
    else:
        chat = ChatTemplate(tokenizer)
        make = {"sft": lambda: encode_rows(rows, chat, True, 2048, "data")[0]}
        make["pairs"] = lambda: encode_pairs(rows, chat, 2048, "data")[0]
        make["ratings"] = lambda: encode_ratings(rows, chat, "score", 2048, "data")[0]
        examples = make[kind]()
        lap("tokens")
        for _, numbers in zip(range(3), steps_of(examples.lengths, 64, 1, 0), strict=False):
            [examples[i] for i in numbers]
    lap("first batch")
    return {**found, "memory": f"{_megabytes() - imports:.0f} MB"}


def _megabytes() -> float:
    """The most memory of this process so far; of a file that is mapped, what was touched."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
