"""The reward for numeric answers, such as GSM8K's: found in the text, and compared exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from async_rlhf.config.base import configuration, key
from async_rlhf.rewards.base import Reward, column_values

_DASHES = "\N{MINUS SIGN}\N{EN DASH}"
_TIMES = "*\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}"
_MINUS = str.maketrans(_DASHES, "--")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)"
_SPACE = "[ \N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}]"
# 10 000. But after another number it is part of a list: 1984 100 200.
_GROUP = rf"{_SPACE}[0-9]{{3}}(?![0-9])"
# All groups that follow. Not the possessive "++", which Python 3.11.0 to 3.11.3 compute wrongly.
_SPACED = rf"(?<![0-9.,])(?<![0-9]{_SPACE})[1-9][0-9]{{0,2}}(?:{_GROUP})+(?!{_GROUP})"
# Invalid groups, in which part of a wrong answer could be read as right: 1,000,00 and 1 000 00, 1.000.000, 1.000,50.
_MALFORMED = (
    rf"[0-9]{{1,3}}(?:,[0-9]{{3}}(?![0-9]))+(?!,[0-9]{{3}}(?![0-9])),[0-9][0-9,.]*"
    rf"|{_SPACED}(?:,|{_SPACE})[0-9][0-9 ,.]*"
    r"|[0-9]+(?:\.[0-9]+){2}[0-9.,]*|[0-9]{1,3}\.[0-9]{3},[0-9][0-9.,]*|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+){2}[0-9.]*"
)
# 90^\circ and 5^{th} are the numbers before them.
_POWER = r"\^(?!\s*\{?\s*(?:\\circ|\\degree|\\text|\\mathrm|(?:st|nd|rd|th)\b))\s*(?:\{[^{}]*\}?|[-+]?[0-9.]+)?"
_NUMBER = re.compile(
    # A hyphen after a letter, a digit or a closing bracket is not a minus sign: 10-5, COVID-19, (x)-3.
    rf"(?:(?<![\w.)\]])(?P<sign>[-+{_DASHES}]))?[$€£]?(?P<inner>(?<=[$€£])[-{_DASHES}])?"
    rf"(?:(?P<malformed>{_MALFORMED})|(?:(?P<whole>[0-9]+)[ ]{{1,2}}(?=[0-9]+ ?/))?"
    rf"(?P<number>{_SPACED}(?:\.[0-9]+)?|{_DECIMAL})"
    rf"(?:[ ]?/[ ]?(?P<denominator>[-{_DASHES}]?{_DECIMAL})|(?P<exponent>[eE][-+]?[0-9]{{1,3}})(?![0-9]))?"
    rf"(?P<power>[ ]?(?:(?:\\times|\\cdot|[{_TIMES}])[ ]?[0-9]+[ ]?)?{_POWER})?)"
    r"|\^\s*(?:\{[^{}]*\}?|[-+]?[0-9]+)"  # a power of something else: the 2 of m^2 is no answer
)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")


@configuration
class NumericAnswer(Reward):
    r"""1 if the completion's number equals the reference's, else 0.

    The number of a text is the first one after the last "####" (as in GSM8K); else the one in the last ``\boxed{}``;
    else the last of all. The reference's is found in the same way, so a column may hold a whole solution or only the
    number. ``1,234.50``, ``$5``, ``50%`` (that is 50), ``-3``, ``3/4``, ``1 1/2``, ``\frac{3}{4}``, ``1e-3`` and
    ``10 000`` are numbers. They are compared as fractions, without rounding. If a power (``10^3``) or an invalid
    group (``1,000,00``, ``1.000.000``) is in the number's place, the text has no answer.

    Args:
        column: the column with the reference, a text or a number.
        tolerance: how far the answer may be off.
        strict: only what follows "####" or is in ``\boxed{}`` counts, not just any last number.
    """

    column: str = "answer"
    tolerance: float = key(0.0, ge=0)
    strict: bool = False

    def rewards(self, completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[float]:
        references = column_values(columns, self.column)
        return [float(self._right(text, answer)) for text, answer in zip(completions, references, strict=True)]

    def _right(self, completion: str, reference: Any) -> bool:
        wanted = find_answer(str(reference))
        if wanted is None:
            raise ValueError(f"column {self.column!r} holds {str(reference)[-200:]!r}; must hold a number")
        found = find_answer(completion, self.strict)
        return found is not None and abs(found - wanted) <= Fraction(str(self.tolerance))


def find_answer(text: str, strict: bool = False) -> Fraction | None:
    """The number that a text gives as its answer, see :class:`NumericAnswer`; None if there is none."""
    marked = text.rpartition("####")
    if marked[1] and (numbers := _numbers(marked[2])):
        return numbers[0]
    boxed = _last_boxed(text)
    # "x = 5" has its number at the end, "5 m^2" at the start.
    if boxed is not None and (numbers := _numbers(boxed.rpartition("=")[2]) or _numbers(boxed)):
        return numbers[0]
    numbers = [] if strict else _numbers(text)
    return numbers[-1] if numbers else None


def _last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{}``; up to the end of the text if the brace is left open."""
    _, command, rest = text.rpartition(r"\boxed")
    if not command or not rest.lstrip().startswith("{"):
        return None
    rest = rest.lstrip()[1:]
    depth = 1
    for position, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:position]
    return rest


def _numbers(text: str) -> list[Fraction | None]:
    """The numbers of a text; None for an invalid one, of which no part may be taken for the answer."""
    text = text.replace("{,}", ",").replace(r"\$", "$")
    text = re.sub(r"(?<=[0-9])\\[,! ](?=[0-9])|(?<=,)\\!", "", text)  # LaTeX's small spaces between thousands
    text = re.sub(r"(?<=[0-9])(?=\\[dtc]?frac)", " ", text)  # 1\frac{1}{2} is one and a half
    text = _FRACTION.sub(lambda found: "/".join(part for part in found.groups() if part is not None), text)
    values: list[Fraction | None] = []
    for found in _NUMBER.finditer(text):
        if found["malformed"] or found["power"]:
            values.append(None)
        elif found["number"] and (value := _value(found)) is not None:
            values.append(value)
    return values


def _value(found: re.Match[str]) -> Fraction | None:
    def number(name: str) -> Fraction:
        digits = re.sub(rf",|{_SPACE}", "", (found[name] or "").translate(_MINUS))
        return Fraction(digits + (found["exponent"] or "" if name == "number" else ""))

    try:
        value = number("number")
        if found["denominator"]:
            value /= number("denominator")
        if found["whole"] and value < 1:  # 1 1/2, but not "Step 3 8/2"
            value += number("whole")
    except (ValueError, ZeroDivisionError):  # more digits than Python converts, or a denominator of 0
        return None
    sign = ((found["sign"] or "") + (found["inner"] or "")).translate(_MINUS)
    return -value if sign == "-" else value


numeric_answer = NumericAnswer()
"""Compares with the number of the column ``answer``; see :class:`NumericAnswer` for its options."""
