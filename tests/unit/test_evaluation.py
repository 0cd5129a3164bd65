"""Intervals, perplexity, KL and win-rates as numbers; the evaluation as a whole; the plot."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rlhf.commands.evaluate import format_table, run_evaluate, side_by_side
from async_rlhf.commands.evaluation.likelihood import EncodedRow, loss_and_perplexity, response_logprob_sums
from async_rlhf.commands.evaluation.reward_judge import RewardJudge
from async_rlhf.commands.evaluation.sampling import first_prompts, sample
from async_rlhf.commands.evaluation.statistics import (
    clustered_mean_interval,
    mean_interval,
    outcomes,
    paired_difference,
    t_quantile,
    wilson,
    win_rate,
)
from async_rlhf.commands.stage import json_lines
from async_rlhf.config import ConfigError, EvaluateConfig
from async_rlhf.data.loading import load_rows
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.saving import write_model
from async_rlhf.rewards.functions import RewardError
from async_rlhf.studies.report.charts import GREY, Key, Series
from async_rlhf.studies.report.plots import against_kl, evaluated, over_checkpoints, plot_training

# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("freedom", "tabulated"),
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (10, 2.228),
        (30, 2.042),
        (120, 1.980),
        (9999, 1.960),
    ],
)
def test_students_t(freedom, tabulated):
    assert t_quantile(freedom) == pytest.approx(tabulated, abs=5e-4)


def test_mean_interval_by_hand():
    mean, low, high = mean_interval([1.0, 2.0, 3.0, 4.0])
    half = 3.182 * math.sqrt(5 / 3) / 2  # s^2 = 5/3, n = 4
    assert (mean, low, high) == pytest.approx((2.5, 2.5 - half, 2.5 + half), abs=5e-3)
    assert mean_interval([0.0, 0.0]) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="at least 2 values; got 1"):
        mean_interval([1.0])


def test_clustered_interval_is_its_formula():
    """Against loops over clusters of every size; with one value a cluster it is Student's."""
    random = np.random.default_rng(0)
    for clusters in ([0, 0, 1], list("aabbbc"), [*range(20), 3, 3, 7]):
        values = list(random.normal(1.0, 2.0, size=len(clusters)))
        n, mean = len(values), math.fsum(values) / len(values)
        squares, form_NN = 0.0, np.zeros((n, n))
        for cluster in set(clusters):
            inside_N = np.array([c == cluster for c in clusters], dtype=float)
            size = inside_N.sum()
            squares += math.fsum(v - mean for v, c in zip(values, clusters, strict=True) if c == cluster) ** 2 / (
                1 - size / n
            )
            sums_N = (inside_N - size / n) / math.sqrt(1 - size / n)  # e_g as a linear form of the values
            form_NN += np.outer(sums_N, sums_N)
        freedom = np.trace(form_NN) ** 2 / np.trace(form_NN @ form_NN)
        half = t_quantile(freedom) * math.sqrt(squares) / n
        assert clustered_mean_interval(values, clusters) == pytest.approx((mean, mean - half, mean + half))
    assert clustered_mean_interval([1.0, 2.0, 4.0], "abc") == mean_interval([1.0, 2.0, 4.0])
    twice = clustered_mean_interval([1.0, 2.0, 4.0] * 2, "abcabc")
    assert twice == pytest.approx(
        tuple(mean_interval([1.0, 2.0, 4.0]))
    )  # the same once or thrice over says nothing new
    thrice = win_rate([1, 0, 0.5, 1] * 3, list("abcd") * 3)
    assert thrice == pytest.approx(tuple(wilson(2.5 * 3 / 4, 4 * 3 / 4, t_quantile(3))))
    assert win_rate([1, 0, 0.5, 1], list("abcd")) == win_rate([1, 0, 0.5, 1])
    assert win_rate([1.0] * 6, list("aabbcc")) == pytest.approx(tuple(wilson(3, 3, t_quantile(2))))
    with pytest.raises(ValueError, match="at least 2 clusters; got 1"):
        clustered_mean_interval([1.0, 2.0], "aa")


