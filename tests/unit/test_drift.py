"""The page about a run says when its measures part from its score, and nothing of a run that is healthy."""

from __future__ import annotations

import random
import re

import pytest

from async_rlhf.studies.report.drift import Mean, StartAndEnd, drifts

STILL = {"objective/kl": 0.2, "val/response_length": 20.0, "policy/entropy_avg": 2.0}


def row_of(batch: int, **metrics: float) -> dict[str, float]:
    return {"batch": float(batch), "completions": 16.0 * batch, **STILL, **metrics}


def test_each_measure_that_parts_from_the_score_is_named():
    """The gold reward rises with the score up to batch 60 and then falls; answers grow later than that."""
    chance, rows, began = random.Random(0), [], dict[str, int]()
    for batch in range(1, 301):
        gold = 0.02 * min(batch, 60) - 0.02 * max(0, batch - 60) + chance.gauss(0, 0.1)
        measures = {"objective/scores": 0.02 * batch + chance.gauss(0, 0.1), "reward/hacked": 0.02 * batch}
        measures |= {"reward/gold": gold, "val/response_length": 20.0 if batch < 150 else 45.0}
        rows.append(row_of(batch, **measures))
        for drift in drifts(rows, [1.0, 0.0]):
            if began.setdefault(drift.title, batch) == batch and drift.title == "The rewards part":
                peak = re.search(r"but gold fell from .* it was highest about batch (\d+)", drift.text)[1]
                assert 50 <= int(peak) <= 70
    assert list(began) == ["The rewards part", "Answers grow with the score"]
    assert 120 < began["The rewards part"] < 145  # below where it began, and that is no chance
    assert 150 < began["Answers grow with the score"] < 175


def test_of_a_healthy_run_nothing_is_said():
    """Forty of them: scores rise or stay, and five other rewards stay or rise, all with noise that lasts a little."""
    for seed in range(40):
        chance, rows, noise = random.Random(seed), [], [0.0] * 6
        for batch in range(1, 201):
            noise = [0.2 * each + chance.gauss(0, 1) for each in noise]
            scores = 0.01 * batch * (seed % 2) + noise[0]
            others = {f"reward/other_{i}": 0.004 * batch * (i > 2) + noise[i] for i in range(1, 6)}
            lengths = {"val/response_length": 20 + 0.02 * batch + chance.gauss(0, 2), "objective/kl": 0.004 * batch}
            rows.append(row_of(batch, **{"objective/scores": scores, "reward/trained": scores, **others, **lengths}))
            if batch % 10 == 0:
                assert list(drifts(rows, [1.0] + [0.0] * 5)) == []


def test_what_is_chance_and_what_is_not():
    """Welch's t-test at 1 in 10,000, at both ends of its freedom."""
    level, above = Mean([0.0, 1.0] * 4), Mean([1.0, 2.0] * 4)
    assert level.rises_to(above) == pytest.approx(3.74, abs=0.01)
    assert not level.surely_below(above)
    assert level.surely_below(Mean([1.5, 2.5] * 4))  # 5.6 standard errors, of 14 degrees of freedom
    assert not Mean([0.0, 1.0]).surely_below(Mean([10.0, 11.0]))  # 14, of 2
    assert not Mean([0.0] * 7).surely_below(Mean([1.0] * 7))  # they may be rewards of 0 and 1 that are rare
    assert Mean([0.0] * 8).surely_below(Mean([1.0] * 8))
    for size in (1e-200, 1e200):
        assert Mean([0.0, size] * 8).surely_below(Mean([3 * size, 4 * size] * 8))
    assert not Mean([]).surely_below(Mean([1.0]))
    assert (StartAndEnd([]).rises, StartAndEnd([1.0, 2.0, 3.0]).rises, StartAndEnd([0.0] * 8 + [1.0] * 16).rises) == (
        False,
        False,
        True,
    )


def test_a_penalty_that_falls_is_no_news():
    measures = [{"objective/scores": b, "reward/right": b, "reward/slips": -0.1 * b} for b in map(float, range(1, 61))]
    rows = [row_of(batch, **each) for batch, each in enumerate(measures, 1)]
    for weights in ([1.0, -1.0], [1.0, 1.0]):
        assert len(list(drifts(rows, weights))) == (weights[1] > 0)
