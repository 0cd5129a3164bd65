"""Labels that people give late: what they are asked, what they have said, and in which order batches are trained on.

    RUN/feedback/questions.jsonl   the questions that are open now, written whole
    RUN/feedback/answers.jsonl     what people have said; only ever appended to, by `async-rlhf feedback` or other tools
    RUN/feedback/asked.jsonl       the questions of batches that have been trained on
    RUN/feedback.jsonl             the labels that each batch was trained on, which is what a replay repeats

A question is known by a fingerprint of its texts. So a run that is resumed, or done again, and asks the same again has
its answers at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError, FeedbackConfig
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.run.episodes import conversation, episode_fields
from async_rlhf.run.folder import FEEDBACK
from async_rlhf.run.schedule import version_for
from async_rlhf.system.files import write_file
from async_rlhf.types import Batch, Group, Labels, Sample

logger = logging.getLogger(__name__)

QUESTIONS, ANSWERS, ASKED = (Path("feedback") / f"{name}.jsonl" for name in ("questions", "answers", "asked"))
TIE = "tie"
STARS = 5
Said = int | Literal["tie"]
"""Of a comparison, the number of the better completion, 0 or 1, or a tie; of a rating, the stars."""


@dataclass(frozen=True)
class Question:
    """What people are asked: which of two completions is the better one, or how good one is."""

    ask: Literal["compare", "rate"]
    prompt: str
    completions: tuple[str, ...]
    answers: int = 1
    """People who have to answer."""
    batch: int = 0
    """The number of its batch, in the order of sampling."""

    @cached_property
    def id(self) -> str:
        """A fingerprint of what is asked."""
        asked = json.dumps([self.ask, self.prompt, self.completions])
        return hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()[:16]

    def row(self) -> dict[str, Any]:
        """As it stands in files, and in the answers of the server."""
        return {"id": self.id, **asdict(self), "completions": list(self.completions)}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Question:
        """The other way round."""
        values = {name: value for name, value in row.items() if name in cls.__dataclass_fields__}
        return cls(**{**values, "completions": tuple(row["completions"])})

    def wrong(self, said: object) -> str | None:
        """Why an answer cannot be one to this question; None if it can."""
        if self.ask == "rate":
            right, fine = f"must be a whole number from 1 to {STARS}", type(said) is int and 1 <= said <= STARS
        else:
            right, fine = f'must be 0, 1 or "{TIE}"', said == TIE or (type(said) is int and said in (0, 1))
        return None if fine else right

    def label(self, said: Said) -> float:
        """From 0 to 1: of the first completion, or the only one."""
        if self.ask == "rate":
            return (int(said) - 1) / (STARS - 1)
        return 0.5 if said == TIE else 1.0 - int(said)


class Answers:
    """What people have said, by question and person. The last word of each counts.

    Args:
        path: a file that grows, and may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._lines = path, 0, 0
        self._said: dict[str, dict[str, list[Any]]] = {}
        self._warned: set[tuple[str, str, str]] = set()

    def refresh(self) -> int:
        """Read what has been added. Lines that cannot be answers are passed over, with a warning.

        Returns:
            How many lines there are.
        """
        if not self._path.is_file():
            return self._lines
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._read:  # somebody has made it shorter
                self._read, self._lines, self._said = 0, 0, {}
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for row in rows_of(whole):
            self._lines += 1
            if row is None:
                right = "must be an object with id, annotator and answer"
                logger.warning("WARNING: %s, line %d: %s; it is passed over", self._path, self._lines, right)
            else:
                self._said.setdefault(row["id"], {}).setdefault(row["annotator"], []).append(row["answer"])
        return self._lines

    def of(self, question: Question) -> dict[str, Said]:
        """What was said, by person. What cannot be an answer to the question does not count, with a warning."""
        found = {}
        for who, words in self._said.get(question.id, {}).items():
            for said in words:
                if (right := question.wrong(said)) is None:
                    found[who] = said
                elif (told := (question.id, who, repr(said))) not in self._warned:
                    self._warned.add(told)
                    logger.warning("WARNING: %s: answer %r of %s to %s: %s", self._path, said, who, question.id, right)
        return found

    def label(self, question: Question) -> float | None:
        """The mean of the labels; None if nobody has answered."""
        said = self.of(question).values()
        return fmean(map(question.label, said)) if said else None

    def missing(self, questions: Iterable[Question]) -> list[Question]:
        """The questions that too few people have answered."""
        return [question for question in questions if len(self.of(question)) < question.answers]


