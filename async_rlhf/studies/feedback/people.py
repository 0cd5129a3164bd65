"""What people are asked, in which order, and how far they agree."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from async_rlhf.run.feedback import ANSWERS, ASKED, QUESTIONS, TIE, Answers, Question, Said, rows_of
from async_rlhf.system.files import naming

_LONGEST_NAME = 100


class WrongAnswerError(ValueError):
    """Something that cannot be taken for an answer; the message says what would be right."""


class People:
    """The questions of a run, and the answers to them. May be used from any thread.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._questions, self._path = folder / QUESTIONS, folder / ANSWERS
        self._answers = Answers(self._path)
        self._known: dict[str, Question] = {}
        """All that were open at some time, as somebody may still be thinking about them."""
        self._open: list[Question] = []
        self._mark: tuple[int, ...] | None = None
        """Of the file that they were read from."""
        self._alone = threading.Lock()

    def open(self) -> list[Question]:
        """The questions that too few people have answered, the oldest batch first."""
        with self._alone:
            return self._answers.missing(self._look())

    def next(self, annotator: str, skipped: Sequence[str] = ()) -> tuple[Question | None, int]:
        """The next question for a person, and how many there are; None for one who has answered all that are open.

        Args:
            annotator: the person.
            skipped: questions to be asked after all others.
        """
        with self._alone:
            questions = self._answers.missing(self._look())
            mine = [question for question in questions if annotator not in self._answers.of(question)]
        mine.sort(key=lambda question: question.id in skipped)  # else in their order
        return (mine[0] if mine else None), len(mine)

    def answer(self, row: Mapping[str, Any]) -> None:
        """Write down what a person has said.

        Raises:
            WrongAnswerError: it answers no question of this run.
        """
        if not isinstance(row, dict):
            raise WrongAnswerError("must be an object with id, annotator and answer")
        who = row.get("annotator")
        if not isinstance(who, str) or not 0 < len(who.strip()) <= _LONGEST_NAME:
            raise WrongAnswerError(f"annotator: got {who!r}; must be a name of at most {_LONGEST_NAME} characters")
        with self._alone:
            self._look()
            question = self._known.get(str(row.get("id")))
            if question is None:
                raise WrongAnswerError(f"id: got {row.get('id')!r}; must be that of a question that is or was open")
            if (right := question.wrong(row.get("answer"))) is not None:
                raise WrongAnswerError(f"answer: got {row.get('answer')!r}; {right}")
            said = {"id": question.id, "annotator": who.strip(), "answer": row["answer"], "time": time.time()}
            text = json.dumps(said | {name: question.row()[name] for name in ("ask", "prompt", "completions", "batch")})
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with naming(self._path), self._path.open("a+b") as file:  # of two servers each line stays whole
                file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                begin = b"" if file.read() in (b"", b"\n") else b"\n"  # somebody's line was cut off
                file.write(begin + f"{text}\n".encode())
                file.flush()
                os.fsync(file.fileno())

    def _look(self) -> list[Question]:
        self._answers.refresh()
        found = self._questions.stat() if self._questions.is_file() else None
        mark = None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)
        if mark != self._mark:
            text = "" if mark is None else self._questions.read_text(encoding="utf-8")
            self._open = [Question.of(json.loads(line)) for line in text.splitlines()]
            self._known |= {question.id: question for question in self._open}
            self._mark = mark
        return self._open


def shown_order(question: Question, annotator: str) -> list[int]:
    """In which order a person sees the completions: drawn, so that neither place is better in itself."""
    drawn = hashlib.sha256(f"{question.id} {annotator}".encode(errors="surrogatepass")).digest()[0]
    numbers = list(range(len(question.completions)))
    return numbers[::-1] if drawn % 2 else numbers


def said_by_all(folder: Path) -> list[tuple[Question, str, Said]]:
    """All answers of a run, with who gave them; the last word of each person."""
    texts = b"".join(path.read_bytes() for path in (folder / ASKED, folder / QUESTIONS) if path.is_file())
    found = [Question.of(json.loads(line)) for line in texts.split(b"\n") if line.endswith(b"}")]
    questions = {question.id: question for question in found}
    answers, last = folder / ANSWERS, {}
    for row in rows_of(answers.read_bytes() if answers.is_file() else b""):
        if row is None:
            continue
        with suppress(TypeError, KeyError):  # of a run whose questions are gone
            questions.setdefault(row["id"], Question.of(row))
        question = questions.get(row["id"])
        if question is not None and question.wrong(row["answer"]) is None:
            last[question.id, row["annotator"]] = question, row["annotator"], row["answer"]
    return list(last.values())


