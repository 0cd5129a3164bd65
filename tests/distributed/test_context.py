"""Rows that ranks share by parts of their sequences are computed as by one rank, gradients and all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import finish, launch

pytestmark = pytest.mark.distributed

ROUNDING = 1e-12
"""float64, relative to the size of what is compared."""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, list[float]]]:
    """Two and four of four ranks share rows."""
    folder = tmp_path_factory.mktemp("context")
    log = folder / "log"
    finish(launch([{"folder": str(folder)}], 4, log, Path(__file__).with_name("context.py")), log, 400)
    return json.loads((folder / "found.json").read_text())


def test_numbers_and_gradients_are_those_of_one_rank(found):
    """Padded and packed, with windows, learned positions and experts, and with fewer key heads than ranks."""
    assert len(found["passes"]) == 4 * (7 + 4 * 4 + 1)
    assert {case: off for case, off in found["passes"].items() if max(off) > ROUNDING} == {}


def test_a_learner_knows_and_does_what_one_rank_does(found):
    """Two groups of two, and one of four: log-probabilities, values, advantages; how weights move; metrics."""
    assert len(found["learners"]) == 3 * 4
    assert {case: off for case, off in found["learners"].items() if max(off) > ROUNDING} == {}


def test_a_reward_model_scores_as_on_one_rank_of_which_each_computes_a_part(found):
    """By halves, by quarters of a forest, and whole rows of a model that cannot share them."""
    assert max(off for off, _ in found["scores"].values()) <= ROUNDING
    padded, forest = 2 * 36, 36  # the shorter row of each pass is the beginning of the longer one
    tokens = {case: most for case, (_, most) in found["scores"].items()}
    assert tokens == {"ddp, 2, 4": padded / 2, "fsdp, 4, 4": forest / 4, "ddp, 4, 2": padded}
