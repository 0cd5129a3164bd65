"""The kernel for checksums of weights, without a GPU. Triton is here because vLLM needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import async_rlhf

pytestmark = pytest.mark.vllm


def run(call: str, folder: Path, **environment: str) -> str:
    """What a function of interpreted_fold.py prints, in a process of its own."""
    paths = f"{Path(async_rlhf.__file__).parents[1]}:{Path(__file__).parent}"
    done = subprocess.run(
        [sys.executable, "-c", f"import interpreted_fold; interpreted_fold.{call}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(folder), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_kernel_computes_the_checksum_bit_for_bit_and_reads_every_byte_once(tmp_path):
    """Of all types, of tails, of what is not aligned and not contiguous; against the formula word by word, too."""
    found = json.loads(run("compare()", tmp_path, TRITON_INTERPRET="1"))
    assert {name: sums for name, (sums, _, _) in found.items() if any(one != sums[0] for one in sums)} == {}
    assert len({tuple(sums[0]) for sums, _, nbytes in found.values() if nbytes > 8}) > 40
    sizes = {name: (moved, nbytes) for name, (_, moved, nbytes) in found.items() if nbytes >= 3 * 16 * 8}
    assert len(sizes) > 20
    # The words, the last of them padded, and two sums of each of three programs.
    assert {name: size for name, size in sizes.items() if size[0] != -(-size[1] // 8) * 8 + 2 * 3 * 8} == {}


def test_the_kernel_is_compiled_for_every_gpu_that_torch_has_kernels_for(tmp_path):
    assert min(json.loads(run("compile_for(75, 80, 89, 90, 100, 120)", tmp_path))) > 1000
