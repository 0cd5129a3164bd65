"""Repeats one update of a run, bit for bit, and says what moved the policy, and what would have moved it without."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.config.parallel import launched_ranks
from async_rlhf.generation.placement import shared_cores
from async_rlhf.run.config import RunConfig
from async_rlhf.run.episodes import EPISODES
from async_rlhf.run.folder import Checkpoints, batch_of
from async_rlhf.run.record import ENVIRONMENT
from async_rlhf.studies.explain.ablation import distance
from async_rlhf.studies.explain.config import ExplainConfig
from async_rlhf.studies.explain.explanation import explained
from async_rlhf.studies.explain.page import page
from async_rlhf.studies.explain.repetition import Course, Part, Repetition, share
from async_rlhf.studies.explain.rerun import (
    Line,
    RepetitionDiffersError,
    of_training,
    read_metrics,
    read_run,
    require_equal,
)
from async_rlhf.studies.explain.update import difference, norm
from async_rlhf.studies.explain.what_if import what_changes
from async_rlhf.system.files import write_file
from async_rlhf.types import Experience

logger = logging.getLogger(__name__)


def run_explain(config: ExplainConfig) -> dict[str, Any]:
    """Explain one update of a run. Nothing in the run's folder changes but ``explain``.

    Returns:
        What explain-BATCH.json holds.

    Raises:
        ConfigError: the run cannot be repeated, or has no such batch.
        RepetitionDiffersError: what was repeated is not what the run had logged.
    """
    run, original = Path(config.run), read_run(config.run)
    _require_one_rank(run, original)
    folder = run / "explain" if config.output_dir is None else Path(config.output_dir)
    files = [folder / f"explain-{config.batch}.{kind}" for kind in ("json", "txt")]
    for file in files:
        free = config.overwrite or not file.exists()
        require(free, "output_dir", str(folder), f"has {file.name} already; set overwrite, or choose another folder")
    logged = of_training(read_metrics(run))
    part = _part(config, run, original, max(logged, default=0))
    _require_answers(config, part)
    scores = {int(n): float(score) for n, score in config.what_if.items()}
    start = 0 if part.checkpoint is None else batch_of(part.checkpoint.name) or 0
    _say_from(part, start)
    with tempfile.TemporaryDirectory(prefix="explain-") as scratch:
        found = Repetition(part, Path(scratch, "run"), keep=bool(scores))
        ours = found.course.metrics
        both = [batch for batch in ours if batch in logged]
        _require_as_logged(ours, logged, config.batch)
        other = None
        if scores:
            logger.info("explain: repeats them with the scores of what_if")
            again = replace(part, window=range(0))
            other = Repetition(again, Path(scratch, "what_if"), keep=True, scores=scores).course
    account = {
        "run": str(run),
        "batch": config.batch,
        "algorithm": original.algorithm,
        "staleness": original.train.staleness,
        "repeated": {
            "from": None if part.checkpoint is None else part.checkpoint.name,
            "batches": config.batch - start,
            "after": max(ours) - config.batch,
            "compared": both,
        },
        **_taken_apart(found, config, scores, other),
    }
    _write(files, account, ours[config.batch])
    return account


def _part(config: ExplainConfig, run: Path, original: RunConfig, last: int) -> Part:
    """What is repeated of a run that has logged so many batches."""
    right = f"must be 1 to {last}, the last batch that {config.run!r} has logged"
    require(config.batch <= last, "batch", config.batch, right)
    first = max(1, config.batch - max(config.before, 1) + 1)
    checkpoint = Checkpoints(run).newest_whole(until=first - 1)
    if checkpoint is None and original.train.resume_from is not None:
        why = f"was branched from a checkpoint of another run, and has none of its own before batch {first}"
        raise ConfigError(f"run: {config.run!r} {why}; must have one, to be explained there")
    window = range(first, config.batch + 1) if config.before else range(0)
    return Part(run, original, checkpoint, config.batch, min(config.batch + config.after, last), window)


def _require_answers(config: ExplainConfig, part: Part) -> None:
    """Require that the batch has these completions, and that with other scores nobody has to answer anew."""
    train = part.original.train
    most = train.batch_size * train.samples_per_prompt
    highest = max(map(int, config.what_if), default=0)
    right = f"must be of completions 1 to {most}, which a batch of {config.run!r} has"
    require(highest <= most, "what_if", config.what_if, right)
    right = "must be empty for a run whose environments answered: they would be asked something else"
    require(not config.what_if or not (part.run / EPISODES).is_file(), "what_if", config.what_if, right)


def _require_one_rank(run: Path, original: RunConfig) -> None:
    path, ranks = run / ENVIRONMENT, original.train.parallel.ranks
    starts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    most = max([ranks, launched_ranks(), *(int(start.get("ranks", 1)) for start in starts)])
    if most > 1:
        raise ConfigError(
            f"run: {str(run)!r} has a learner on {most} ranks; must be on one: an update is explained where one "
            "process has all weights and all rows"
        )


def _require_as_logged(ours: Mapping[int, Line], logged: Mapping[int, Line], batch: int) -> None:
    """Require that what was repeated equals what the run had logged."""
    for after in (False, True):
        both = [each for each in ours if each in logged and (each > batch) is after]
        try:
            require_equal([ours[each] for each in both], [logged[each] for each in both])
        except RepetitionDiffersError as error:
            told = f"; --after 0 repeats no batch after {batch}" if after else ""
            raise RepetitionDiffersError(f"{error}{told}") from error


def _say_from(part: Part, start: int) -> None:
    count, later = part.batch - start, part.last - part.batch
    repeats, after = f"{count} {'batch' if count == 1 else 'batches'}", f", and {later} later" if later else ""
    if part.checkpoint is None:
        told = "explain: there is no checkpoint before batch %d; repeats %s from the beginning%s"
        logger.info(told, part.batch, repeats, after)
    else:
        logger.info("explain: repeats %s from %s%s", repeats, part.checkpoint.name, after)


def _taken_apart(
    found: Repetition, config: ExplainConfig, scores: Mapping[int, float], other: Course | None
) -> dict[str, Any]:
    """With as many threads as in training, for sums depend on them."""
    run, learner, update = found.trainer.run, found.trainer.learner, found.update
    with shared_cores(run.config, run.device):
        scored = found.course.scored[config.batch]
        experience = update.annotate(scored)
        again = update.take(experience)
        if not all(map(torch.equal, again, found.after)):
            raise RepetitionDiffersError("the update cannot be repeated bit for bit: on a GPU, set train.deterministic")
        logger.info("explain: the update repeats bit for bit; taking it apart")
        account = explained(update, scored, experience, run.scorer, run.tokenizer, found.after, config.top)
        account["later"] = found.later
        found.later[-1]["kl_per_token"] = distance(update, experience, found.end, found.end_without).kl
        account["before"] = _ranked(found, experience) if found.without else None
        account["what_if"] = None if other is None else what_changes(found, other, experience, scores)
    learner.optimizer.zero_grad()
    return account


def _ranked(found: Repetition, experience: Experience) -> dict[str, Any]:
    """The batches that were left out in turn, by their share of the way of all, and the share of those before them."""
    way, rows = difference(found.after, found.start), []
    for batches, weights in found.without:
        kl = distance(found.update, experience, found.after, weights).kl
        rows.append({"batch": batches[-1], "share": share(difference(found.after, weights), way), "kl_per_token": kl})
    together, *rows = rows
    rest = None if together["share"] is None else 1 - together["share"]
    rows.sort(key=lambda row: -(row["share"] or 0.0))
    return {"norm": norm(way), "earlier": rest, "batches": rows}


def _write(files: Sequence[Path], account: dict[str, Any], metrics: Line) -> None:
    text = page(account)
    account["metrics"] = metrics
    write_file(files[0], json.dumps(account, indent=1, allow_nan=False) + "\n")
    write_file(files[1], text)
    print(text)
    logger.info("explain: written to %s and %s", *files)