def test_a_paired_difference_does_not_see_what_is_hard_for_both():
    hard = np.random.default_rng(1).normal(0, 10, size=50)
    ours, theirs = list(hard + 1.0), list(hard + 0.01 * np.arange(50))
    difference = paired_difference(ours, theirs, range(50))
    assert difference == pytest.approx(tuple(mean_interval([a - b for a, b in zip(ours, theirs, strict=True)])))
    assert difference.high - difference.low < 0.2 < 4 < mean_interval(ours).high - mean_interval(ours).low
    assert difference.low > 0


def test_wilson_against_published_numbers():
    assert wilson(8, 10) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.0, 0.2775), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((1.0, 0.7225, 1.0), abs=1e-4)
    assert wilson(50, 100) == pytest.approx((0.5, 0.4038, 0.5962), abs=1e-4)
    for successes, n in ((1, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="0 <= successes <= n"):
            wilson(successes, n)


def test_win_rate_counts_ties_as_half():
    assert outcomes([1, 2, 3, 4], [0, 2, 4, 3]) == [1, 0.5, 0, 1]
    assert win_rate([1, 0.5, 0, 1]) == wilson(2.5, 4)
    assert win_rate(outcomes([5, 5], [5, 5])).estimate == 0.5
    ours, theirs = [0.1, 0.7, 0.7, 0.2], [0.3, 0.7, 0.1, 0.9]
    assert win_rate(outcomes(ours, theirs)).estimate + win_rate(outcomes(theirs, ours)).estimate == 1.0
    with pytest.raises(ValueError, match="got 2 and 1"):
        outcomes([1, 2], [1])


# ---------------------------------------------------------------- likelihood

ROWS = [
    EncodedRow((10, 11, 12, 13, 14, 256), 3),
    EncodedRow((20, 21), 1),
    EncodedRow((30, 31, 32, 33, 34, 35, 36, 37, 256), 8),
    EncodedRow((40, 257, 42, 256), 0),
]


def logprob_by_hand(model, row: EncodedRow, temperature: float) -> float:
    """Token by token, unpadded, in float64."""
    total = 0.0
    for position in range(max(row.start, 1), len(row.tokens)):
        with torch.no_grad():
            logits_V = model(input_ids=torch.tensor([row.tokens[:position]])).logits[0, -1].double() / temperature
        total += (logits_V[row.tokens[position]] - logits_V.exp().sum().log()).item()
    return total


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprob_sums_are_of_the_response_alone(make_policy, batch_size, temperature):
    model = make_policy()
    done = []
    found = response_logprob_sums(model, ROWS, temperature=temperature, batch_size=batch_size, progress=done.append)
    assert found.tolist() == pytest.approx([logprob_by_hand(model, row, temperature) for row in ROWS], rel=1e-4)
    assert done[-1] == 4


def test_perplexity_divides_by_response_tokens_only(make_policy):
    model = make_policy()
    loss, perplexity = loss_and_perplexity(model, ROWS, batch_size=4)
    tokens = 3 + 1 + 1 + 3  # the prompts have 3 + 1 + 8 more; token 0 of the last row is never predicted
    by_hand = -sum(logprob_by_hand(model, row, 1.0) for row in ROWS) / tokens
    assert loss == pytest.approx(by_hand, rel=1e-5)
    assert perplexity == pytest.approx(math.exp(by_hand), rel=1e-4)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)  # uniform over the vocabulary
    assert loss_and_perplexity(model, ROWS, batch_size=4)[1] == pytest.approx(258, rel=1e-5)


# ---------------------------------------------------------------- judge


