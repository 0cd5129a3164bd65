"""Rated rows: reward models by least squares, pairs that are drawn, and errors that name the bad rating."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rlhf.algorithms.supervised import RATINGS
from async_rlhf.commands import reward
from async_rlhf.commands.evaluation.statistics import correlation_interval, pearson, spearman
from async_rlhf.commands.pairs import run_pairs
from async_rlhf.commands.ratings import (
    EncodedRating,
    Scale,
    encode_ratings,
    evaluate_ratings,
    rating_calibration,
    rating_rows,
)
from async_rlhf.commands.reward import run_reward
from async_rlhf.commands.stage import json_lines
from async_rlhf.config import ConfigError, PairsConfig, RewardConfig
from async_rlhf.data.held_out import hold_out
from async_rlhf.data.loading import load_rows
from async_rlhf.data.ratings import draw_pairs
from async_rlhf.learner.learner import Learner
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.forward import score_rows
from async_rlhf.models.loading import load_reward_model, load_tokenizer
from async_rlhf.models.saving import write_model

RATED = [{"text": f"{'x' * (i % 7)} {'yz'[i % 2] * 3} {i}", "score": 40.0 + 10 * (i % 2)} for i in range(120)]


def write_rows(path: Path, rows) -> str:
    path.write_text(json_lines(rows))
    return str(path)


@pytest.fixture
def config(tmp_path, make_policy, tokenizer) -> RewardConfig:
    write_model(make_policy(), tokenizer, tmp_path / "base")
    return RewardConfig(
        write_rows(tmp_path / "rated.jsonl", RATED),
        str(tmp_path / "reward"),
        model=str(tmp_path / "base"),
        learning_rate=3e-3,
        num_epochs=3.0,
        per_device_train_batch_size=8,
    )


# ---------------------------------------------------------------- least squares


@pytest.mark.parametrize(("size", "accumulate"), [(16, 1), (5, 4)])
def test_the_loss_is_the_formula(config, make_reward_model, tokenizer, size, accumulate):
    """Mean of (score - (rating - mean) / sd)^2 over 16 rows, whole and as 5 + 5 + 5 + 1; scores row by row."""
    rows, dropped = encode_ratings(RATED[:16], ChatTemplate(tokenizer), "score", 96, "train")
    assert dropped == 0
    model = make_reward_model()
    scale = Scale.of([row.rating for row in rows])
    assert scale == (45.0, 5.0)
    by_hand = 0.0
    for row in rows:
        with torch.no_grad():
            hidden_TH = model.base_model(input_ids=torch.tensor([list(row.tokens)])).last_hidden_state[0]
        by_hand += (float(hidden_TH[-1] @ model.score.weight[0]) - (row.rating - 45) / 5) ** 2 / 16
    changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
    config = replace(config, num_epochs=1.0, learning_rate=1e-8, **changes)
    learner = Learner(model, None, RATINGS, config.for_learner(1, config.output_dir))
    assert learner.update(rating_rows(rows, scale), 1)["loss"] == pytest.approx(by_hand, rel=1e-5)


def test_a_rated_row_ends_unless_it_was_cut_off(tokenizer):
    rows = [
        {"prompt": "ab", "completion": " cd", "score": 1},
        {"prompt": "ab", "completion": " cd", "score": 2.5, "finish_reason": "length"},
    ]
    first, second = encode_ratings(rows, ChatTemplate(tokenizer), "score", 96, "train")[0]
    assert first == EncodedRating((*tokenizer.encode("ab cd"), 256), 1.0)
    assert second == EncodedRating(tuple(tokenizer.encode("ab cd")), 2.5)
    kept, dropped = encode_ratings(
        [*rows, {"text": "z" * 50, "score": 3}], ChatTemplate(tokenizer), "score", 30, "train"
    )
    assert (len(kept), dropped) == (2, 1)
    with pytest.raises(
        ConfigError, match=r"max_length: got 3; no row of train has 1 to 3 tokens \(the shortest has 5\)"
    ):
        encode_ratings(rows, ChatTemplate(tokenizer), "score", 3, "train")


def test_a_reward_model_learns_ratings(config, tmp_path, caplog):
    caplog.set_level("INFO")
    found = run_reward(config)
    assert (found["rows"], found["eval_rows"], found["dropped"]) == (110, 10, 0)  # by the hashes of the texts
    assert found["rating_mean"] == pytest.approx(45, abs=1)
    assert found["eval_r2"] > 0.9
    assert found["eval_pearson_low"] < found["eval_pearson"] < found["eval_pearson_high"]
    assert found["eval_spearman"] > 0.8
    assert found["eval_rmse"] < 1.6
    assert found["eval_loss"] == pytest.approx((found["eval_rmse"] / found["rating_sd"]) ** 2)
    assert abs(found["score_mean"]) < 0.5  # the zero is the mean rating
    assert any(f"10 held-out rows R^2 {found['eval_r2']:.3f}, Spearman" in message for message in caplog.messages)
    model, tokenizer = load_reward_model(config.output_dir), load_tokenizer(config.output_dir)
    scores = score_rows(model, [(*tokenizer.encode(f"xx {c * 3} 7"), 256) for c in "yz"], 2)
    predicted = (found["rating_mean"] + found["rating_sd"] * scores).tolist()
    assert predicted == pytest.approx([40.0, 50.0], abs=3)
    assert run_reward(config) == found  # done already

    units = [{**row, "stars": row["score"] / 1000 - 7} for row in RATED]  # the ratings' units change nothing
    other = write_rows(tmp_path / "units.jsonl", [{k: v for k, v in row.items() if k != "score"} for row in units])
    again = run_reward(replace(config, train=other, score_field="stars", output_dir=str(tmp_path / "units")))
    assert again["eval_r2"] == pytest.approx(found["eval_r2"], abs=0.02)
    assert again["eval_rmse"] == pytest.approx(found["eval_rmse"] / 1000, rel=0.2)


def test_the_first_words_are_the_prompt_here_too(config, tmp_path):
    found = run_reward(replace(config, prompt_words=1, num_epochs=0.1))
    assert found["rows"] + found["eval_rows"] == 120
    found = run_reward(replace(config, prompt_words=2, num_epochs=0.1, output_dir=str(tmp_path / "two")))
    # Every seventh text begins with a space: two words, and no response.
    assert found["rows"] + found["eval_rows"] == 120 - 18


def test_statistics_by_hand():
    a, b = [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 9.0]
    assert pearson(a, b) == pytest.approx(11.5 / math.sqrt(5 * 38.75))
    assert spearman(a, b) == pytest.approx(0.8)
    assert spearman([1, 1, 2], [3, 3, 9]) == pytest.approx(1.0)
    # Ranks 1.5, 1.5, 3 and 1, 2, 3: the correlation of these.
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(1.5 / math.sqrt(1.5 * 2))
    # 1.5, 1.5, 3, 4 and 1 to 4.
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert pearson([1, 1], [1, 2]) is pearson([1], [2]) is None
    low, high = correlation_interval(0.5, 28)[1:]
    assert (low, high) == pytest.approx((0.1560, 0.7358), abs=1e-3)  # tanh(0.5493 -+ 1.96 / 5)
    assert correlation_interval(1.0, 10).low > 0.99
    assert correlation_interval(0.5, 3) is None
    assert correlation_interval(0.5, 28, of_ranks=True).low < low


@pytest.mark.parametrize("correlation", [0.3, 0.8, 0.95])
def test_intervals_of_rank_correlations_cover_what_they_promise(correlation):
    """1,500 samples of 40 pairs of normal values each; Spearman's of the population is 6 / pi asin(r / 2)."""
    random, truth, covered = np.random.default_rng(0), 6 / math.pi * math.asin(correlation / 2), 0
    for _ in range(1500):
        a_R, rest_R = random.normal(size=(2, 40))
        b_R = correlation * a_R + math.sqrt(1 - correlation**2) * rest_R
        found = correlation_interval(spearman(a_R, b_R), 40, of_ranks=True)
        covered += found.low <= truth <= found.high
    assert 0.93 < covered / 1500 < 0.97


