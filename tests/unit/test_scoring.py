"""Scores: the reward model at the last real token of each row alone, reward functions on text, the penalties, and
what comes of functions that fail, hang or return nonsense."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from tables import each
from tiny import LLAMA_SIZES, call_reward_function, rare

from async_rlhf import OnlineDPOConfig
from async_rlhf.commands.evaluation.reward_judge import RewardJudge
from async_rlhf.config import ConfigError
from async_rlhf.models.forward import reward_scores
from async_rlhf.rewards.calls import TooLateError, call_together
from async_rlhf.rewards.functions import RewardError
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.rewards.shares import SharedFunctions
from async_rlhf.types import Batch, Group, Prompt, Sample

EOS, PAD = 256, 257


# The reward model


def make_scoring_model(kind: str, make_reward_model, pad: int | None):
    tokens = {"vocab_size": 258, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": pad, "num_labels": 1}
    sizes = tokens | LLAMA_SIZES
    if kind == "gpt_neox":
        return make_reward_model(pad_token_id=pad)
    torch.manual_seed(0)
    if kind == "gpt2":
        model = hf.GPT2ForSequenceClassification(
            hf.GPT2Config(**tokens, n_embd=32, n_layer=2, n_head=4, n_positions=96)
        )
    elif kind == "llama":
        model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**sizes))
    else:
        model = hf.MistralForSequenceClassification(hf.MistralConfig(**sizes, sliding_window=4))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model.eval()


def slow_scores(model, rows: list[list[int]]) -> list[float]:
    """Each row alone, unpadded, by the whole model; without a padding id it reads the very last token."""
    alone = copy.deepcopy(model).double()
    alone.config.pad_token_id = None
    with torch.no_grad():
        return [alone(input_ids=torch.tensor([row])).logits.item() for row in rows]


def rows_with_special_tokens() -> list[list[int]]:
    """Rows of 1 to 14 tokens; EOS and PAD at the end, inside, doubled, or nowhere."""
    rng = random.Random(0)
    rows = [[rng.randrange(256) for _ in range(length)] for length in (1, 14, 5, 8, 8, 3, 11)]
    rows[1][-1] = EOS
    rows[2][2] = EOS
    rows[3][-2:] = [EOS, EOS]
    rows[4][-1] = PAD
    rows[5][:] = [PAD, PAD, PAD]
    rows[6][4:6] = [PAD, EOS]
    return rows


@each(itertools.product(["gpt_neox", "gpt2", "llama", "mistral_sliding"], [PAD, EOS]))
def test_reward_scores_are_those_of_each_row_alone(kind, pad, make_reward_model):
    model, rows = make_scoring_model(kind, make_reward_model, pad), rows_with_special_tokens()
    expected = slow_scores(model, rows)
    assert max(expected) - min(expected) > 0.1
    lengths_B = torch.tensor([len(row) for row in rows])
    for filler in (PAD, EOS, 65):
        tokens_BT = torch.full((len(rows), 17), filler)
        for i, row in enumerate(rows):
            tokens_BT[i, : len(row)] = torch.tensor(row)
        with torch.no_grad():
            ours_B = reward_scores(model, tokens_BT, lengths_B)
            trimmed_B = reward_scores(model, tokens_BT[:, :14], lengths_B)
        assert ours_B.shape == (7,)
        assert ours_B.tolist() == pytest.approx(expected, abs=1e-4)
        assert trimmed_B.tolist() == pytest.approx(expected, abs=1e-4)


def test_the_gradient_of_reward_scores_is_that_of_the_rows_alone(make_reward_model):
    model, rows = make_reward_model(), rows_with_special_tokens()[1:5]
    slow = copy.deepcopy(model)
    slow.config.pad_token_id = None
    tokens_BT = torch.full((4, 15), PAD)
    for i, row in enumerate(rows):
        tokens_BT[i, : len(row)] = torch.tensor(row)
    weights = [1.0, -2.0, 0.5, 3.0]
    scores_B = reward_scores(model, tokens_BT, torch.tensor([len(row) for row in rows]))
    (scores_B @ torch.tensor(weights)).backward()
    sum(w * slow(input_ids=torch.tensor([row])).logits[0, 0] for w, row in zip(weights, rows, strict=True)).backward()
    assert max(p.grad.abs().max().item() for p in slow.parameters() if p.grad is not None) > 0.1
    for (name, ours), theirs in zip(model.named_parameters(), slow.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=2e-4, msg=name)


# The scorer

# (completion, finish reason) of two samples of each of three prompts; "|" stands for the stop token that ended it.
SAMPLES = (
    (("return x|", "stop"), ("abc", "length")),
    (("|", "stop"), ("x = 1; é|", "stop")),
    (("more and more", "length"), ("pass\n", "stop")),  # a newline can be a stop token as well
)
TEXTS = ["return x", "abc", "", "x = 1; é", "more and more", "pass"]
ENDED = [True, False, True, True, False, True]


def make_batch(tokenizer) -> Batch:
    groups = []
    for p, samples in enumerate(SAMPLES):
        query = f"def f{p}({'y' * p}):"
        prompt = Prompt(p, 10 + p, tuple(tokenizer(query)["input_ids"]), {"query": query, "name": f"f{p}", "level": p})
        answers = []
        for text, finish in samples:
            tokens = tokenizer(text.rstrip("|"))["input_ids"] + [EOS] * text.endswith("|")
            answers.append(Sample.answer(prompt.tokens, tokens, [-0.5] * len(tokens), [0] * len(tokens), finish))
        groups.append(Group(prompt, tuple(answers)))
    return Batch(1, 0, tuple(groups), 0.0)


def config(**changes) -> OnlineDPOConfig:
    return OnlineDPOConfig(**{"non_eos_penalty": False} | changes)


def length_reward(prompts, completions, **columns) -> list[float]:
    return [float(len(text)) for text in completions]


def level_reward(prompts, completions, level, **columns) -> list[float]:
    return [100.0 * n + len(prompt) for n, prompt in zip(level, prompts, strict=True)]


LENGTHS = [float(len(text)) for text in TEXTS]
LEVELS = [100.0 * p + len(f"def f{p}({'y' * p}):") for p in range(3) for _ in range(2)]


def whole_rows(batch: Batch) -> list[list[int]]:
    """Whatever ended an answer, a reward model reads the end of sequence."""
    return [
        [*s.tokens.tolist()[: len(s) - (s.finish_reason == "stop")], *[EOS] * (s.finish_reason == "stop")]
        for s in batch.samples
    ]


def scores(tokenizer, batch, reward_model=None, functions=(), **changes) -> list[float]:
    scored = Scorer(tokenizer, config(**changes), reward_model, list(functions))(batch)
    assert scored.batch is batch
    assert scored.scores_PK.shape == (3, 2)
    assert (scored.scores_PK.dtype, scored.scores_PK.device.type) == (torch.float32, "cpu")
    return scored.scores_PK.flatten().tolist()


@each([PAD, EOS])
def test_the_reward_model_reads_the_stop_token(pad, tokenizer, make_reward_model):
    """With pad = eos a model that looks for padding would read the score one token early."""
    batch, model = make_batch(tokenizer), make_reward_model(pad_token_id=pad)
    by_model = slow_scores(model, whole_rows(batch))
    early = slow_scores(model, [row[:-1] for row in whole_rows(batch)])
    assert min(abs(a - b) for a, b in zip(by_model, early, strict=True)) > 1e-2
    assert scores(tokenizer, batch, model) == pytest.approx(by_model, abs=1e-4)


@each([-1.0, 3.5])
def test_the_penalty_replaces_the_score_of_what_did_not_end(penalty, tokenizer, make_reward_model):
    batch, model = make_batch(tokenizer), make_reward_model()
    by_model = slow_scores(model, whole_rows(batch))
    options = {"non_eos_penalty": True, "penalty_reward_value": penalty}
    for reward_model, functions, full in (
        (None, [length_reward], LENGTHS),
        (model, [], by_model),
        (model, [length_reward], [a + b for a, b in zip(by_model, LENGTHS, strict=True)]),
        (None, [length_reward, level_reward], [a + b for a, b in zip(LENGTHS, LEVELS, strict=True)]),
    ):
        expected = [score if ended else penalty for score, ended in zip(full, ENDED, strict=True)]
        assert scores(tokenizer, batch, reward_model, functions, **options) == pytest.approx(expected, abs=1e-4)
        replaces = options | {"non_eos_penalty": "replace"}
        assert scores(tokenizer, batch, reward_model, functions, **replaces) == pytest.approx(expected, abs=1e-4)
        lowers = {"non_eos_penalty": "add", "penalty_reward_value": -abs(penalty)}
        expected = [score if ended else score - abs(penalty) for score, ended in zip(full, ENDED, strict=True)]
        assert scores(tokenizer, batch, reward_model, functions, **lowers) == pytest.approx(expected, abs=1e-4)
        assert scores(tokenizer, batch, reward_model, functions) == pytest.approx(full, abs=1e-4)


def test_a_reward_function_sees_texts_without_stop_token_and_the_columns_of_the_data(tokenizer):
    calls = []

    def spy(**arguments):
        calls.append(arguments)
        return [0.0] * len(arguments["completions"])

    batch = make_batch(tokenizer)
    Scorer(tokenizer, config(annotate_batch_size=4), None, [spy])(batch)
    seen = {name: [value for call in calls for value in call[name]] for name in calls[0]}
    assert seen["completions"] == TEXTS
    assert seen["prompts"] == [f"def f{p}({'y' * p}):" for p in range(3) for _ in range(2)]
    assert seen["name"] == [f"f{p}" for p in range(3) for _ in range(2)]
    assert seen["level"] == [p for p in range(3) for _ in range(2)]


def test_prompt_field_names_the_column_with_the_prompt(tokenizer):
    batch, seen = make_batch(tokenizer), []

    def spy(prompts, completions, **columns):
        seen.extend(prompts)
        return [0.0] * len(completions)

    Scorer(tokenizer, config(), None, [spy], prompt_field="name")(batch)
    assert seen == [f"f{p}" for p in range(3) for _ in range(2)]


def test_functions_do_not_see_what_others_do_to_their_lists(tokenizer):
    emptied = threading.Event()

    def empties(prompts, completions, name, **columns):
        count = len(completions)
        for given in (prompts, completions, name):
            given.clear()
        emptied.set()
        return [0.0] * count

    def looks_afterwards(prompts, completions, name, **columns):
        assert emptied.wait(30)
        assert (len(prompts), len(name)) == (6, 6)
        return [float(len(text)) for text in completions]

    assert scores(tokenizer, make_batch(tokenizer), None, [looks_afterwards, empties]) == LENGTHS


def test_what_functions_do_within_a_column_changes_no_data(tokenizer):
    """Neither for others nor for later batches; what cannot be copied is handed over as it is."""
    lock = threading.Lock()
    batch = make_batch(tokenizer)
    for group in batch.groups:
        group.prompt.columns["tests"] = {"hidden": ["a"], "lock": lock}

    def appends(prompts, completions, tests, **columns):
        for one in tests:
            assert one["hidden"] in (["a"], ["a", "b"])  # the completions of one prompt share it
            assert one["lock"] is lock
            one["hidden"][1:] = ["b"]
        return [0.0] * len(completions)

    for _ in range(2):
        assert scores(tokenizer, batch, None, [appends, appends]) == [0.0] * 6
    assert all(group.prompt.columns["tests"]["hidden"] == ["a"] for group in batch.groups)


def test_columns_with_names_that_are_ours_get_others(tokenizer, caplog):
    batch = make_batch(tokenizer)
    for group in batch.groups:
        group.prompt.columns.update({"prompts": 1, "completions": 2, "messages": 3, "messages_": 4, "self": 5})

    class Reads:
        def __call__(self, prompts, completions, level, **columns):
            given = {"prompts_": 1, "completions_": 2, "messages_": 4, "messages__": 3, "self_": 5, "name": "f"}
            assert {name: [*{str(value)[0] for value in each}] for name, each in columns.items()} == {
                name: [str(value)] for name, value in given.items()
            }
            return [float(len(text)) for text in completions]

    for _ in range(2):
        assert scores(tokenizer, batch, None, [Reads()]) == LENGTHS
    assert [record.args[1] for record in caplog.records] == ["prompts_", "completions_", "messages__", "self_"]


# Weights and the penalty for length


def test_weights_multiply_the_model_and_the_functions_but_not_their_metrics(tokenizer, make_reward_model):
    batch, model = make_batch(tokenizer), make_reward_model()
    by_model = slow_scores(model, whole_rows(batch))
    changes = {"reward_model_weight": -3.0, "reward_weights": [0.5, 0.25]}
    expected = [-3 * m + 0.5 * a + 0.25 * b for m, a, b in zip(by_model, LENGTHS, LEVELS, strict=True)]
    scored = Scorer(tokenizer, config(**changes), model, [length_reward, level_reward])(batch)
    assert scored.scores_PK.flatten().tolist() == pytest.approx(expected, abs=1e-3)
    assert scored.metrics["objective/scores"] == pytest.approx(sum(expected) / 6, abs=1e-3)
    assert scored.metrics["reward/model"] == pytest.approx(sum(by_model) / 6, abs=1e-4)
    assert scored.metrics["reward/length_reward"] == pytest.approx(sum(LENGTHS) / 6)
    assert scored.metrics["reward/level_reward"] == pytest.approx(sum(LEVELS) / 6)


@each(
    [([1.0], []), ([1.0], [length_reward, level_reward]), ([1.0, 2.0], [length_reward]), ([0.0] * 3, [length_reward])]
)
def test_the_number_of_weights_is_checked_before_anything_runs(weights, functions, tokenizer, make_reward_model):
    with pytest.raises(ConfigError) as error:
        Scorer(tokenizer, config(reward_weights=weights), make_reward_model(), functions)
    assert str(error.value).startswith(f"reward_weights: got {weights}; must be empty")
    assert f"{len(functions)} reward functions {[f.__name__ for f in functions]}" in str(error.value)


def test_the_length_penalty_is_for_each_token_and_not_for_what_did_not_end(tokenizer):
    """The stop token counts, and the penalty for not ending replaces the one for length as well."""
    batch = make_batch(tokenizer)
    tokens = [len(sample.drawn) for sample in batch.samples]
    assert tokens == [9, 3, 1, 10, 13, 5]  # the e with its accent is two
    changes = {"length_penalty": 0.25, "reward_weights": [2.0]}
    expected = [2 * n - 0.25 * t for n, t in zip(LENGTHS, tokens, strict=True)]
    assert scores(tokenizer, batch, None, [length_reward], **changes) == expected
    expected = [score if ended else -7.0 for score, ended in zip(expected, ENDED, strict=True)]
    changes |= {"non_eos_penalty": True, "penalty_reward_value": -7.0}
    assert scores(tokenizer, batch, None, [length_reward], **changes) == expected


# Functions that fail


def raises(prompts, completions, **columns):
    raise KeyError("no such key here")


def gives_nan(prompts, completions, **columns):
    return [math.nan if text == "abc" else 1.0 for text in completions]


def gives_infinity(prompts, completions, **columns):
    return [math.inf if text == "abc" else 1.0 for text in completions]


def gives_none_for_one(prompts, completions, **columns):
    return [None if text == "abc" else 1.0 for text in completions]


def gives_none(prompts, completions, **columns):
    return None


def gives_too_few(prompts, completions, **columns):
    return [1.0] * (len(completions) - 1)


def gives_too_many(prompts, completions, **columns):
    return [1.0] * (len(completions) + 1)


async def raises_later(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    raise KeyError("no such key here")


async def is_cancelled(prompts, completions, **columns):
    asyncio.current_task().cancel()
    await asyncio.sleep(60)


async def yields(prompts, completions, **columns):
    for text in completions:
        yield float(len(text))


def gives_a_dict(prompts, completions, **columns):
    return dict.fromkeys(range(len(completions)), 1.0)


def gives_a_set(prompts, completions, **columns):
    return {float(number) for number in range(len(completions))}


def gives_text(prompts, completions, **columns):
    return "1" * len(completions)


def gives_bytes(prompts, completions, **columns):
    return b"1" * len(completions)


def gives_a_generator(prompts, completions, **columns):
    return (1.0 for _ in completions)


async def gives_an_array_of_no_dimension(prompts, completions, **columns):
    return np.array(1.0)


NO_SEQUENCES = (gives_a_dict, gives_a_set, gives_text, gives_bytes, gives_a_generator, gives_an_array_of_no_dimension)
FAILS_AS_A_WHOLE = (
    *NO_SEQUENCES,
    raises,
    raises_later,
    is_cancelled,
    yields,
    gives_none,
    gives_too_few,
    gives_too_many,
)
BROKEN = (*FAILS_AS_A_WHOLE, gives_nan, gives_infinity)


@each(itertools.product(BROKEN, [False, True]))
def test_a_broken_reward_function_is_named(function, penalty, tokenizer):
    scorer = Scorer(tokenizer, config(non_eos_penalty=penalty), None, [length_reward, function])
    with pytest.raises(RewardError, match=function.__name__) as error:
        scorer(make_batch(tokenizer))
    assert "length_reward" not in str(error.value)
    count = {gives_too_few: 5, gives_too_many: 7}.get(function)
    assert count is None or f"returned {count} rewards for 6 completions" in str(error.value)
    if function in (raises, raises_later):
        cause = error.value.__cause__
        assert isinstance(cause, KeyError)
        assert "no such key here" in str(error.value)
        frames = [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
        assert frames[-1] == function.__name__


@pytest.mark.parametrize("function", [*NO_SEQUENCES, gives_none, yields])
@pytest.mark.parametrize("limit", [None, 60.0], ids=["here", "in a process"])
def test_what_is_no_sequence_is_said(tokenizer, function, limit):
    scorer = Scorer(tokenizer, config(reward_timeout=limit), None, [function])
    with scorer.started(), pytest.raises(RewardError) as error:
        scorer(make_batch(tokenizer))
    assert str(error.value).startswith(f"reward function {function.__name__} returned ")
    assert str(error.value).endswith("must be a list, an array or a tensor of 6 numbers, one for each completion")


@each([tuple, np.array, torch.tensor, deque])
def test_sequences_of_every_kind_are_rewards(kind):
    assert call_reward_function(lambda **_: kind([0.5, 2.0]), ["p"] * 2, ["c"] * 2, {}) == [0.5, 2.0]


def no_float() -> object:
    class Broken:
        def __float__(self) -> float:
            raise LookupError("no number here")

    return Broken()


BAD_VALUES = (
    *(math.nan, -math.inf, "1.0", b"1", bytearray(b"1"), np.str_("1.0"), [1.0], 1j, 10**400, {}, no_float()),
    *(torch.tensor([1.0, 2.0]), torch.tensor(math.nan), np.float32("inf")),
)


@each(BAD_VALUES)
def test_a_bad_value_is_an_error_or_leaves_out_its_completion(value, tokenizer, caplog):
    def my_reward(prompts, completions, **columns):
        bad = {"x = 1; é": value, "pass": "the last"}
        return [bad.get(text, float(len(text))) for text in completions]

    batch = make_batch(tokenizer)
    with pytest.raises(RewardError, match="reward function my_reward returned") as error:
        Scorer(tokenizer, config(), None, [my_reward])(batch)
    for part in (repr(value)[:100], "must be a finite number", "Prompt: 'def f1(y):'", "Completion: 'x = 1; é'"):
        assert part in str(error.value)
    assert caplog.records == []

    scored = Scorer(tokenizer, config(reward_errors="skip"), None, [length_reward, my_reward])(batch)
    valid = [8.0, 3.0, 0.0, 13.0]
    expected = [8.0, 3.0, 0.0, math.nan, 13.0, math.nan]
    assert scored.scores_PK.flatten().tolist() == pytest.approx([2 * score for score in expected], nan_ok=True)
    found = scored.metrics
    assert found["objective/scores"] == pytest.approx(2 * sum(valid) / 4)
    assert found["objective/scores_std"] == pytest.approx(2 * float(np.std(valid)))
    assert found["reward/my_reward"] == pytest.approx(sum(valid) / 4)
    assert found["reward/length_reward"] == pytest.approx(sum(LENGTHS) / 6)
    assert found["reward/skipped"] == 2
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"2 of 6 completions have no reward: {error.value}"


@each(itertools.product([False, True], ["error", "skip"]))
def test_none_leaves_the_reward_to_the_others(with_model, reward_errors, tokenizer, make_reward_model, caplog):
    """Against a loop that adds up what applies to each completion, times its weight; NaN stays a failure."""
    batch, model = make_batch(tokenizer), make_reward_model() if with_model else None
    by_model = slow_scores(model, whole_rows(batch)) if with_model else [0.0] * 6
    tables = {"code": [1.0, None, 2.0, None, None, 3.0], "text": [None, 5.0, 7.0, 11.0, None, math.nan]}
    if not with_model:
        tables["code"][4] = 4.0  # else nothing applies to it
    if reward_errors == "error":
        tables["text"][5] = 0.5

    def table(name):
        def function(prompts, completions, **columns):
            return list(tables[name])

        function.__name__ = name
        return function

    weights = {"code": 0.5, "text": -2.0}
    expected = []
    for row in range(6):
        parts = [by_model[row] * 3.0] if with_model else []
        parts += [weights[name] * tables[name][row] for name in tables if tables[name][row] is not None]
        expected.append(math.fsum(parts))
    changes = {"reward_errors": reward_errors, "reward_weights": [0.5, -2.0], "reward_model_weight": 3.0}
    scored = Scorer(tokenizer, config(**changes), model, [table("code"), table("text")])(batch)
    assert scored.scores_PK.flatten().tolist() == pytest.approx(expected, abs=1e-4, nan_ok=True)
    assert scored.metrics["reward/code"] == pytest.approx(2.0 if with_model else 2.5)  # of what it applies to
    assert [record.getMessage()[:37] for record in caplog.records] == ["1 of 6 completions have no reward: re"] * (
        reward_errors == "skip"
    )


def test_none_of_every_function_is_an_error_or_leaves_out_the_prompt(tokenizer, caplog):
    batch, functions = make_batch(tokenizer), [gives_none_for_one, gives_none_for_one]
    message = "every reward function returned None for completion 'abc'; at least one must return a number"
    with pytest.raises(RewardError) as error:
        Scorer(tokenizer, config(length_penalty=1.0), None, functions)(batch)
    assert str(error.value) == message
    scored = Scorer(tokenizer, config(reward_errors="skip"), None, functions)(batch)
    assert scored.scores_PK.flatten().tolist() == pytest.approx([2.0, math.nan, 2.0, 2.0, 2.0, 2.0], nan_ok=True)
    assert scored.metrics["reward/skipped"] == 1
    assert [record.getMessage() for record in caplog.records] == [f"1 of 6 completions have no reward: {message}"]
    for alone in (lambda: call_reward_function(gives_none_for_one, ["p"], ["abc"], {}), lambda: judged([None])):
        with pytest.raises(RewardError, match=r"every reward function returned None; .* Completion: 'abc'"):
            alone()
    assert judged([None, 0.5]) == judged([0.5, None]) == [0.5]
    assert judged([0.25, 0.5]) == [0.75]


def judged(rewards: list[float | None]) -> list[float]:
    """By evaluation's judge, of functions that return these for the completion "abc"."""
    judge = RewardJudge(None, [], 4, "cpu")
    judge.functions = [lambda reward=reward, **columns: [reward] for reward in rewards]
    return judge(["p"], [{}], ["abc"], [True])