def agreement(said: Iterable[tuple[Question, str, Said]]) -> str:
    """One line: how many people have answered how much, and how far they agree where several have."""
    by_question: dict[str, list[float]] = {}
    people, kinds = set(), set()
    for question, who, what in said:
        by_question.setdefault(question.id, []).append(question.label(what))
        people.add(who)
        kinds.add(question.ask)
    count = sum(map(len, by_question.values()))
    told = f"{count} answers by {', '.join(sorted(people)) or 'nobody'} to {len(by_question)} questions"
    pairs = [pair for labels in by_question.values() for pair in combinations(labels, 2)]
    if not pairs:
        return f"{told}; no question was answered by two"
    same = sum(a == b for a, b in pairs) / len(pairs)
    if kinds == {"compare"}:
        alpha = krippendorff(list(by_question.values()), lambda a, b: float(a != b))
    else:
        alpha = krippendorff(list(by_question.values()), lambda a, b: (a - b) ** 2)
    return f"{told}; of {len(pairs)} pairs of answers to one question {same:.0%} are the same, alpha {alpha:.2f}"


def krippendorff(units: Sequence[Sequence[float]], distance: Callable[[float, float], float]) -> float:
    """Krippendorff's alpha: 1 for full agreement, 0 for that of chance. NaN if nothing could differ.

    1 - D_observed / D_expected, with D_observed the mean distance of values of one unit, each unit of m values counted
    m times, and D_expected that of any two values of all such units. (Krippendorff, Content Analysis, chapter 12.)

    Args:
        units: the values that each unit was given; those with fewer than two do not count.
        distance: of two values; 0 for equal ones.
    """
    units = [unit for unit in units if len(unit) > 1]
    values = [value for unit in units for value in unit]
    expected = sum(distance(a, b) for a, b in combinations(values, 2)) * 2 / (len(values) * (len(values) - 1))
    if expected == 0:
        return float("nan")
    observed = sum(sum(distance(a, b) for a, b in combinations(unit, 2)) * 2 / (len(unit) - 1) for unit in units)
    return 1 - observed / len(values) / expected


def pair_of(question: Question, said: Said) -> dict[str, str] | None:
    """A line of a file with preference pairs; None for a tie, or a rating."""
    if question.ask != "compare" or said == TIE:
        return None
    better = int(said)
    chosen, rejected = question.completions[better], question.completions[1 - better]
    return {"prompt": question.prompt, "chosen": chosen, "rejected": rejected}


def rating_of(question: Question, said: Said) -> dict[str, Any] | None:
    """A line of a file with ratings; None for a comparison."""
    if question.ask != "rate":
        return None
    return {"prompt": question.prompt, "completion": question.completions[0], "score": said}


LABEL_STUDIO = {
    "compare": '<View><Text name="prompt" value="$prompt"/><Pairwise name="better" toName="first,second"/>'
    '<Text name="first" value="$first"/><Text name="second" value="$second"/></View>',
    "rate": '<View><Text name="prompt" value="$prompt"/><Text name="completion" value="$completion"/>'
    '<Rating name="stars" toName="completion" maxRating="5"/></View>',
}
"""The labelling configuration that a project of Label Studio needs to import the tasks."""


def label_studio_tasks(said: Iterable[tuple[Question, str, Said]]) -> list[dict[str, Any]]:
    """Tasks with annotations, as Label Studio imports them: one for each question, with who gave them in its data, as
    an annotation can name only users that Label Studio has.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for question, who, what in said:
        compared = question.ask == "compare"
        names = ("first", "second") if compared else ("completion",)
        data = {"question": question.id, "prompt": question.prompt, "annotators": []}
        data |= zip(names, question.completions, strict=True)
        task = tasks.setdefault(question.id, {"data": data, "annotations": []})
        task["data"]["annotators"].append(who)
        if not compared:
            result = {"from_name": "stars", "to_name": "completion", "type": "rating", "value": {"rating": what}}
        elif what != TIE:
            value = {"selected": "left" if what == 0 else "right"}
            result = {"from_name": "better", "to_name": "first,second", "type": "pairwise", "value": value}
        else:
            result = None  # which Label Studio has no word for
        task["annotations"].append({"result": [] if result is None else [result]})
    return list(tasks.values())
