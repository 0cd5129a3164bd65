"""What a first GPU decides, in one command of at most 25 minutes: a table, and a file that names the machine.

    make bench-gpu                  # or: python benchmarks/gpu.py [--only kernels] [--folder benchmarks/figures]

Each part is another benchmark, in a process of its own, with sizes at which a GPU has something to do; what decides
most comes first:

    kernels    shared_tokens.py: packed rows against padded ones, and the forest of shared tokens against packed ones
    update     learner.py: a step in bfloat16, against a bare pass, and as a share of the GPU's peak
    vllm       generation.py: tokens a second, and the share of the time in which the GPU waits for Python
    weights    publish.py: a version's way to generators, whole and in parts
    overlap    overlap.py: S = 0, in turn and in two processes, against S = 1 and 2, on one GPU
    memory     memory.py: what a learner holds at most, against `async-rlhf plan`

A part that fails, dies or takes longer than it may is skipped with the reason, and the others go on. The file is
written anew after each part, so nothing is lost if the machine goes.

ASYNC_RLHF_GPU_TESTS_ON=cpu runs the same on a CPU at its smallest size: the figures say nothing, but that all of it
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
from smallest import parse

HERE = Path(__file__).parent
Found = dict[str, Any]
LIKE_410M = "--hidden 1024 --layers 24"
SHAPES = "tldr4 reasoning agents docstrings4"


class Part(NamedTuple):
    """A benchmark, the seconds that it may take, and which figures of the JSON that it prints are shown."""

    benchmark: str
    words: str
    seconds: float
    shown: Sequence[str]


PARTS = {
    "kernels": Part("shared_tokens", f"--bf16 --rounds 5 --shapes {SHAPES}", 240, ("padded", "ratio")),
    "update": Part("learner", f"--bf16 {LIKE_410M} --rounds 5 --budgets 4096 16384", 180, ("ratio", "tflops", "peak")),
    "vllm": Part(
        "generation",
        f"--contestants vLLM --dtype bfloat16 --batch 512 --samples 2 --rounds 3 --new-tokens 256 --heads 16 "
        f"--longest-prompt 512 --vocabulary 50304 {LIKE_410M}",
        360,
        ("vLLM",),
    ),
    "weights": Part("publish", "--rounds 5", 120, ("network", "gb_per_second", "seconds")),
    "overlap": Part(
        "overlap", f"--rounds 1 --batches 12 --prompts 128 --bf16 {LIKE_410M}", 480, ("wall", "generate", "train")
    ),
    "memory": Part("memory", "", 120, ("bytes", "planned")),
}
"""In all at most 25 minutes."""
NAMES = ("model", "shape", "budget")
"""What tells the rows of a list apart."""


def figures_in(found: Any, keys: Sequence[str], path: str = "") -> Iterator[tuple[str, str]]:
    """Where these keys are, and their values."""
    if isinstance(found, list):
        for one in found:
            yield from figures_in(one, keys, " ".join([path, *(str(one[name]) for name in NAMES if name in one)]))
    elif isinstance(found, dict):
        here = {key: found[key] for key in keys if isinstance(found.get(key), float | int | str)}
        if here:
            told = (f"{key} {value if isinstance(value, str) else f'{value:.4g}'}" for key, value in here.items())
            yield path.strip(), ", ".join(told)
        for key, value in found.items():
            yield from figures_in(value, keys, f"{path} {key}")


def attempt(command: Sequence[str], seconds: float) -> Found:
    """The JSON of the last line that a program prints; or ``skipped``, and the reason. No process of it is left."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"skipped": f"not done within {seconds:g} s"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines, said = out.splitlines(), errors.strip().splitlines()
    if process.returncode:
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        return {"skipped": f"{how}: {said[-1] if said else 'no message'}"}
    with suppress(IndexError, ValueError):
        if isinstance(found := json.loads(lines[-1]), dict):
            return found
    return {"skipped": "printed no JSON"}


def measure(name: str, device: str, smallest: bool) -> Found:
    """One part."""
    part = PARTS[name]
    if name == "vllm" and find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed: make setup-vllm"}
    if name == "memory" and device == "cpu":
        return {"skipped": "a CPU's allocator does not count what it gives"}
    words = "--contestants vLLM --smallest" if smallest and name == "vllm" else "--smallest" if smallest else part.words
    if name != "overlap":  # which finds its devices
        words += f" --device {device}"
    elif device != "cpu" and find_spec("vllm") is not None:
        words += " --engine vllm"
    command = [sys.executable, str(HERE / f"{part.benchmark}.py"), *shlex.split(words), "--json"]
    print(f"{name}: {shlex.join(command[1:])}", flush=True)
    started = time.monotonic()
    found = attempt(command, part.seconds)
    again = f"python benchmarks/{part.benchmark}.py {words}"
    return {"command": again, "took": round(time.monotonic() - started, 1), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS), action="append", help="one part; may be given several times")
    parser.add_argument("--folder", type=Path, default=HERE / "figures")
    options = parse(parser)
    on_gpu = os.environ.get("ASYNC_RLHF_GPU_TESTS_ON", "cuda") != "cpu"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py: there is no CUDA device here")
    device = "cuda:0" if on_gpu else "cpu"
    figures: Found = {"machine": machine.describe(device)}
    file = options.folder / f"{re.sub('[^0-9A-Za-z]+', '_', machine.name_of(device)).strip('_')}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only or PARTS:
        figures[name] = measure(name, device, options.smallest or not on_gpu)
        file.write_text(json.dumps(figures, indent=2) + "\n")
    print("\n| part | of | figures |\n|---|---|---|")
    for name in options.only or PARTS:
        for where, told in figures_in(figures[name], ("skipped", *PARTS[name].shown)):
            print(f"| {name} | {where} | {told.replace('|', '/')} |")
    print(f"\nwritten to {file}")


if __name__ == "__main__":
    main()
