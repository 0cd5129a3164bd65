"""A curriculum draws by past scores: its probabilities and its draws are those of slow loops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from slow_curriculum import chances, drawn, spreads_after
from tiny import PROMPTS, byte_tokenizer, count_letters

from async_rlhf import GRPOConfig, OnlineTrainer
from async_rlhf.config import ConfigError
from async_rlhf.data.curriculum import Curriculum
from async_rlhf.data.stream import PromptStream
from async_rlhf.types import Batch, Group, Prompt, ScoredBatch

ROWS = [*PROMPTS[:6], {"query": "x" * 80, "name": "long"}, *PROMPTS[6:12]]
"""The seventh is too long, so that numbers in the stream are no rows."""


def stream(seed: int = 3) -> PromptStream:
    return PromptStream(ROWS, byte_tokenizer(), max_length=40, seed=seed)


def scored(index: int, prompts: Sequence[Prompt], scores: Sequence[Sequence[float]]) -> ScoredBatch:
    groups = tuple(Group(prompt, ()) for prompt in prompts)
    return ScoredBatch(Batch(index, 0, groups, 0.0), torch.tensor(scores, dtype=torch.float32), {})


def score(rng: np.random.Generator, prompts: int, missing: float = 0.1) -> list[list[float]]:
    """Of four completions each: of rewards 0 and 1 and of others, some with a missing one."""
    found = np.where(rng.random((prompts, 1)) < 0.6, rng.integers(0, 2, (prompts, 4)), rng.normal(size=(prompts, 4)))
    found = found.astype(np.float32)
    found[rng.random(found.shape) < missing] = math.nan
    return found.tolist()


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_draws_and_probabilities_are_those_of_slow_loops(share):
    """Also with scores that come two batches late, which is what staleness does."""
    rng, curriculum, noted, waiting = np.random.default_rng(0), Curriculum(stream(), share), [], []
    numbers = {row: number for number, row in enumerate([*range(6), *range(7, 13)])}
    for index in range(1, 30):
        prompts = curriculum.batch(index, 5)
        expected = drawn(index, 5, 3, noted, 12, share)
        assert [numbers[prompt.row] for prompt in prompts] == expected
        assert [prompt.draw for prompt in prompts] == list(range(5 * index - 5, 5 * index))
        assert all(prompt.columns == ROWS[prompt.row] for prompt in prompts)
        waiting.append((index, prompts, expected))
        if len(waiting) > 2:
            number, asked, places = waiting.pop(0)
            scores = score(rng, 5)
            assert [curriculum.prompt(prompt.draw) for prompt in asked] == asked
            curriculum.note(scored(number, asked, scores))
            noted.append(list(zip(places, scores, strict=True)))
        assert curriculum.probabilities() == pytest.approx(chances(noted, 12, share), rel=1e-12)
        known = [math.nan if x is None else x for x in spreads_after(noted, 12)]
        assert curriculum.spreads_N.tolist() == pytest.approx(known, rel=1e-12, nan_ok=True)
    assert max(curriculum.probabilities()) > (1 + 0.4 * share) / 12
    assert min(curriculum.probabilities()) >= (1 - share) / 12


def test_prompts_that_are_solved_half_the_time_come_most_often():
    """Each with its share of the draws, and those that teach nothing are not forgotten."""
    rates, rng = [0.0, 0.02, 0.25, 0.5, 0.75, 1.0], np.random.default_rng(1)
    curriculum, counts = Curriculum(stream(), 0.8), Counter[int]()
    expected = np.zeros(12)
    for index in range(1, 2001):
        expected += 4 * curriculum.probabilities()
        prompts = curriculum.batch(index, 4)
        numbers = [prompt.row - (prompt.row > 6) for prompt in prompts]
        counts.update(numbers)
        scores = [(rng.random(8) < rates[number // 2]).astype(float).tolist() for number in numbers]
        curriculum.note(scored(index, prompts, scores))
    share = [(counts[2 * i] + counts[2 * i + 1]) / 8000 for i in range(6)]
    assert share[3] > share[2] > 2 * share[1] > 2 * share[0] > 0.06
    assert share[3] > share[4] > 2 * share[5] > 0.06
    assert [counts[i] for i in range(12)] == pytest.approx(expected.tolist(), abs=60)


def test_a_batch_has_a_prompt_twice_only_if_it_is_so_likely():
    for index in range(1, 40):
        curriculum = Curriculum(stream(index), 0.5)
        assert sorted(prompt.row for prompt in curriculum.batch(index, 12)) == [*range(6), *range(7, 13)]
        assert sorted(Counter(prompt.row for prompt in curriculum.batch(index, 30)).values())[::11] == [2, 3]
    curriculum.note(scored(39, curriculum.batch(39, 12), [[0.0, 1.0]] + [[1.0, 1.0]] * 11))
    assert max(Counter(prompt.row for prompt in curriculum.batch(40, 12)).values()) in (3, 4)  # 0.54 / 2 + 0.5 / 12


def test_its_state_is_all_that_it_knows():
    ours, theirs, rng = Curriculum(stream(), 0.6), Curriculum(stream(), 0.6), np.random.default_rng(2)
    asked = {index: ours.batch(index, 5) for index in range(1, 5)}
    for index in (1, 2):
        ours.note(scored(index, asked[index], score(rng, 5)))
    theirs.restore(ours.state(), ours.spreads_N.copy())
    for index in (3, 4):
        assert [theirs.prompt(prompt.draw) for prompt in asked[index]] == asked[index]
        scores = score(rng, 5)
        for each in (ours, theirs):
            each.note(scored(index, asked[index], scores))
    assert theirs.batch(5, 5) == ours.batch(5, 5)
    with pytest.raises(ConfigError, match=r"train_dataset: has 12 prompts of the right length; must have the 11 that"):
        theirs.restore(ours.state(), ours.spreads_N[:11])


def test_it_is_refused_where_it_cannot_work(make_args, make_policy, tokenizer):
    def refused(match: str, **changes: object):
        return pytest.raises(ConfigError, match=match), {"curriculum": 0.5, "samples_per_prompt": 2, **changes}

    for match, changes in (
        (r"curriculum: got 1.0; must be in \[0, 1\): some prompts must be drawn evenly", {"curriculum": 1.0}),
        (r"curriculum: got 0.5; must be 0 with samples_per_prompt 1", {"algorithm": "ppo", "samples_per_prompt": 1}),
        (r'curriculum: got 0.5; must be 0 with staleness_mode "bounded"', {"staleness_mode": "bounded"}),
    ):
        error, values = refused(match, **changes)
        with error:
            make_args(**values)
    args = make_args(curriculum=0.5, samples_per_prompt=2)
    with pytest.raises(ConfigError, match=r"curriculum: got 0.5; must be 0 with a train_dataset that has no length"):
        OnlineTrainer(make_policy(), args, iter(PROMPTS), reward_funcs=count_letters, processing_class=tokenizer)
    assert GRPOConfig(output_dir="unused", total_episodes=512, curriculum=0.0).curriculum == 0
