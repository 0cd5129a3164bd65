"""Trains with vLLM in this process: it sleeps while the learner trains, and wakes with the learner's new weights.

python tests/gpu/in_turn.py FOLDER

vLLM cannot sleep on a CPU: there the calls come in the same order, and free nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpus import BF16_TOLERANCE, GPU, KV_CACHE_GB, largest, train, with_vllm

from async_rlhf.generation.inline import InlineGenerator
from async_rlhf.generation.vllm_engine import VLLMEngine
from async_rlhf.learner.learner import Learner

CALLS: list[tuple[str, int]] = []
"""What was done, and the bytes of the GPU that were in use after it."""


def used() -> int:
    if not GPU:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def note(kind: type, name: str) -> None:
    call = getattr(kind, name)

    def noted(*given, **options):
        result = call(*given, **options)
        CALLS.append((name, used()))
        return result

    setattr(kind, name, noted)


def main(folder: Path) -> None:
    for name in ("wake", "load", "generate", "sleep"):
        note(VLLMEngine, name)
    note(Learner, "update")
    if not GPU:
        make = InlineGenerator.__init__
        InlineGenerator.__init__ = lambda self, *given, **_: make(self, *given, sleeps=True)
    generation = with_vllm(placement="inline", mismatch_samples=16)
    rows = train(folder, "in_turn", generation, staleness=0, bf16=True)
    turn = ["load", "generate", "sleep", "update"]
    assert [name for name, _ in CALLS] == turn + ["wake", *turn] * 5, CALLS
    assert [row["schedule/version"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert 0 < largest(rows, "engine/logprob_difference") < BF16_TOLERANCE
    if GPU:
        awake = min(size for name, size in CALLS if name == "generate")
        asleep = max(size for name, size in CALLS if name == "sleep")
        print(f"vLLM's sleep frees {(awake - asleep) / 2**30:.2f} GB, with {KV_CACHE_GB} for keys and values")
        assert awake - asleep > 0.9 * KV_CACHE_GB * 2**30, CALLS


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
