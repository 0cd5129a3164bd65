"""Repeats a part of a run, and keeps what is asked of it: one update, what its batch does later, and other scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from async_rlhf.commands.train import make_trainer
from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.config.parallel import launched_ranks
from async_rlhf.config.parsing import parse
from async_rlhf.config.yaml_text import read_yaml
from async_rlhf.distributed.parallel import trainable
from async_rlhf.learner.learner import Learner
from async_rlhf.models.context_length import with_prompt_cap
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.run.config import RunConfig
from async_rlhf.run.episodes import EPISODES
from async_rlhf.run.folder import METRICS, Checkpoints
from async_rlhf.run.record import ENVIRONMENT, RUN_FILE, first_time, starts_of, unnamed_in
from async_rlhf.run.rollouts import sample_numbers
from async_rlhf.run.trainer import train
from async_rlhf.studies.explain.explanation import number
from async_rlhf.studies.explain.omission import Omission, Omissions
from async_rlhf.studies.explain.update import RepeatableUpdate, clones, difference, inner, norm
from async_rlhf.studies.report.reading import json_lines
from async_rlhf.system.errors import DiffersError
from async_rlhf.types import Batch, Experience, ScoredBatch

Line: TypeAlias = dict[str, float]
"""Of metrics.jsonl, without times."""


class RepetitionDiffersError(DiffersError):
    """The metrics of what was repeated differ from those of the run."""


def read_run(run: str) -> RunConfig:
    """The configuration of a run, by its output folder. It must say all that is needed to repeat the run.

    Raises:
        ConfigError: there is no run, or it cannot be repeated from its record.
    """
    folder = Path(run)
    if not (folder / RUN_FILE).is_file() or not (folder / METRICS).is_file():
        raise ConfigError(f"run: got {run!r}; must be the output folder of a run, with {RUN_FILE} in it")
    read_yaml(str(folder / RUN_FILE), "run")  # refused here if it is none, or no text
    objects = unnamed_in(folder / RUN_FILE)
    if objects:
        why = f"was started from Python with objects that {RUN_FILE} cannot name ({'; '.join(objects)})"
        raise ConfigError(f"run: {run!r} {why}, and cannot be explained")
    original, _ = parse(RunConfig, "train", ["--config", str(folder / RUN_FILE)])
    how = original.train.generation
    for key, unknown in (("seed_per_request", not how.seed_per_request), ("in_flight", how.in_flight)):
        if unknown:
            why = f"sampled with train.generation.{key} {str(key == 'in_flight').lower()}"
            raise ConfigError(f"run: {run!r} {why}, so that nothing says what was drawn, and cannot be explained")
    chat = replace(original.train.chat, now=original.train.chat.now or first_time(folder))
    return replace(original, train=replace(original.train, chat=chat))


def read_metrics(folder: Path) -> dict[int, Line]:
    """The metrics of each batch that a run has trained on, without times. A line that was written only in part is left
    out.
    """
    rows = (row for row in json_lines(folder / METRICS, []) if "completions" in row)
    return {
        int(row["batch"]): {key: x for key, x in row.items() if not key.startswith("time/") and key != "eps"}
        for row in rows
    }


def started_in(run: Path, output_dir: str) -> Path:
    """The folder that a run was started in, if its output folder is still there below it; else the current one."""
    path = Path(output_dir)
    depth = len(path.parts)
    above = not path.is_absolute() and run.parts[-depth:] == path.parts
    return run.parents[depth - 1] if above else Path.cwd()


def require_one_rank(run: Path, original: RunConfig) -> None:
    """Require that a run's learner was one process.

    Raises:
        ConfigError: it had several ranks.
    """
    noted = [start.get("ranks") for start in starts_of(run / ENVIRONMENT) or ()]
    most = max([original.train.parallel.ranks, launched_ranks(), *(ranks for ranks in noted if isinstance(ranks, int))])
    if most > 1:
        raise ConfigError(
            f"run: {str(run)!r} has a learner on {most} ranks; must be on one: an update is explained where one "
            "process has all weights and all rows"
        )


def checkpoint_before(run: Path, original: RunConfig, batch: int) -> Path | None:
    """What a run is repeated from, to see a batch: its newest checkpoint before it; None for its beginning.

    Raises:
        ConfigError: the run began elsewhere, and has no checkpoint of its own before that batch.
    """
    checkpoint = Checkpoints(run).newest_whole(until=batch - 1)
    if checkpoint is None and original.train.resume_from is not None:
        why = f"was branched from a checkpoint of another run, and has none of its own before batch {batch}"
        raise ConfigError(f"run: {str(run)!r} {why}; must have one, to be repeated there")
    return checkpoint


def require_equal(ours: Mapping[int, Line], logged: Mapping[int, Line], batch: int) -> None:
    """Require that what was repeated equals what the run had logged.

    Raises:
        RepetitionDiffersError: names the first difference, and how to leave out batches after the one of interest.
    """
    for each in sorted(ours.keys() & logged.keys()):
        actual, expected = ours[each], logged[each]
        keys = [key for key in expected if actual.get(key) != expected[key]]
        if keys:
            raise RepetitionDiffersError(
                f"batch {each}: {keys[0]} is {actual.get(keys[0])!r}, was {expected[keys[0]]!r} ({len(keys)} metrics "
                f"differ){f'; --after 0 repeats no batch after {batch}' if each > batch else ''}"
            )


@dataclass(frozen=True)
class Otherwise:
    """What is to be otherwise in one batch of a run that is repeated; completions are counted from 1."""

    scores: Mapping[int, float] = field(default_factory=dict)
    """Of completions."""
    without: Sequence[int] = ()
    """Completions whose weight in the loss is 0."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the objective, with dots."""

    def __bool__(self) -> bool:
        return bool(self.scores or self.without or self.settings)

    def experience(self, experience: Experience, scored: ScoredBatch) -> Experience:
        """The rows, without weight for those that are left out, and for the other one of a pair."""
        rows = [row for row, number in enumerate(sample_numbers(experience, scored)) if number + 1 in self.without]
        loss_weights_U = experience.loss_weights_U.clone()
        loss_weights_U[[row // experience.rows_per_unit for row in rows]] = 0.0
        return replace(experience, loss_weights_U=loss_weights_U)


@dataclass(frozen=True)
class Part:
    """Which batches of a run are repeated, and what for.

    The run is repeated from a checkpoint, or from its beginning, through batch ``last``.
    """

    run: Path
    original: RunConfig
    checkpoint: Path | None
    batch: int
    """That is explained."""
    last: int
    window: range
    """The batches that are left out in turn, up to ``batch``; empty for none."""

    def config(self, scratch: Path, anew: bool = False) -> RunConfig:
        """The run's configuration, to be repeated in a folder: it saves no checkpoints, and sends nothing anywhere. Its
        environments say what they said, unless they are asked ``anew``.
        """
        train, replies = self.original.train, self.run / EPISODES
        changes: dict[str, Any] = {
            field.name: field.default for field in fields(train) if field.name.startswith("hub_")
        }
        changes |= {"push_to_hub": False, "report_to": [], "save_steps": 0, "logging_steps": 1, "trace": False}
        changes["rollouts"] = "logged"
        changes |= {"resume": False, "resume_from": None if self.checkpoint is None else str(self.checkpoint)}
        if replies.is_file() and not anew:
            changes["generation"] = replace(train.generation, replies_from=str(replies))
        train = replace(train, output_dir=str(scratch / "run"), **changes)
        return replace(self.original, train=with_prompt_cap(train, self.original.model))


class _Witness:
    """A scorer that keeps batches as they were scored, and is else the one that it wraps.

    Args:
        scorer: that it wraps.
        first: the first batch that is kept.
        scores: of that batch's completions, counted from 1, where they are to be others.
    """

    def __init__(self, scorer: Scorer, first: int, scores: Mapping[int, float]) -> None:
        self._scorer, self._first, self._scores = scorer, first, scores
        self.seen: dict[int, ScoredBatch] = {}

    def __call__(self, batch: Batch) -> ScoredBatch:
        if batch.index == self._first and self._scores:
            vars(self._scorer)["total"] = self._total  # before the metrics are computed from it
        scored = self._scorer(batch)
        vars(self._scorer).pop("total", None)
        if batch.index >= self._first:
            self.seen[batch.index] = scored
        return scored

    def _total(self, *args: Any) -> Tensor:
        scores_R = type(self._scorer).total(self._scorer, *args)
        for completion, score in self._scores.items():
            scores_R[completion - 1] = score
        return scores_R

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)


def share(missing: Sequence[Tensor], way: Sequence[Tensor]) -> float | None:
    """How much of the way of some weights would be missing, along it: 1 if all of it. None if there is no way."""
    length = inner(way, way)
    return inner(missing, way) / length if length else None


def with_keys(config: Any, keys: Mapping[str, Any]) -> Any:
    """A configuration with other values of keys of its objective, with dots.

    Raises:
        ConfigError: a key is not one of the objective, or its value is none.
    """
    own = {item.name for item in fields(type(config))} - {item.name for item in fields(OnlineConfig)}
    for name, value in keys.items():
        group, _, inner = name.partition(".")
        rule = f"must be keys of the objective: {', '.join(sorted(own))}"
        require(group in own, "settings", name, rule)
        config = replace(config, **{group: replace(getattr(config, group), **{inner: value}) if inner else value})
    return config


class Course(NamedTuple):
    """What became of a run from a batch on, by the number of the batch."""

    scored: dict[int, ScoredBatch]
    weights: dict[int, list[Tensor]]
    """Of what is trained of the policy, after each batch, and before the first: on the CPU. Empty unless asked for."""
    metrics: dict[int, Line]
    """Of all batches that were repeated."""


class Repetition(TrainerCallback):
    """A run that is repeated through a batch, and a few more: it keeps the learner as it is before the batch, and what
    becomes of the policy from then on, and ends the run.

    Args:
        part: what of a run.
        scratch: a folder that is not there yet.
        keep: whether the weights after each batch are kept.
        otherwise: what is to be otherwise in the batch, where environments are asked anew.

    Raises:
        RepetitionDiffersError: a callback has stopped the run before the batch.
    """

    update: RepeatableUpdate
    course: Course
    end: list[Tensor]
    end_without: list[Tensor]
    """The policy after the last batch that was repeated, and what it would be without the gradient of this one."""
    _own: Omission

    def __init__(self, part: Part, scratch: Path, keep: bool = False, otherwise: Otherwise | None = None) -> None:
        scratch.mkdir()
        self._otherwise = otherwise or Otherwise()
        config = part.config(scratch, anew=bool(otherwise))
        self._part, self._keep = part, keep
        self.trainer = make_trainer(config)
        self._omissions = Omissions(self.trainer.learner)
        self._policy = trainable(self.trainer.learner.policy)
        self._window: list[Omission] = []
        self.start: list[Tensor] = []
        """The policy before the batches that are left out in turn."""
        self.after: list[Tensor] = []
        """The policy after the batch."""
        self.without: list[tuple[range, list[Tensor]]] = []
        """The policy after this batch, without the gradients of some: of all in the window, then of each in turn."""
        self._kept: dict[int, list[Tensor]] = {}
        self.later: list[dict[str, Any]] = []
        """For each batch from this one on, how far the weights are from those without the gradient of this one:
        ``size`` in norms of this batch's step, and ``share`` of the way since before it."""
        witness = self._witness = _Witness(self.trainer.run.scorer, part.batch, self._otherwise.scores)
        self.trainer.add_callback(self)
        train(replace(self.trainer.run, scorer=cast(Scorer, witness)))
        self._omissions.followed = []
        if not self.after:
            raise RepetitionDiffersError(f"the run has ended before batch {part.batch}: a callback has stopped it")
        self.course = Course(witness.seen, self._kept, read_metrics(Path(config.train.output_dir)))
        self.end = clones(self._policy)
        self.end_without = self._own.weights(self._policy)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before a batch is scored."""
        batch, part = state.global_step + 1, self._part
        self._omissions.batch = batch
        if part.window and batch == part.window.start:
            self.start = clones(self._policy)
            self._window = [self._omissions.follow(part.window)]
        if batch in part.window:
            self._window.append(self._omissions.follow(range(batch, batch + 1)))
        if batch == part.batch:
            self.update = RepeatableUpdate(self.trainer.learner, batch)
            self._own = self._omissions.follow(range(batch, batch + 1))
            self._note(batch - 1)
            if self._otherwise:
                self._change(self.trainer.learner)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the update."""
        batch = state.global_step
        if batch < self._part.batch:
            return
        if batch == self._part.batch:
            vars(self.trainer.learner).pop("annotate", None)
            self.trainer.learner.config = self.trainer.args
            self.after = clones(self._policy)
            self.without = [(each.batches, each.weights(self._policy)) for each in self._window]
            self._window, self._omissions.followed = [], [self._own]
        self._note(batch)
        missing, way = difference(self._policy, self._own.weights(self._policy)), self.update.step_to(self._policy)
        size = norm(missing) / (norm(self.update.step_to(self.after)) or math.nan)
        self.later.append({"batch": batch, "size": number(size), "share": share(missing, way)})
        control.should_training_stop = control.should_training_stop or batch == self._part.last

    def _change(self, learner: Learner) -> None:
        """Have the learner see this batch with what is to be otherwise."""
        annotate = learner.annotate
        learner.config = with_keys(learner.config, self._otherwise.settings)

        def changed(scored: ScoredBatch) -> tuple[Experience, dict[str, float]]:
            experience, metrics = annotate(scored)
            return self._otherwise.experience(experience, scored), metrics

        vars(learner)["annotate"] = changed

    def _note(self, batch: int) -> None:
        if self._keep:
            self._kept[batch] = [parameter.detach().to("cpu", copy=True) for parameter in self._policy]