def test_perfect_predictions_have_the_error_that_is_called_the_floor():
    random = np.random.default_rng(1)
    predicted = torch.from_numpy(random.normal(size=60))
    found = [rating_calibration(predicted, predicted + torch.from_numpy(random.normal(size=60))) for _ in range(300)]
    errors, floors = ([one[name] for one in found] for name in ("eval_calibration_error", "eval_calibration_floor"))
    assert np.mean(floors) == pytest.approx(np.mean(errors), rel=0.06)
    assert rating_calibration(predicted, predicted)["eval_calibration_floor"] == 0


def test_calibration_of_ratings():
    predicted = torch.arange(20.0)
    found = rating_calibration(predicted, predicted)
    assert found["eval_calibration_error"] == 0
    assert found["calibration"][0] == {"predicted": 0.5, "actual": 0.5, "rows": 2}
    assert len(found["calibration"]) == 10
    assert rating_calibration(predicted, predicted + 3)["eval_calibration_error"] == pytest.approx(3)
    assert len(rating_calibration(predicted[:3], predicted[:3])["calibration"]) == 3


def test_what_is_not_defined_is_none(make_reward_model):
    rows = [EncodedRating((65, 66, 256), 3.0), EncodedRating((70, 256), 3.0)]
    found = evaluate_ratings(make_reward_model(), rows, Scale(2.0, 1.0), 2)
    assert found["eval_r2"] is found["eval_pearson"] is found["eval_spearman_low"] is None
    assert found["eval_rmse"] > 0


