"""The figures of this machine's GPU, written to a file that names it: benchmarks/figures/NVIDIA_H100_80GB_HBM3.json

    make bench-gpu                  # or: python benchmarks/gpu.py [--only publish] [--folder benchmarks/figures]

Runs overlap.py, generation.py and publish.py one after the other, each in a process of its own; with sizes at which a
GPU has something to do. If one of them fails, nothing is written.

ASYNC_RLHF_GPU_TESTS_ON=cpu runs the same on a CPU, in seconds: the figures say nothing, but that all of it runs.
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

HERE = Path(__file__).parent
ON_GPU: dict[str, str] = {
    # As Pythia 410m is, but for its vocabulary.
    "overlap": "--rounds 3 --batches 16 --hidden 1024 --layers 24 --bf16 --tried 16 32 64 128 256",
    "generation": "--device cuda:0 --dtype bfloat16 --batch 512 --samples 2 --rounds 5 --new-tokens 256 "
    "--longest-prompt 512 --vocabulary 50304 --hidden 1024 --layers 24 --heads 16",
    "publish": "--device cuda:0 --rounds 5",
}
ON_CPU: dict[str, str] = {
    "overlap": "--rounds 1 --batches 6 --hidden 64 --layers 1 --prompts 4",
    "generation": "--rounds 1 --new-tokens 8 --batch 8 --hidden 64 --layers 1 --heads 2",
    "publish": "--device cpu --rounds 1",
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
        "--only", choices=list(ON_GPU), action="append", help="one benchmark; may be given several times"
    )
    parser.add_argument("--folder", type=Path, default=HERE / "figures")
    options = parser.parse_args()
    on_gpu = os.environ.get("ASYNC_RLHF_GPU_TESTS_ON", "cuda") != "cpu"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py: there is no CUDA device here")
    device, chosen = ("cuda:0", ON_GPU) if on_gpu else ("cpu", ON_CPU)
    figures: dict[str, Any] = {"machine": machine.describe(device)}
    for name in options.only or chosen:
        words = shlex.split(chosen[name])
        print(f"{name}.py {chosen[name]}", flush=True)
        figures[name] = {"command": f"python benchmarks/{name}.py {chosen[name]}", **run(name, words)}
    file = options.folder / f"{re.sub('[^0-9A-Za-z]+', '_', machine.name_of(device)).strip('_')}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{json.dumps(figures, indent=2)}\nwritten to {file}")


if __name__ == "__main__":
    main()
