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
# Invalid groups, in which part of a wrong answer could be read as right: 1,000,00 and 12,34, 1 000 00, 1.000.000.
_MALFORMED = (
    r"(?![0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9]))[0-9]+(?:,[0-9]+)+[0-9,.]*"
    rf"|{_SPACED}(?:,|{_SPACE})[0-9][0-9 ,.]*"
    r"|[0-9]+(?:\.[0-9]+){2}[0-9.,]*|[0-9]+\.[0-9]+,[0-9][0-9.,]*|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+){2}[0-9.]*"
)
# 90^\circ and 5^{th} are the numbers before them.
_POWER = r"\^(?!\s*\{?\s*(?:\\circ|\\degree|\\text|\\mathrm|(?:st|nd|rd|th)\b))\s*(?:\{[^{}]*\}?|[-+]?[0-9.]+)?"
_NUMBER = re.compile(
    # A hyphen after a letter, a digit or a closing bracket is not a minus sign: 10-5, COVID-19, (x)-3.
    rf"(?:(?<![\w.)\]])(?P<sign>[-+{_DASHES}]))?[$€£]?(?P<inner>(?<=[$€£])[-{_DASHES}])?"
    rf"(?:(?P<malformed>{_MALFORMED})|(?:(?P<whole>[0-9]+)[ ]{{1,2}}(?=[0-9]+ ?/))?"
    rf"(?P<number>{_SPACED}(?:\.[0-9]+)?|{_DECIMAL})"
    rf"(?:[ ]?/[ ]?(?P<denominator>[-{_DASHES}]?{_DECIMAL})|(?P<exponent>[eE][-+]?[0-9]{{1,3}})(?![0-9]|\.[0-9]))?"
    rf"(?P<power>[ ]?(?:(?:\\times|\\cdot|[{_TIMES}])[ ]?[0-9]+[ ]?)?{_POWER})?)"
    r"|\^\s*(?:\{[^{}]*\}?|[-+]?[0-9]+)"  # a power of something else: the 2 of m^2 is no answer
)
# A number is a part of something else by what follows it (2x, 5\pi, 2\sqrt{3}, 2*x) or stands before it (3:2, 2+3i,
# 10-5, 0x10, \sqrt{5}, |5|). Letters before it that do not follow a digit make it a name (x1, H2O), which is no number.
_UNIT = "mgshldtAVWJNCFKLHTG"
_AFTER = re.compile(
    r"\s?(?:\\(?:sqrt|pi|infty|pm|log|ln|sin|cos|tan|binom)(?![A-Za-z])|[√π∞±]|(?:pi|sqrt)(?![A-Za-z]))"
    rf"|(?![{_UNIT}])[A-Za-z](?![A-Za-z])|_\{{?\w"
    rf"|(?:\s[+{_TIMES}]\s|[+{_TIMES[1:]}]|\*(?!\*)|/(?=\w\b))[\w(\\]|\s[<>≤≥]=?\s"
    r"|\s(?:(?:hundred|thousand|(?:[mb]|tr)illion)s?(?![A-Za-z])|and a (?:half|quarter))"
)
_PLAIN = r"text\w*|math(?:rm|bf|it|sf|tt)|mbox|f?boxed|bm|boldsymbol|left|right|q?quad|displaystyle|big|Big|item|dots"
_PLAIN += r"|approx|to|implies|(?:Long)?[Rr]ightarrow|therefore|circ|degree|pounds|euro|dollar|mu|Omega|Delta"
_BEFORE = re.compile(
    rf"(?:[0-9]:|_\{{?|[0-9][-{_DASHES}]|[0-9] [-{_DASHES}] "
    rf"|[\w)\]}}]\s?[+/{_TIMES[1:]}]\s?|[\w)\]}}](?:\s\*\s|\*\*?)"
    r"|[0-9][A-Za-z]+|\.[0-9]+[eE][-+]?|[A-Za-z]\(|\)\(|[√±≤≥≠<]=?\s?|[\w)}\]] >=?\s?|\|"
    rf"|\\(?!(?:{_PLAIN})(?![A-Za-z]))[A-Za-z]+(?:_\{{?\w+\}}?|\[[^\]]*\])?\s?[{{(]?|\}}\s?\{{)\Z"
)
_NAMED = re.compile(r"(?<![0-9A-Za-z])(?![A-Z]{3}\Z)[A-Za-z]+\Z")
_LISTED = re.compile(r"[(\[{][-+0-9./ ]+,[-+0-9.,/ ]*\Z")  # (5, 4)
_WINDOW = 40
# What may stand by the number of a marked answer, here \0: units and other words, but none that count or compare.
_COUNTS = r"plus|minus|times|half|halves|quarters?|thirds?|hundreds?|thousand|(?:[mb]|tr)illion|dozen|pi|sqrt|root"
_COUNTS += r"|squared|cubed|infinity|mod|modulo|than|least|most|not"
_LETTER = r"[^\W\d_]"
_WORDS = re.compile(
    r"(?:\s|[.,;:?'\"\u201c\u201d\u2018\u2019`#$€£¥¢₹%°&()\[\]{}~]|\*\*|(?<!\0)!|\0"
    rf"|\\(?:{_PLAIN})(?![A-Za-z])|\\[,;:!%$()\[\]\s]"
    rf"|(?!(?:{_COUNTS})(?!{_LETTER}))(?:{_LETTER}{{2,}}|[^\W\d_A-Za-z])|[{_UNIT}aI](?!{_LETTER})"
    rf"|(?<={_LETTER})[-/](?={_LETTER})|(?<=\0)[-/](?=[a-z]{{2}}))*"
)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")


