"""Evidence against a sampler: as defined; silent while the sampler is right, loud soon after it is not."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import pytest
from tiny import rare

from async_rlhf.generation import sampling_test as module
from async_rlhf.generation.sampling_test import BINS, FALSE_ALARMS, LIMIT, WINDOW, SamplingTest, Where
from async_rlhf.types import Group, Prompt, Sample


def group(*completions: tuple[int, ...], logprob: float = -1.0, version: int = 0) -> Group:
    samples = [Sample.answer([1], c, [logprob] * len(c), [version] * len(c), "length") for c in completions]
    return Group(Prompt(0, 0, (1,)), tuple(samples))


def fortunes(values, partitions=(2, 4, 8, 16, 32)) -> list[float]:
    """What one bettor for each partition owns, token by token: it stakes by what it has seen."""
    owned = []
    for bins in partitions:
        counts, fortune = [0.5] * bins, 0.0
        for value in values:
            part = min(int(value * bins), bins - 1)
            fortune += math.log(bins * counts[part] / sum(counts))
            counts[part] += 1
        owned.append(math.exp(fortune))
    return owned


def test_the_bets_on_classes_are_those_of_the_definition():
    """By position (0, 1, 2 and 3, from 4 on, ...), by place of the prompt, and on distances from the ranks before."""
    rng, found = random.Random(4), SamplingTest()
    tokens = [Where(prompt, sample, p) for prompt in (0, 3, 17) for sample in range(2) for p in range(7)]
    batches = [[[rng.betavariate(a, 1) for _ in tokens] for a in (2, 1.2)] for _ in range(3)]
    batches[0][1][0] = 0.0001  # which is kept as 0
    batches[1][0][0] = 1.0
    evidence = max(found.add(ranks, [], tokens) for ranks in batches)
    by_rank = [(token, value) for ranks in batches for token, value in zip(tokens, ranks[0], strict=True)]
    positions = [[v for token, v in by_rank if token.position in part] for part in ((0,), (1,), (2, 3), (4, 5, 6))]
    prompts = [[v for token, v in by_rank if token.prompt in part] for part in ((0,), (3,), (17,))]
    apart = [abs(round(a, 3) - b) for one, two in pairwise(batches) for a, b in zip(one[1], two[1], strict=True)]
    distances = [2 * min(x, 1 - x) for x in apart]
    owned = [fortune for values in (*positions, *prompts, distances) for fortune in fortunes(values, (2, 4, 8))]
    whole = [f for kind in range(2) for f in fortunes([x for ranks in batches for x in ranks[kind]])]
    bettors = 3 * (16 + 16 + 1)  # by position, by prompt, on distances
    of_classes = (sum(owned) + bettors - len(owned)) / bettors
    assert evidence == pytest.approx(math.log10(0.8 * sum(whole) / len(whole) + 0.2 * of_classes), rel=1e-9)


def test_ranks_that_come_back_in_their_place_are_found():
    """Also where they are near the ends of [0, 1), which meet. In other places they say nothing."""
    rng, places = random.Random(6), [Where(prompt, k, p) for prompt in range(4) for k in range(2) for p in range(8)]
    drawn = [i / len(places) for i in rng.sample(range(len(places)), len(places))]
    for same in (True, False):
        evidence, found = SamplingTest(), []
        for batch in range(8):
            tokens = places if same else [token._replace(prompt=token.prompt + 4 * batch) for token in places]
            ranks = [(x + 0.1 * (rng.random() - 0.5)) % 1 for x in drawn]
            found.append(evidence.add([[rng.random() for _ in ranks], ranks], [], tokens))
        distances = evidence.state()["classes"][0][-1]
        assert sum(distances) == (7 * len(places) if same else 0)
        assert sum(distances[:2]) == sum(distances)
        assert not same or found[1] > LIMIT > found[0]


def test_the_state_stays_small():
    evidence = SamplingTest()
    for prompt in range(300):
        evidence.add([[0.12345] * 9] * 2, [], [Where(prompt, k, 7 + k) for k in range(9)])
    assert len(evidence.state()["last"]) == 256
    assert {len(ranks) for ranks in evidence.state()["last"].values()} == {8}
    assert evidence.state()["last"]["0.0"] == [-1.0] * 7 + [0.123]
    assert len(json.dumps(evidence.state())) < 30_000
    far = SamplingTest()  # where the classes by position end
    far.add([[0.5] * 3] * 2, [], [Where(0, 0, 2**14 - 1), Where(0, 0, 2**14), Where(0, 0, 2**20)])
    assert [sum(counts) for counts in far.state()["classes"][0]] == [0] * 14 + [1, 2, 3] + [0] * 16


def test_a_state_of_an_older_version_goes_on_and_new_bettors_begin():
    rng, old = random.Random(7), SamplingTest()
    batches = [[[rng.random() ** 1.3 for _ in range(64)] for _ in range(2)] for _ in range(9)]
    for ranks in batches[:8]:
        old.add(ranks, [group((1,), (1,))])
    state = {key: old.state()[key] for key in ("all", "recent", "copies", "batches")}
    resumed = SamplingTest()
    resumed.restore(json.loads(json.dumps(state)))
    tokens = [Where(0, k, 0) for k in range(64)]
    assert resumed.add(batches[8], [], tokens) == pytest.approx(old.add(batches[8], []), abs=0.01)
    assert sum(map(sum, resumed.state()["classes"][0])) == 2 * 64


def test_the_bet_on_copies_is_that_of_the_definition():
    groups = [group((1, 2), (1, 2), (1, 3)), group((4,), (5,), (5,))]
    expected = math.log10(0.95 + 0.05 * (math.exp(2) + math.exp(1)) / 4)
    assert module._bet_on_copies(groups) == pytest.approx(expected, rel=1e-12)
    assert module._bet_on_copies([group((1, 2), (1, 3))]) == pytest.approx(math.log10(0.95))
    assert module._bet_on_copies([group((1,))]) == 0
    long = group(*[tuple(range(900))] * 2)  # its probability is smaller than any float
    assert module._bet_on_copies([long]) == pytest.approx(900 / math.log(10) + math.log10(0.05))


def test_a_window_is_that_many_compared_batches():
    """What was won or lost before does not count in the next; copies, too."""
    evidence, copied = SamplingTest(), [group((1,), (1,))]
    for batch in range(1, 3 * WINDOW + 1):
        evidence.add([[0.1] * 3] * 2, copied, [Where(0, 0, p) for p in range(3)])
        state, within = evidence.state(), (batch - 1) % WINDOW + 1
        assert sum(state["recent"][0]) == sum(state["recent"][1]) == 3 * within
        assert [sum(map(sum, counts[:-1])) for counts in state["classes"]] == [6 * batch, 6 * within]
        assert state["copies"] == pytest.approx(within * module._bet_on_copies(copied))
    evidence.add([], copied)  # nothing compared: still in the window
    assert evidence.state()["copies"] == pytest.approx((WINDOW + 1) * module._bet_on_copies(copied))


def test_the_chances_of_all_windows_add_up_to_that_of_one():
    """Whatever a bettor owns in its window counts for less, by shares that add up to 1 over all windows."""
    low, copied = [[0.1] * 40] * 2, [group(tuple(range(40)), tuple(range(40)))]
    for ranks, groups in ((low, []), ([[], []], copied)):
        shares = []
        for window in range(3000):
            evidence = SamplingTest()
            past = [[10**6] * BINS for _ in range(2)]  # where ranks are uniform: the bettors on all of it are poor
            evidence.restore({"all": past, "recent": [], "copies": 0.0, "batches": window * WINDOW})
            shares.append(10 ** evidence.add(ranks, groups))
        owned = 10 ** module._bet_on_copies(groups) if groups else 0.8 * sum(o := fortunes(low[0])) / len(o) + 0.2
        assert 0.99 < sum(shares) / owned <= 1.0001


@pytest.mark.parametrize("late", [0, 1000])
def test_a_fault_is_found_soon_also_after_a_long_right_past(late):
    rng, evidence = random.Random(2), SamplingTest()
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
    tokens = [Where(p % 3, p % 2, p // 3) for p in range(20)]
    batches = [
        ([[rng.random() ** 1.1 for _ in tokens] for _ in range(2)], [group((1,), (1,))], tokens) for _ in range(70)
    ]
    undisturbed = SamplingTest()
    expected = [undisturbed.add(*batch) for batch in batches]
    for stop in (1, 31, 32, 50):
        first, second = SamplingTest(), SamplingTest()
        found = [first.add(*batch) for batch in batches[:stop]]
        second.restore(json.loads(json.dumps(first.state())))
        assert found + [second.add(*batch) for batch in batches[stop:]] == expected


def test_the_end_of_the_last_bin_belongs_to_it():
    evidence = SamplingTest()
    evidence.add([[0.0, 1.0 - 2**-54, 1.0], [0.0] * 3], [])
    assert evidence.state()["all"] == [[1] + [0] * (BINS - 2) + [2], [3] + [0] * (BINS - 1)]


@pytest.mark.parametrize("runs", [100, rare(400)])
def test_right_samplers_are_left_alone(runs):
    """By Ville's inequality the evidence of a run ever passes x in 10^-x of runs at most."""
    rng, batches = random.Random(1), 3 * WINDOW
    vocabulary, probability = range(4), 1 / 4
    most = []
    for _ in range(runs):
        evidence, largest = SamplingTest(), -math.inf
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


def test_right_samplers_are_left_alone_by_the_bettors_on_classes_too(monkeypatch):
    """With nearly all money in their hands, and ranks that come in the same places again and again."""
    monkeypatch.setattr(module, "_ON_CLASSES", 0.999)
    monkeypatch.setattr(module, "WINDOW", 8)
    rng, runs, tokens = random.Random(9), 150, [Where(prompt, 0, p) for prompt in range(2) for p in range(3)]
    most = []
    for _ in range(runs):
        evidence = SamplingTest()
        batches = ([[rng.random() for _ in tokens] for _ in range(2)] for _ in range(32))
        most.append(max(evidence.add(ranks, [], tokens) for ranks in batches))
    assert max(most) < LIMIT
    for x in (0.5, 1.0, 1.5):
        assert sum(value >= x for value in most) / runs <= 2 * 10**-x + 0.05