def test_the_judge_reads_the_last_real_token(tmp_path, make_reward_model, tokenizer):
    model = make_reward_model()
    write_model(model, tokenizer, tmp_path / "reward")
    prompts = ["a", "longer prompt", "a", "a"]
    rows = [{}] * 4
    texts, ended = ["x<pad>", "y", "x<pad>", "x<pad>"], [False, True, False, True]
    scores = RewardJudge(str(tmp_path / "reward"), [], 2, "cpu")(prompts, rows, texts, ended)
    for score, prompt, text, stop in zip(scores, prompts, texts, ended, strict=True):
        tokens = torch.tensor([tokenizer.encode(prompt + text) + [256] * stop])
        with torch.no_grad():
            by_hand = model.score(model.base_model(input_ids=tokens).last_hidden_state[0, -1]).item()
        assert score == pytest.approx(by_hand, abs=1e-4)
    assert scores[0] == scores[2] != scores[3]

    torch.nn.init.constant_(model.score.weight, math.nan)
    write_model(model, tokenizer, tmp_path / "broken")
    with pytest.raises(RewardError, match="the reward model gave nan for 'ax<pad>'"):
        RewardJudge(str(tmp_path / "broken"), [], 2, "cpu")(prompts, rows, texts, ended)


def test_the_judge_names_a_row_that_is_longer_than_its_model_reads(tmp_path, make_reward_model, tokenizer):
    write_model(make_reward_model(max_position_embeddings=16), tokenizer, tmp_path / "reward")
    judge = RewardJudge(str(tmp_path / "reward"), [], 2, "cpu")
    assert len(judge(["a", "b"], [{}] * 2, ["x" * 15, "x" * 14], [False, True])) == 2  # 16 tokens fit
    with pytest.raises(ConfigError, match=r"row 2 of 2 has 17 tokens with its completion; must have 16 at most"):
        judge(["a", "b"], [{}] * 2, ["x", "x" * 15], [True, True])


# ---------------------------------------------------------------- evaluate

REWARD = """
def letters(prompts, completions, **columns):
    return [float(sum(c.isascii() and c.isalpha() for c in text)) for text in completions]
"""


@pytest.fixture
def config(tmp_path, make_policy, tokenizer):
    for name, seed in (("sft", 0), ("policy", 1)):
        write_model(make_policy(seed), tokenizer, tmp_path / name)
    (tmp_path / "judge.py").write_text(REWARD)
    rows = [{"query": f"p{i}", "query_reference_response": f"p{i} {'ab' * (i % 3)}<eos>"} for i in range(12)]
    rows.insert(3, {"query": "z" * 40, "query_reference_response": "z" * 41})
    (tmp_path / "held.jsonl").write_text(json_lines(rows))
    return EvaluateConfig(
        models={"sft": str(tmp_path / "sft"), "policy": str(tmp_path / "policy"), "copy": str(tmp_path / "sft")},
        data=str(tmp_path / "held.jsonl"),
        output_dir=str(tmp_path / "evaluation"),
        reward_funcs=[f"{tmp_path / 'judge.py'}:letters"],
        response_length=10,
        max_prompts=11,
        max_prompt_length=20,
        batch_size=4,
        num_samples=2,
        device="cpu",
    )


