"""Trains with a generator process, with flash-attn installed.

python tests/gpu/with_flash_attn.py FOLDER DEVICE
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
FOLDER = Path(sys.argv[1])


def pretend() -> None:
    """Put something that looks like flash-attn where this process and its children find it."""
    place = FOLDER / "installed"
    info = place / "flash_attn-2.8.3.dist-info"
    for path, text in {
        place / "flash_attn" / "__init__.py": "",
        info / "METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n",
        info / "top_level.txt": "flash_attn\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, str(place))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])


def main() -> None:
    import torch
    from gpus import FLOAT32_TOLERANCE, largest, train

    torch.set_num_threads(1)
    assert version("flash-attn")
    rows = train(FOLDER, "run", {"placement": "process", "device": sys.argv[2]}, staleness=1)
    assert [row["schedule/lag"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert largest(rows, "engine/logprob_difference") < FLOAT32_TOLERANCE


if __name__ == "__main__":
    if os.environ.get("ASYNC_RLHF_GPU_TESTS_ON") == "cpu":
        pretend()
    main()