def rows_of(lines: bytes) -> Iterator[dict[str, Any] | None]:
    """The answers in whole lines of JSON; None for a line that is none."""
    for line in lines.split(b"\n")[:-1]:
        try:
            row = json.loads(line)
            if not isinstance(row["id"], str):
                raise TypeError("no fingerprint")
            # An annotator may be a number, elsewhere.
            yield {**row, "annotator": str(row["annotator"]), "answer": row["answer"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            yield None


class _Asked(NamedTuple):
    """What is asked about a prompt's completions."""

    samples: int
    questions: Mapping[tuple[int, ...], Question]
    """By the numbers of their completions. Two that are the same text need no comparison."""

    def labels(self, answers: Answers) -> tuple[float | None, ...]:
        """Of each completion, the mean of what was said of it."""
        found: list[list[float]] = [[] for _ in range(self.samples)]
        compared = {numbers for numbers in self.questions if len(numbers) == 2}
        for numbers, question in self.questions.items():
            label = answers.label(question)
            if label is not None:
                for number, its in zip(numbers, (label, 1 - label), strict=False):
                    found[number].append(its)
        if compared or not self.questions:
            for pair in set(combinations(range(self.samples), 2)) - compared:
                for number in pair:
                    found[number].append(0.5)
        return tuple(fmean(each) if each else None for each in found)


@dataclass
class Feedback:
    """Asks about batches as they are sampled, and says which one is trained on next. Of rank 0.

    Args:
        config: what is asked.
        folder: of the run.
        staleness: S.
        prompts: of a batch.
        tokenizer: of the policy.
        prompt_field: the column with the prompt's text.
        recorded: labels that are repeated, by the batch that was trained on them.
    """

    config: FeedbackConfig
    folder: Path
    staleness: int
    prompts: int
    tokenizer: PreTrainedTokenizerBase
    prompt_field: str
    recorded: Mapping[int, Labels]
    _asked: dict[int, dict[int, _Asked]] = field(default_factory=dict)
    """By batch and number of the prompt."""
    _collected: dict[int, str] = field(default_factory=dict)
    """Fingerprints of the batches that have been collected."""
    _unwritten: set[int] = field(default_factory=set)
    """The batches whose questions are not in the file yet."""
    _taken: set[int] = field(default_factory=set)
    """The batches that are trained on, or were."""
    _alone: threading.Lock = field(default_factory=threading.Lock)
    _told: int = 0
    """The last step whose waiting was logged."""
    _seen: tuple[int, ...] = ()
    """What there was when no batch had its labels."""

    def __post_init__(self) -> None:
        self.answers = Answers(self.folder / ANSWERS)
        self._write()

    def arrived(self, index: int, first: int, groups: Sequence[Group]) -> None:
        """Ask about prompts that have been sampled, from the batch's prompt number ``first`` on. From any thread: an
        error is left to :meth:`next`, which does the same once the batch is collected, and so checked.
        """
        try:
            self._ask(index, first, groups)
        except Exception as error:
            logger.debug("batch %d is asked about when it is collected: %s", index, error)

    def _ask(self, index: int, first: int, groups: Sequence[Group]) -> None:
        if index <= 0 or index in self._taken or self.config.labels_from is not None:  # below 1: held-out answers
            return
        asked = {first + number: self._questions(index, group) for number, group in enumerate(groups)}
        with self._alone:
            here = self._asked.setdefault(index, {})
            if asked != {number: here.get(number) for number in asked}:
                here |= asked
                self._unwritten.add(index)
            if index in self._unwritten and self._is_sampled(index):
                self._write()

    def close(self) -> None:
        """Nothing is asked any more: the run has ended."""
        self._asked.clear()
        self._write()

    def next(self, step: int, waiting: Mapping[int, Batch | None]) -> Labels | None:
        """The batch to train on now, and its labels; None while there is none that has all of them.

        Args:
            step: the number of the batch in the order of training.
            waiting: the batches that have been asked for, in order; None where they are still being sampled.
        """
        for index, batch in waiting.items():
            if batch is not None and index not in self._collected:  # what has arrived may be of a worker that died
                self._collected[index] = fingerprint(batch)
                self._ask(index, 0, batch.groups)
        if step in self.recorded and (number := self.recorded[step].sampled_as) in waiting:
            if waiting[number] is None:
                return None  # it is collected next, and compared
            if self._collected[number] == self.recorded[step].completions:
                return self._take(self.recorded[step])
        if self.config.labels_from is not None:
            why = "has labels of other completions for" if step in self.recorded else "has no labels for"
            raise RuntimeError(f"feedback.labels_from: {self.config.labels_from!r} {why} batch {step}")
        if step in self.recorded:
            logger.warning("WARNING: batch %d was labelled with other completions; people are asked again", step)
            self.recorded = {}
        seen = (step, self.answers.refresh(), sum(map(len, self._asked.values())), len(self._collected))
        if seen == self._seen:
            return None
        labelled = [index for index in waiting if self._is_sampled(index) and not self._missing([index])]
        if not labelled:
            self._tell(step, waiting)
            self._seen = seen
            return None
        fine = (i for i in labelled if self._may_wait(step, [other for other in waiting if other != i]))
        chosen = next(fine, min(waiting, key=self._latest))
        return self._take(self._labels(chosen)) if self._collected.get(chosen) else None

    def _latest(self, index: int) -> float:
        """The last step at which a batch is not too old to be trained on."""
        most = math.inf if self.config.max_lag is None else self.config.max_lag
        return most + 1 + version_for(index, self.staleness)

    def _may_wait(self, step: int, batches: Sequence[int]) -> bool:
        """Whether each of these can still be trained on in time after a step, one at each step."""
        latest = sorted(map(self._latest, batches))
        return all(last >= step + number for number, last in enumerate(latest, 1))

    def _is_sampled(self, index: int) -> bool:
        return len(self._asked.get(index, ())) == self.prompts

    def _missing(self, batches: Iterable[int]) -> list[Question]:
        return self.answers.missing(self._open(batches))

    def _open(self, batches: Iterable[int]) -> Iterator[Question]:
        for index in batches:
            for asked in self._asked.get(index, {}).values():
                yield from asked.questions.values()

    def _labels(self, index: int) -> Labels:
        rewards_PK = tuple(asked.labels(self.answers) for _, asked in sorted(self._asked[index].items()))
        return Labels(index, rewards_PK, self._collected[index])

    def _take(self, labels: Labels) -> Labels:
        with self._alone:
            self._taken.add(labels.sampled_as)
            if questions := [*self._open([labels.sampled_as])]:
                with (self.folder / ASKED).open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(question.row()) + "\n" for question in questions)
            self._asked.pop(labels.sampled_as, None)
            self._write()
        return labels

    def _tell(self, step: int, waiting: Mapping[int, Batch | None]) -> None:
        """Once for each step, say who is waited for."""
        if self._told < step and all(waiting.values()):
            self._told = step
            count, missing = len(list(self._open(waiting))), len(self._missing(waiting))
            told = "batch %d waits for people: %d of %d questions have no answer yet; async-rlhf feedback %s asks them"
            logger.info(told, step, missing, count, self.folder)

    def _questions(self, index: int, group: Group) -> _Asked:
        row = group.prompt.columns[self.prompt_field]
        prompt = row if isinstance(row, str) else conversation(row, ())
        texts = [self._text(sample, plain) for sample, plain in zip(group.samples, self._decode(group), strict=True)]
        size = 1 if self.config.ask == "rate" else 2
        found = {}
        for numbers in combinations(range(len(texts)), size):
            completions = tuple(texts[number] for number in numbers)
            if len(set(completions)) == size:
                assert self.config.ask is not None
                found[numbers] = Question(self.config.ask, prompt, completions, self.config.answers, index)
        return _Asked(len(texts), found)

    def _decode(self, group: Group) -> list[str]:
        return decode_samples(self.tokenizer, group.samples)

    @staticmethod
    def _text(sample: Sample, plain: str) -> str:
        """What people see of a completion: of an episode all that was said."""
        fields = episode_fields(sample)
        return conversation(fields["messages"], ()) if fields else plain

    def _write(self) -> None:
        """The open questions, the oldest first."""
        unique = {question.id: question for question in self._open(sorted(self._asked))}
        lines = (json.dumps(question.row()) + "\n" for question in unique.values())
        write_file(self.folder / QUESTIONS, "".join(lines))
        self._unwritten = {index for index in self._asked if not self._is_sampled(index)}


def fingerprint(batch: Batch) -> str:
    """Of a batch's completions."""
    found = hashlib.sha256()
    for sample in batch.samples:
        found.update(sample.tokens.tobytes() + b"\n")
    return found.hexdigest()[:16]


def read_labels(path: Path) -> dict[int, Labels]:
    """The labels that batches were trained on, in a file as a run writes it.

    Raises:
        ConfigError: the file cannot be read, or is none of a run.
    """
    found: dict[int, Labels] = {}
    try:
        text = path.read_text(encoding="utf-8")
        for row in map(json.loads, text[: text.rfind("\n") + 1].splitlines()):
            # A batch that was trained on otherwise, after all: what followed it is no more.
            found = {batch: labels for batch, labels in found.items() if batch < row["batch"]}
            rewards_PK = tuple(tuple(labels) for labels in row["labels"])
            found[row["batch"]] = Labels(row["sampled_as"], rewards_PK, row["completions"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        right = f"must be the {FEEDBACK} of a run"
        raise ConfigError(f"feedback.labels_from: got {str(path)!r}; {right}: {error}") from error
    return found


def labels_row(batch: Batch) -> dict[str, Any]:
    """A line of the file that :func:`read_labels` reads."""
    labels = batch.labels
    assert labels is not None
    names = {"batch": batch.index, "sampled_as": labels.sampled_as, "completions": labels.completions}
    return {**names, "labels": labels.rewards_PK}
