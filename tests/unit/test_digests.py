"""The digests of a batch: each part has its own, and nothing of it is left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rlhf.run.loop import digests_of
from async_rlhf.types import Batch, Experience, Group, Prompt, Sample, ScoredBatch


def made(turns: bool = False, **changes) -> dict[str, str]:
    """Of two prompts with one sample each, the second with these changes; the experience has some of them too."""
    of_sample = {name: x for name, x in changes.items() if name in Sample.__dataclass_fields__}
    of_rows = {name: x for name, x in changes.items() if name in Experience.__dataclass_fields__}
    samples = []
    for _ in range(2):
        sample = Sample.answer((5, 6), [7, 8, 9, 10], [-1.0, -2.0, -3.0, -4.0], [1, 1, 1, 1], "stop")
        if turns:
            sampled = np.array([False, False, True, True, False, True])
            sample = replace(sample, sampled=sampled, rewards=np.zeros(6, np.float32), messages=())
        samples.append(sample)
    samples[1] = replace(samples[1], **of_sample)
    prompts = [Prompt(0, 3, (5, 6)), replace(Prompt(1, 4, (5, 6)), **changes.get("prompt", {}))]
    groups = tuple(Group(prompt, (sample,)) for prompt, sample in zip(prompts, samples, strict=True))
    numbers_BT = torch.ones(2, 6)
    named = ("sampled", "behaviour_logprobs", "rewards", "old_logprobs", "advantages")
    rows = Experience(
        tokens_BT=torch.ones(2, 6, dtype=torch.long),
        lengths_B=torch.full((2,), 6),
        scores_B=torch.ones(2),
        loss_weights_U=torch.ones(2),
        **{f"{name}_BT": numbers_BT for name in named},
    )
    rewards = {"length": torch.tensor([1.0, changes.get("reward", 2.0)])}
    scored = ScoredBatch(Batch(1, 0, groups, 0.0), torch.tensor([[1.0], [changes.get("score", 2.0)]]), {}, rewards)
    return digests_of(scored, replace(rows, **of_rows))


CHANGES = {
    "prompts": {"prompt": {"row": 5}},
    "versions": {"versions": np.array([-1, -1, 1, 1, 1, 2], np.int32)},
    "tokens": {"tokens": np.array([5, 6, 7, 8, 9, 11], np.int32)},
    "logprobs": {"logprobs": np.array([0, 0, -1, -2, -3, np.nextafter(-4, -5, dtype=np.float32)], np.float32)},
    "reward/length": {"reward": 2.5},
    "scores": {"score": 2.5},
    "learner": {"old_logprobs_BT": torch.full((2, 6), 2.0)},
    "credit": {"advantages_BT": torch.full((2, 6), 2.0)},
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_part_that_changes_changes_its_digest_alone(part):
    before, after = made(), made(**CHANGES[part])
    assert list(before) == list(CHANGES)
    assert [name for name in before if before[name] != after[name]] == [part]


def test_how_a_sample_ended_counts_as_its_tokens():
    before, after = made(), made(finish_reason="length")
    assert [name for name in before if before[name] != after[name]] == ["tokens"]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"tokens": np.array([5, 6, 7, 11, 9, 10], np.int32)}, ["tokens", "episodes"]),  # in the first answer
        ({"tokens": np.array([5, 6, 7, 8, 11, 10], np.int32)}, ["episodes"]),  # what was said to it
        ({"rewards": np.array([0, 0, 0, 1, 0, 0], np.float32)}, ["episodes"]),
    ],
)
def test_of_episodes_the_first_answer_has_a_digest_of_its_own(changes, parts):
    before, after = made(turns=True), made(turns=True, **changes)
    assert [name for name in before if before[name] != after[name]] == parts