def test_run_evaluate(config, tmp_path, make_policy, tokenizer):
    results = run_evaluate(config)
    samples = load_rows(str(tmp_path / "evaluation" / "samples.jsonl"))
    assert (results["reference"], results["prompts"], results["dropped"]) == ("sft", 11, 1)
    assert [one["query"] for one in samples] == [f"p{i}" for i in range(11)]
    assert samples[4]["reference_response"] == " ab"
    sft, policy, copy = (results["models"][name] for name in ("sft", "policy", "copy"))

    scores = {name: [one["models"][name]["score"] for one in samples] for name in results["models"]}
    human = [one["reference_score"] for one in samples]
    assert human == [2.0 * (i % 3) for i in range(11)]
    assert policy["reward_mean"]["estimate"] == pytest.approx(sum(scores["policy"]) / 11)
    wins = sum((a > b) + (a == b) / 2 for a, b in zip(scores["policy"], human, strict=True)) / 11
    assert policy["win_rate_vs_reference_response"]["estimate"] == pytest.approx(wins)
    assert policy["win_rate_vs_sft"] == win_rate(outcomes(scores["policy"], scores["sft"]))._asdict()
    assert "win_rate_vs_sft" not in sft
    difference = [a - b for a, b in zip(scores["policy"], scores["sft"], strict=True)]
    assert policy["reward_difference_vs_sft"] == mean_interval(difference)._asdict()
    assert copy["reward_difference_vs_sft"] == {"estimate": 0.0, "low": 0.0, "high": 0.0}
    table = (tmp_path / "evaluation" / "evaluation.txt").read_text()
    assert "reward difference" in table  # no model is of a run, so nobody knows whether it is gold
    assert "│ (human)" in table
    assert results["reference_response"]["reward_mean"] == mean_interval(human)._asdict()

    # The same weights see the same random numbers.
    assert scores["copy"] == scores["sft"] != scores["policy"]
    assert {key: copy[key] for key in sft} == sft
    assert copy["win_rate_vs_sft"]["estimate"] == 0.5
    assert sft["kl_to_reference"] == copy["kl_to_reference"] == {"estimate": 0.0, "low": 0.0, "high": 0.0}
    assert policy["kl_to_reference"]["low"] > 0

    models = {"sft": make_policy(0).eval(), "policy": make_policy(1).eval()}
    references = [
        EncodedRow((*tokenizer.encode(f"p{i}"), *tokenizer.encode(f" {'ab' * (i % 3)}"), 256), 2 + (i > 9))
        for i in range(11)
    ]
    for name, model in models.items():
        assert results["models"][name]["perplexity"] == pytest.approx(
            loss_and_perplexity(model, references, 4)[1], rel=1e-4
        )
    prompts, _ = first_prompts(load_rows(config.data), ChatTemplate(tokenizer), config)
    by_hand = []
    for prompt, (answer,) in zip(
        prompts, sample(models["policy"], tokenizer, prompts, config, 1, "again"), strict=True
    ):
        row = EncodedRow(tuple(answer.tokens.tolist()), len(prompt.tokens))
        by_hand.append(logprob_by_hand(models["policy"], row, 0.7) - logprob_by_hand(models["sft"], row, 0.7))
    assert tuple(policy["kl_to_reference"].values()) == pytest.approx(mean_interval(by_hand), rel=1e-4)
    assert policy["ended_share"] == sum(one["models"]["policy"]["ended"] for one in samples) / 11

    text = (tmp_path / "evaluation" / "evaluation.txt").read_text()
    assert text == f"{format_table(results)}\n\n{side_by_side(samples, 2)}"
    assert json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())["results"] == results
    assert run_evaluate(config) == results
    with pytest.raises(ConfigError, match="seed: was 0, is 1"):
        run_evaluate(replace(config, seed=1))


def test_without_human_responses_and_with_another_reference(config, tmp_path):
    (tmp_path / "held.jsonl").write_text(json_lines([{"query": f"p{i}"} for i in range(4)]))
    results = run_evaluate(replace(config, reference="policy"))
    assert results["reference_response"] is None
    assert results["reference"] == "policy"
    without_human = {"reward_mean", "kl_to_reference", "mean_length", "ended_share", "perplexity_under_reference"}
    assert results["models"]["policy"].keys() == without_human | {"ppl_original"}
    assert results["models"]["sft"]["win_rate_vs_policy"] == results["models"]["copy"]["win_rate_vs_policy"]
    assert results["models"]["policy"]["kl_to_reference"]["estimate"] == 0.0
    with pytest.raises(ConfigError, match="got 1 prompt; must be 2 at least"):
        run_evaluate(replace(config, max_prompts=1, output_dir=str(tmp_path / "other")))