@configuration
class NumericAnswer(Reward):
    r"""1 if the completion's number equals the reference's, else 0.

    The number of a text is the one on the line after the last "####" (as in GSM8K); else the one in the last
    ``\boxed{}``; else the last of all. A marked answer is one number, with or without a unit, or an equation that ends
    with one: ``#### 18 of 20`` and ``\boxed{2\sqrt{3}}`` are no answer. The reference is such a number, marked or
    alone. ``1,234.50``, ``$5``, ``50%`` (that is 50), ``-3``, ``3/4``, ``1 1/2``, ``\frac{3}{4}``, ``1e-3`` and
    ``10 000`` are numbers. They are compared as fractions, without rounding. If something else is in the number's
    place, such as a
    power (``10^3``), an invalid group (``1,000,00``), a ratio (``3:2``), a pair (``(5, 4)``) or a term (``2+3i``), the
    text has no answer. What a model thinks is no answer, see :class:`~async_rlhf.rewards.base.Reward`.

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
        wanted = find_reference(str(reference))
        if wanted is None:
            rule = "must hold a number, alone, with a unit, after #### or in \\boxed{}"
            raise ValueError(f"column {self.column!r} holds {str(reference)[-200:]!r}; {rule}")
        answer = find_answer(completion, self.strict)
        return answer is not None and abs(answer - wanted) <= Fraction(str(self.tolerance))


def find_answer(text: str, strict: bool = False) -> Fraction | None:
    """The number that a text gives as its answer, see :class:`NumericAnswer`; None if there is none."""
    if (marked := marked_answer(text)) is not None:
        return _only(marked)
    numbers = [] if strict else _numbers(text)
    return numbers[-1] if numbers else None


def find_reference(text: str) -> Fraction | None:
    """The number that a reference is: what it marks, or all of it; None if that is not one number, with or without a
    unit.
    """
    return _only(text if (marked := marked_answer(text)) is None else marked)


def marked_answer(text: str) -> str | None:
    """What a text marks as its answer: the line after the last "####", or the content of the last ``\\boxed{}``."""
    _, mark, rest = text.rpartition("####")
    if mark and rest.strip():
        return rest.strip().splitlines()[0].replace("!", " ")
    boxed = _last_boxed(text)
    return boxed if boxed and boxed.strip() else None


def _only(text: str) -> Fraction | None:
    """The number of a text that has one, and otherwise nothing but words; of equations the last side."""
    first, *others = re.split(r"(?<![<>!:])=(?!>)|\\approx(?![A-Za-z])|≈", text)
    if others:
        *middle, last = others
        # 6*7 = 40+2 = 42 is one number; x = 2, y = 3 and x = 2 or 3 are two.
        several = re.search(r"[,;]|\\\\|\\text|\b(?:and|or)\b", re.sub(r"\([^()]*\)", "", "".join([first, *middle])))
        if several or any(re.search(r"[0-9]\s*[A-Za-z]\s*\Z", side) for side in middle):
            return None
        text = last if re.search("[0-9]", last) or middle else first
    text = _plain(text)
    matches = [match for match in _NUMBER.finditer(text) if match["number"] or match["malformed"]]
    if not matches or _NAMED.search(_before(matches[0], text)) or (value := _read(matches[0], text)) is None:
        return None
    rest = re.sub(r"(?<=[\w}])(?:\^\s*(?:\{[^{}]*\}|-?[0-9]+)|[²³])", "", text[matches[0].end() :])  # of a unit
    rest = re.sub(r"\A\s*\^\s*\{?\s*(?=\\|st|nd|rd|th)", " ", rest)  # 90^\circ, 5^{th}
    return value if _WORDS.fullmatch(f"{text[: matches[0].start()]}\0{rest}") else None


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


def _plain(text: str) -> str:
    """The text with numbers of LaTeX as plain ones."""
    text = text.replace("{,}", ",").replace(r"\$", "$")
    text = re.sub(r"(?<=[0-9])\\[,! ](?=[0-9])|(?<=,)\\!", "", text)  # LaTeX's small spaces between thousands
    text = re.sub(r"(?<=[0-9])(?=\\[dtc]?frac)", " ", text)  # 1\frac{1}{2} is one and a half
    return _FRACTION.sub(lambda match: "/".join(part for part in match.groups() if part is not None), text)


def _numbers(text: str) -> list[Fraction | None]:
    """The numbers of a text; None for an invalid one, of which no part may be taken for the answer."""
    text = _plain(text)
    matches = [match for match in _NUMBER.finditer(text) if match["number"] or match["malformed"]]
    return [_read(match, text) for match in matches if not _NAMED.search(_before(match, text))]


def _before(match: re.Match[str], text: str) -> str:
    return text[max(0, match.start() - _WINDOW) : match.start()]


def _read(match: re.Match[str], text: str) -> Fraction | None:
    """The number; None for an invalid one, and for a part of something else."""
    if match["malformed"] or match["power"]:
        return None
    before, after = _before(match, text), text[match.end() : match.end() + _WINDOW]
    if _BEFORE.search(before) or _AFTER.match(after):
        return None
    listed = _LISTED.search(before) and re.match(r"\s*\\?[)\]}]", after)
    return None if listed else _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    def number(name: str) -> Fraction:
        digits = re.sub(rf",|{_SPACE}", "", (match[name] or "").translate(_MINUS))
        return Fraction(digits + (match["exponent"] or "" if name == "number" else ""))

    try:
        value = number("number")
        if match["denominator"]:
            value /= number("denominator")
        if match["whole"] and value < 1:  # 1 1/2, but not "Step 3 8/2"
            value += number("whole")
    except (ValueError, ZeroDivisionError):  # more digits than Python converts, or a denominator of 0
        return None
    sign = ((match["sign"] or "") + (match["inner"] or "")).translate(_MINUS)
    return -value if sign == "-" else value


numeric_answer = NumericAnswer()
"""Compares with the number of the column ``answer``; see :class:`NumericAnswer` for its options."""
