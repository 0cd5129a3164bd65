"""Labels that people give late: what they are asked, what they have said, and in which order batches are trained on.

    RUN/feedback/questions.jsonl   the questions that are open now, written whole
    RUN/feedback/answers.jsonl     what people have said; only ever appended to, by `async-rlhf feedback` or other tools
    RUN/feedback.jsonl             the labels that each batch was trained on, which is what a replay repeats

A question is known by a fingerprint of its texts. So a run that is resumed, or done again, and asks the same again has
its answers at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from async_rlhf.system.files import whole_file
from async_rlhf.types import Batch, Group, Labels, Sample

logger = logging.getLogger(__name__)

QUESTIONS, ANSWERS = Path("feedback") / "questions.jsonl", Path("feedback") / "answers.jsonl"
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

    @property
    def id(self) -> str:
        """A fingerprint of what is asked."""
        asked = json.dumps([self.ask, self.prompt, self.completions])
        return hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()[:16]

    def row(self) -> dict[str, Any]:
        """As it stands in files, and in the answers of the server."""
        return {"id": self.id, **vars(self), "completions": list(self.completions)}

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
        self._said: dict[str, dict[str, Any]] = {}

    def refresh(self) -> None:
        """Read what has been added. Lines that cannot be answers are passed over, with a warning."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._lines += 1
            try:
                row = json.loads(line)
                self._said.setdefault(row["id"], {})[str(row["annotator"])] = row["answer"]
            except (ValueError, KeyError, TypeError, RecursionError):
                right = "must be an object with id, annotator and answer"
                logger.warning("WARNING: %s, line %d: %s; it is passed over", self._path, self._lines, right)

    def of(self, question: Question) -> dict[str, Said]:
        """What was said, by person; what cannot be an answer to the question is left out."""
        said = self._said.get(question.id, {})
        return {who: what for who, what in said.items() if question.wrong(what) is None}

    def label(self, question: Question) -> float | None:
        """The mean of the labels; None if nobody has answered."""
        said = self.of(question).values()
        return fmean(map(question.label, said)) if said else None

    def missing(self, questions: Iterable[Question]) -> list[Question]:
        """The questions that too few people have answered."""
        return [question for question in questions if len(self.of(question)) < question.answers]


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
    _whole: set[int] = field(default_factory=set)
    """The batches that have been collected."""
    _alone: threading.Lock = field(default_factory=threading.Lock)
    _told: int = 0
    """The last step whose waiting was logged."""

    def __post_init__(self) -> None:
        self.answers = Answers(self.folder / ANSWERS)
        self._write()

    def arrived(self, index: int, first: int, groups: Sequence[Group]) -> None:
        """Ask about prompts that have been sampled, from the batch's prompt number ``first`` on. From any thread."""
        if index <= 0 or self.config.labels_from is not None:  # held-out answers; nobody is asked
            return
        asked = {first + number: self._questions(index, group) for number, group in enumerate(groups)}
        with self._alone:
            here = self._asked.setdefault(index, {})
            if asked != {number: here.get(number) for number in asked}:
                here |= asked
                self._write()

    def next(self, step: int, waiting: Mapping[int, Batch | None]) -> Labels | None:
        """The batch to train on now, and its labels; None while there is none that has all of them.

        Args:
            step: the number of the batch in the order of training.
            waiting: the batches that have been asked for, in order; None where they are still being sampled.
        """
        for index, batch in waiting.items():
            if batch is not None and index not in self._whole:  # of inline sampling, or of a checkpoint; or all is said
                self._whole.add(index)
                self.arrived(index, 0, batch.groups)
        if step in self.recorded:
            return self._taken(self.recorded[step])
        if self.config.labels_from is not None:
            raise RuntimeError(f"{self.config.labels_from!r} has no labels for batch {step}")
        self.answers.refresh()
        labelled = [index for index in waiting if self._is_sampled(index) and not self._missing([index])]
        if not labelled:
            self._tell(step, waiting)
            return None
        fine = (i for i in labelled if self._may_wait(step, [other for other in waiting if other != i]))
        chosen = next(fine, min(waiting, key=self._latest))
        return self._taken(self._labels(chosen)) if self._is_sampled(chosen) else None

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
        return Labels(index, tuple(asked.labels(self.answers) for _, asked in sorted(self._asked[index].items())))

    def _taken(self, labels: Labels) -> Labels:
        with self._alone:
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
        return conversation(fields["messages"], fields["rewards"]) if fields else plain

    def _write(self) -> None:
        """The open questions, the oldest first."""
        unique = {question.id: question for question in self._open(sorted(self._asked))}
        with whole_file(self.folder / QUESTIONS) as file:
            for question in unique.values():
                file.write(json.dumps(question.row()) + "\n")


def read_labels(path: Path, after: int = 0, key: str = "feedback.labels_from") -> dict[int, Labels]:
    """The labels that batches were trained on, in a file as a run writes it, from the batch behind ``after`` on.

    Raises:
        ConfigError: the file cannot be read, or is none of a run.
    """
    try:
        text = path.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        found = {
            row["batch"]: Labels(row["sampled_as"], tuple(tuple(labels) for labels in row["labels"])) for row in rows
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: got {str(path)!r}; must be the {FEEDBACK} of a run: {error}") from error
    return {batch: labels for batch, labels in found.items() if batch > after}


def labels_row(batch: Batch) -> dict[str, Any]:
    """A line of the file that :func:`read_labels` reads."""
    assert batch.labels is not None
    return {"batch": batch.index, "sampled_as": batch.labels.sampled_as, "labels": batch.labels.rewards_PK}
