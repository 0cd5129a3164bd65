"""Evidence against a sampler: as defined; silent while the sampler is right, loud soon after it is not."""

from __future__ import annotations

import json
import math
import random

import pytest

from async_rlhf.generation import evidence as module
from async_rlhf.generation.evidence import BINS, FALSE_ALARMS, LIMIT, WINDOW, Evidence
from async_rlhf.types import Group, Prompt, Sample


def group(*completions: tuple[int, ...], logprob: float = -1.0, version: int = 0) -> Group:
    samples = [Sample.answer([1], c, [logprob] * len(c), [version] * len(c), "length") for c in completions]
    return Group(Prompt(0, 0, (1,)), tuple(samples))


def test_the_bet_on_ranks_is_that_of_the_definition():
    """Token by token: each partition's bettor stakes by what it has seen, and the mean over bettors is the evidence."""
    rng, found = random.Random(0), Evidence()
    ranks = [[rng.betavariate(2, 1) for _ in range(300)] for _ in range(2)]
    evidence = max(found.add([part[i : i + 100] for part in ranks], []) for i in (0, 100, 200))
    owned = []
    for values in ranks:
        for bins in (2, 4, 8, 16, 32):
            counts, fortune = [0.5] * bins, 0.0
            for value in values:
                fortune += math.log(bins * counts[int(value * bins)] / sum(counts))
                counts[int(value * bins)] += 1
            owned.append(math.exp(fortune))
    assert evidence == pytest.approx(math.log10(sum(owned) / len(owned)), rel=1e-9)
    assert evidence > LIMIT


def test_the_bet_on_copies_is_that_of_the_definition():
    groups = [group((1, 2), (1, 2), (1, 3)), group((4,), (5,), (5,))]
    expected = math.log10(0.95 + 0.05 * (math.exp(2) + math.exp(1)) / 4)
    assert module._bet_on_copies(groups) == pytest.approx(expected, rel=1e-12)
    assert module._bet_on_copies([group((1, 2), (1, 3))]) == pytest.approx(math.log10(0.95))
    assert module._bet_on_copies([group((1,))]) == 0
    long = group(*[tuple(range(900))] * 2)  # its probability is smaller than any float
    assert module._bet_on_copies([long]) == pytest.approx(900 / math.log(10) + math.log10(0.05))


def test_right_samplers_are_left_alone():
    """By Ville's inequality the evidence of a run ever passes x in 10^-x of runs at most."""
    rng, runs, batches = random.Random(1), 400, 3 * WINDOW
    vocabulary, probability = range(4), 1 / 4
    most = []
    for _ in range(runs):
        evidence, largest = Evidence(), -math.inf
        for _ in range(batches):
            completions = [(rng.choice(vocabulary), rng.choice(vocabulary)) for _ in range(4)]
            groups = [group(*completions, logprob=math.log(probability))]
            largest = max(largest, evidence.add([[rng.random() for _ in range(8)] for _ in range(2)], groups))
        most.append(largest)
    assert max(most) < LIMIT
    # Three tests, of which the two by windows have a third of their chances each in the first window at most.
    for x in (0.5, 1.0, 1.5):
        assert sum(value >= x for value in most) / runs <= 3 * 10**-x + 0.05
    assert pytest.approx(FALSE_ALARMS) == 3 * 10**-LIMIT
    assert FALSE_ALARMS < 1e-4


@pytest.mark.parametrize("late", [0, 1000])
def test_a_fault_is_found_soon_also_after_a_long_right_past(late):
    rng, evidence = random.Random(2), Evidence()
    found = 0
    for batch in range(late + 64):
        ranks = [
            [rng.random() * (0.9 if batch >= late else 1.0) for _ in range(100)],
            [rng.random() for _ in range(100)],
        ]
        if evidence.add(ranks, []) >= LIMIT:
            found = batch + 1 - late
            break
    assert 0 < found <= 8 + WINDOW


def test_state_goes_through_json_and_goes_on_as_before():
    rng = random.Random(3)
    batches = [([[rng.random() ** 1.1 for _ in range(20)] for _ in range(2)], [group((1,), (1,))]) for _ in range(70)]
    undisturbed = Evidence()
    expected = [undisturbed.add(*batch) for batch in batches]
    for stop in (1, 31, 32, 50):
        first, second = Evidence(), Evidence()
        found = [first.add(*batch) for batch in batches[:stop]]
        second.restore(json.loads(json.dumps(first.state())))
        assert found + [second.add(*batch) for batch in batches[stop:]] == expected


def test_the_end_of_the_last_bin_belongs_to_it():
    evidence = Evidence()
    evidence.add([[0.0, 1.0 - 2**-54, 1.0]], [])
    assert evidence.state()["all"] == [[1] + [0] * (BINS - 2) + [2]]
