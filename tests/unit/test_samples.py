"""A sample: one sequence with a flag on each token that the policy drew; by that flag everything else goes."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import answered, drawn

from async_rlhf import OnlineDPOConfig
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.sampling import row_uniforms, sample_uniforms
from async_rlhf.models.rows import sampled_rows
from async_rlhf.rewards.functions import RewardError
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.run.checkpoint import ResumeState
from async_rlhf.types import Batch, Group, Prompt, Sample, drawn_versions


def two_turns(first: str = "ab", told: str = "xyz", second: str = "c|", prompt: str = "pq", **changes) -> Sample:
    """Prompt, a first turn, what the policy was told, a second turn; "|" is the stop token."""
    parts = [(prompt, False), (first, True), (told, False), (second, True)]
    tokens = [256 if letter == "|" else ord(letter) for text, _ in parts for letter in text]
    sampled = np.array([flag for text, flag in parts for _ in text])
    values = {
        "tokens": np.array(tokens),
        "sampled": sampled,
        "logprobs": np.where(sampled, -0.25 * np.arange(1, len(tokens) + 1), 0).astype(np.float32),
        "versions": np.where(sampled, 3, -1),
        "finish_reason": "stop" if second.endswith("|") else "length",
    }
    return Sample(**values | changes)


def spelt(sample: Sample, tokenizer) -> Sample:
    """With the tokenizer's ids of the letters."""
    ids = [token if token == 256 else tokenizer(chr(token))["input_ids"][0] for token in sample.tokens]
    return replace(sample, tokens=np.array(ids))


def test_an_answer_is_a_prompt_and_what_was_drawn_after_it():
    sample = Sample.answer((7, 8), (1, 2, 256), (-0.5, -1.0, -0.125), (4, 4, 5), "stop")
    assert sample.tokens.tolist() == [7, 8, 1, 2, 256]
    assert sample.sampled.tolist() == [False, False, True, True, True]
    assert sample.logprobs.tolist() == [0, 0, -0.5, -1.0, -0.125]
    assert sample.versions.tolist() == [-1, -1, 4, 4, 5]
    kinds = [array.dtype.name for array in (sample.tokens, sample.sampled, sample.logprobs, sample.versions)]
    assert kinds == ["int32", "bool", "float32", "int32"]
    assert drawn(sample) == ((1, 2, 256), (-0.5, -1.0, -0.125), (4, 4, 5), "stop")
    assert answered([Prompt(0, 0, (7, 8))], [[drawn(sample)]]) == [(sample,)]
    assert len(sample) == 5


def test_samples_are_equal_where_all_their_arrays_are():
    sample = two_turns()
    assert sample == two_turns() == pickle.loads(pickle.dumps(sample))
    for change in (
        {"tokens": sample.tokens + 1},
        {"sampled": ~sample.sampled},
        {"logprobs": sample.logprobs * 2},
        {"versions": sample.versions + 1},
        {"finish_reason": "length"},
        {"rewards": np.zeros(len(sample), np.float32)},
    ):
        assert sample != replace(sample, **change)
    assert sample != "another thing"


def test_positions_count_what_the_policy_was_told():
    """So that a second turn draws afresh, and one turn draws as it would without any other."""
    sample = two_turns()
    assert sample.positions.tolist() == [0, 1, 5, 6]
    assert Sample.answer([1] * 9, [5, 6], [0, 0], [0, 0], "length").positions.tolist() == [0, 1]
    assert Sample.answer([1], [], [], [], "length").positions.tolist() == []
    prompts = [Prompt(11, 0, (1,)), Prompt(12, 0, (1,))]
    uniforms = row_uniforms(3, prompts, 4, 8)
    assert sample_uniforms(3, 12, 2, sample.positions).tolist() == uniforms[1, 2, [0, 1, 5, 6]].tolist()
    assert sample_uniforms(3, 11, 0, np.arange(8)).tolist() == uniforms[0, 0].tolist()


def test_versions_are_those_of_drawn_tokens():
    mixed = replace(two_turns(), versions=np.array([-1, -1, 3, 3, -1, -1, -1, 5, 8]))
    assert drawn_versions([two_turns(), mixed]) == {3, 5, 8}
    assert drawn_versions([Sample.answer([1], [], [], [], "length")]) == drawn_versions([]) == set()


def test_rows_hold_what_samples_say():
    rewards = np.array([0, 0.5, 0, 1, 0, -2, 0, 0, 0.25], np.float32)
    short = Sample.answer([9], [5], [-3.0], [0], "length")
    rows = sampled_rows([two_turns(rewards=rewards), short])
    assert rows["tokens_BT"].tolist() == [[*map(ord, "pqabxyzc"), 256], [9, 5, *[0] * 7]]
    assert rows["tokens_BT"].dtype == torch.long
    assert rows["lengths_B"].tolist() == [9, 2]
    assert rows["sampled_BT"].tolist() == [[0, 0, 1, 1, 0, 0, 0, 1, 1], [0, 1, *[0] * 7]]
    expected = [[0, 0, -0.75, -1, 0, 0, 0, -2, -2.25], [0, -3, *[0] * 7]]
    assert rows["behaviour_logprobs_BT"].tolist() == expected
    assert rows["rewards_BT"].tolist() == [rewards.tolist(), [0] * 9]
    assert rows["truncated_B"].tolist() == [False, True]
    kinds = {rows[name].dtype for name in ("sampled_BT", "behaviour_logprobs_BT", "rewards_BT")}
    assert kinds == {torch.float32}


