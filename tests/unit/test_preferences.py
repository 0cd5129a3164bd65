"""Preference pairs and the reward model trained on them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_rlhf.algorithms import supervised
from async_rlhf.commands.pairs import best_and_worst, run_pairs
from async_rlhf.commands.reward import EncodedPair, encode_pairs, evaluate_pairs, pair_rows, run_reward
from async_rlhf.commands.stage import json_lines
from async_rlhf.config import ConfigError, PairsConfig, RewardConfig
from async_rlhf.data.loading import load_rows
from async_rlhf.learner.learner import Learner
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.loading import load_reward_model
from async_rlhf.models.saving import write_model
from async_rlhf.types import Prompt, Sample


def write_rows(path: Path, rows) -> str:
    path.write_text(json_lines(rows))
    return str(path)


# ---------------------------------------------------------------- pairs


def sampled(text: str, finish: str = "stop") -> Sample:
    return Sample.answer([], list(text.encode()), [0.0] * len(text), [0] * len(text), finish)


def test_best_against_worst_and_ties():
    prompts = [Prompt(i, i, (1,), {"query": f"q{i}"}) for i in range(3)]
    texts = ["a", "b", "c", "d", "e", "f", "g", "h", "i"]
    samples = [sampled(text, "length" if text == "c" else "stop") for text in texts]
    scores = [0.5, 2.0, -1.0, 3.0, 3.0, 3.0, 1.0, 1.0, 0.0]
    assert best_and_worst(prompts, samples, texts, scores) == [
        {
            "prompt": "q0",
            "chosen": "b",
            "rejected": "c",
            "chosen_score": 2.0,
            "rejected_score": -1.0,
            "chosen_finish_reason": "stop",
            "rejected_finish_reason": "length",
        },
        {
            "prompt": "q2",
            "chosen": "g",
            "rejected": "i",
            "chosen_score": 1.0,
            "rejected_score": 0.0,
            "chosen_finish_reason": "stop",
            "rejected_finish_reason": "stop",
        },
    ]


REWARD = """
def letters(prompts, completions, name, **columns):
    assert "query" not in columns and all(prompt.endswith(n) for prompt, n in zip(prompts, name))
    return [float(sum(c.isalpha() and c.isascii() for c in text) > 3) for text in completions]
