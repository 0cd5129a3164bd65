"""Trains with ``deterministic``, twice, and resumes: all must be the same bit for bit.

python tests/gpu/deterministic.py FOLDER STALENESS
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpus import GPU, train


def without_clock(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: x for name, x in row.items() if not name.startswith("time/") and name != "eps"} for row in rows]


def main(folder: Path, staleness: int) -> None:
    options = {"staleness": staleness, "deterministic": True, "save_steps": 2}
    once, again = (without_clock(train(folder, name, **options)) for name in ("once", "again"))
    start = folder / "once" / "checkpoint-2"
    resumed = without_clock(train(folder, "resumed", **options, resume_from=str(start)))
    assert torch.are_deterministic_algorithms_enabled() == GPU
    assert len(once) == 6
    assert once == again, (once, again)
    assert once[2:] == resumed, (once[2:], resumed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
