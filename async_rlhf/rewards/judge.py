"""A language model behind an OpenAI-compatible URL that judges: which of two completions is better, or how good one is.

As a reward it gives scores, or compares a prompt's completions.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from async_rlhf.config import ConfigError, JudgeConfig
from async_rlhf.config.base import configuration, require
from async_rlhf.models.thoughts import answer_of
from async_rlhf.rewards.chat import MARKED, ChatModel, filled

logger = logging.getLogger(__name__)


def _text(title: str, placeholder: str) -> str:
    """A part of a question: a text between two marks."""
    return f"[{title}]\n{{mark}}\n{{{placeholder}}}\n{{mark}}\n\n"


QUESTION = (
    "Here are a request and two answers to it. Which answer is the better one: the more correct, helpful and clear? "
    f"Length in itself is no merit, nor is the order in which they are shown. {MARKED}\n\n"
    + _text("Request", "prompt")
    + _text("Answer A", "first")
    + _text("Answer B", "second")
    + "Reply with the letter of the better answer, A or B, and nothing else."
)
SCORE = (
    "Here are a request and an answer to it. How good is the answer: how correct, helpful and clear? Length in itself "
    f"is no merit. {MARKED}\n\n"
    + _text("Request", "prompt")
    + _text("Answer", "completion")
    + "Reply with a number from {lowest} for a useless answer to {highest} for one that could not be better, and "
    "nothing else."
)
ASKED = {"score": (SCORE, ("prompt", "completion")), "pairs": (QUESTION, ("prompt", "first", "second"))}
"""The question, and the places that one of the user's own must have."""
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of|of)\s*\d+(?:\.\d+)?)?")
"""A score, maybe out of so many."""
_MARKED = re.compile(r"\[\[\s*([AB])\s*\]\]")
_NAMED = re.compile(
    r"[\W_]*(?:(?:so|therefore|thus|hence)\b\W*)?(?:(?:i|we) (?:prefer|choose|pick)\b\W*)?"
    r"(?:(?:my|the|final|better|best|preferred)\b\W*)*(?:(?:answer|verdict|choice|winner|option|response|reply)\b\W*)?"
    r"(?:(?:is|would be)\b\W*)?(?:(?:answer|option|response|reply)\b\W*)?([AB])[\W_]*",
    re.IGNORECASE,
)
_LETTER = re.compile(r"(?<![A-Za-z'])([AB])(?![A-Za-z'])")
_ARTICLE = re.compile(
    r"A\s+(?!(?:is|was|wins|has|does|gives|answers|seems|over|because|by|as|since|or|and|nor)\b)[a-z]"
)


class Pair(NamedTuple):
    """Two answers to one prompt."""

    prompt: str
    ours: str
    theirs: str


class PairwiseJudge:
    """Asks for a verdict on every pair in both orders.

    Args:
        config: with a URL.
        memory: a .jsonl file with all verdicts, see :class:`~async_rlhf.rewards.chat.ChatModel`.

    Raises:
        ConfigError: the file with the question lacks a place for the prompt or an answer.
    """

    def __init__(self, config: JudgeConfig, memory: Path) -> None:
        self._chat = ChatModel(config, memory)
        self._question = read_question(config.prompt_file, QUESTION, ("prompt", "first", "second"))
        self.unread = ""
        """One of the replies that gave no verdict, of those asked for last."""

    def outcomes(self, pairs: Sequence[Pair], label: str | None) -> tuple[list[float], dict[str, float]]:
        """For each pair 1 where ours is the better answer, 0 where theirs is, 1/2 where the two orders disagree or the
        texts are the same.

        Args:
            pairs: any number.
            label: of the progress bar; None shows none.

        Returns:
            The outcomes, and the shares of pairs whose two verdicts contradicted each other (`inconsistent`) and
            of verdicts that were neither A nor B (`unreadable`, which count as half).

        Raises:
            JudgeError: a request failed, after its retries.
        """
        # [pair][order]: ours is shown first, then second. Equal answers need no verdict.
        asked = [pair for pair in pairs if pair.ours != pair.theirs]
        texts = [
            filled(self._question, {"prompt": pair.prompt, "first": first, "second": second})
            for pair in asked
            for first, second in ((pair.ours, pair.theirs), (pair.theirs, pair.ours))
        ]
        replies = self._chat.answers(texts, label)
        verdicts = iter(map(verdict, replies))
        self.unread = next((reply for reply in replies if not verdict(reply)), "")
        outcomes, inconsistent, unreadable = [], 0, 0
        for pair in pairs:
            if pair.ours == pair.theirs:
                outcomes.append(0.5)
                continue
            first, second = next(verdicts), next(verdicts)
            for_us = [{"A": 1.0, "B": 0.0}.get(first, 0.5), {"A": 0.0, "B": 1.0}.get(second, 0.5)]
            unreadable += (first == "") + (second == "")
            inconsistent += first == second != ""
            outcomes.append({0.0: 0.0, 2.0: 1.0}.get(sum(for_us), 0.5))
        shares = {"inconsistent": inconsistent / len(pairs), "unreadable": unreadable / (2 * len(pairs))}
        return outcomes, shares


