"""What a model thinks before it answers: the marks of today's families, and the answer without it."""

from __future__ import annotations

import re

THOUGHTS = {
    "<think>": "</think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "\N{WHITE LEFT-POINTING TRIANGLE}think\N{WHITE RIGHT-POINTING TRIANGLE}": (
        "\N{WHITE LEFT-POINTING TRIANGLE}/think\N{WHITE RIGHT-POINTING TRIANGLE}"
    ),
}
"""How a thought begins, and how it ends."""
MARKS = (*THOUGHTS, *THOUGHTS.values(), "<|channel|>analysis")
OPENED = re.compile(rf"({'|'.join(map(re.escape, THOUGHTS))})\s*\Z")
"""A prompt that begins a thought."""
_WHOLE = {
    end: re.compile(rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)", re.DOTALL) for begin, end in THOUGHTS.items()
}
_ENDED = re.compile(r"<\|(?:end|eom|return)\|>\s*\Z")


def answer_of(text: str, prompt: str = "") -> str:
    """A completion without what was thought, which the completion or the end of its prompt has begun; empty if it was
    cut off in its thought.
    """
    opened = OPENED.search(prompt)
    whole = (opened[1] if opened else "") + text
    if "<|message|>" in text or "<|channel|>analysis" in text:
        whole = by_channels(text)[1]
    for end, thought in _WHOLE.items():
        # An end without a beginning: of a thought within the thought, or after a prompt that is not here.
        whole = thought.sub("", whole).rpartition(end)[2]
    return text if whole == text else whole.lstrip("\n")


def by_channels(text: str) -> tuple[str, str]:
    """What a model thinks that says to whom it speaks (gpt-oss, Muse), and the rest; calls are left as they are."""
    thought, rest = "", ""
    for piece in text.split("<|start|>assistant"):
        head, spoken, body = piece.partition("<|message|>")
        said = _ENDED.sub("", body)
        if "analysis" in head or "to=self" in head:
            thought += said
        else:
            rest += piece if not spoken or re.search(r"to=(?!user)", head) else said
    return thought.strip(), rest
