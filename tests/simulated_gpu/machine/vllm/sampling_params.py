"""See vllm/__init__.py."""

from enum import Enum


class RequestOutputKind(Enum):
    """When outputs are given."""

    FINAL_ONLY = 2