@each([True, 3, np.float32(0.5), np.int64(2), torch.tensor(1.5), torch.tensor([2.5])])
def test_whatever_is_a_number_is_a_reward(value, tokenizer):
    def my_reward(prompts, completions, **columns):
        return [value] * len(completions)

    assert scores(tokenizer, make_batch(tokenizer), None, [my_reward]) == [float(value)] * 6


def test_only_the_sum_has_to_fit_into_float32(tokenizer):
    changes = {"reward_weights": [1e-40, -1e-40]}
    assert scores(tokenizer, make_batch(tokenizer), None, [named("a", 3e40), named("b", 1e40)], **changes) == [2.0] * 6


@each(FAILS_AS_A_WHOLE)
def test_a_failed_call_leaves_out_the_batch(function, tokenizer, caplog):
    scored = Scorer(tokenizer, config(reward_errors="skip"), None, [length_reward, function])(make_batch(tokenizer))
    assert scored.scores_PK.isnan().all()
    assert scored.metrics["reward/skipped"] == 6
    assert scored.metrics["reward/length_reward"] == pytest.approx(sum(LENGTHS) / 6)
    assert {"objective/scores", "objective/scores_std", f"reward/{function.__name__}"}.isdisjoint(scored.metrics)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"6 of 6 completions have no reward: reward function {function.__name__} r")