def test_texts_and_lengths_are_of_drawn_tokens(tokenizer):
    """The text for rewards, the penalty for length, and the length that is logged; the reward model reads all."""
    samples = [spelt(sample, tokenizer) for sample in (two_turns(), two_turns(first="more", second="", told="no"))]
    assert decode_samples(tokenizer, samples) == ["abc", "more"]
    seen = []

    def reward(prompts, completions, **columns):
        seen.extend(completions)
        return [1.0] * len(completions)

    batch = Batch(1, 3, (Group(Prompt(0, 0, tuple(b"pq"), {"query": "pq"}), tuple(samples)),), 0.0)
    config = OnlineDPOConfig(non_eos_penalty=False, length_penalty=0.5)
    scored = Scorer(tokenizer, config, None, [reward])(batch)
    assert seen == ["abc", "more"]
    assert scored.scores_PK.tolist() == [[1 - 0.5 * 4, 1 - 0.5 * 4]]
    assert scored.metrics["val/response_length"] == 4


def test_rewards_of_an_environment_are_part_of_the_score(tokenizer):
    rewards = np.array([0, 0, 0, 0, 0, 2.5, 0, -0.5, 0], np.float32)
    samples = (two_turns(rewards=rewards), two_turns())
    batch = Batch(1, 3, (Group(Prompt(0, 0, tuple(b"pq"), {"query": "pq"}), samples),), 0.0)
    ones = lambda prompts, completions, **columns: [1.0] * len(prompts)  # noqa: E731
    scored = Scorer(tokenizer, OnlineDPOConfig(non_eos_penalty=False), None, [ones])(batch)
    assert scored.scores_PK.tolist() == [[3.0, 1.0]]


def test_a_sample_that_its_environment_alone_rewards_has_a_score(tokenizer):
    none = lambda prompts, completions, **columns: [None] * len(prompts)  # noqa: E731
    config = OnlineDPOConfig(non_eos_penalty=False)
    group = Group(Prompt(0, 0, tuple(b"pq"), {"query": "pq"}), (two_turns(rewards=np.full(9, np.float32(0.1))),))
    scored = Scorer(tokenizer, config, None, [none])(Batch(1, 3, (group,), 0.0))
    assert scored.scores_PK.item() == pytest.approx(0.9)
    group = replace(group, samples=(spelt(two_turns(), tokenizer),))
    with pytest.raises(RewardError, match="every reward function returned None for completion 'abc'"):
        Scorer(tokenizer, config, None, [none])(Batch(1, 3, (group,), 0.0))


class Stream:
    """Prompts of two tokens, at every draw; others, or none, if it is said so."""

    def __init__(self, *tokens: int, nobody: bool = False) -> None:
        self.tokens, self.nobody = tokens, nobody

    def prompts(self, draws) -> list[Prompt]:
        return [] if self.nobody else [Prompt(draw, draw, self.tokens) for draw in draws]


@pytest.mark.parametrize("rewards", [None, np.arange(9, dtype=np.float32) / 3])
def test_a_checkpoint_holds_samples_to_the_bit(tmp_path, rewards):
    """By the names of their fields."""

    messages = [{"role": "assistant", "content": "b"}]
    said = {} if rewards is None else {"messages": messages, "metrics": {"turns": 2.0}, "starts": (5,)}
    first = replace(two_turns(rewards=rewards), logprobs=np.full(9, np.float32(-1 / 3)), **said)
    group = Group(Prompt(5, 5, (7,)), (first, two_turns(second="d")))
    batch = Batch(4, 3, (group,), 1.5, (3,), {"engine/kl": 0.1})
    state = ResumeState(3, {}, {}, {}, {}, ahead=[batch])
    state.write(tmp_path)
    (line,) = (tmp_path / "resume" / "rollouts.jsonl").read_text().splitlines()
    row = json.loads(line)["groups"][0]["samples"][0]
    arrays = {"tokens", "sampled", "logprobs", "versions", "rewards"}
    assert row.keys() == arrays | {"finish_reason", "messages", "metrics", "starts"}
    read = ResumeState.read(tmp_path)
    read.read_ahead(tmp_path, Stream(7))
    assert read.ahead == [batch]
    for sample in read.ahead[0].samples:
        assert [getattr(sample, name).dtype.name for name in ("tokens", "sampled", "logprobs", "versions")] == [
            "int32",
            "bool",
            "float32",
            "int32",
        ]


def test_a_checkpoint_holds_the_evaluation_under_way(tmp_path, caplog):
    """It is left out if its prompts are others; a rank that has no prompts has no answers."""
    sample = Sample.answer((7, 8), (1, 2), (-0.5, -1.0), (4, 4), "length")
    agents = Sample.answer((1, 2), (1, 2, 3, 4), (-0.5, -1.0, -1.0, -1.0), (4, 4, 4, 4), "length")
    agents = replace(agents, sampled=np.array([0, 1, 1, 0, 1, 1], bool), starts=(3,))
    held = Batch(-4, 4, (Group(Prompt(5, 5, (7, 8)), (agents, sample)),), 1.5)
    for name, evaluation in (("with", held), ("without", None)):
        (tmp_path / name).mkdir()
        ResumeState(4, {}, {}, {}, {}, evaluation=evaluation).write(tmp_path / name)
    assert (tmp_path / "with" / "resume" / "state.json").stat().st_mode & 0o777 == 0o600

    def read(name: str, stream: Stream | None) -> Batch | None:
        state = ResumeState.read(tmp_path / name)
        state.read_evaluation(tmp_path / name, stream, Ranks())
        return state.evaluation

    assert read("without", Stream(7, 8)) is None
    assert read("with", Stream(7, 8)) == held
    assert read("with", Stream(7, 8, nobody=True)) == replace(held, groups=())
    assert not caplog.records
    for other in (Stream(7, 9), Stream(8, 8), Stream(7), None):
        assert read("with", other) is None
    assert len(caplog.records) == 4
