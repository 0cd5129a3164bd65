"""Episodes in a run's files: who said what, and what it was worth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from async_rlhf.types import Group, Sample

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
            place = {"batch": batch, "evaluated": evaluated, "draw": group.prompt.draw, "sample": number}
            yield place | {"finish_reason": sample.finish_reason, **episode_fields(sample)}


def conversation(messages: Sequence[Mapping[str, Any]], rewards: Sequence[float | None]) -> str:
    """An episode for people to read: who says what, with calls of tools, and the rewards of the policy's messages."""
    lines, left = [], list(rewards)
    for message in reversed(messages):  # earlier ones of the assistant's may not be the policy's
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said = [str(message["content"]), *(f"{call['name']}({json.dumps(call['arguments'])})" for call in calls)]
        reward = left.pop() if left and message["role"] == "assistant" else None
        given = "" if reward is None else f" [{reward:g}]"
        lines.append(f"{message['role']}: {' '.join(filter(None, said))}{given}")
    return "\n".join(lines[::-1])


def episode_fields(sample: Sample) -> dict[str, Any]:
    """What an episode's row in a file has besides: its messages, the reward at the end of each answer (None where the
    environment failed), its metrics.
    """
    if sample.messages is None or sample.rewards is None:
        return {}
    ends = sample.sampled & ~np.append(sample.sampled[1:], False)
    rewards = [None if np.isnan(reward) else reward for reward in sample.rewards[ends].tolist()]
    return {"messages": list(sample.messages), "rewards": rewards, "metrics": dict(sample.metrics)}
