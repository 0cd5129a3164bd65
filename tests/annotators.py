"""People who label a run while it goes on, simulated: they answer each question after a delay of their own."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_rlhf.run.feedback import ANSWERS, QUESTIONS, Question

Opinion = Callable[[Question], Any]


def more_letters(question: Question) -> Any:
    """The better completion has more letters; stars grow with their number."""
    letters = [sum(c.isascii() and c.isalpha() for c in text) for text in question.completions]
    if question.ask == "rate":
        return 1 + min(4, letters[0] // 2)
    return "tie" if letters[0] == letters[1] else int(letters[1] > letters[0])


def open_questions(folder: Path) -> list[Question]:
    path = folder / QUESTIONS
    return [Question.of(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def say(folder: Path, question: Question, what: Any, who: str = "ada") -> None:
    with (folder / ANSWERS).open("a") as file:
        file.write(json.dumps({"id": question.id, "annotator": who, "answer": what}) + "\n")


class Annotator:
    """Answers in a thread.

    Args:
        folder: of the run.
        ready: whether a question is answered now, given the newest batch of which a question has been seen.
        opinion: what is answered.
        who: the annotator's name.
    """

    def __init__(
        self,
        folder: Path,
        ready: Callable[[Question, int], bool] = lambda question, newest: True,
        opinion: Opinion = more_letters,
        who: str = "ada",
    ) -> None:
        self.folder, self.ready, self.opinion, self.who = folder, ready, opinion, who
        self._ended = threading.Event()

    def _work(self) -> None:
        said: set[str] = set()
        newest = 0
        while not self._ended.wait(0.02):
            questions = open_questions(self.folder)
            newest = max([newest, *(question.batch for question in questions)])
            for question in questions:
                if question.id not in said and self.ready(question, newest):
                    said.add(question.id)
                    say(self.folder, question, self.opinion(question), self.who)

    @contextmanager
    def working(self) -> Iterator[None]:
        thread = threading.Thread(target=self._work)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()


def late(folder: Path, by: dict[int, int], **more: Any) -> Annotator:
    """One who answers at once, but about some batches only when a question of a given later batch is there."""
    return Annotator(folder, lambda question, newest: newest >= by.get(question.batch, 0), **more)


def random_times(seed: int, longest: float) -> Callable[[Question, int], bool]:
    """Each question is answered after seconds of its own."""
    drawn = random.Random(seed)
    due: dict[str, float] = {}

    def ready(question: Question, _newest: int) -> bool:
        return time.monotonic() >= due.setdefault(question.id, time.monotonic() + drawn.uniform(0, longest))

    return ready
