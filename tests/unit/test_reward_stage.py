"""Reward models: where their zero is, whether their margins are probabilities, adapters; pairs labelled anew."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from datetime import datetime

import pytest
import torch
from datasets import Dataset
from tiny import LLAMA_SIZES, json_rows
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification, pipeline

from async_rlhf.commands.evaluation.statistics import wilson
from async_rlhf.commands.relabel import run_relabel
from async_rlhf.commands.reward import encode_pairs, run_reward
from async_rlhf.commands.reward_scale import calibration, center_scores
from async_rlhf.commands.stage import json_lines
from async_rlhf.config import AdapterConfig, ConfigError, RelabelConfig, RewardConfig, SFTConfig
from async_rlhf.data.loading import load_rows
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.forward import score_rows
from async_rlhf.models.loading import load_reward_model, load_tokenizer, new_reward_model
from async_rlhf.models.saving import write_model

PAIRS = [{"prompt": f"p{i}", "chosen": f" good{i % 3}", "rejected": f" bad{i % 4}"} for i in range(40)]
ROWS = [(65 + i, 66, *range(70, 72 + i), 256) for i in range(9)]


@pytest.fixture
def config(tmp_path, make_policy, tokenizer) -> RewardConfig:
    write_model(make_policy(), tokenizer, tmp_path / "base")
    (tmp_path / "pairs.jsonl").write_text(json_lines(PAIRS))
    return RewardConfig(
        train=str(tmp_path / "pairs.jsonl"),
        output_dir=str(tmp_path / "reward"),
        model=str(tmp_path / "base"),
        learning_rate=3e-3,
        per_device_train_batch_size=8,
    )


# ---------------------------------------------------------------- where zero is


def test_centring_subtracts_a_constant(make_reward_model):
    model = make_reward_model()
    before = score_rows(model, ROWS, 4)
    offset = center_scores(model, ROWS, 4)
    after = score_rows(model, ROWS, 4)
    assert offset == pytest.approx(before.mean().item(), rel=1e-3)
    assert abs(offset) > 0.1  # there was something to subtract
    assert after.mean().item() == pytest.approx(0.0, abs=1e-4)
    assert (before - after).tolist() == pytest.approx([offset] * len(ROWS), abs=1e-4)
    others = [(80, 81, 256), (90, 91, 92)]
    fresh = make_reward_model()
    assert (score_rows(fresh, others, 2) - score_rows(model, others, 2)).tolist() == pytest.approx(
        [offset] * 2, abs=1e-4
    )


def test_a_model_without_a_bias_is_left_as_it_is(caplog):
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**LLAMA_SIZES, num_labels=1)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert center_scores(model, ROWS, 4) == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert "LlamaForSequenceClassification has no bias before its head" in caplog.text


def test_a_normalisation_that_is_not_the_last_thing_before_the_head_is_left_alone(make_reward_model, caplog):
    model = make_reward_model()
    model.score.register_forward_pre_hook(lambda _, inputs: (torch.tanh(inputs[0]),))
    before = score_rows(model, ROWS, 4)
    assert center_scores(model, ROWS, 4) == 0.0
    assert torch.equal(score_rows(model, ROWS, 4), before)
    assert "keep their mean" in caplog.text


def test_every_program_that_loads_the_model_has_its_zero(config, tmp_path, tokenizer):
    """On the reference data; and the scores are those that transformers computes by itself."""
    demonstrations = [{"query": f"p{i}", "query_reference_response": f"p{i} bad{i % 3}"} for i in range(8)]
    (tmp_path / "sft.jsonl").write_text(json_lines(demonstrations))
    results = run_reward(replace(config, reference=str(tmp_path / "sft.jsonl")))
    model = AutoModelForSequenceClassification.from_pretrained(config.output_dir, dtype=torch.float32).eval()
    texts = [row["query_reference_response"] + "<eos>" for row in demonstrations]
    scores = []
    for text in texts:
        with torch.no_grad():
            scores.append(model(**load_tokenizer(config.output_dir)(text, return_tensors="pt")).logits[0, 0].item())
    assert sum(scores) / len(scores) == pytest.approx(0.0, abs=1e-3)
    assert max(scores) - min(scores) > 1e-2
    classify = pipeline("text-classification", model=config.output_dir, function_to_apply="none", device="cpu")
    assert [one["score"] for one in classify(texts)] == pytest.approx(scores, abs=1e-4)

    without = run_reward(replace(config, center=False, output_dir=str(tmp_path / "without")))
    assert without["score_offset"] == 0.0
    shift = without["score_mean"] - results["score_mean"]
    assert shift == pytest.approx(results["score_offset"], abs=1e-3)
    assert without["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-4)  # margins do not change

    chosen = run_reward(replace(config, output_dir=str(tmp_path / "chosen")))
    assert chosen["score_offset"] > results["score_offset"] + 0.1
    with pytest.raises(ConfigError, match="reference: got 'x'; must be null without center"):
        replace(config, center=False, reference="x")


def test_rows_of_the_reference_that_are_too_long_do_not_count(config, tmp_path):
    offsets = []
    for name, rows in {"short": [" bad0", " bad1"], "mixed": [" bad0", "x" * 50, " bad1"]}.items():
        (tmp_path / f"{name}.jsonl").write_text(json_lines([{"prompt": "p", "completion": text} for text in rows]))
        files = {"reference": str(tmp_path / f"{name}.jsonl"), "output_dir": str(tmp_path / name)}
        offsets.append(run_reward(replace(config, max_length=40, **files))["score_offset"])
    assert offsets[0] == offsets[1] != 0


def test_the_penalty_on_sums_by_hand(tokenizer, config, tmp_path):
    model = new_reward_model(config.model, tokenizer, config.seed)
    pairs, _ = encode_pairs(PAIRS[:8], ChatTemplate(tokenizer), 96, "train")
    scores = [[score_rows(model, [side], 1).item() for side in (pair.chosen, pair.rejected)] for pair in pairs]
    by_hand = sum(math.log1p(math.exp(r - c)) + 0.3 * (c + r) ** 2 for c, r in scores) / 8
    (tmp_path / "few.jsonl").write_text(json_lines(PAIRS[:8]))
    changed = replace(config, center_rewards_coefficient=0.3, train=str(tmp_path / "few.jsonl"), eval=config.train)
    assert run_reward(changed)["train_loss"] == pytest.approx(by_hand, rel=1e-4)


def test_rows_longer_than_the_model_has_positions_are_dropped(config, tmp_path):
    """They are 96, and max_length is 512: nothing of more tokens may reach the model."""
    long = [{"prompt": f"p{i}", "chosen": " good" + "x" * 100, "rejected": " bad"} for i in range(3)]
    (tmp_path / "pairs.jsonl").write_text(json_lines(PAIRS + long))
    (tmp_path / "eval.jsonl").write_text(json_lines(PAIRS[:10] + long))
    reference = [{"prompt": "p", "completion": text} for text in (" bad", "x" * 100)]
    (tmp_path / "sft.jsonl").write_text(json_lines(reference))
    files = {"eval": str(tmp_path / "eval.jsonl"), "reference": str(tmp_path / "sft.jsonl")}
    results = run_reward(replace(config, max_length=512, **files))
    assert (results["pairs"], results["dropped"], results["eval_pairs"]) == (40, 3, 10)


# ---------------------------------------------------------------- calibration


def test_calibration_by_hand():
    """Three bins: at 0.5 a tie; 0.62 once right, once wrong; 0.95 right three times out of three."""
    margins = torch.tensor([0.0, 0.5, -0.5, 3.0, 3.0, 3.0])
    found = calibration(margins)
    low, middle, high = 0.5, 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-3.0))
    assert [(row["accuracy"], row["pairs"]) for row in found["calibration"]] == [(0.5, 1), (0.5, 2), (1.0, 3)]
    assert [row["confidence"] for row in found["calibration"]] == pytest.approx([low, middle, high])
    assert found["eval_ece"] == pytest.approx((2 * (middle - 0.5) + 3 * (1 - high)) / 6)


def test_calibration_has_ten_bins_between_a_half_and_one():
    """Confidences 0.52 and 0.58 are in bins of their own; five bins would put them into one, with an error of 0.05."""
    margins = torch.tensor([0.52, 0.58], dtype=torch.float64).logit() * torch.tensor([1, -1])
    found = calibration(margins)
    assert [(row["accuracy"], row["pairs"]) for row in found["calibration"]] == [(1.0, 1), (0.0, 1)]
    assert found["eval_ece"] == pytest.approx((0.48 + 0.58) / 2)
    every = (torch.arange(10, dtype=torch.float64) / 20 + 0.525).logit()
    assert [row["pairs"] for row in calibration(every)["calibration"]] == [1] * 10


def test_the_floor_is_the_mean_error_of_models_that_are_calibrated():
    """On 100 pairs a tenth of the error is chance; on many it vanishes."""
    generator = torch.Generator().manual_seed(3)
    log_odds, found = 1.5 * torch.randn(100, generator=generator, dtype=torch.float64), []
    for _ in range(300):
        right = torch.rand(100, generator=generator) < log_odds.abs().sigmoid()
        found.append(calibration(torch.where(right, log_odds.abs(), -log_odds.abs())))
    errors = [one["eval_ece"] for one in found]
    assert found[0]["eval_ece_floor"] == pytest.approx(sum(errors) / 300, rel=0.05)
    assert 0.08 < found[0]["eval_ece_floor"] < 0.12
    assert calibration(log_odds.repeat(100))["eval_ece_floor"] < 0.012


# ---------------------------------------------------------------- adapters, held-out losses on the way


def test_adapters_and_the_head_are_trained_and_merged(config, tmp_path):
    results = run_reward(replace(config, lora=AdapterConfig(rank=4), num_epochs=3.0, learning_rate=1e-2))
    assert results["eval_accuracy"] > 0.9
    model, base = load_reward_model(config.output_dir), str(tmp_path / "base")
    # An adapter alone would lack the head and the centring: peft would give it a random head.
    assert not (tmp_path / "reward" / "adapter").exists()
    start = new_reward_model(base, load_tokenizer(base), config.seed).state_dict()  # where the stage started from
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, start[name])}
    assert "score.weight" in changed
    assert any("attention.query_key_value.weight" in name for name in changed)
    # The last normalisation was centred; no other bias, norm or embedding has moved.
    assert {name for name in changed if "bias" in name or "norm" in name or "embed" in name} == {
        "gpt_neox.final_layer_norm.bias"
    }


def test_held_out_losses_on_the_way(config, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        run_reward(replace(config, eval=config.train, eval_steps=2))
    lines = [message for message in caplog.messages if "held-out loss" in message]
    assert [line.partition(":")[0] for line in lines] == ["step 2 of 5", "step 4 of 5"]
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert losses[1] < losses[0]
    caplog.clear()
    share = replace(config, eval=config.train, eval_steps=0.4, output_dir=str(tmp_path / "share"))
    with caplog.at_level(logging.INFO):
        run_reward(share)
    assert [line for line in caplog.messages if "held-out loss" in line] == lines
    with pytest.raises(ConfigError, match=r"eval_steps: got 1.5; must be a whole number"):
        replace(share, eval_steps=1.5)
    with pytest.raises(ConfigError, match=r"eval_steps: got 2.0; must be 0 without eval or eval_fraction"):
        SFTConfig(config.train, output_dir=str(tmp_path / "sft"), eval_steps=2)
    caplog.clear()
    with caplog.at_level(logging.INFO):  # pairs are held out anyway
        run_reward(replace(config, eval_steps=4, output_dir=str(tmp_path / "own")))
    assert len([line for line in caplog.messages if "held-out loss" in line]) == 1


# ---------------------------------------------------------------- relabel

GOLD = """
def gold(prompts, completions, **columns):
    assert all(p.startswith("p") for p in prompts)
    return [float(c.count("o") - c.count("x")) for c in completions]