def test_each_failing_function_is_warned_about_once(tokenizer, caplog):
    scorer = Scorer(tokenizer, config(reward_errors="skip"), None, [raises, gives_nan, length_reward, gives_infinity])
    for _ in range(2):
        caplog.clear()
        scored = scorer(make_batch(tokenizer))
        assert scored.scores_PK.isnan().all()
        found = sorted(record.getMessage().split(": ")[0:2] for record in caplog.records)
        assert [count for count, _ in found] == [f"{n} of 6 completions have no reward" for n in (1, 1, 6)]
        assert [text.split()[2] for _, text in found] == ["gives_infinity", "gives_nan", "raises"]


@each([raises, gives_nan])
def test_the_penalty_is_a_valid_score_whatever_the_function_returned(function, tokenizer):
    changes = {"reward_errors": "skip", "non_eos_penalty": True, "penalty_reward_value": -7.0}
    scored = Scorer(tokenizer, config(**changes), None, [function])(make_batch(tokenizer))
    ended = 1.0 if function is gives_nan else math.nan
    expected = [ended, -7.0, ended, ended, -7.0, ended]
    assert scored.scores_PK.flatten().tolist() == pytest.approx(expected, nan_ok=True)
    assert scored.metrics["reward/skipped"] == (0 if function is gives_nan else 4)
    assert scored.metrics["objective/scores"] == pytest.approx(-10 / 6 if function is gives_nan else -7.0)
    scored = Scorer(tokenizer, config(**changes | {"non_eos_penalty": "add"}), None, [function])(make_batch(tokenizer))
    expected = [ended, math.nan, ended, ended, ended - 7.0, ended]  # what is added to nothing is no score
    assert scored.scores_PK.flatten().tolist() == pytest.approx(expected, nan_ok=True)


