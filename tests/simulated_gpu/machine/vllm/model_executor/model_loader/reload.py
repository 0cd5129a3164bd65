"""See vllm/__init__.py."""

from typing import Any


def initialize_layerwise_reload(model: Any) -> None:
    """The model keeps its weights as checkpoints have them."""


def finalize_layerwise_reload(model: Any, config: Any) -> None:
    """The same."""
