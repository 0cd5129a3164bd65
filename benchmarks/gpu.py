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
from collections.abc import Callable, Sequence
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
PEAKS = {"B200": 2250, "H200": 989, "H100": 989, "GH200": 989, "A100": 312, "L40S": 362, "L4": 121, "A10G": 70}
"""TFLOPS in bfloat16, dense, by the data sheets of NVIDIA."""


class Part(NamedTuple):
    """A benchmark, and what is shown of the JSON that it prints."""

    benchmark: str
    words: str
    seconds: float
    """That it may take."""
    shown: Callable[[Found], dict[str, float | str]]


def of_kernels(found: Found) -> dict[str, float | str]:
    return {
        f"{row['model']} {row['shape']}: padded / packed, packed / forest": f"{row['padded']:.2f}, {row['ratio']:.2f}"
        for row in found["rows"]
    }


def of_update(found: Found) -> dict[str, float | str]:
    shown: dict[str, float | str] = {}
    peak = next((tflops for name, tflops in PEAKS.items() if name in machine.name_of(found["device"]).split()), None)
    for row in found["rows"]:
        shown[f"{row['budget']} tokens a pass: update / bare pass"] = row["ratio"]
        shown[f"{row['budget']} tokens a pass: TFLOPS"] = row["tflops"]
        shown[f"{row['budget']} tokens a pass: share of one large product of matrices"] = row["peak"]
        if peak is not None:
            shown[f"{row['budget']} tokens a pass: share of the data sheet's peak"] = row["tflops"] / peak
    return shown


def of_vllm(found: Found) -> dict[str, float | str]:
    speeds = {f"{name}: tokens/s": speed for name, speed in found["full length"].items()}
    return speeds | {f"{name}: share of waiting for Python": share for name, share in found["idle"].items()}


def of_weights(found: Found) -> dict[str, float | str]:
    shown: dict[str, float | str] = {f"{found['gigabytes']:.2g} GB to {found['receivers']}, by": found["network"]}
    for name, way in found["ways"].items():
        shown[f"{name}: seconds, GB/s"] = f"{way['seconds']:.3g}, {way['gb_per_second']:.3g}"
    return shown


def of_overlap(found: Found) -> dict[str, float | str]:
    return {
        f"S = {name}: seconds a batch, sampling, training": ", ".join(f"{run[key]:.3f}" for key in OF_A_BATCH)
        for name, run in found["staleness"].items()
    }


def of_memory(found: Found) -> dict[str, float | str]:
    return {
        f"{case}, {phase}: GB, planned": f"{one['bytes'] / 1e9:.2f}, {one['planned'] / 1e9:.2f}"
        for case, phases in found["memory"].items()
        for phase, one in phases.items()
    }


OF_A_BATCH = ("wall", "generate", "train")
PARTS = {
    "kernels": Part("shared_tokens", "--bf16 --rounds 5", 240, of_kernels),
    "update": Part("learner", f"--bf16 {LIKE_410M} --rounds 5 --budgets 4096 16384", 180, of_update),
    "vllm": Part(
        "generation",
        f"--contestants vLLM --dtype bfloat16 --batch 512 --samples 2 --rounds 3 --new-tokens 256 --heads 16 "
        f"--longest-prompt 512 --vocabulary 50304 {LIKE_410M}",
        360,
        of_vllm,
    ),
    "weights": Part("publish", "--rounds 5", 180, of_weights),
    "overlap": Part("overlap", f"--rounds 2 --batches 12 --prompts 128 --bf16 {LIKE_410M}", 360, of_overlap),
    "memory": Part("memory", "", 120, of_memory),
}


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
    try:
        return dict(json.loads(lines[-1]))
    except (IndexError, ValueError):
        return {"skipped": "printed no JSON"}


def measure(name: str, device: str, smallest: bool) -> Found:
    """One part."""
    part = PARTS[name]
    if name == "vllm" and find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed: make setup-vllm"}
    if name == "memory" and device == "cpu":
        return {"skipped": "a CPU's allocator does not count what it gives"}
    words = "--contestants vLLM --smallest" if smallest and name == "vllm" else "--smallest" if smallest else part.words
    words += f" --device {device}" if name != "overlap" else ""  # which finds its devices
    command = [sys.executable, str(HERE / f"{part.benchmark}.py"), *shlex.split(words), "--json"]
    print(f"{name}: {shlex.join(command[1:])}", flush=True)
    started = time.monotonic()
    found = attempt(command, part.seconds)
    again = f"python benchmarks/{part.benchmark}.py {words}"
    return {"command": again, "took": round(time.monotonic() - started, 1), "device": device, **found}


def rows_of(name: str, found: Found) -> list[tuple[str, str, str]]:
    """Of the table."""
    if "skipped" in found:
        return [(name, "skipped", found["skipped"])]
    try:
        shown = PARTS[name].shown(found)
    except (KeyError, TypeError, ValueError) as error:
        return [(name, "skipped", f"its figures are not as expected: {error!r}")]
    return [(name, what, f"{value:.3g}" if isinstance(value, float) else str(value)) for what, value in shown.items()]


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
    print("\n| part | figure | value |\n|---|---|---|")
    for name in options.only or PARTS:
        for row in rows_of(name, figures[name]):
            print(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")
    print(f"\nwritten to {file}")


if __name__ == "__main__":
    main()
