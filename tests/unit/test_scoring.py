"""Scores: the reward model at the last real token of each row alone, reward functions on text, the penalty."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from conftest import LLAMA_SIZES
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForSequenceClassification,
)

from async_rlhf.config import OnlineDPOConfig
from async_rlhf.forward import reward_scores
from async_rlhf.scoring import RewardError, Scorer
from async_rlhf.types import Prompt, Rollout, RolloutBatch, RolloutGroup

EOS, PAD = 256, 257


# The reward model


def make_scoring_model(kind: str, make_reward_model, pad: int | None):
    tokens = {"vocab_size": 258, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": pad, "num_labels": 1}
    sizes = tokens | LLAMA_SIZES
    if kind == "gpt_neox":
        return make_reward_model(pad_token_id=pad)
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2ForSequenceClassification(GPT2Config(**tokens, n_embd=32, n_layer=2, n_head=4, n_positions=96))
    elif kind == "llama":
        model = LlamaForSequenceClassification(LlamaConfig(**sizes))
    else:
        model = MistralForSequenceClassification(MistralConfig(**sizes, sliding_window=4))
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


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama", "mistral_sliding"])
@pytest.mark.parametrize("pad", [PAD, EOS])
def test_reward_scores_are_those_of_each_row_alone(make_reward_model, kind, pad):
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


def make_batch(tokenizer) -> RolloutBatch:
    groups = []
    for p, samples in enumerate(SAMPLES):
        query = f"def f{p}({'y' * p}):"
        prompt = Prompt(p, 10 + p, tuple(tokenizer(query)["input_ids"]), {"query": query, "name": f"f{p}", "level": p})
        rollouts = []
        for text, finish in samples:
            tokens = tokenizer(text.rstrip("|"))["input_ids"] + [EOS] * text.endswith("|")
            rollouts.append(Rollout(tuple(tokens), (-0.5,) * len(tokens), (0,) * len(tokens), finish))
        groups.append(RolloutGroup(prompt, tuple(rollouts)))
    return RolloutBatch(1, 0, tuple(groups), 0.0)


def config(**changes) -> OnlineDPOConfig:
    return OnlineDPOConfig(**{"non_eos_penalty": False} | changes)


def length_reward(prompts, completions, **columns) -> list[float]:
    return [float(len(text)) for text in completions]


def level_reward(prompts, completions, level, **columns) -> list[float]:
    return [100.0 * n + len(prompt) for n, prompt in zip(level, prompts, strict=True)]


LENGTHS = [float(len(text)) for text in TEXTS]
LEVELS = [100.0 * p + len(f"def f{p}({'y' * p}):") for p in range(3) for _ in range(2)]


def whole_rows(batch: RolloutBatch) -> list[list[int]]:
    return [[*group.prompt.tokens, *rollout.tokens] for group in batch.groups for rollout in group.rollouts]


def scores(tokenizer, batch, reward_model=None, functions=(), **changes) -> list[float]:
    scored = Scorer(tokenizer, config(**changes), reward_model, list(functions))(batch)
    assert scored.batch is batch
    assert scored.scores_PK.shape == (3, 2)
    assert (scored.scores_PK.dtype, scored.scores_PK.device.type) == (torch.float32, "cpu")
    return scored.scores_PK.flatten().tolist()


def test_scores_are_the_sum_of_model_and_functions(tokenizer, make_reward_model):
    batch, model = make_batch(tokenizer), make_reward_model()
    by_model = slow_scores(model, whole_rows(batch))
    assert len({round(score, 3) for score in by_model}) == 6
    assert scores(tokenizer, batch, model) == pytest.approx(by_model, abs=1e-4)
    assert scores(tokenizer, batch, None, [length_reward]) == LENGTHS
    two = [a + b for a, b in zip(LENGTHS, LEVELS, strict=True)]
    assert scores(tokenizer, batch, None, [length_reward, level_reward]) == two
    three = [a + b for a, b in zip(two, by_model, strict=True)]
    assert scores(tokenizer, batch, model, [level_reward, length_reward]) == pytest.approx(three, abs=1e-4)


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_the_reward_model_reads_the_stop_token(tokenizer, make_reward_model, pad):
    """With pad = eos a model that looks for padding would read the score one token early."""
    batch, model = make_batch(tokenizer), make_reward_model(pad_token_id=pad)
    by_model = slow_scores(model, whole_rows(batch))
    early = slow_scores(model, [row[:-1] for row in whole_rows(batch)])
    assert min(abs(a - b) for a, b in zip(by_model, early, strict=True)) > 1e-2
    assert scores(tokenizer, batch, model) == pytest.approx(by_model, abs=1e-4)


@pytest.mark.parametrize("penalty", [-1.0, 3.5])
def test_the_penalty_replaces_the_score_of_what_did_not_end(tokenizer, make_reward_model, penalty):
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


BROKEN = (raises, gives_nan, gives_infinity, gives_none_for_one, gives_none, gives_too_few, gives_too_many)


@pytest.mark.parametrize("function", BROKEN)
@pytest.mark.parametrize("penalty", [False, True])
def test_a_broken_reward_function_is_named(tokenizer, function, penalty):
    scorer = Scorer(tokenizer, config(non_eos_penalty=penalty), None, [length_reward, function])
    with pytest.raises(RewardError, match=function.__name__) as error:
        scorer(make_batch(tokenizer))
    assert "length_reward" not in str(error.value)
    if function is raises:
        assert isinstance(error.value.__cause__, KeyError)
        assert "no such key here" in str(error.value)


def test_wrong_counts_are_errors_that_say_both_numbers(tokenizer):
    for function, count in ((gives_too_few, 5), (gives_too_many, 7)):
        with pytest.raises(RewardError) as error:
            Scorer(tokenizer, config(), None, [function])(make_batch(tokenizer))
        assert str(count) in str(error.value)
        assert "6" in str(error.value)


@pytest.mark.parametrize("annotate_batch_size", [1, 2, 4, 5])
def test_scores_do_not_depend_on_annotate_batch_size(tokenizer, make_reward_model, annotate_batch_size):
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
