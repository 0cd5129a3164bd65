"""Every fault of an engine that can be told from chance is found: by name, in so many batches."""

from __future__ import annotations

import re

import pytest
from planted_faults import FAULTS, batches_until_found

PATIENCE = 60
"""Batches that a test waits; faults that take longer on some engines are in the table that planted_faults.py prints."""


KINDS = {planted.found: planted for planted in reversed(FAULTS)}
"""By the check that finds them."""


def is_often_tried(number: int) -> bool:
    """Each fault in one kind of engine, and one of each kind in both."""
    counter_based, planted = CASES[number]
    within = planted.within if counter_based else planted.within_any
    other = planted.within_any if counter_based else planted.within
    if planted in KINDS.values() or within is None:
        return True
    return within <= PATIENCE and (counter_based or other is None or other > PATIENCE)


CASES = [(counter_based, planted) for counter_based in (True, False) for planted in FAULTS]
MARKED = [
    pytest.param(
        counter_based,
        planted,
        id=f"{'transformers' if counter_based else 'any'}-{planted.name}",
        marks=[pytest.mark.quick] * (planted in KINDS.values()) + [pytest.mark.rare] * (not is_often_tried(number)),
    )
    for number, (counter_based, planted) in enumerate(CASES)
]


@pytest.mark.parametrize(("counter_based", "planted"), MARKED)
def test_a_planted_fault_is_found(planted, counter_based):
    within = planted.within if counter_based else planted.within_any
    if within is not None and within > PATIENCE:
        pytest.skip(f"takes up to {within} batches: python tests/contract/planted_faults.py")
    batches, message = batches_until_found(planted, counter_based, within or PATIENCE)
    if within is None:
        assert batches is None, message
    else:
        assert batches is not None
        assert re.search(planted.found, message, re.DOTALL), message


STEPS = 3
ALWAYS = 8
"""Batches before a fault that is there in the end only: beyond those that are compared in any case."""


RARE = {True: [], False: [pytest.mark.rare]}
LATE = [pytest.param(f, id=f.name, marks=RARE[f in KINDS.values()]) for f in FAULTS if f.within == 1]


@pytest.mark.parametrize("planted", LATE)
def test_comparing_every_third_batch_finds_a_late_fault_within_three_times_as_many(planted):
    """What is found in the first batch with the fault is found in the first of them that is compared."""
    batches, message = batches_until_found(planted, True, STEPS, STEPS, later=ALWAYS)
    assert batches is not None
    found = re.sub(r"\d+", r"\\d+", planted.found)  # of another batch, so with other versions and prompts
    assert re.search(found, message, re.DOTALL), message


SLOW = [planted for planted in FAULTS if planted.within_any and 1 < planted.within_any <= PATIENCE // STEPS]


@pytest.mark.parametrize("planted", SLOW, ids=lambda planted: planted.name)
def test_what_needs_several_batches_needs_as_many_that_are_compared(planted):
    within = STEPS * planted.within_any
    batches, message = batches_until_found(planted, False, within, STEPS)
    assert batches is not None
    assert re.search(planted.found, message, re.DOTALL), message


def test_the_faults_are_many_and_each_is_named_once():
    assert len(FAULTS) >= 42
    assert len({planted.name for planted in FAULTS}) == len({planted.what for planted in FAULTS}) == len(FAULTS)
