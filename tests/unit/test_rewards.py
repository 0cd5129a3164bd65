"""Built-in rewards against tables of tricky cases, and reasoning-gym's own scorers."""

from __future__ import annotations

import json
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each
from tiny import call_reward_function

from async_rlhf.config import ConfigError
from async_rlhf.rewards import distinct, exact_match, length, numeric_answer, reasoning_gym, regex
from async_rlhf.rewards.functions import RewardError, function_name
from async_rlhf.rewards.mathematics import math_answer
from async_rlhf.rewards.numeric import find_answer


def reward(function, completion: str, **columns) -> float:
    """Of one completion, by the way that the trainer takes."""
    return call_reward_function(function, ["prompt"], [completion], {k: [v] for k, v in columns.items()})[0]


# Numbers

NUMBERS = [
    # text, its answer
    ("18", 18), ("The answer is 18.", 18), ("#### 18", 18), ("####18", 18), ("#### 18.", 18), ("####\n18", 18),
    ("She has 16 - 3 - 4 = 9 eggs and makes 9 * 2 = $18.\n#### 18", 18),
    ("#### 18 apples\nand 3 pears", 18), ("#### 5\nWait, that is wrong.\n#### 6", 6), ("2 + 2 = 4 ####", 4),
    ("1,234", 1234), ("#### 1,234,567.50", Fraction("1234567.5")), ("#### $1,080.00", 1080), ("$-5", -5), ("-$5", -5),
    ("\N{MINUS SIGN}5 degrees", -5), ("x = -7", -7), ("(-7)", -7), ("answer:-7", -7), ("+7", 7), ("10-5", None),
    ("pages 10\N{EN DASH}15", None), ("COVID-19", 19), ("Answer:\n- 5", 5), ("50%", 50), (r"\boxed{50\%}", 50),
    ("3/4", Fraction(3, 4)), ("3 / 4 of it", Fraction(3, 4)), ("-3/4", Fraction(-3, 4)), ("1 1/2", Fraction(3, 2)),
    ("-1 1/2", Fraction(-3, 2)), ("step 3 8/2", 4), ("1.5/0.5", 3), ("5/0", None), ("5 of 6/0", None),
    (".5", Fraction(1, 2)), ("It is .5.", Fraction(1, 2)), ("3.14.", Fraction("3.14")), ("0.30", Fraction("0.3")),
    ("007", 7), ("1e-3", Fraction(1, 1000)), ("2.5E4", 25000), ("12,34", None), ("1,2345", None), ("12,34,567",
    None), ("**42**", 42), ("1e1000", None), ("It is 0x10.", None), ("2**3", None), ("so 1.5e3.5", None),
    ("It is (5, 4).", None), ("5 sqrt(3)", None), ("It is 3:2", None), ("2+3i", None),
    ("£3.50", Fraction("3.5")), (r"so \boxed{42} of 100", 42), (r"\boxed{1} then \boxed{2}", 2), (r"\boxed{x = 5}", 5),
    (r"\boxed{5 \text{ m}^2}", 5), (r"\boxed{\text{18 dollars}}", 18), (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
    (r"\boxed{-\dfrac{3}{4}}", Fraction(-3, 4)), (r"\boxed{\frac{-3}{4}}", Fraction(-3, 4)),
    (r"\boxed{\frac34}", Fraction(3, 4)), (r"\boxed{2\frac{1}{2}}", Fraction(5, 2)), (r"\boxed{12{,}345}", 12345),
    (r"\boxed{12\,345}", 12345), (r"\boxed{12,\!345}", 12345), (r"\boxed{\$18}", 18), (r"\boxed{18", 18),
    (r"17 \boxed{}", 17), (r"\boxed{none} of 3", None), (r"\boxed{7}" + "\n#### 8", 8), ("no number at all", None),
    ("", None), ("nan, inf", None), ("9" * 5000, None),
    # Powers
    (r"\boxed{10^3}", None), (r"17, so \boxed{10^{3}}", None), ("It is 2 ^ 10.", None), ("#### 1,000^2", None),
    ("3/4^2", None), (r"\boxed{3 \times 10^3}", None), ("8 = 2^3, so 8", 8), ("2^3 = 8", 8), ("x^2 = 9", 9),
    ("5 m^2", 5), (r"\boxed{90^\circ}", 90), (r"\boxed{90^{\circ}}", 90), ("the 5^{th}", 5),
    # Thousands in groups
    ("#### 1 000", 1000), ("10 000", 10000), ("-10 000.5", Fraction("-10000.5")), ("$1 234 567 in all", 1234567),
    ("10\N{NARROW NO-BREAK SPACE}000", 10000), ("1984 100 200", 200), ("3 40", 40), ("#### 1 000 00", None),
    ("#### 1 000 0000", None), ("1,000,00", None), ("#### 1,000,00", None), ("1,000,0000", None),
    ("#### 1.000.000", None), ("7 #### 1.000.000,00", None), ("1.000,50", None), ("1,000.5.5", None),
    (r"\boxed{1.5, 2.5}", None), ("(1.5,2.5)", None),
]  # fmt: skip


@each(NUMBERS)
def test_the_number_of_a_text(text, answer):
    assert find_answer(text) == answer
    if answer is not None:
        assert reward(numeric_answer, text, answer=str(answer)) == 1
        assert reward(numeric_answer, text, answer=f"Because.\n#### {answer + 1}") == 0


UNITS = [
    "5 km/h", "5 m^2", "$5", "5 dollars per hour", "x = 5", "**5**", "5.", "(5)", "5\N{DEGREE SIGN}C", r"5^\circ",
    "2 + 3 = 5",
    r"5\text{ cm}^2", r"5\,\text{m/s}", "5 %", r"5\%", "5th", "5-year", "5km", "5m", "5 a day", "$5$", r"\(5\)", "`5`",
    "5 (five)", "Therefore, 5 eggs", "5 = x", "USD 5", "about 5", "5\N{CJK UNIFIED IDEOGRAPH-65E5}", "+5", "10/2",
]  # fmt: skip
PARTS = [
    "3:2", "(5, 4)", r"2\sqrt{3}", "12:30", "2+3i", "2 + 3i", "2-7i", r"5\pi", r"5 \pi", "2x", "3x+1", "2, 5",
    "[1,5]", r"\{1, 5\}",
    "3 or 5", "3 and 5", "1-5", "x > 5", r"x \ge 5", r"\pm 5", r"5 \pm 1", "101_2", r"\frac{\sqrt{3}}{5}",
    r"\frac{x}{5}",
    r"-\sqrt{5}", "e^5", r"\log 5", "sin(5)", "|5|", "5 million", "5 and a half", "2024-01-05", "1/2/2024",
    "1e1000", "0x10",
    "2**5", "1.5e3.5", "12,34,567", "x=2, y=5", "x = 2 or x = 5", "5i", "2 + 5", r"2 \cdot 5", r"3 \times 5", "f(5)",
    r"\binom{9}{5}", "9 mod 5", "3 hours 5 minutes", "3.5.1", "at least 5", "5k", "x/5", "5/x", r"\sqrt[3]{5}",
    r"3\sqrt[5]{2}",
    r"\boxed{2\sqrt{2}}", "5 sqrt(3)", "5\N{SQUARE ROOT}3", "3 to 5", r"x \in [1, 5]", "A5", "(3)(5)", "1;5", "2e",
    "five",
]  # fmt: skip


@each(UNITS)
def test_a_number_with_a_unit_is_that_number_marked_or_alone(text):
    for form in (f"9 #### {text}", rf"so \boxed{{{text}}} of 9"):
        assert find_answer(form) == 5
        assert reward(numeric_answer, "5", answer=form) == reward(numeric_answer, "5", answer=text) == 1


@each(PARTS)
def test_a_part_of_an_answer_is_not_paid_for(text):
    """As a reference it is an error; a marked answer that says it is none."""
    for reference in (text, f"Because.\n#### {text}", rf"so \boxed{{{text}}}"):
        with pytest.raises(RewardError, match=r"must hold a number, alone, with a unit, after #### or in .boxed"):
            reward(numeric_answer, text, answer=reference)
    for marked in (f"9, so\n#### {text}", rf"9, so \boxed{{{text}}}"):
        assert find_answer(marked) is None


@each(
    ["3:2 of 5:2", "(5, 4) of (3, 4)", r"5\sqrt{3} of 2\sqrt{3}", "12:30 of 10:30", r"\boxed{2+3i} of 2-7i", "5 of 6"]
)
def test_formulas_are_compared_by_the_fields_parser(text):
    """Beside the numbers here, which are refused as references."""
    pytest.importorskip("math_verify", reason="needs the extra math: pip install '.[math]'")
    wrong, right = text.split(" of ")
    assert reward(math_answer, wrong, answer=right) == 0
    assert reward(math_answer, rf"\boxed{{{right}}}", answer=right) == 1
    assert reward(math_answer, f"<think>#### {wrong}</think>\n#### {right}", answer=f"#### {right}") == 1
    assert reward(math_answer, f"<think>#### {right}", answer=right) == 0
    assert reward(math_answer, r"\boxed{2\sqrt{3}}", answer=r"\sqrt{12}") == 1


@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 10**6),
    st.sampled_from(["{}", "#### {}", r"\boxed{{{}}}", "it is ${}."]),
)
def test_every_spelling_of_a_number_is_that_number(whole, decimals, form):
    text = f"{whole:,}.{decimals:06d}"
    value = Fraction(text.replace(",", ""))
    for spelling in (text, text.replace(",", ""), f"{value.numerator}/{value.denominator}"):
        assert find_answer(f"first 12, then {form.format(spelling)}") == value


