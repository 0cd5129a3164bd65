"""A reward that differs between a random model's answers: nobody else's right ones are among them."""

from __future__ import annotations


def letters(completions: list[str], **columns: object) -> list[float]:
    """How many of them there are."""
    return [float(sum(map(str.isalpha, text))) for text in completions]
