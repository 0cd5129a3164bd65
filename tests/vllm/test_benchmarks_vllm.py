"""The benchmarks with vLLM, at their smallest size: what they print is possible."""

from __future__ import annotations

import pytest
from printed import by_itself, markdown, require

pytestmark = [pytest.mark.vllm, pytest.mark.rare]


def test_generation():
    tables = markdown(by_itself("generation.py"))
    assert len(tables) == 2
    for rows in tables:
        assert [row[""] for row in rows] == ["ours", "generate", "bare loop", "vLLM"]
        for row in rows:
            require(row["tokens/s"], 1)
