"""What environments said, kept with a run: so it can be repeated although they would say something else now."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from async_rlhf.generation.episodes.environment import Message, Observation


class Replies:
    """Reads a run's episodes.jsonl (run/episodes.py), an episode at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._places = path, dict[tuple[int | None, int, int], int]()
        with path.open("rb") as file:
            while line := file.readline():
                row = json.loads(line)
                self._places[row["evaluated"], row["draw"], row["sample"]] = file.tell() - len(line)

    def of(self, evaluated: int | None, draw: int, sample: int) -> Recorded | None:
        """The environment of an episode, as it was; None if the run had no such episode."""
        offset = self._places.get((evaluated, draw, sample))
        if offset is None:
            return None
        with self._path.open("rb") as file:
            file.seek(offset)
            return Recorded(json.loads(file.readline()))


class Recorded:
    """An environment that says once more what another said.

    Args:
        row: of that file.
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
            raise ValueError(f"in the recorded run the policy wrote something else here, or this failed: {message}")
        done = self._turn == len(rewards) and self._row["finish_reason"] == "stop"
        # Those of the whole episode: of equal names the last counts.
        metrics = {name: value for name, value in self._row["metrics"].items() if name != "turns"}
        return Observation(self._next(), rewards[self._turn - 1], done, metrics)

    def close(self) -> None:
        """Nothing is held."""

    def _next(self) -> list[Message]:
        """What was said up to the policy's next message."""
        messages = list(takewhile(lambda message: message["role"] != "assistant", self._left))
        del self._left[: len(messages)]
        return messages