def test_a_reward_model_without_a_number_follows_the_same_policy(tokenizer, make_reward_model, caplog):
    batch, model = make_batch(tokenizer), make_reward_model()
    by_model = slow_scores(model, whole_rows(batch))
    accent = tokenizer("é")["input_ids"][0]
    assert [accent in row for row in whole_rows(batch)] == [False, False, False, True, False, False]
    with torch.no_grad():
        model.get_input_embeddings().weight[accent] = math.nan
    with pytest.raises(RewardError, match="the reward model gave nan for 'x = 1; é<eos>'"):
        Scorer(tokenizer, config(), model, [length_reward])(batch)
    assert caplog.records == []
    scored = Scorer(tokenizer, config(reward_errors="skip"), model, [length_reward])(batch)
    expected = [a + b for a, b in zip(by_model, LENGTHS, strict=True)]
    expected[3] = math.nan
    assert scored.scores_PK.flatten().tolist() == pytest.approx(expected, abs=1e-4, nan_ok=True)
    assert scored.metrics["reward/skipped"] == 1
    assert scored.metrics["reward/model"] == pytest.approx((sum(by_model) - by_model[3]) / 5, abs=1e-4)
    (record,) = caplog.records
    assert record.getMessage().startswith("1 of 6 completions have no reward: the reward model gave nan")


