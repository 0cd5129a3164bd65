"""Keys about rows of data that several commands share: what is held out, what of a plain text is the prompt."""

from __future__ import annotations

from async_rlhf.config.base import Rule, at_least, require

EVAL_FRACTION = Rule(lambda share: 0 < share < 1, "must be between 0 and 1")
PROMPT_WORDS = at_least(1)
COLUMN = Rule(bool, "must name a column")
SCORE = "score"
"""The column with a rating, unless the user says otherwise."""


def check_one_held_out(eval_data: str | None, eval_fraction: float | None, group: str = "") -> None:
    """Require at most one of the two ways to hold data out.

    Raises:
        ConfigError: both are given.
    """
    right = f"must be null with {group}eval, which names the held-out data"
    require(eval_data is None or eval_fraction is None, f"{group}eval_fraction", eval_fraction, right)


def check_prompt_words(prompt_words: int | None, prompt_field: str, group: str = "") -> None:
    """Require that no column is named for prompts that are the first words of `text`.

    Raises:
        ConfigError: one is.
    """
    right = f"must be left out with {group}prompt_words, which takes the prompt from `text`"
    require(prompt_words is None or prompt_field == "query", f"{group}prompt_field", prompt_field, right)