def test_tables_say_the_numbers():
    def interval(estimate, half):
        return {"estimate": estimate, "low": estimate - half, "high": estimate + half}

    one = {"reward_mean": interval(0.5, 0.1), "kl_to_reference": interval(-1e-9, 0.0), "ended_share": 0.875}
    two = {**one, "win_rate_vs_sft": interval(0.6, 0.05), "perplexity": 12.345}
    table = format_table(
        {"reference": "sft", "prompts": 7, "reference_response": None, "models": {"sft": one, "new": two}}
    )
    line = " ".join(line for line in table.splitlines() if "new" in line)
    assert "-0.000" not in table
    assert max(map(len, table.splitlines())) < 120
    for cell in ("0.500 [0.400, 0.600]", "60.0% [55.0%, 65.0%]", "12.35", "87.5%"):
        assert cell in line
    shown = {
        "query": "def f():\n",
        "reference_response": "Human.",
        "reference_score": 0.25,
        "models": {"sft": {"completion": " Text\n", "score": -1.0, "ended": True}},
    }
    assert side_by_side([shown, shown], 1) == "def f():\n(human)    0.250  'Human.'\nsft       -1.000  ' Text\\n'\n"
    assert side_by_side([shown], 0) == ""


# ---------------------------------------------------------------- plots


def test_plot(tmp_path):
    row = {"time/batch": 1.0, "objective/scores": 0.5, "objective/kl": 0.1}
    (tmp_path / "metrics.jsonl").write_text(json_lines({"episode": 8 * i, **row} for i in range(1, 9)))
    point = {"estimate": 0.5, "low": 0.4, "high": 0.7}
    results = {
        "reference": "sft",
        "reference_response": {"reward_mean": point},
        "models": {"sft": {"reward_mean": point, "kl_to_reference": {"estimate": 3.0, "low": 2.0, "high": 4.0}}},
    }
    (tmp_path / "evaluation.json").write_text(json.dumps({"results": results}))
    plot_training({Series("run"): tmp_path / "metrics.jsonl"}, tmp_path / "plot.png", tmp_path / "evaluation.json")
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    key = Key([Series("run"), *evaluated(results, {Series("run"): None})])
    assert key.looks["sft"].colour == GREY  # what was not trained here
    spec = against_kl(results, key)
    (row,) = spec["data"]["values"]
    drawn = {"kl": 3.0, "x_low": 2.0, "x_high": 4.0, "reward_mean": 0.5, "y_low": 0.4, "y_high": 0.7, "series": "sft"}
    assert {name: row[name] for name in drawn} == drawn
    band = spec["layer"][0]["data"]["values"][0]
    assert (band["low"], band["high"], band["text"]) == (0.4, 0.7, "human")
    x = spec["layer"][-1]["encoding"]["x"]
    assert (x["field"], x["scale"]["zero"]) == ("kl", True)


def test_checkpoints_are_one_series_in_the_order_of_their_batches():
    def interval(value: float) -> dict[str, float]:
        return {"estimate": value, "low": value - 0.1, "high": value + 0.1}

    models = {
        name: {"reward_mean": interval(gold), "kl_to_reference": interval(kl)}
        for name, gold, kl in (("sft", 0.1, 0.0), ("checkpoint-100", 0.4, 3.0), ("checkpoint-20", 0.3, 1.0))
    }
    results = {"reference": "sft", "reference_response": None, "models": models}
    key = Key(evaluated(results, {}))
    assert list(key.looks) == ["sft", "checkpoints"]
    rows = against_kl(results, key)["data"]["values"]
    assert [row["model"] for row in rows] == ["sft", "checkpoint-20", "checkpoint-100"]
    by_batch = over_checkpoints(results, key)["data"]["values"]
    assert [(row["batch"], row["reward_mean"], row["low"]) for row in by_batch] == [
        (20, 0.3, pytest.approx(0.2)),
        (100, 0.4, pytest.approx(0.3)),
    ]
    del models["checkpoint-20"]
    assert over_checkpoints(results, key) is None
