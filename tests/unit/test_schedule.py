"""The schedule alone: what is published, submitted and collected, in which order, and which weights are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.run.schedule import RolloutSchedule, StaleWeightsError, batches_for, version_for
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Group, Prompt, Sample

POLICY = nn.Linear(1, 1)
PARAMS = SamplingParams(1, 1.0, 4, (), 0)


class Notes:
    """A generator that notes what it is asked for, and answers with the versions that it is told."""

    def __init__(self, drawn: dict[int, list[int]] | None = None) -> None:
        self.drawn, self.calls = drawn or {}, []

    def publish(self, policy, version):
        assert policy is POLICY
        self.calls.append(("publish", version))

    def submit(self, index, version, prompts):
        assert [prompt.draw for prompt in prompts] == [2 * index - 2, 2 * index - 1]
        self.calls.append(("submit", index, version))

    def collect(self, index):
        self.calls.append(("collect", index))
        version = next((c[2] for c in self.calls if c[:2] == ("submit", index)), None)
        versions = self.drawn.get(index) or (list(version) if isinstance(version, tuple) else [version])
        return batch(index, versions)

    def submit_evaluation(self, version, prompts, params):
        self.calls.append(("evaluate", version, len(prompts), params))

    def collect_evaluation(self, version):
        return batch(0, self.drawn[0]).groups


def batch(index: int, versions: list[int]) -> Batch:
    samples = tuple(Sample.answer([1], [5], [-1.0], [version], "length") for version in versions)
    return Batch(index, min(versions), (Group(Prompt(0, 0, (1,)), samples),), 0.0, tuple(versions))


PROMPTS = SimpleNamespace(
    batch=lambda index, size: [Prompt(d, d, (1,)) for d in range((index - 1) * size, index * size)]
)


def schedule(generator: Notes, staleness: int = 1, batches: int = 4, **options) -> RolloutSchedule:
    return RolloutSchedule(
        generator, PROMPTS, batch_size=2, num_batches=batches, staleness=staleness, trace=Trace(), **options
    )


def run(rollouts: RolloutSchedule, start: int = 0) -> list[int]:
    """As the loop does it. Returns the batches."""
    rollouts.publish(POLICY, start)
    done = []
    for found in rollouts:
        done.append(found.index)
        rollouts.publish(POLICY, found.index)
    return done


def test_which_version_samples_which_batch():
    assert [version_for(index, 0) for index in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert [version_for(index, 1) for index in (1, 2, 3, 4)] == [0, 0, 1, 2]
    assert [list(batches_for(version, 1, 4)) for version in range(5)] == [[1, 2], [3], [4], [], []]
    assert [list(batches_for(version, 1, 4, start=2)) for version in range(2, 5)] == [[3, 4], [], []]


def test_each_version_is_followed_by_what_it_samples_and_nothing_is_published_in_vain():
    generator = Notes()
    assert run(schedule(generator)) == [1, 2, 3, 4]
    assert generator.calls == [
        ("publish", 0), ("submit", 1, 0), ("submit", 2, 0), ("collect", 1),
        ("publish", 1), ("submit", 3, 1), ("collect", 2),
        ("publish", 2), ("submit", 4, 2), ("collect", 3), ("collect", 4),
    ]  # fmt: skip


def test_in_flight_the_schedule_names_no_version_and_publishes_each_that_may_be_the_newest():
    generator = Notes({1: [0], 2: [1, 0], 3: [2], 4: [3, 2]})
    assert run(schedule(generator, in_flight=True)) == [1, 2, 3, 4]
    assert [call for call in generator.calls if call[0] == "submit"] == [("submit", b, None) for b in (1, 2, 3, 4)]
    assert [call for call in generator.calls if call[0] == "publish"] == [("publish", v) for v in (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("options", "drawn", "right"),
    [
        ({}, [0, 0], True),
        ({}, [1], False),
        ({}, [0, 1], False),
        ({"in_flight": True}, [0], True),
        ({"in_flight": True}, [1, 0], True),
        ({"in_flight": True}, [2], False),
        ({"in_flight": True}, [1, 2], False),
        ({"in_flight": True}, [-1, 1], False),
    ],
)
def test_tokens_of_other_weights_stop_the_run(options, drawn, right):
    """Of batch 2, at staleness 1."""
    rollouts = schedule(Notes({1: [0], 2: drawn}), batches=2, **options)
    if right:
        assert run(rollouts) == [1, 2]
        return
    expected = "version 0 to 1" if options else "version 0"
    found = ", ".join(map(str, sorted(set(drawn))))
    with pytest.raises(StaleWeightsError) as caught:
        run(rollouts)
    assert str(caught.value) == (
        f"batch 2 must be sampled by {expected} (staleness 1); its tokens come from version {found}"
    )
    others = schedule(Notes({1: [0], 2: drawn}), batches=2, is_main=False, **options)
    assert run(others) == [1, 2], "ranks other than 0 have no tokens to look at"


def test_after_a_resume_no_weights_are_older_than_those_it_started_from():
    for drawn, right in (([5], True), ([4], False)):
        rollouts = schedule(Notes({6: drawn, 7: [6]}), staleness=2, batches=7, in_flight=True, start=5)
        if right:
            assert run(rollouts, 5) == [6, 7]
        else:
            with pytest.raises(StaleWeightsError, match="version 5 to 5"):
                run(rollouts, 5)


def test_what_older_weights_have_sampled_goes_into_the_checkpoint_and_is_not_asked_for_again():
    generator, last = Notes(), 4
    rollouts = schedule(generator, staleness=2, batches=6)
    rollouts.publish(POLICY, 0)
    done = iter(rollouts)
    for trained in (1, 2):
        next(done)
        rollouts.publish(POLICY, trained)
    kept = rollouts.ahead(2)
    assert [found.index for found in kept] == list(range(3, last + 1))
    assert [call[1] for call in generator.calls if call[0] == "collect"] == [1, 2, *range(3, last + 1)]
    assert next(done).index == 3
    assert ("collect", 3) not in generator.calls[generator.calls.index(("collect", last)) + 1 :]

    resumed = Notes()
    after = schedule(resumed, staleness=2, batches=6, start=2, ahead=kept)
    assert run(after, 2) == [3, 4, 5, 6]
    assert [call[1] for call in resumed.calls if call[0] == "submit"] == list(range(last + 1, 7))
    assert [call[1] for call in resumed.calls if call[0] == "collect"] == list(range(last + 1, 7))


def test_an_evaluation_is_by_just_its_version_which_is_published_once():
    generator = Notes({0: [2, 2]})
    rollouts = schedule(generator)
    rollouts.ask(POLICY, 2, [Prompt(0, 0, (1,))], PARAMS)
    rollouts.publish(POLICY, 2)
    assert generator.calls == [("publish", 2), ("evaluate", 2, 1, PARAMS), ("submit", 4, 2)]
    assert len(rollouts.answers(2)) == 1
    generator.drawn[0] = [2, 1, 3]
    with pytest.raises(
        StaleWeightsError, match=r"after batch 2 must be of version 2; its tokens come from version 1, 2, 3$"
    ):
        rollouts.answers(2)