def read_question(file: str | None, default: str, places: Sequence[str]) -> str:
    """The question of a file, or the default.

    Raises:
        ConfigError: the file cannot be read, or lacks a place.
    """
    if file is None:
        return default
    try:
        question = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"judge.prompt_file: got {file!r}: {error}") from error
    for placeholder in places:
        if f"{{{placeholder}}}" not in question:
            raise ConfigError(f"judge.prompt_file: got {file!r}; must have {{{placeholder}}} in it")
    return question


def verdict(reply: str) -> str:
    """ "A" or "B", whichever the reply names, without what was thought: [[A]], a last line that says no more, or the
    one letter that stands alone and is no article. "" if there is none, or both.
    """
    said = answer_of(reply).strip()
    if marked := {*_MARKED.findall(said)}:
        return marked.pop() if len(marked) == 1 else ""
    if (named := _NAMED.fullmatch(said.splitlines()[-1] if said else "")) and named[1].isupper():
        return named[1]
    letters = [letter for letter in _LETTER.finditer(said) if not _ARTICLE.match(said, letter.start())]
    choices = {letter[1] for letter in letters}
    denied = any(re.search(r"\b(?:not|neither|nor|than)\s*\Z", said[: letter.start()]) for letter in letters)
    return choices.pop() if len(choices) == 1 and not denied else ""


class _Unread(float):
    """No number, with the reply that gave none."""

    _why: str

    def __new__(cls, reply: str, rule: str) -> _Unread:
        made = super().__new__(cls, math.nan)
        made._why = f"nan, as the judge replied {reply[-100:]!r}; {rule} (more max_tokens for one that thinks)"
        return made

    def __repr__(self) -> str:
        return self._why


@configuration
class Judge(JudgeConfig):
    """What a judge says of completions, from 0 to 1. It answers without chance (temperature 0), and each text once.

    Its options are those of :class:`~async_rlhf.config.JudgeConfig`, and these. With ``how`` "score", a ``prompt_file``
    has {prompt} and {completion} in it; {lowest} and {highest} are replaced by the ends of the scale.
    """

    how: Literal["score", "pairs"] = "score"
    """ "score" asks for a number for each completion; "pairs" for the better one of each two completions of a prompt,
    in both orders, and the reward is the share of the others that a completion beats, ties half."""
    lowest: float = 1.0
    """The score that is reward 0."""
    highest: float = 10.0
    """The score that is reward 1."""
    memory: str = "judge.jsonl"
    """A file with what was said, by whom and for how many tokens: it is not asked for again."""

    __name__ = "judge"

    def check(self) -> None:
        super().check()
        self.require_public()
        require(self.lowest < self.highest, "judge.highest", self.highest, f"must be above lowest ({self.lowest:g})")
        # An error in a file shows before anything is sampled.
        read_question(self.prompt_file, *ASKED[self.how])

    @property
    def by_prompt(self) -> bool:
        """Whether it may be called with some prompts of a batch: not where it has to tell a prompt's completions from
        those of the same prompt, drawn again.
        """
        return self.how == "score"

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        """The rewards. A reply without a number of the scale is no reward (NaN). One without a verdict is a tie, and
        the log says so; if no reply has one, there is no reward.
        """
        return self._scores(prompts, completions) if self.how == "score" else self._wins(prompts, completions)

    def _scores(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        ends = {"lowest": f"{self.lowest:g}", "highest": f"{self.highest:g}"}
        texts = [
            filled(self._question, {"prompt": prompt, "completion": completion, **ends})
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return [self._read(reply) for reply in self._chat.answers(texts)]

    def _read(self, reply: str) -> float:
        numbers = _NUMBER.findall(answer_of(reply))
        score = float(numbers[0]) if len(numbers) == 1 else math.nan  # "from 1 to 10: 7" may be read as one likes
        if self.lowest <= score <= self.highest:
            return (score - self.lowest) / (self.highest - self.lowest)
        return _Unread(reply, f"must be one number from {self.lowest:g} to {self.highest:g}")

    def _wins(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        groups = [[i for i, _ in group] for _, group in groupby(enumerate(prompts), key=lambda each: each[1])]
        couples = [couple for group in groups for couple in combinations(group, 2)]
        pairs = [Pair(prompts[i], completions[i], completions[j]) for i, j in couples]
        outcomes, shares = self._pairwise.outcomes(pairs, None) if pairs else ([], {})
        asked = sum(pair.ours != pair.theirs for pair in pairs) / max(1, len(pairs))
        if share := shares.get("unreadable", 0.0):
            unread = _Unread(self._pairwise.unread, "must be A or B")
            if share == asked:
                return [unread] * len(prompts)
            logger.warning(
                "WARNING: %.0f%% of the judge's replies gave no verdict, and count as ties: %r", 100 * share, unread
            )
        wins, others = [0.0] * len(prompts), [0] * len(prompts)
        for (i, j), outcome in zip(couples, outcomes, strict=True):
            wins[i] += outcome
            wins[j] += 1 - outcome
            others[i] += 1
            others[j] += 1
        return [won / count if count else 0.5 for won, count in zip(wins, others, strict=True)]

    @cached_property
    def _question(self) -> str:
        return read_question(self.prompt_file, *ASKED["score"])

    @cached_property
    def _chat(self) -> ChatModel:
        return ChatModel(self, Path(self.memory))

    @cached_property
    def _pairwise(self) -> PairwiseJudge:
        return PairwiseJudge(self, Path(self.memory))


judge = Judge
"""``async_rlhf.rewards.judge:judge(url=..., model=...)``; see :class:`Judge`."""