def test_a_sum_too_large_for_float32_follows_the_same_policy(tokenizer, caplog):
    def large(prompts, completions, **columns):
        return [2e38 if text in ("abc", "pass") else 1.0 for text in completions]

    def larger(prompts, completions, **columns):
        return [2e38 if text == "abc" else 3.0 for text in completions]

    batch = make_batch(tokenizer)
    with pytest.raises(RewardError, match="the reward of completion 'abc' is inf; must be a finite float32"):
        Scorer(tokenizer, config(), None, [large, larger])(batch)
    scored = Scorer(tokenizer, config(reward_errors="skip"), None, [large, larger])(batch)
    assert scored.scores_PK.flatten().tolist() == pytest.approx([4.0, math.nan, 4.0, 4.0, 4.0, 2e38], nan_ok=True)
    assert scored.metrics["reward/skipped"] == 1
    assert scored.metrics["objective/scores_std"] == pytest.approx(0.8e38, rel=1e-5)
    (record,) = caplog.records
    assert record.getMessage().startswith("1 of 6 completions have no reward: the reward of completion 'abc'")


@each(["error", "skip"])
def test_an_interrupt_is_no_failure_of_a_function(reward_errors, tokenizer):
    async def interrupts(prompts, completions, **columns):
        raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        Scorer(tokenizer, config(reward_errors=reward_errors), None, [interrupts])(make_batch(tokenizer))


