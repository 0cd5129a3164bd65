"""Parts of the tests with servers and with ranks serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("vllm", "distributed")]
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
