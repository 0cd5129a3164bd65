"""Rewards for the text of a completion: the right answer, a pattern, a length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import regex as matching

from async_rlhf.config.base import configuration, key, require
from async_rlhf.rewards.base import Reward, column_values

_FLAGS = matching.VERSION0  # reads an expression as Python's own module does
MATCH_SECONDS = 10.0
"""How long a pattern may take for one completion. Expressions such as (a|aa)+$ take forever on some texts; usable ones
take microseconds."""


@configuration
class ExactMatch(Reward):
    """1 if the completion is the reference, else 0.

    Args:
        column: the column with the reference, or with a list of references of which one must match.
        extract: a pattern that finds the answer within the completion: its first group if it has one, else the whole
            match, and of several matches the last; null takes the whole completion. Without a match the reward is 0.
        ignore_case: "Paris" matches "PARIS".
        whitespace: "strip" ignores it around answer and reference, "collapse" also takes any run of it for one space,
            "keep" ignores none.
    """

    column: str = "answer"
    extract: str | None = None
    ignore_case: bool = False
    whitespace: Literal["strip", "collapse", "keep"] = "strip"

    def check(self) -> None:
        check_pattern("extract", self.extract)

    def patterns(self, rows: int, columns: Mapping[str, Sequence[Any]]) -> Sequence[str]:
        """See :class:`Reward`."""
        return [self.extract or ""] * rows

    def rewards(self, completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[float]:
        references = column_values(columns, self.column)
        return [float(self._matches(text, reference)) for text, reference in zip(completions, references, strict=True)]

    def _matches(self, completion: str, reference: Any) -> bool:
        if reference is None:
            raise ValueError(f"column {self.column!r} has an empty value; must be the right answer")
        answer: str | None = completion
        if self.extract is not None:
            matches = _matches(self.extract, completion, every=True)
            answer = matches[-1][min(1, matches[-1].re.groups)] if matches else None
        if answer is None:
            return False
        several = reference if isinstance(reference, (list, tuple)) else [reference]
        return self._normal(answer) in {self._normal(str(alternative)) for alternative in several}

    def _normal(self, text: str) -> str:
        if self.whitespace == "strip":
            text = text.strip()
        elif self.whitespace == "collapse":
            text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


@configuration
class Regex(Reward):
    """1 if the completion matches a regular expression (of the package ``regex``, which accepts Python's), else 0.

    Args:
        pattern: the expression; null takes each row's own from ``column``. Write flags inside it: "(?s)" lets "." match
            newlines, "(?i)" ignores case.
        column: the column with the expressions, if ``pattern`` is null.
        full: the whole completion must match, instead of some part of it.
    """

    pattern: str | None = None
    column: str = "pattern"
    full: bool = False

    def check(self) -> None:
        check_pattern("pattern", self.pattern)

    def patterns(self, rows: int, columns: Mapping[str, Sequence[Any]]) -> Sequence[str]:
        """See :class:`Reward`."""
        if self.pattern is not None:
            return [self.pattern] * rows
        patterns = column_values(columns, self.column)
        for number, pattern in enumerate(patterns, start=1):
            self._check_own(number, pattern)
        return patterns

    def rewards(self, completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[float]:
        pairs = zip(self.patterns(len(completions), columns), completions, strict=True)
        return [float(bool(_matches(pattern, text, self.full))) for pattern, text in pairs]

    def _check_own(self, number: int, pattern: Any) -> None:
        location = f"column {self.column!r}, row {number} of the batch"
        if not isinstance(pattern, str):
            raise ValueError(f"{location}: got {pattern!r}; must be a regular expression")
        check_pattern(location, pattern)


@configuration
class Length(Reward):
    """A reward for length: the length itself, or how near it is to the wanted length.

    Without a target or limits it is the number of words or characters; a negative weight then makes answers shorter.
    With limits it is 1 within them and 0 outside. With a target it is 1 there, and falls linearly to 0 at length 0
    and at twice the target.

    Args:
        unit: "words", which whitespace separates, or "characters".
        target: the wanted length.
        minimum: the least wanted length.
        maximum: the greatest wanted length.
    """

    unit: Literal["words", "characters"] = "words"
    target: int | None = key(None, ge=1)
    minimum: int | None = key(None, ge=0)
    maximum: int | None = None

    def check(self) -> None:
        least = self.minimum or 0
        self.require(self.maximum is None or self.maximum >= least, "maximum", f"must be at least {least}")
        rule = "must be left out with minimum or maximum"
        require(self.target is None or self.minimum is self.maximum is None, "target", self.target, rule)

    def rewards(self, completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[float]:
        return [self._reward(len(text.split() if self.unit == "words" else text)) for text in completions]

    def _reward(self, length: int) -> float:
        if self.target is not None:
            return max(0.0, 1 - abs(length - self.target) / self.target)
        if self.minimum is None and self.maximum is None:
            return float(length)
        return float((self.minimum or 0) <= length and (self.maximum is None or length <= self.maximum))


@configuration
class Distinct(Reward):
    """How little a completion repeats itself: the share of its runs of ``n`` words that are distinct, 1 if none comes
    twice or there is none (distinct-n: Li et al., arXiv 1510.03055, section 5). Watched with the weight 0, it falls
    where the policy has found a phrase that the reward pays for.

    Args:
        n: words of a run.
    """

    n: int = key(3, ge=1)

    def rewards(self, completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[float]:
        return [self._share(text.split()) for text in completions]

    def _share(self, words: Sequence[str]) -> float:
        runs = [tuple(words[i : i + self.n]) for i in range(len(words) - self.n + 1)]
        return len(set(runs)) / len(runs) if runs else 1.0


def _matches(pattern: str, text: str, full: bool = False, every: bool = False) -> list[Any]:
    """The match of the whole text, the first match within it, or all matches.

    Raises:
        ValueError: matching takes longer than MATCH_SECONDS.
    """
    compiled = matching.compile(pattern, _FLAGS)
    # Concurrent: releases the GIL, so other threads and signal handlers can run.
    options: dict[str, Any] = {"timeout": MATCH_SECONDS, "concurrent": True}
    try:
        if every:
            return list(compiled.finditer(text, **options))
        match = (compiled.fullmatch if full else compiled.search)(text, **options)
    except TimeoutError:
        raise ValueError(
            f"pattern {pattern!r:.200} was not done with {text!r:.200} after {MATCH_SECONDS:g} s; must be one that "
            "does not try for ever, without repetition within repetition such as (a+)+"
        ) from None
    return [] if match is None else [match]


def check_pattern(key: str, pattern: str | None) -> None:
    """Require a regular expression, or None."""
    rule = r"has a backspace; write r'\b' for the edge of a word: '\b' without r is that in Python"
    require("\b" not in (pattern or ""), key, pattern, rule)
    try:
        matching.compile(pattern or "", _FLAGS)
    except (matching.error, OverflowError, RecursionError) as error:
        require(False, key, pattern, f"must be a regular expression: {error}")


exact_match = ExactMatch()
"""Compares with the column ``answer``; see :class:`ExactMatch` for its options."""
regex = Regex()
"""Matches the expression of the column ``pattern``, or ``regex(pattern=...)``; see :class:`Regex`."""
distinct = Distinct()
"""How little a completion repeats itself; see :class:`Distinct`."""
length = Length()
"""Counts words, or rewards a wanted number of them; see :class:`Length`."""
