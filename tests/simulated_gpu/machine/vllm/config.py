"""See vllm/__init__.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


def set_current_vllm_config(config: Any) -> Any:
    """Nothing here depends on it."""
    return nullcontext()


def get_current_vllm_config_or_none() -> None:
    """None is ever set."""
