"""The gold reward: real docstrings against worse ones, each component alone, and strings made to cheat it."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import each

from async_rlhf.tasks.docstrings.harvest import Function, harvest
from async_rlhf.tasks.docstrings.reward import GATES, WEIGHTS, explain, gold_reward, gold_rewards

QUOTES = '\n    """'
GET_VALUE = "def get_cached_value(key: str, default=None) -> int:" + QUOTES
PARSE_ARGS = "def parse_args(self, args=None, namespace=None):" + QUOTES
SIZE = "def get_terminal_size(fallback=(80, 24)):" + QUOTES

# Real first lines, of the standard library unless said, and what the documented formula gives.
REAL = [
    ("def get_terminal_size(fallback=(80, 24)):", "Get the size of the terminal window.", 0.920),
    ("def shuffle(self, x):", "Shuffle list x in place, and return None.", 0.946),
    ("def wait_closed(self):", "Wait until server is closed.", 0.953),  # asyncio
    ("def rmtree(path, ignore_errors=False, onerror=None):", "Recursively delete a directory tree.", 0.827),
    ("def getsize(filename):", "Return the size of a file, reported by os.stat().", 0.802),
    (
        "def copyfile(src, dst, *, follow_symlinks=True):",
        "Copy data from src to dst in the most efficient way possible.",
        0.760,
    ),
    (
        "def iterencode(self, o, _one_shot=False):",
        "Encode the given object and yield each string representation as available.",
        0.744,
    ),
    ("def add_option(self, flag):", "Add an option.", 0.657),  # three words
    ("def to_dict(self) -> dict[str, Any]:", "Serializes this instance to a Python dictionary.", 0.764),
    ("def exists(path):", "Test whether a path exists.  Returns False for broken symbolic links", 0.707),
    ("def fmean(data, weights=None):", "Convert data to floats and compute the arithmetic mean.", 0.616),
    ("def dedent(text):", "Remove any common leading whitespace from every line in `text`.", 0.604),
    ("def randint(self, a, b):", "Return random integer in range [a, b], including both end points.", 0.433),
    ("def isabs(s):", "Test whether a path is absolute", 0.410),
    ("def basename(p):", "Returns the final component of a pathname", 0.263),
    (
        "def mkdtemp(suffix=None, prefix=None, dir=None):",
        "User-callable function to create and return a unique temporary directory.",
        0.259,
    ),
    (
        "def set_seed(seed: int, deterministic: bool=False):",  # transformers
        "Helper function for reproducible behavior to set the seed in random, numpy, torch.",
        0.625,
    ),
]


@pytest.fixture(scope="module")
def functions() -> list[Function]:
    return harvest(["email", "asyncio", "unittest", "argparse", "logging", "tarfile", "pathlib", "http", "numpy"])


@each(REAL)
def test_real_docstrings_score_as_documented(signature, summary, score):
    assert gold_reward(signature + QUOTES, summary) == pytest.approx(score, abs=0.002)


@each(itertools.product([GET_VALUE, PARSE_ARGS, SIZE], [summary for _, summary, _ in REAL]))
def test_score_is_the_documented_sum_times_the_gates(query, summary):
    parts = explain(query, summary)
    weights = {"imperative": 0.14, "capital": 0.06, "period": 0.08, "length": 0.08, "fluency": 0.14}
    total = sum(weight * parts[name] for name, weight in weights.items()) + 0.5 * parts["relevance"]
    gate = parts["words"] * parts["repetition"] * parts["brevity"] * parts["symbols"]
    assert parts["score"] == pytest.approx(gate * total)
    assert set(parts) == {*WEIGHTS, *GATES, "score"}
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)


# One change, the only part that moves, and its values before and after.
ALONE = [
    ("Get the size of the terminal.", "get the size of the terminal.", "capital", 1.0, 0.0),
    ("Get the size of the terminal.", "Get the size of the terminal", "period", 1.0, 0.0),
    ("Make the size of the terminal.", "Lake the size of the terminal.", "imperative", 1.0, 0.0),
    ("Get the size of the terminal.", "Get the size of the  terminal.", "length", None, None),
    ("Get the size of the terminal.", "Get the size of the document.", "relevance", None, None),
    ("Get the size (of) the terminal.", "Get the size (of( the terminal.", "symbols", 1.0, 0.5),
    ('Get the "size" of the terminal.', 'Get the "size, of the terminal.', "symbols", 1.0, 0.5),
]


@each(ALONE)
def test_one_change_moves_one_part(before, after, name, value, changed):
    one, two = explain(SIZE, before), explain(SIZE, after)
    allowed = {name, "score"} | ({"fluency", "relevance"} if name == "imperative" else set())
    assert {part for part in one if one[part] != two[part]} <= allowed
    assert one[name] != two[name]
    if value is not None:
        assert (one[name], two[name]) == (value, changed)
    gate = math.prod(one[part] for part in GATES)
    if name in WEIGHTS and name != "imperative":
        assert one["score"] - two["score"] == pytest.approx(gate * WEIGHTS[name] * (one[name] - two[name]))