"""


def test_run_pairs(tmp_path, make_policy, tokenizer):
    write_model(make_policy(), tokenizer, tmp_path / "base")
    (tmp_path / "judge.py").write_text(REWARD)
    rows = [{"query": f"p{'y' * (i % 5)} n{i}", "name": f"n{i}"} for i in range(30)] + [
        {"query": "z" * 50, "name": "z"}
    ]
    config = PairsConfig(
        model=str(tmp_path / "base"),
        prompts=write_rows(tmp_path / "prompts.jsonl", rows),
        output=str(tmp_path / "out" / "pairs.jsonl"),
        reward_funcs=[f"{tmp_path / 'judge.py'}:letters"],
        samples_per_prompt=3,
        response_length=12,
        max_prompts=25,
        max_prompt_length=40,
        batch_size=16,
        device="cpu",
    )
    results = run_pairs(config)
    pairs = load_rows(config.output)
    assert (results["prompts"], results["dropped"]) == (25, 1)
    assert results["pairs"] == len(pairs) > 0
    assert results["ties"] == 25 - len(pairs) > 0
    for pair in pairs:
        assert (pair["chosen_score"], pair["rejected_score"]) == (1.0, 0.0)
        assert pair["chosen_finish_reason"] in ("stop", "length")
        assert "<eos>" not in pair["chosen"] + pair["rejected"]
        for side in ("chosen", "rejected"):
            assert float(sum(c.isalpha() and c.isascii() for c in pair[side]) > 3) == pair[f"{side}_score"]
    assert results["score_margin"] == 1.0
    written = Path(config.output).read_text()
    assert run_pairs(config) == results
    run_pairs(replace(config, batch_size=7, overwrite=True))
    assert Path(config.output).read_text() == written, "the batch size is no part of the result"
    with pytest.raises(ConfigError, match="seed: was 0, is 1"):
        run_pairs(replace(config, batch_size=7, seed=1))


def test_pairs_by_a_reward_model(tmp_path, make_policy, make_reward_model, tokenizer):
    write_model(make_policy(), tokenizer, tmp_path / "base")
    reward_model = make_reward_model()
    write_model(reward_model, tokenizer, tmp_path / "reward")
    config = PairsConfig(
        model=str(tmp_path / "base"),
        prompts=write_rows(tmp_path / "prompts.jsonl", [{"query": f"p{i}"} for i in range(8)]),
        output=str(tmp_path / "pairs.jsonl"),
        reward_model=str(tmp_path / "reward"),
        response_length=8,
        device="cpu",
    )
    assert run_pairs(config)["pairs"] >= 7
    for pair in load_rows(config.output):
        for side in ("chosen", "rejected"):
            tokens = tokenizer.encode(pair["prompt"]) + (pair.get(f"{side}_tokens") or tokenizer.encode(pair[side]))
            tokens += [tokenizer.eos_token_id] * (pair[f"{side}_finish_reason"] == "stop")
            assert pair[f"{side}_score"] == pytest.approx(score_by_hand(reward_model, tokens), abs=1e-4)
        assert pair["chosen_score"] > pair["rejected_score"]


# ---------------------------------------------------------------- reward


def score_by_hand(model, tokens) -> float:
    """One row, unpadded: the head on the last hidden state."""
    with torch.no_grad():
        hidden_TH = model.base_model(input_ids=torch.tensor([list(tokens)])).last_hidden_state[0]
        return float(hidden_TH[-1] @ model.score.weight[0])


PAIRS = [
    {"prompt": f"p{i % 40}", "chosen": f" {'x' * (i % 7)} good", "rejected": f" {'x' * (i % 5)} bad"}
    for i in range(160)
]


def test_reward_is_read_at_the_last_real_token(make_reward_model, tokenizer):
    """The padding token inside a text is a token like any other; so is the end of sequence."""
    rows = [
        {"prompt": "a<pad>b", "chosen": "c<pad>", "rejected": "<pad><pad>d", "chosen_finish_reason": "length"},
        {"prompt": "long prompt of many tokens", "chosen": "<eos>x", "rejected": "x<eos>"},
    ]
    model = make_reward_model()
    pairs, _ = encode_pairs(rows, ChatTemplate(tokenizer), 96, "train")
    assert pairs[0].chosen == (*tokenizer.encode("a"), 257, *tokenizer.encode("bc"), 257)  # cut off: no <eos>
    assert pairs[0].rejected[-3:] == (257, *tokenizer.encode("d"), 256)
    assert pairs[1].rejected[-2:] == (*tokenizer.encode("x"), 256)
    by_hand = torch.tensor([[score_by_hand(model, side) for side in (pair.chosen, pair.rejected)] for pair in pairs])
    found = evaluate_pairs(model, pairs, batch_size=2)
    assert found["eval_loss"] == pytest.approx(
        torch.log1p((by_hand[:, 1] - by_hand[:, 0]).exp()).mean().item(), rel=1e-4
    )
    assert found["eval_accuracy"] == (by_hand[:, 0] > by_hand[:, 1]).float().mean().item()
    assert found["score_mean"] == pytest.approx(by_hand.mean().item(), abs=1e-4)
    assert found["score_sd"] == pytest.approx(by_hand.std().item(), rel=1e-4)


@pytest.mark.parametrize(("size", "accumulate"), [(16, 1), (5, 4)])
def test_reward_loss_by_hand(make_reward_model, tokenizer, tmp_path, size, accumulate):
    """One optimiser step over 16 pairs, whole and as 5 + 5 + 5 + 1."""
    model = make_reward_model()
    pairs, _ = encode_pairs(PAIRS[:16], ChatTemplate(tokenizer), 96, "train")
    margins = [score_by_hand(model, pair.chosen) - score_by_hand(model, pair.rejected) for pair in pairs]
    by_hand = sum(math.log1p(math.exp(-margin)) for margin in margins) / 16
    config = RewardConfig(
        train="-",
        output_dir=str(tmp_path / "out"),
        model="-",
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-8,
    )
    learner = Learner(model, None, supervised.PAIRS, config.for_learner(1, str(tmp_path)))
    assert learner.update(pair_rows(pairs), 1)["loss"] == pytest.approx(by_hand, rel=1e-4)


def test_pairs_left_out(tokenizer):
    rows = [
        *PAIRS[:4],
        {"prompt": "p", "chosen": "x", "rejected": "x"},
        {"prompt": "p", "chosen": "x" * 50, "rejected": ""},
    ]
    pairs, counts = encode_pairs(rows, ChatTemplate(tokenizer), 30, "train")
    assert (len(pairs), counts) == (4, {"dropped": 1, "ties": 1})
    with pytest.raises(ConfigError, match="train: row 1: `chosen` is a chat, but `prompt` is str"):
        encode_pairs(
            [{"prompt": "p", "chosen": [{"role": "user"}], "rejected": ""}], ChatTemplate(tokenizer), 30, "train"
        )
    both = pair_rows([EncodedPair((5, 6, 7), (8,)), EncodedPair((9, 9), (4, 4))])
    assert both.tokens_BT.tolist() == [[5, 6, 7], [8, 0, 0], [9, 9, 0], [4, 4, 0]]
    assert both.lengths_B.tolist() == [3, 1, 2, 2]


def test_run_reward_learns_a_preference(tmp_path, make_policy, tokenizer):
    write_model(make_policy(), tokenizer, tmp_path / "base")
    config = RewardConfig(
        train=write_rows(tmp_path / "pairs.jsonl", PAIRS),
        output_dir=str(tmp_path / "reward"),
        model=str(tmp_path / "base"),
        learning_rate=3e-3,
        num_epochs=3.0,
        per_device_train_batch_size=16,
    )
    results = run_reward(config)
    assert (results["pairs"], results["eval_pairs"]) == (148, 12)  # 3 of 40 prompts, by their hashes
    assert results["eval_accuracy"] > 0.9
    assert results["eval_accuracy_low"] < results["eval_accuracy"] <= results["eval_accuracy_high"]
    assert results["eval_loss"] < 0.3
    model = load_reward_model(config.output_dir)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    ends = [[*tokenizer.encode(f"new{text}"), tokenizer.eos_token_id] for text in (" good", " bad")]
    assert score_by_hand(model, ends[0]) > score_by_hand(model, ends[1])
    assert run_reward(config) == results

    held = replace(config, eval=config.train, num_epochs=1.0, learning_rate=1e-9, output_dir=str(tmp_path / "held"))
    results = run_reward(held)
    assert (results["pairs"], results["eval_pairs"]) == (160, 160)
    assert results["eval_loss"] == pytest.approx(results["train_loss"], rel=1e-3)  # nothing was learned in between
