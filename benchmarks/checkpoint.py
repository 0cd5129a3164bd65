"""How long training stands still while a checkpoint is saved: whole and sharded, on one rank and on two.

    python benchmarks/checkpoint.py [--hidden 512] [--layers 8] [--batches 12] [--every 4] [--ranks 1 2]
                                    [--folder DIR] [--threads 1] [--json]

Trains a GPT-NeoX with a vocabulary of 50,304 (77M parameters by default, and as large a reference policy) on tiny
batches; every row of the table is a run in processes of its own. Two ranks spread the weights by FSDP2. What stands
still is the span "save" of the run's trace: all that saving costs between two batches. For a sharded checkpoint it
includes waiting for the one before, if that is not written by then. The first save of a run, which gets memory for the
copies, stands by itself; the other figure is the median of the rest. With --json the last line is JSON, whose
``ratio`` is sharded / whole, the largest of any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import torch
from rich.console import Console
from rich.table import Table
from smallest import parse
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
KINDS = ("whole", "sharded")


def differing(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Rewards without ties, so that there is something to train on."""
    return [float(i) for i in range(len(completions))]


def train(options: argparse.Namespace) -> None:
    """One run, in this process or as one of several ranks; its trace says how long each save took."""
    from tiny import PROMPTS, byte_tokenizer, new_args

    from async_rlhf.config import ParallelConfig
    from async_rlhf.run.trainer import OnlineTrainer

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    heads, ranks = options.hidden // 64, int(os.environ.get("WORLD_SIZE", 1))
    sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers, "num_attention_heads": heads}
    config = GPTNeoXConfig(**sizes, intermediate_size=4 * options.hidden, vocab_size=50304, eos_token_id=256)
    args = new_args(
        options.folder,
        options.train,
        batches=options.batches,
        total_episodes=131_072,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4 // ranks,
        num_mini_batches=1,
        save_steps=options.every,
        save_total_limit=1,
        checkpoint_format=options.train,
        num_threads=options.threads,
        parallel=ParallelConfig("fsdp" if ranks > 1 else "auto"),
        generation={"response_length": 4, "num_threads": options.threads},
    )
    policy = GPTNeoXForCausalLM(config)
    tokenizer = byte_tokenizer()
    OnlineTrainer(policy, args, PROMPTS, reward_funcs=differing, processing_class=tokenizer).train()


def measure(options: argparse.Namespace, ranks: int, kind: str, folder: Path) -> dict[str, Any]:
    """The stalls of one run, and how long the run took from its first batch to its end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    words = [sys.executable, *(torchrun if ranks > 1 else []), __file__, "--train", kind, "--folder", str(folder)]
    for name in ("hidden", "layers", "batches", "every", "threads"):
        words += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])
    spans = [row for row in json.loads((folder / kind / "trace.json").read_text()) if row["ph"] == "X"]
    stalls = [row["dur"] / 1e6 for row in spans if row["name"] == "save"]
    learner = [row for row in spans if row["name"] in ("score", "train", "save")]
    newest = next((folder / kind).glob("checkpoint-*"))
    return {
        "ranks": ranks,
        "format": kind,
        "first": stalls[0],
        "stall": statistics.median(stalls[1:]),
        "stalls": stalls,
        "run": (max(row["ts"] + row["dur"] for row in learner) - min(row["ts"] for row in learner)) / 1e6,
        "gigabytes": sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) / 1e9,
    }


def main() -> None:
    """Measure, print the table, and the line of JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--train", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parse(parser, hidden=64, layers=1, batches=2, every=1)
    if options.train:
        train(options)
        return
    rows = []
    for ranks in options.ranks:
        for kind in KINDS:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                rows.append(measure(options, ranks, kind, Path(folder)))
    table = Table("ranks", "format", "GB", "first save, s", "other saves, s", "whole run, s")
    for row in rows:
        numbers = [f"{row[name]:.2f}" for name in ("gigabytes", "first", "stall", "run")]
        table.add_row(str(row["ranks"]), row["format"], *numbers)
    Console().print(table)
    by_ranks = {
        ranks: {row["format"]: row["stall"] for row in rows if row["ranks"] == ranks} for ranks in options.ranks
    }
    ratios = {ranks: found["sharded"] / found["whole"] for ranks, found in by_ranks.items()}
    for ranks, ratio in ratios.items():
        print(f"{ranks} ranks: sharded stands still {ratio:.3f} times as long as whole")
    if options.json:
        print(json.dumps({"ratio": max(ratios.values()), "ratios": ratios, "rows": rows, **machine.describe("cpu")}))


if __name__ == "__main__":
    main()
