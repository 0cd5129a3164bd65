"""A run says when its measures part from its score: once each, with the batch, and nothing while it is healthy."""

from __future__ import annotations

import logging
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from tiny import StopAfter, json_rows

from async_rlhf import OnlineTrainer
from async_rlhf.run import warnings
from async_rlhf.run.warnings import DriftWatch, Mean, StartAndEnd

STILL = {"objective/kl": 0.2, "val/response_length": 20.0, "policy/entropy_avg": 2.0}


def said_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "async_rlhf.run.warnings"]


def row_of(batch: int, **metrics: float) -> dict[str, float]:
    return {"batch": float(batch), "completions": 16.0 * batch, **STILL, **metrics}


def test_one_line_for_each_measure_names_the_batch(caplog):
    """The gold reward rises with the score up to batch 60 and then falls; answers grow later than that."""
    chance, watch, batches = random.Random(0), DriftWatch([1.0, 0.0]), []
    for batch in range(1, 301):
        gold = 0.02 * min(batch, 60) - 0.02 * max(0, batch - 60) + chance.gauss(0, 0.1)
        measures = {"objective/scores": 0.02 * batch + chance.gauss(0, 0.1), "reward/hacked": 0.02 * batch}
        measures |= {"reward/gold": gold, "val/response_length": 20.0 if batch < 150 else 45.0}
        before = len(said_of(caplog))
        watch.look(row_of(batch, **measures))
        batches += [batch] * (len(said_of(caplog)) - before)
    rewards, length = said_of(caplog)
    assert rewards.startswith(f"WARNING: batch {batches[0]}: the rewards part. The training score rose from ")
    assert 120 < batches[0] < 145  # below where it began, and that is no chance
    assert 50 <= int(re.search(r"but gold fell from .* it was highest about batch (\d+)", rewards)[1]) <= 70
    assert length.startswith(f"WARNING: batch {batches[1]}: answers grow with the score. ")
    assert 150 < batches[1] < 175
    assert watch.said == {"reward/gold", "val/response_length"}


def test_looking_takes_time_linear_in_the_run(monkeypatch):
    read = []
    monkeypatch.setattr(warnings, "drifts", lambda rows, *_: read.append(len(rows)) or iter(()))
    watch = DriftWatch([])
    for batch in range(1, 2001):
        watch.look(row_of(batch))
    assert read[:100] == [*range(1, 101)]
    assert max(b - a for a, b in pairwise(read)) <= 20  # in one of a hundred more at the latest
    assert sum(read) < 2000 * 120


def test_a_healthy_run_says_nothing(caplog):
    """Forty of them: scores rise or stay, and five other rewards stay or rise, all with noise that lasts a little."""
    for seed in range(40):
        chance, watch, noise = random.Random(seed), DriftWatch([1.0] + [0.0] * 5), [0.0] * 6
        for batch in range(1, 201):
            noise = [0.2 * each + chance.gauss(0, 1) for each in noise]
            scores = 0.01 * batch * (seed % 2) + noise[0]
            others = {f"reward/other_{i}": 0.004 * batch * (i > 2) + noise[i] for i in range(1, 6)}
            lengths = {"val/response_length": 20 + 0.02 * batch + chance.gauss(0, 2), "objective/kl": 0.004 * batch}
            watch.look(row_of(batch, **{"objective/scores": scores, "reward/trained": scores, **others, **lengths}))
    assert said_of(caplog) == []


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


def test_a_penalty_that_falls_is_no_news(caplog):
    for weights in ([1.0, -1.0], [1.0, 1.0]):
        watch = DriftWatch(weights)
        for batch in range(1, 61):
            measures = {"objective/scores": float(batch), "reward/right": float(batch), "reward/slips": -0.1 * batch}
            watch.look(row_of(batch, **measures))
        assert len(said_of(caplog)) == (weights[1] > 0)


def pays_for_e(prompts, completions, **columns):
    return [text.count("e") / 12 for text in completions]


def pays_for_others(prompts, completions, **columns):
    return [1 - text.count("e") / 12 for text in completions]


@pytest.mark.rare
def test_a_run_warns_once_of_a_watched_reward_that_falls_also_if_it_is_resumed(
    make_policy, tokenizer, prompts, make_args, caplog
):
    """A reward with the weight 0 is not trained on and is logged: the run is the same without it."""
    caplog.set_level(logging.WARNING)

    def run(name, functions, callbacks=(), **more):
        options = {"algorithm": "grpo", "samples_per_prompt": 4, "staleness": 0, "total_episodes": 8 * 40}
        args = make_args(name, learning_rate=3e-3, **{**options, **more})
        policy = make_policy()
        trainer = OnlineTrainer(
            policy, args, prompts, reward_funcs=functions, processing_class=tokenizer, callbacks=callbacks
        )
        if callbacks:
            with pytest.raises(SystemExit, match=r"^0$"):
                trainer.train()
        else:
            trainer.train()
        return json_rows(Path(args.output_dir) / "metrics.jsonl")

    both = [pays_for_e, pays_for_others]
    whole = run("whole", both, reward_weights=[1.0, 0.0])
    assert whole[-1]["reward/pays_for_others"] < whole[0]["reward/pays_for_others"]
    line, narrow = said_of(caplog)
    assert "the policy has become narrow" in narrow
    batch = int(re.match(r"WARNING: batch (\d+): the rewards part\. .* pays_for_others fell from ", line)[1])
    caplog.clear()
    for stop in (batch - 1, batch + 1):
        name = f"stopped-{stop}"
        run(name, both, [StopAfter(stop)], reward_weights=[1.0, 0.0])
        again = run(name, both, reward_weights=[1.0, 0.0], resume=True)
        assert said_of(caplog) == [line, narrow]
        assert [row["objective/scores"] for row in again] == [row["objective/scores"] for row in whole]
        caplog.clear()
    alone = run("alone", [pays_for_e])
    assert [row["objective/scores"] for row in alone] == [row["objective/scores"] for row in whole]
    assert said_of(caplog) == [narrow]