# ---------------------------------------------------------------- pairs


def test_pairs_are_drawn_from_all_that_differ_enough():
    """Against all pairs, one by one."""
    ratings = [3.0, 1.0, 2.0, 3.0, 0.3, 0.1, 0.2, 5.0]
    groups = [[0, 1, 2, 3], [4, 5, 6], [7]]
    for margin in (0.0, 0.1, 1.0, 2.0, 9.0):
        least = max(margin, 0.05) - 1e-9
        all_pairs = {(i, j) for group in groups for i in group for j in group if ratings[i] - ratings[j] >= least}
        drawn, possible = draw_pairs(groups, ratings, margin, 100, seed=0)
        assert (set(drawn), len(drawn), possible) == (all_pairs, len(all_pairs), len(all_pairs))
    few = [draw_pairs(groups, ratings, 0.0, 3, seed)[0] for seed in range(200)]
    assert few[0] == draw_pairs(groups, ratings, 0.0, 3, 0)[0]
    assert all(len(set(pairs)) == 3 for pairs in few)
    counts = {pair: sum(pair in pairs for pairs in few) for pair in draw_pairs(groups, ratings, 0.0, 100, 0)[0]}
    assert min(counts.values()) > 40  # of 75 expected for each of the 8
    assert max(counts.values()) < 115


def rating_pairs(tmp_path, rows, **changes) -> PairsConfig:
    place = write_rows(tmp_path / "rated.jsonl", rows)
    return PairsConfig(from_ratings=place, output=str(tmp_path / "pairs.jsonl"), **changes)


def test_pairs_of_one_prompt(tmp_path):
    rows = [
        {"prompt": f"p{i % 4}", "completion": f" c{i}", "score": i % 8, "finish_reason": "length" if i == 4 else None}
        for i in range(16)
    ]
    config = rating_pairs(tmp_path, rows, margin=4, seed=1)
    found = run_pairs(config)
    # Every prompt has two rows rated p and two rated p + 4.
    assert found == {"rows": 16, "dropped": 0, "possible": 16, "pairs": 16, "score_margin": 4.0}
    for pair in load_rows(config.output):
        better, worse = (int(pair[side][2:]) for side in ("chosen", "rejected"))
        assert (pair["chosen_score"], pair["rejected_score"]) == (better % 8, worse % 8)
        assert pair["prompt"] == f"p{better % 4}" == f"p{worse % 4}"
        assert (pair.get("chosen_finish_reason") == "length") == (better == 4)
    assert run_pairs(config) == found
    assert len(load_rows(config.output)) == 16
    run_pairs(replace(config, max_pairs=5, overwrite=True))
    assert len(load_rows(config.output)) == 5
    with pytest.raises(
        ConfigError, match=r"margin: got 5\.0; the 4 prompts of 16 rows have no two ratings that differ by"
    ):
        run_pairs(replace(config, margin=5, overwrite=True))
    alone = rating_pairs(tmp_path, [{"prompt": f"p{i}", "completion": "c", "score": i} for i in range(4)])
    with pytest.raises(
        ConfigError, match="each of the 4 prompts has one row, and a pair needs two; `reward` also learns"
    ):
        run_pairs(replace(alone, overwrite=True))


def test_pairs_of_texts_train_a_reward_model(config, tmp_path):
    """They have no prompt in common; no held-out text is in a pair that is trained on."""
    drawn = rating_pairs(tmp_path, RATED, max_pairs=300, eval_fraction=0.3)
    assert run_pairs(drawn)["pairs"] == 300
    rows = load_rows(drawn.output)
    assert set(rows[0]) == {"chosen", "rejected", "chosen_score", "rejected_score"}
    trained, held = hold_out(rows, 0.3, "train")
    assert len(held) == pytest.approx(0.3 * 300, abs=30)
    texts = [{row[side] for row in part for side in ("chosen", "rejected")} for part in (trained, held)]
    assert not texts[0] & texts[1]
    found = run_reward(replace(config, train=drawn.output, eval_fraction=0.3, num_epochs=1))
    assert found["pairs"] == len(trained)
    assert found["eval_accuracy"] > 0.9