# Functions at the same time, and the time limit


def test_plain_and_async_functions_run_at_the_same_time(tokenizer):
    everyone = threading.Barrier(4)  # one that is called alone waits in vain

    def plain(prompts, completions, **columns):
        everyone.wait(30)
        return [float(len(text)) for text in completions]

    async def later(prompts, completions, level, **columns):
        await asyncio.to_thread(everyone.wait, 30)
        return [1000.0 * n for n in level]

    class Partly:
        """A callable whose awaitable only shows when it is called."""

        def __call__(self, **arguments):
            return later(**arguments)

    changes = {"reward_weights": [1.0, 2.0, 3.0, 4.0]}
    found = scores(tokenizer, make_batch(tokenizer), None, [later, plain, Partly(), plain], **changes)
    assert found == [4000.0 * p + 6.0 * n for p, n in zip((0, 0, 1, 1, 2, 2), LENGTHS, strict=True)]


@pytest.fixture
def hang():
    """An event that nobody sets before the test is over: whoever waits for it is abandoned until then."""
    event = threading.Event()
    yield event
    event.set()


def test_a_plain_function_over_the_time_limit_is_abandoned(tokenizer, hang):
    returned = threading.Event()

    def slow(prompts, completions, **columns):
        hang.wait(120)
        returned.set()
        return [1.0] * len(completions)

    scorer = Scorer(tokenizer, config(reward_timeout=0.25), None, [length_reward, slow])
    with pytest.raises(
        RewardError, match=r"reward function slow was not done after 0\.25 s.*\(reward_timeout\)"
    ) as error:
        scorer(make_batch(tokenizer))
    assert error.value.__cause__ is None
    assert not returned.is_set()
    hang.set()
    assert returned.wait(30)


def test_an_async_function_over_the_time_limit_is_cancelled(tokenizer):
    cancelled = threading.Event()

    async def slow(prompts, completions, **columns):
        try:
            await asyncio.sleep(120)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [1.0] * len(completions)

    scorer = Scorer(tokenizer, config(reward_timeout=0.25), None, [slow])
    with pytest.raises(RewardError, match=r"reward function slow was not done after 0\.25 s.*\(reward_timeout\)"):
        scorer(make_batch(tokenizer))
    assert cancelled.wait(30)


def test_the_limit_is_the_same_for_an_async_function_that_notices_it_first():
    async def slow():
        await asyncio.sleep(120)

    found = {}
    for number, outcome in call_together([list, slow], timeout=0.5):
        found[number] = outcome
        time.sleep(1.0)  # the caller looks again long after the limit
    assert isinstance(found[1], TooLateError)


def test_what_was_too_late_is_left_out_and_the_next_batch_is_scored(tokenizer, hang, caplog):
    first_batch = [True]

    def slow_at_first(prompts, completions, **columns):
        if first_batch:
            hang.wait(120)
        return [1.0] * len(completions)

    async def async_slow_at_first(prompts, completions, **columns):
        if first_batch:
            await asyncio.sleep(120)
        return [2.0] * len(completions)

    # The limit is also what the quick functions have on a busy machine.
    changes = {"reward_errors": "skip", "reward_timeout": 3.0}
    scorer = Scorer(tokenizer, config(**changes), None, [slow_at_first, length_reward, async_slow_at_first])
    scored = scorer(make_batch(tokenizer))
    assert scored.scores_PK.isnan().all()
    assert scored.metrics["reward/skipped"] == 6
    assert scored.metrics["reward/length_reward"] == pytest.approx(sum(LENGTHS) / 6)
    messages = sorted(record.getMessage().split(" reward function ")[1] for record in caplog.records)
    assert [text.split(", ")[0] for text in messages] == [
        "async_slow_at_first was not done after 3 s",
        "slow_at_first was not done after 3 s",
    ]
    first_batch.clear()
    scored = scorer(make_batch(tokenizer))
    assert scored.scores_PK.flatten().tolist() == [n + 3 for n in LENGTHS]
    assert scored.metrics["reward/skipped"] == 0


def test_a_time_out_of_the_function_itself_is_not_the_limit(tokenizer):
    async def asks(prompts, completions, **columns):
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    with pytest.raises(RewardError, match="reward function asks raised TimeoutError") as error:
        Scorer(tokenizer, config(reward_timeout=100.0), None, [asks])(make_batch(tokenizer))
    assert isinstance(error.value.__cause__, TimeoutError)


