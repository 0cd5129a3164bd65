"""Episodes in a run's files: who said what, and what it was worth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from async_rlhf.types import Group

EPISODES = "episodes.jsonl"
"""All episodes of a run, of its evaluations too."""


def episode_rows(batch: int, groups: Sequence[Group], evaluated: int | None = None) -> Iterator[dict[str, Any]]:
    """A row for each episode.

    Args:
        batch: its number, or that of the batch after which they were asked for.
        groups: prompts and their episodes.
        evaluated: the version that was evaluated with them; None for a batch.
    """
    for group in groups:
        for number, sample in enumerate(group.samples):
            key = {"batch": batch, "evaluated": evaluated, "draw": group.prompt.draw, "sample": number}
            yield key | {"finish_reason": sample.finish_reason, **sample.episode}


def conversation(messages: Sequence[Mapping[str, Any]], rewards: Sequence[float | None]) -> str:
    """An episode for people to read: who says what, with calls of tools, and the rewards of the policy's messages."""
    lines, left = [], list(rewards)
    for message in reversed(messages):  # earlier ones of the assistant's may not be the policy's
        calls = [call["function"] for call in message.get("tool_calls", ())]
        written = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
        reward = left.pop() if left and message["role"] == "assistant" else None
        reward_text = [] if reward is None else [f"[{reward:g}]"]
        who = f"{message['role']} {message.get('name') or ''}".rstrip()
        said = " ".join(filter(None, (str(message["content"]).strip("\n"), *written, *reward_text)))
        lines.append(f"{who}: {said}".replace("\n", "\n  "))  # so that only roles begin a line
    return "\n".join(lines[::-1])
