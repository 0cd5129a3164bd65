"""Parts of the simulated GPUs serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "simulated_gpu"))
