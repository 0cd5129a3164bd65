"""Rank 0 alone has the batch: another rank is sent the rows that it computes, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import finish, launch

pytestmark = pytest.mark.distributed

RANKS = 3


def test_a_rank_is_sent_the_rows_that_it_computes_and_no_others(tmp_path):
    """A third of all bytes for each of three, and a little padding and talk; a planted broadcast does not pass."""
    runs = [{"folder": str(tmp_path), "planted": planted} for planted in (False, True)]
    log = tmp_path / "log"
    finish(launch(runs, RANKS, log, Path(__file__).with_name("shares.py")), log, 240)

    def shares(kind: str) -> list[float]:
        found = [json.loads((tmp_path / f"{kind}-{rank}.json").read_text()) for rank in range(RANKS)]
        assert [each["rows"] for each in found] == [96, 0, 0]
        assert [each["metrics"] > 0 for each in found] == [True, False, False]
        return [each["bytes"] / found[0]["all"] for each in found[1:]]

    assert all(0.9 / RANKS < share < 1.2 / RANKS for share in shares("right")), shares("right")
    assert all(share > 1.4 / RANKS for share in shares("planted")), shares("planted")