@each(
    [
        ("Return the value.", 1.0),
        ("Recursively delete a tree.", 1.0),
        ("Normalize the name.", 1.0),
        ("Rebuild the index.", 1.0),
        ("Returns the value.", 0.3),
        ("Returned by the value.", 0.3),
        ("Parsing of the value.", 0.3),
        ("Copies the value.", 0.3),
        ("List of the values.", 0.0),
        ("List the values.", 1.0),
        ("The value.", 0.0),
        ("Whether the value is set.", 0.0),
        ("Decorator of a function.", 0.0),
    ]
)
def test_imperative_mood(summary, imperative):
    assert explain(GET_VALUE, summary)["imperative"] == imperative


@each([(44, 1.0), (8, math.exp(-1)), (71, math.exp(-0.5625))])
def test_length_is_the_documented_bell(n_chars, length):
    assert explain(SIZE, "a" * n_chars + ".")["length"] == pytest.approx(length)


def test_length_falls_to_a_quarter_beyond_72_characters() -> None:
    assert explain(SIZE, "a" * 73)["length"] == pytest.approx(0.25 * math.exp(-((29 / 36) ** 2)))
    assert explain(SIZE, "Get the size\nof it.")["length"] == 0.0


@each(
    [
        ("Get the size of the terminal.", 1.0),
        ("Get the size of the size.", math.exp(-0.1 * 2 - 0.4)),  # "size", and "the size"
        ("Get the size of the terminal of the host.", math.exp(-0.1 * 1.5 - 0.4 * 0.5)),  # third "the", "of the"
        ("Get the size size.", 0.7 * explain(SIZE, "Get the size")["score"]),
    ]
)
def test_repetition_costs_what_is_documented(summary, repetition):
    parts = explain(SIZE, summary)
    if summary.endswith("size size."):
        assert parts["score"] <= repetition
    else:
        assert parts["repetition"] == pytest.approx(repetition)


@each(
    [
        ("", 0.0),
        ("   \n ", 0.0),
        (".", 0.0),
        ("(((", 0.0),
        ("\u503c\u3092\u8fd4\u3059\u3002", 0.0),
        ("Return", 0.05),
        ("Value.", 0.15),
        ("Value value value.", 0.05),
        ("Return return return return.", 0.05),
        ("get_cached_value", 0.45),
        ("Get cached value get cached value.", 0.3),
        ("xq zrt kpw bnm dfg.", 0.05),
        ("Return the value the value the value the value.", 0.05),
        ("Get " * 100, 0.0),
        ("Get the cached value key default int str key default value.", 0.35),
    ]
)
def test_degenerate_strings_earn_little(summary, most):
    assert gold_reward(GET_VALUE, summary) <= most


def test_human_lines_beat_other_functions_lines_and_shuffled_ones(functions: list[Function]) -> None:
    rng = random.Random(0)
    others = rng.sample(functions, len(functions))
    n = len(functions)
    human = sum(gold_reward(f.query, f.summary) for f in functions) / n
    other = sum(gold_reward(f.query, o.summary) for f, o in zip(functions, others, strict=True)) / n
    words = [f.summary.split() for f in functions]
    shuffled = [" ".join(rng.sample(line, len(line))) for line in words]
    mixed = sum(gold_reward(f.query, line) for f, line in zip(functions, shuffled, strict=True)) / n
    assert n > 1000
    assert 0.62 < human < 0.72
    assert 0.33 < other < 0.43
    assert 0.25 < mixed < 0.35


def test_at_least_five_thousand_a_second(functions: list[Function]) -> None:
    best = math.inf
    for _ in range(3):  # the least of three: other work on the machine only adds
        start = time.process_time()
        for function in functions[:1000]:
            gold_reward(function.query, function.summary)
        best = min(best, time.process_time() - start)
    assert 1000 / best > 5000


def test_gold_rewards_follows_the_lists_and_ignores_columns() -> None:
    lines = ["Parse the arguments.", "", "Parse args."]
    scores = gold_rewards([PARSE_ARGS] * 3, lines, name=["parse_args"] * 3, trainer_state=None)
    assert scores == [gold_reward(PARSE_ARGS, line) for line in lines]
    with pytest.raises(ValueError, match="shorter"):
        gold_rewards([PARSE_ARGS] * 3, lines[:2])


VOCABULARY = "Get get the value values of cached key key. is (a b) Return a list for 3 caf\u00e9"
WORDS = st.sampled_from(VOCABULARY.split())
TEXTS = st.one_of(st.text(max_size=200), st.lists(WORDS, max_size=14).map(" ".join))


@settings(max_examples=300, deadline=None)
@given(query=st.one_of(st.sampled_from([GET_VALUE, PARSE_ARGS]), st.text(max_size=60)), completion=TEXTS)
def test_any_strings_score_in_the_unit_interval(query: str, completion: str) -> None:
    parts = explain(query, completion)
    assert all(0.0 <= value <= 1.0 for value in parts.values()), parts
    assert explain(query, completion) == parts


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, n_tail=st.integers(1, 14), times=st.integers(1, 3), query=st.sampled_from([GET_VALUE, SIZE]))
def test_repeating_the_end_never_pays(text: str, n_tail: int, times: int, query: str) -> None:
    tail = " ".join(text.split()[-n_tail:])
    assert gold_reward(query, " ".join([text, *[tail] * times])) <= gold_reward(query, text)
