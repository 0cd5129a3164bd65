"""How fast checksums of weights are on a host, by one thread: GB/s, the best of several rounds.

python benchmarks/checksums.py [--megabytes 512] [--rounds 5]

xxh3       what the code does (models/weights.py)
sum        torch's sum of 64-bit integers: what reading the memory takes
fold 64    a checksum that a GPU could compute too: each integer times a weight of its place, summed, all modulo
           2^64; block by block, so that what is in between stays in the cache. It does not see two flipped top bits
fold 32    the same of 32-bit integers, which sees them
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from smallest import parse
from torch import Tensor

_BLOCK = 1 << 15


def fold(numbers: Tensor, weights: Tensor) -> Tensor:
    """Of 32- or 64-bit integers, modulo 2^64: one number a block."""
    products = torch.empty_like(weights)
    sums = [torch.mul(block, weights, out=products).sum() for block in numbers.view(-1, len(weights))]
    return torch.stack(sums)


def measure(megabytes: int, rounds: int) -> dict[str, float]:
    """GB/s of each way."""
    generator = torch.Generator().manual_seed(0)
    lowest, highest = -(1 << 63), (1 << 63) - 1
    numbers = torch.randint(lowest, highest, (megabytes << 17,), generator=generator)
    weights = torch.randint(lowest, highest, (_BLOCK,), generator=generator) | 1
    data = numbers.view(torch.uint8).numpy()
    ways: dict[str, Callable[[], Any]] = {
        "xxh3": lambda: xxhash.xxh3_128(data).digest(),
        "sum": lambda: numbers.sum(),
        "fold 64": lambda: fold(numbers, weights),
        "fold 32": lambda: fold(numbers.view(torch.int32), weights),
    }
    found = {}
    for name, way in ways.items():
        seconds = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - started)
        found[name] = numbers.nbytes / 1e9 / min(seconds[1:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parse(parser, megabytes=1, rounds=1)
    torch.set_num_threads(1)
    for name, speed in measure(options.megabytes, options.rounds).items():
        print(f"{name:<8}{speed:>7.1f} GB/s")


if __name__ == "__main__":
    main()
