"""What environments said, kept with a run: so it can be repeated although they would say something else now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from async_rlhf.generation.episodes.environment import Message, Observation
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
            yield place | {
                "messages": list(sample.messages or ()),
                "rewards": rewards_of_turns(sample),
                "finish_reason": sample.finish_reason,
                "metrics": dict(sample.metrics),
            }


def conversation(messages: Sequence[Mapping[str, Any]], rewards: Sequence[float | None]) -> str:
    """An episode for people to read: who says what, with calls of tools, and the rewards of the policy's messages."""
    lines, left = [], iter(rewards)
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said = [str(message["content"]), *(f"{call['name']}({json.dumps(call['arguments'])})" for call in calls)]
        reward = next(left, None) if message["role"] == "assistant" else None
        given = "" if reward is None else f" [{reward:g}]"
        lines.append(f"{message['role']}: {' '.join(filter(None, said))}{given}")
    return "\n".join(lines)


def rewards_of_turns(sample: Sample) -> list[float | None]:
    """The reward at the end of each answer; None where the environment failed."""
    if sample.rewards is None:
        return []
    ends = sample.sampled & ~np.append(sample.sampled[1:], False)
    return [None if np.isnan(reward) else reward for reward in sample.rewards[ends].tolist()]


class Replies:
    """Reads :data:`EPISODES` of a run, an episode at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._places = path, dict[tuple[int | None, int, int], int]()
        with path.open("rb") as file:
            while line := file.readline():
                row = json.loads(line)
                self._places[row["evaluated"], row["draw"], row["sample"]] = file.tell() - len(line)

    def of(self, evaluated: int | None, draw: int, sample: int) -> Recorded | None:
        """The environment of an episode, as it was; None if the run had no such episode."""
        place = self._places.get((evaluated, draw, sample))
        if place is None:
            return None
        with self._path.open("rb") as file:
            file.seek(place)
            return Recorded(json.loads(file.readline()))


class Recorded:
    """An environment that says once more what another said.

    Args:
        row: as :func:`episode_rows` has it.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row, self._left, self._turn = row, list(row["messages"]), 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """The opening."""
        return self._next()

    def step(self, message: Message) -> Observation:
        """The answer to a message, which must be the one that was answered.

        Raises:
            ValueError: it is another.
        """
        rewards, self._turn = self._row["rewards"], self._turn + 1
        if not self._left or self._left.pop(0) != message or rewards[self._turn - 1] is None:
            raise ValueError(f"the policy wrote something else in the recorded run, or that failed: {message}")
        done = self._turn == len(rewards) and self._row["finish_reason"] == "stop"
        # Those of the whole episode: of equal names the last counts.
        metrics = {name: value for name, value in self._row["metrics"].items() if name != "turns"}
        return Observation(self._next(), rewards[self._turn - 1], done, metrics)

    def close(self) -> None:
        """Nothing is held."""

    def _next(self) -> list[Message]:
        """What was said up to the policy's next message."""
        found = list(takewhile(lambda message: message["role"] != "assistant", self._left))
        del self._left[: len(found)]
        return found
