"""A language model behind an OpenAI-compatible URL that says which of two completions is better."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from async_rlhf.config import ConfigError, JudgeConfig
from async_rlhf.rewards.chat import MARKED, ChatModel, filled

QUESTION = f"""Here are a request and two answers to it. Which answer is the better one: the more correct, helpful and \
clear? Length in itself is no merit, nor is the order in which they are shown. {MARKED}

[Request]
{{mark}}
{{prompt}}
{{mark}}

[Answer A]
{{mark}}
{{first}}
{{mark}}

[Answer B]
{{mark}}
{{second}}
{{mark}}

Reply with the letter of the better answer, A or B, and nothing else."""


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
        verdicts = iter(map(verdict, self._chat.answers(texts, label)))
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
    for place in places:
        if f"{{{place}}}" not in question:
            raise ConfigError(f"judge.prompt_file: got {file!r}; must have {{{place}}} in it")
    return question


def verdict(reply: str) -> str:
    """ "A" or "B", whichever letter stands alone in the reply; "" if none does, or both."""
    found = set(re.findall(r"(?<![A-Za-z])([AB])(?![A-Za-z'])", reply))
    return found.pop() if len(found) == 1 else ""