@given(st.text(alphabet="0123456789.,/-+$%eE ={}\\#boxedfrac\n", max_size=80))
def test_no_text_breaks_it(text):
    found = find_answer(text)
    assert found is None or isinstance(found, Fraction)
    assert find_answer(text, strict=True) in (None, found)


@each([
    "1", "1 ", "1,", "1,111", "1 /", ".", r"\frac{", "{", "-", r"\boxed{", "1 1/", "1 111", "1.111", "1^", "1^{",
    "1 111,", "1*1",
])  # fmt: skip
def test_long_nonsense_is_read_in_time(part):
    started = time.process_time()
    find_answer(part * (20_000 // len(part)))
    assert time.process_time() - started < 5  # 0.1 s; a quadratic pattern takes minutes


def test_answers_within_a_tolerance():
    assert reward(numeric_answer, "0.333", answer="1/3") == 0
    assert reward(numeric_answer(tolerance=0.001), "0.333", answer="1/3") == 1
    assert reward(numeric_answer(tolerance=0.3), "0.7", answer=1) == 1  # 3/10, not the float, which is less
    assert reward(numeric_answer(tolerance=0.3), "0.69", answer=1) == 0
    assert reward(numeric_answer, "0.1", answer=0.1) == 1
    assert reward(numeric_answer(column="target"), "7", target=7, answer=8) == 1


def test_strictly_only_marked_answers_count():
    strict = numeric_answer(strict=True)
    assert reward(strict, "It is 7", answer="7") == 0
    assert reward(strict, "It is \\boxed{7}", answer="7") == 1
    assert reward(strict, "8 #### 7", answer="a plain 7") == 1  # the reference may be plain


@each([None, "none", "", float("nan")])
def test_a_reference_without_a_number_is_an_error(reference):
    with pytest.raises(RewardError, match=r"numeric_answer raised ValueError: column 'answer' .*must hold a number"):
        reward(numeric_answer, "7", answer=reference)


# Thoughts

THOUGHTS = [
    # completion, the end of its prompt, what is answered
    ("<think>6*7 = 42, but wait", "", ""), ("<think>6*7, maybe #### 42? no</think>The answer is 41.", "",
    "The answer is 41."),
    ("<think>... #### 41? no</think>\n\nThe answer is 42.", "", "The answer is 42."), ("42", "Go on: <think>\n", ""),
    ("42? </think>41", "<think>", "41"), ("42? </think>41", "a chat without its thought", "41"), ("42",
    "<think></think>", "42"),
    ("<think>a<think>b</think> 42</think>41", "", "41"), (" <think>42</think> 4<think>1</think>1", "", "  41"),
    ("[THINK]42[/THINK]41", "", "41"), ("<|START_THINKING|>42<|END_THINKING|>41", "", "41"), ("<thinking>42", "", ""),
    ("<|channel|>analysis<|message|>42<|end|><|start|>assistant<|channel|>final<|message|>41", "", "41"),
    ("<|channel|>analysis<|message|>42", "", ""), ("I think 42", "", "I think 42"),
]  # fmt: skip


@each(THOUGHTS)
def test_what_is_thought_is_no_answer(completion, prompt, answer):
    def paid(function, **columns):
        given = {name: [value] for name, value in columns.items()}
        return call_reward_function(function, [prompt], [completion], given)[0]

    numbers = re.findall("[0-9]+", answer)
    for number in (41, 42):
        is_right = numbers == [str(number)]
        assert paid(numeric_answer, answer=number) == is_right
        assert paid(exact_match(extract="[0-9]+"), answer=number) == is_right
        assert paid(regex(pattern=str(number))) == is_right
    assert paid(exact_match, answer=answer) == 1
    assert paid(length(unit="characters")) == len(answer)
    assert paid(distinct(n=1)) == 1
    assert paid(length(unit="characters", thoughts=True)) == len(completion)
    assert paid(regex(pattern="(?s)(think|THINK|analysis).*42")) == bool(
        re.search("(?s)(think|THINK|analysis).*42", completion)
    )


def test_what_is_thought_in_several_turns_is_no_answer():
    turn = {"role": "assistant", "content": "Hm", "reasoning_content": "41"}
    said = [turn, {"role": "user", "content": "Well?"}, {**turn, "content": "", "reasoning_content": "42"}]
    columns = {"answer": [42], "completion_messages": [said]}
    assert call_reward_function(numeric_answer, ["<think>"], ["41</think>Hm 42"], columns) == [0]
    said[-1] |= {"content": "#### 42"}
    assert call_reward_function(numeric_answer, ["<think>"], ["41</think>Hm 42</think>#### 42"], columns) == [1]


# Texts


@each([
    ({}, "Paris", "Paris", 1), ({}, " Paris\n", "Paris", 1), ({}, "Paris", " Paris ", 1), ({}, "paris", "Paris", 0),
    ({}, "Paris.", "Paris", 0), ({}, "New  York", "New York", 0), ({}, "7", 7, 1), ({}, "", "", 1),
    ({"ignore_case": True}, "STRASSE", "straße", 1),
    ({"whitespace": "keep"}, " Paris", "Paris", 0),
    ({"whitespace": "collapse"}, " New\n York", "New  York", 1),
    ({}, "NYC", ["New York", "NYC"], 1), ({}, "Boston", ["New York", "NYC"], 0), ({}, "Boston", [], 0),
    ({"extract": r"<answer>(.*?)</answer>"}, "so <answer> B </answer>", "B", 1),
    ({"extract": r"<answer>(.*?)</answer>"}, "<answer>A</answer> no, <answer>B</answer>", "B", 1),
    ({"extract": r"<answer>(.*?)</answer>"}, "B", "B", 0),
    ({"extract": r"\b[A-D]\b"}, "I say B", "B", 1),
    ({"extract": r"(A)|B"}, "B", "B", 0),  # the group has matched nothing
    ({"column": "target"}, "B", "A", 0),
])  # fmt: skip
def test_exact_match(options, completion, answer, right):
    assert reward(exact_match(**options), completion, answer=answer, target="C") == right


@each([
    ({"pattern": r"\d+"}, "in 1984", 1), ({"pattern": r"\d+"}, "never", 0),
    ({"pattern": r"\d+", "full": True}, "in 1984", 0),
    ({"pattern": r"\d+", "full": True}, "1984", 1),
    ({"pattern": r"\d+", "full": True}, "1984x", 0),
    ({"pattern": "<think>.*</think>.+"}, "<think>a\nb</think> c", 0),
    ({"pattern": "(?s)<think>.*</think>.+", "full": True}, "<think>a\nb</think> c", 1),
    ({}, "abc", 1), ({"full": True}, "abc", 0), ({"column": "other"}, "abc", 0),
])  # fmt: skip
def test_regex(options, completion, matches):
    assert reward(regex(**options), completion, pattern="b", other="^b") == matches


@each([(None, "got None; must be a"), (7, "got 7; must be a"), ("(", "got '('; must be a")])
def test_a_row_with_no_regular_expression_is_named(pattern, found):
    with pytest.raises(RewardError) as error:
        call_reward_function(regex(column="own"), ["p", "q"], ["a", "b"], {"own": ["a", pattern]})
    assert f"column 'own', row 2 of the batch: {found} regular expression" in str(error.value)


@each([
    ({}, 4), ({"unit": "characters"}, 18), ({"target": 4}, 1), ({"target": 8}, 0.5), ({"target": 2}, 0),
    ({"target": 1}, 0), ({"target": 3}, pytest.approx(2 / 3)), ({"minimum": 4}, 1), ({"minimum": 5}, 0),
    ({"maximum": 4}, 1), ({"maximum": 3}, 0),
    ({"minimum": 18, "maximum": 18, "unit": "characters"}, 1),
])  # fmt: skip
def test_length(options, expected):
    assert reward(length(**options), "two  words\nand two") == expected


@each([
    (regex, {"pattern": "("}, r"pattern: got '\('; must be a regular expression: missing"),
    (regex, {"pattern": "\bword"}, r"pattern: got '\\x08word'; has a backspace; write r'\\b'"),
    (exact_match, {"extract": "["}, r"extract: got '\['; must be a regular expression"),
    (exact_match, {"whitespace": "some"}, "whitespace: got 'some'; must be one of 'strip', 'collapse', 'keep'"),
    (numeric_answer, {"tolerance": -1}, "tolerance: got -1; must be at least 0"),
    (length, {"target": 3, "minimum": 2}, "target: got 3; must be left out with minimum or maximum"),
    (length, {"minimum": 3, "maximum": 2}, "maximum: got 2; must be at least 3"),
])  # fmt: skip
def test_options_that_cannot_be(function, options, message):
    with pytest.raises(ConfigError, match=message):
        function(**options)


@each([(exact_match, "answer"), (numeric_answer, "answer"), (regex, "pattern")])
def test_a_column_that_is_not_there(function, column):
    with pytest.raises(RewardError, match=f"the data has no column '{column}'; it has question, solution"):
        reward(function, "7", question="q", solution="7")


def test_they_are_called_what_they_are():
    functions = [exact_match, numeric_answer(tolerance=1), regex, length, distinct(n=2), reasoning_gym.score]
    names = ["exact_match", "numeric_answer", "regex", "length", "distinct", "score"]
    assert list(map(function_name, functions)) == names


@each([
    ("", 1), ("a b", 1), ("a b c d", 1), ("a a a a", 1 / 2), ("a b c a b c a b c", 3 / 7), ("A a a", 1),
    ("a\nb\tc", 1),
])  # fmt: skip
def test_distinct_is_the_share_of_runs_of_words_that_come_once_or_first(text, share):
    assert reward(distinct, text) == pytest.approx(share)
    assert reward(distinct(n=1), text) == pytest.approx(len(set(text.split())) / max(1, len(text.split())) or 1)


# reasoning-gym

TASKS = ["leg_counting", "basic_arithmetic", "arc_1d", "arc_agi", "kakurasu", "countdown", "knights_knaves"]


@pytest.fixture
def library():
    return pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym: pip install '.[reasoning-gym]'")


@pytest.mark.parametrize("task", TASKS)
def test_reasoning_gym_scores_as_its_own_scorer(library, task):
    rows = [json.loads(json.dumps(row)) for row in reasoning_gym.make_rows(task, size=3, seed=5)]  # as from a file
    dataset = library.create_dataset(task, size=3, seed=5)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("query")
    assert all(entry["question"].strip() in prompt for entry, prompt in zip(dataset, prompts, strict=True))
    for answers in (columns["answer"], ["0"] * 3, ["nonsense"] * 3, [""] * 3):
        expected = [dataset.score_answer(answer, entry) for answer, entry in zip(answers, dataset, strict=True)]
        for form in ("Hm. <answer>1</answer> No: <answer> {} </answer>.", " {}\n"):
            completions = [form.format(answer) for answer in answers]
            assert call_reward_function(reasoning_gym.score, prompts, completions, columns) == expected
        if answers is columns["answer"]:
            assert expected == [1, 1, 1]


def test_an_answer_that_a_scorer_cannot_read_is_worth_nothing(library):
    rows = list(reasoning_gym.make_rows("prime_factorization", size=1, seed=0))
    columns = {name: [row[name] for row in rows] for name in ("task", "answer", "metadata")}
    assert reasoning_gym.score(["p"], ["two times three"], **columns) == [0.0]  # int() raises in the scorer
    assert reasoning_gym.score(["p"], rows[0]["answer"].splitlines(), **columns) == [1.0]


def test_reasoning_gym_reads_no_thought(library):
    """Neither one that is cut off, nor one that the prompt has opened."""
    (row,) = (json.loads(json.dumps(row)) for row in reasoning_gym.make_rows("leg_counting", size=1, seed=5))
    columns = {name: [row[name]] for name in ("task", "answer", "metadata")}
    right, wrong = f"<answer>{row['answer']}</answer>", "<answer>0</answer>"
    (nothing,) = reasoning_gym.score(["p"], [wrong], **columns)
    for prompt, text, score in (
        ("p", f"<think>{right}", nothing),
        ("p <think>\n", right, nothing),
        ("p", f"{right}<think>{wrong}", 1.0),
        ("p", f"<think>{wrong}</think>{row['answer']}", 1.0),
    ):
        assert reasoning_gym.score([prompt], [text], **columns) == [score], text


def test_reasoning_gym_names_what_is_wrong(library):
    for arguments, message in [
        (("no_task", 1, 0), "task: got 'no_task'; must be one of ab, "),
        (("leg_counting", 1, 0, {"legs": 4}), "options: got {'legs': 4}; leg_counting refuses them: "),
        (("leg_counting", 1, 0, {"min_animals": -4}), "options: got {'min_animals': -4}; leg_counting refuses them: "),
    ]:
        with pytest.raises(ConfigError) as error:
            list(reasoning_gym.make_rows(*arguments))
        assert message in str(error.value)
    with pytest.raises(RewardError, match="task: got 'no_task'"):
        reward(reasoning_gym.score, "1", task="no_task", answer="1", metadata="{}")
