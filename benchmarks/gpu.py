"""The figures of this machine's GPU, written to a file that names it: benchmarks/figures/NVIDIA_H100_80GB_HBM3.json

    make bench-gpu                  # or: python benchmarks/gpu.py [--only publish] [--folder benchmarks/figures]

Runs overlap.py, generation.py and publish.py one after the other, each in a process of its own; with sizes at which a
GPU has something to do. If one of them fails, nothing is written.

ASYNC_RLHF_GPU_TESTS_ON=cpu runs the same on a CPU at its smallest size: the figures say nothing, but that all of it
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import torch
from smallest import parse

HERE = Path(__file__).parent
BENCHMARKS: dict[str, str] = {
    # As Pythia 410m is, but for its vocabulary.
    "overlap": "--rounds 3 --batches 16 --hidden 1024 --layers 24 --bf16 --tried 16 32 64 128 256",
    "generation": "--dtype bfloat16 --batch 512 --samples 2 --rounds 5 --new-tokens 256 "
    "--longest-prompt 512 --vocabulary 50304 --hidden 1024 --layers 24 --heads 16",
    "publish": "--rounds 5",
}


def run(name: str, words: Sequence[str]) -> dict[str, Any]:
    """What one benchmark has measured."""
    command = [sys.executable, str(HERE / f"{name}.py"), *words]
    if name == "publish":
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            subprocess.run([*command, "--json", str(file)], check=True)
            found = json.loads(file.read_text())
            del found["machine"]
            return found
    done = subprocess.run([*command, "--json"], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=list(BENCHMARKS), action="append", help="one benchmark; may be given several times"
    )
    parser.add_argument("--folder", type=Path, default=HERE / "figures")
    options = parse(parser)
    on_gpu = os.environ.get("ASYNC_RLHF_GPU_TESTS_ON", "cuda") != "cpu"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py: there is no CUDA device here")
    device = "cuda:0" if on_gpu else "cpu"
    figures: dict[str, Any] = {"machine": machine.describe(device)}
    for name in options.only or BENCHMARKS:
        told = "--smallest" if options.smallest or not on_gpu else BENCHMARKS[name]
        told += f" --device {device}" if name != "overlap" else ""  # which finds its devices
        print(f"{name}.py {told}", flush=True)
        figures[name] = {"command": f"python benchmarks/{name}.py {told}", **run(name, shlex.split(told))}
    file = options.folder / f"{re.sub('[^0-9A-Za-z]+', '_', machine.name_of(device)).strip('_')}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{json.dumps(figures, indent=2)}\nwritten to {file}")


if __name__ == "__main__":
    main()