def test_an_error_does_not_wait_for_the_other_functions(tokenizer, hang):
    def slow(prompts, completions, **columns):
        hang.wait(120)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="reward function raises_later raised KeyError"):
        Scorer(tokenizer, config(), None, [slow, raises_later])(make_batch(tokenizer))


def test_what_belongs_to_a_loop_may_be_kept_between_calls(tokenizer):
    """A queue, as a client has one: it knows the loop in which it was first waited for."""
    queue, seen = asyncio.Queue(), []

    async def answers(completions):
        await asyncio.sleep(0)
        for text in completions:
            queue.put_nowait(float(len(text)))

    async def asks(prompts, completions, **columns):
        seen.append(asyncio.get_running_loop())
        task = asyncio.create_task(answers(completions))
        found = [await queue.get() for _ in completions]
        await task
        return found

    for _ in range(3):
        assert scores(tokenizer, make_batch(tokenizer), None, [asks]) == LENGTHS
    assert len(set(seen)) == 1


def test_a_coroutine_that_blocks_the_loop_holds_up_no_later_batch(tokenizer, hang, caplog):
    async def blocks(prompts, completions, **columns):
        if not caplog.records:
            hang.wait()
        return [1.0] * len(completions)

    scorer = Scorer(tokenizer, config(reward_timeout=0.5, reward_errors="skip"), None, [blocks])
    assert all(math.isnan(score) for score in scorer(make_batch(tokenizer)).scores_PK.flatten())
    assert scorer(make_batch(tokenizer)).scores_PK.flatten().tolist() == [1.0] * 6
    assert "blocks its event loop" in caplog.text


def failing(times: int, function=length_reward):
    """Raises at its first calls."""
    left = iter(range(times))

    def fails(prompts, completions, **columns):
        for _ in left:
            raise ConnectionError("busy")
        return function(prompts, completions, **columns)

    return fails


def test_a_function_that_raises_is_called_again(tokenizer, monkeypatch):
    waits = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=waits.append)
    monkeypatch.setattr("async_rlhf.rewards.calls.time", clock)
    assert scores(tokenizer, make_batch(tokenizer), None, [failing(3)], reward_retries=3) == LENGTHS
    assert waits == [1.0, 2.0, 4.0]
    with pytest.raises(RewardError, match="ConnectionError: busy"):
        scores(tokenizer, make_batch(tokenizer), None, [failing(3)], reward_retries=2)
    waits.clear()
    with pytest.raises(RewardError, match="ConnectionError: busy"):  # a further wait would end after the limit
        scores(tokenizer, make_batch(tokenizer), None, [failing(3)], reward_retries=9, reward_timeout=1.5)
    assert waits == [1.0]


@pytest.mark.parametrize("limit", [None, rare(100.0), 1e300, rare(1e9)])
def test_the_time_that_functions_took_is_a_metric(tokenizer, make_reward_model, limit):
    async def later(prompts, completions, **columns):
        await asyncio.sleep(0.2)
        return [1.0] * len(completions)

    batch = make_batch(tokenizer)
    started = time.monotonic()
    scored = Scorer(tokenizer, config(reward_timeout=limit), None, [later, length_reward])(batch)
    assert 0.19 < scored.metrics["time/reward_funcs"] <= time.monotonic() - started
    assert scored.scores_PK.flatten().tolist() == [n + 1 for n in LENGTHS]
    assert "time/reward_funcs" not in Scorer(tokenizer, config(), make_reward_model())(batch).metrics


HANGS = """
import asyncio, signal, sys, threading, torch
from async_rlhf.rewards.functions import RewardError, call_reward_functions

signal.signal(signal.SIGINT, signal.default_int_handler)

def plain(prompts, completions):
    print("called", flush=True)
    threading.Event().wait()

def busy(prompts, completions):
    weights = torch.ones(300, 300, requires_grad=True)
    while True:
        (weights @ weights).sum().backward()

async def stubborn(prompts, completions):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

try:
    functions = {"plain": plain, "busy": busy, "stubborn": stubborn}
    call_reward_functions(functions, ["p"], ["c"], {}, timeout=TIMEOUT)
except RewardError as error:
    print(error, flush=True)
except KeyboardInterrupt:
    # Left to Python the status would depend on whether torch finds tabulate to import at exit.
    sys.exit(130)
"""


@pytest.mark.parametrize("timeout", [0.5, *(rare(one) for one in (None, 1000.0))])
def test_a_hanging_function_does_not_keep_the_process_from_ending(timeout):
    """Neither once it has been given up, nor when Ctrl-C comes while the learner waits for it."""
    program = HANGS.replace("TIMEOUT", repr(timeout))
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "called\n"
        if timeout == 0.5:
            assert "plain was not done after 0.5 s" in process.stdout.readline()
        else:
            time.sleep(0.5)  # the learner most likely waits by now
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == (0 if timeout == 0.5 else 130), stderr
    finally:
        process.kill()
        process.communicate()


# Names, and other callers


def named(name: str, value: float):
    def function(prompts, completions, **columns):
        if math.isnan(value):
            raise ValueError("broken")
        return [value] * len(completions)

    function.__name__ = name
    return function