"""
LABELLED = [
    {"prompt": "p0", "chosen": "oo", "rejected": "x", "n": 0},
    {"prompt": "p1", "chosen": "x", "rejected": "o", "n": 1, "chosen_finish_reason": "length", "score_rejected": 7},
    {"prompt": "p2", "chosen": "a", "rejected": "b", "n": 2},
]


@pytest.fixture
def relabelling(tmp_path) -> RelabelConfig:
    (tmp_path / "gold.py").write_text(GOLD)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json_lines(LABELLED))
    (tmp_path / "data" / "validation.jsonl").write_text(json_lines(LABELLED[:1] * 3))
    return RelabelConfig(
        data=str(tmp_path / "data"),
        output_dir=str(tmp_path / "new"),
        splits=["train", "validation"],
        reward_funcs=[f"{tmp_path / 'gold.py'}:gold"],
        device="cpu",
    )


def test_relabel(relabelling, tmp_path):
    results = run_relabel(relabelling)
    assert results["train"] == {
        "pairs": 3,
        "ties": 1,
        "swapped": 1,
        "agreement": wilson(1, 2)._asdict(),
        "written": 2,
        "score_margin": 2.5,
    }
    assert results["validation"]["agreement"]["estimate"] == 1.0
    rows = json_rows(tmp_path / "new" / "train.jsonl")
    assert {key: value for key, value in rows[0].items() if value is not None} == {
        **LABELLED[0],
        "chosen_score": 2.0,
        "rejected_score": -1.0,
        "swapped": False,
    }
    # What was said of a side goes with it.
    assert rows[1] == {
        "prompt": "p1",
        "chosen": "o",
        "rejected": "x",
        "n": 1,
        "rejected_finish_reason": "length",
        "score_chosen": 7,
        "chosen_score": 1.0,
        "rejected_score": -1.0,
        "swapped": True,
    }
    # Other commands read the folder, and again nothing is to be swapped.
    assert len(load_rows(relabelling.output_dir, "validation")) == 3
    again = run_relabel(replace(relabelling, data=relabelling.output_dir, output_dir=str(tmp_path / "again")))
    assert (again["train"]["swapped"], again["train"]["ties"]) == (0, 0)
    assert run_relabel(relabelling) == results
    with pytest.raises(ConfigError, match="keep_ties: was False, is True"):
        run_relabel(replace(relabelling, keep_ties=True))
    kept = run_relabel(replace(relabelling, keep_ties=True, output_dir=str(tmp_path / "kept")))
    assert (kept["train"]["written"], kept["train"]["ties"]) == (3, 1)


def test_columns_that_json_has_no_form_for_are_written(relabelling, tmp_path):
    Dataset.from_list(
        [{**LABELLED[0], "when": datetime(2026, 1, 2), "x": float("nan"), "t": "\u2028"}, {**LABELLED[1], "x": 1.0}]
    ).to_parquet(str(tmp_path / "pairs.parquet"))
    run_relabel(replace(relabelling, data=str(tmp_path / "pairs.parquet"), splits=["train"]))
    rows = load_rows(str(tmp_path / "new" / "train.jsonl"))
    assert [(row["when"], row["x"]) for row in rows] == [("2026-01-02 00:00:00", None), (None, 1.0)]


def test_relabel_by_a_reward_model(relabelling, tmp_path, make_reward_model, tokenizer):
    model = make_reward_model()
    write_model(model, tokenizer, tmp_path / "gold")
    results = run_relabel(replace(relabelling, reward_funcs=[], reward_model=str(tmp_path / "gold"), splits=["train"]))
    rows = json_rows(tmp_path / "new" / "train.jsonl")
    assert len(rows) == results["train"]["written"] == 3
    for row in rows:
        for side in ("chosen", "rejected"):
            end = [] if row.get(f"{side}_finish_reason") == "length" else [256]
            tokens = (*tokenizer.encode(row["prompt"] + row[side]), *end)
            assert row[f"{side}_score"] == pytest.approx(score_rows(model, [tokens], 1).item(), abs=1e-4)
        assert row["chosen_score"] > row["rejected_score"]
    assert not (tmp_path / "new" / "validation.jsonl").exists()
    for file in (tmp_path / "gold").glob("tokenizer*"):
        file.rename(tmp_path / file.name)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    apart = replace(
        relabelling, reward_funcs=[], reward_model=str(tmp_path / "gold"), output_dir=str(tmp_path / "apart")
    )
    found = run_relabel(replace(apart, reward_tokenizer=str(tmp_path / "tokenizer")))
    assert found["train"] == results["train"]


def test_relabel_says_what_is_wrong(relabelling, tmp_path):
    (tmp_path / "data" / "train.jsonl").write_text(json_lines([{"prompt": "p", "chosen": "a"}]))
    with pytest.raises(ConfigError, match=r"data, train: row 1 has no 'rejected'"):
        run_relabel(relabelling)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match=r"splits: got .* of one file"):
        run_relabel(replace(relabelling, data=str(tmp_path / "data" / "train.jsonl")))
    with pytest.raises(ConfigError, match=r"splits: got .*; must name each once"):
        replace(relabelling, splits=["train", "train"])
    with pytest.raises(ConfigError, match="give either a reward_model or reward_funcs"):
        replace(relabelling, reward_funcs=[])
