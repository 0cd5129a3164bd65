"""The option that all benchmarks have: a size that takes seconds, whose figures say nothing but that all of it runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def parse(parser: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """The words of the command line; with --smallest, what they do not give is as in ``smallest``."""
    parser.add_argument("--smallest", action="store_true", help="a size that takes seconds, to see that all of it runs")
    if "--smallest" in sys.argv[1:]:
        parser.set_defaults(**smallest)
    return parser.parse_args()