def test_functions_of_the_same_name_get_numbers(tokenizer, make_reward_model):
    names = ["f", "f", "g", "f_2", "f", "model", "skipped"]
    functions = [named(name, float(2**i)) for i, name in enumerate(names)]
    scored = Scorer(tokenizer, config(), make_reward_model(), functions)(make_batch(tokenizer))
    found = {name.removeprefix("reward/"): x for name, x in scored.metrics.items() if name.startswith("reward/")}
    by_model = found.pop("model")
    expected = {"f": 1, "f_2": 2, "g": 4, "f_2_2": 8, "f_3": 16, "model_2": 32, "skipped_2": 64}
    assert found == expected
    assert scored.metrics["objective/scores"] == pytest.approx(by_model + 127, abs=1e-3)
    functions = [named("model", 5.0), named("skipped", 6.0)]
    scored = Scorer(tokenizer, config(), None, functions)(make_batch(tokenizer))
    found = {name: x for name, x in scored.metrics.items() if name.startswith("reward/")}
    assert found == {"reward/model": 5, "reward/skipped_2": 6}
    with pytest.raises(RewardError, match="reward function f_2 raised ValueError: broken"):
        Scorer(tokenizer, config(), None, [named("f", 1.0), named("f", math.nan)])(make_batch(tokenizer))


async def async_lengths(prompts, completions, **columns):
    await asyncio.sleep(0)
    return [len(prompt) + 10 * len(text) for prompt, text in zip(prompts, completions, strict=True)]


def exits(prompts, completions, **columns):
    sys.exit(0)


async def exits_later(prompts, completions, **columns):
    sys.exit(0)


def test_one_function_is_called_also_where_an_event_loop_runs():
    async def notebook():
        return call_reward_function(async_lengths, ["p", "pp"], ["abc", ""], {"n": [1, 2]})

    assert asyncio.run(notebook()) == [31.0, 2.0]
    for function in (raises, raises_later):
        with pytest.raises(RewardError, match=f"reward function {function.__name__} raised KeyError") as error:
            call_reward_function(function, ["p"], ["c"], {})
        assert isinstance(error.value.__cause__, KeyError)
    for function in (exits, exits_later):
        with pytest.raises(RewardError, match=r"raised ExitError: sys.exit\(0\) was called \("):
            call_reward_function(function, ["p"], ["c"], {})


def test_the_judge_takes_async_functions(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "async def later(prompts, completions, n):\n    return [len(p) + k for p, k in zip(prompts, n)]\n"
    )
    judge = RewardJudge(None, [f"{tmp_path / 'rewards.py'}:later"] * 2, 2, "cpu")
    assert judge(["ab", ""], [{"n": 5}, {"n": 7}], ["x", "y"], [True, True]) == [14.0, 14.0]


# The scorer and the reward model


@each([1, 2, 4, 5])
def test_scores_do_not_depend_on_annotate_batch_size(annotate_batch_size, tokenizer, make_reward_model):
    batch, model = make_batch(tokenizer), make_reward_model()
    whole = scores(tokenizer, batch, model, [length_reward, level_reward], annotate_batch_size=64)
    parts = scores(tokenizer, batch, model, [length_reward, level_reward], annotate_batch_size=annotate_batch_size)
    assert parts == pytest.approx(whole, abs=1e-4)
    assert len({round(score, 3) for score in whole}) == 6


def test_scoring_leaves_the_reward_model_as_it_was(tokenizer, make_reward_model):
    batch, model = make_batch(tokenizer), make_reward_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = scores(tokenizer, batch, model)
    assert scores(tokenizer, batch, model) == first
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Rolls:
    """Draws for some completions, from each of the generators."""

    def __init__(self, only: str = "") -> None:
        self.only, self.calls = only, 0

    def __call__(self, prompts, completions, columns_too, **_):
        self.calls += 1
        assert len(columns_too) == len(completions)
        draw = [random.random, np.random.rand, lambda: torch.rand(()).item()]
        return [draw[i % 3]() if self.only in text else float(len(text)) for i, text in enumerate(completions)]


@each(["", "3", "nothing has this"])
def test_what_is_drawn_for_a_completion_depends_on_no_share(only):
    """As many workers as there may be, of which one is restarted."""
    prompts = [f"p{i}" for i in range(12) for _ in range(2)]
    completions, columns = [f"c{i}" * (1 + i % 3) for i in range(24)], {"columns_too": list(range(24))}
    found = []
    for workers in (1, 2, 3, 12):
        size, rewards = 24 // workers, []
        for first in range(0, 24, size):
            part = slice(first, first + size)
            own = {name: values[part] for name, values in columns.items()}
            worker = SharedFunctions({"f": Rolls(only)}, seed=3)
            for _ in range(2):
                ((name, values, wrong),) = worker.call(prompts[part], completions[part], own, 2, None, False, 0)
            assert (name, wrong) == ("f", None)
            rewards += values
        found.append(rewards)
    assert found[0] == found[1] == found[2] == found[3]
    assert len({value for value in found[0] if value < 1}) == {"": 24, "3": 3, "nothing has this": 0}[only]


def test_a_function_that_draws_and_fails_is_told_with_its_prompt():
    def fails(prompts, completions):
        return [random.random() if text != "c5" else math.nan for text in completions]

    worker = SharedFunctions({"fails": fails}, seed=0)
    ((_, values, wrong),) = worker.call(["p"] * 8, [f"c{i}" for i in range(8)], {}, 2, None, True, 0)
    assert [math.isnan(value) for value in values] == [False] * 5 + [True] + [False] * 2
    assert "reward function fails returned nan" in str(wrong)


@each([(gives_nan, None), (raises, "in raises\n    raise KeyError")])
def test_an_error_that_is_sent_has_its_cause_as_text(function, cause):
    ((_, _, error),) = SharedFunctions({"f": function}, seed=0).call(["p"], ["abc"], {}, 1, None, True)
    sent = pickle.loads(pickle.dumps(error))
    assert (str(sent), sent.frames, sent.cause) == (str(error), error.frames, error.cause)
    assert (sent.__cause__ is None) == (cause is None)
    assert cause is None or cause in str(sent.__cause__)