def test_pairs_of_chats_stay_chats(tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": f"q{i % 2}"}, {"role": "assistant", "content": f"a{i}"}], "score": i}
        | {"tools": [{"function": {"name": f"f{i // 2 % 2}"}}], "chat_template_kwargs": {"mood": 3}}
        for i in range(12)
    ]
    config = rating_pairs(tmp_path, chats)
    run_pairs(config)
    for row in load_rows(config.output):
        numbers = [int(row[side][0]["content"][1:]) for side in ("chosen", "rejected")]
        assert [chats[number]["tools"] for number in numbers] == [row["tools"]] * 2
        assert row["chat_template_kwargs"] == {"mood": 3}
        assert row["prompt"] == [{"role": "user", "content": f"q{numbers[0] % 2}"}]
        assert row["chosen_score"] == numbers[0] > numbers[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "m"}, "model: got 'm'; must be left out with from_ratings: nothing is sampled"),
        ({"reward_funcs": ["a:b"]}, r"reward_funcs: got \['a:b'\]; must be left out with from_ratings"),
        ({"from_ratings": None, "margin": 1.0}, "margin: got 1.0; must be left out without from_ratings"),
        ({"from_ratings": None}, "model: got None; give the model that samples, or from_ratings"),
        ({"from_ratings": None, "model": "m"}, "prompts: got None; give a file, a folder"),
        ({"output": ""}, "output: got ''; name the .jsonl file to write"),
    ],
)
def test_keys_that_do_not_go_together(changes, message):
    with pytest.raises(ConfigError, match=message):
        PairsConfig(**{"from_ratings": "r.jsonl", "output": "p.jsonl", **changes})


# ---------------------------------------------------------------- bad ratings


def rated(*scores: object) -> list[dict[str, object]]:
    return [{"text": f"text {i}", "score": score} for i, score in enumerate(scores)]


BAD = [
    ([{"text": "a", "score": 1}, {"text": "b"}], r"row 2 has no 'score'; it has 'text'; must have a rating, a finite"),
    (rated(1, 2, None), r"row 3 has null as 'score'; it has 'text', 'score'; must have a rating"),
    (rated(1, float("nan"), 3), r"row 2: 'score' is nan; must be a finite number"),
    (rated(1, float("-inf"), 3), r"row 2: 'score' is -inf; must be a finite number"),
    (rated(1, 10**400, 3), r"row 2: 'score' is 10+\.\.\.; must be a finite number, at most 1e30 in size"),
    (rated(1, "4 stars", 3), r"row 2: 'score' is '4 stars', a str; must be a finite number, without quotes or units"),
    (rated(1, [4], 3), r"row 2: 'score' is \[4\], a list; must be a finite number"),
    (rated(1, 0, True), r"row 3: 'score' is True, a bool; must be 1 or 0"),
    (rated(3, 3, 3), r"all 3 rows have 3 as 'score'; must differ, or there is nothing to learn"),
    (rated(3), r"got 1 rated row; must be 2 at least, with different ratings"),
]


@pytest.mark.parametrize(("rows", "message"), BAD)
def test_bad_ratings_are_named_before_a_model_is_loaded(tmp_path, monkeypatch, rows, message):
    def load(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr(reward, "load_tokenizer", load)
    place = tmp_path / "rated.jsonl"
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))  # with NaN, as Python writes it
    with pytest.raises(ConfigError, match=f"train: {message}"):
        run_reward(RewardConfig(str(place), str(tmp_path / "out"), model="somewhere"))
    with pytest.raises(ConfigError, match=f"from_ratings: {message}"):
        run_pairs(PairsConfig(from_ratings=str(place), output=str(tmp_path / "pairs.jsonl")))


def test_other_mistakes_with_ratings(tmp_path, monkeypatch):
    place = write_rows(tmp_path / "rated.jsonl", rated(1, 2, 2, 2))
    config = RewardConfig(place, str(tmp_path / "out"), model="somewhere")
    with pytest.raises(ConfigError, match=r"center_rewards_coefficient: got 0.1; must be 0 with ratings"):
        run_reward(replace(config, center_rewards_coefficient=0.1))
    with pytest.raises(ConfigError, match=r"train: row 1 has 'text', 'score'; must have `chosen` and .* in 'stars'"):
        run_reward(replace(config, score_field="stars"))
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}] * 3)
    with pytest.raises(ConfigError, match="score_field: got 'stars'; must be left out with pairs"):
        run_reward(replace(config, train=pairs, score_field="stars"))
    bad = write_rows(tmp_path / "bad.jsonl", rated(1, "x"))
    with pytest.raises(ConfigError, match="eval: row 2: 'score' is 'x'"):
        run_reward(replace(config, eval=bad))
    # What is left to train on must differ, too.
    rows = rated(*[2] * 12)
    held = hold_out(rows, 0.2, "train")[1]
    odd = [{**row, "score": 2 + (row["text"] == held[0]["text"])} for row in rows]
    with pytest.raises(ConfigError, match=r"train, less what is held out: all \d+ rows have 2 as 'score'; must differ"):
        run_reward(replace(config, train=write_rows(tmp_path / "odd.jsonl", odd), eval_fraction=0.2))
