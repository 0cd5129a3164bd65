"""Repeats one update of a run, bit for bit, and says what moved the policy, and what would have moved it without."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rlhf.config.base import require
from async_rlhf.generation.placement import shared_cores
from async_rlhf.run.config import RunConfig
from async_rlhf.run.folder import METRICS, Checkpoints, batch_of
from async_rlhf.studies.explain.ablation import distance
from async_rlhf.studies.explain.config import ExplainConfig
from async_rlhf.studies.explain.explanation import explained, number
from async_rlhf.studies.explain.life import life
from async_rlhf.studies.explain.page import page
from async_rlhf.studies.explain.repetition import (
    Course,
    Line,
    Otherwise,
    Part,
    Repetition,
    RepetitionDiffersError,
    checkpoint_before,
    read_metrics,
    read_run,
    require_equal,
    require_one_rank,
    share,
    started_in,
    with_keys,
)
from async_rlhf.studies.explain.update import compared, difference, norm
from async_rlhf.studies.report.reading import json_lines
from async_rlhf.studies.templates import count
from async_rlhf.system.files import write_file
from async_rlhf.types import Experience, ScoredBatch

logger = logging.getLogger(__name__)

_METRICS = {"score": "objective/scores", "kl": "objective/kl"}


def run_explain(config: ExplainConfig) -> dict[str, Any]:
    """Explain one update of a run. Nothing in the run's folder changes but ``explain``.

    Returns:
        What explain-BATCH.json holds.

    Raises:
        ConfigError: the run cannot be repeated, or has no such batch.
        RepetitionDiffersError: what was repeated is not what the run had logged.
    """
    run, original = Path(config.run), read_run(config.run)
    require_one_rank(run, original)
    folder = run / "explain" if config.output_dir is None else Path(config.output_dir)
    which = "" if config.sample is None else f"-sample-{config.sample}"
    files = [folder / f"explain-{config.batch}{which}.{kind}" for kind in ("json", "txt")]
    for file in files:
        free = config.overwrite or not file.exists()
        require(free, "output_dir", str(folder), f"has {file.name} already; set overwrite, or choose another folder")
    logged = read_metrics(run)
    files = [file.resolve() for file in files]
    with chdir(started_in(run.resolve(), original.train.output_dir)):  # run.yml's paths are relative to it
        part = _part(config, run.resolve(), original, max(logged, default=0))
        _require_answers(config, part)
        scores = {int(n): float(score) for n, score in config.what_if.items()}
        otherwise = Otherwise(scores, config.without, config.settings)
        with_keys(original.train, config.settings)
        start = 0 if part.checkpoint is None else batch_of(part.checkpoint.name) or 0
        _say_from(part, start, run)
        with tempfile.TemporaryDirectory(prefix="explain-") as scratch:
            repetition = Repetition(part, Path(scratch, "run"), keep=bool(otherwise))
            ours = repetition.course.metrics
            require_equal(ours, logged, config.batch)
            other = None
            if otherwise:
                logger.info("explain: repeats them with what is to be otherwise")
                again = replace(part, window=range(0))
                other = Repetition(again, Path(scratch, "what_if"), keep=True, otherwise=otherwise).course
                before = {batch: line for batch, line in ours.items() if batch < config.batch}
                require_equal(other.metrics, before, config.batch)  # else its environment does not repeat by itself
        account = {
            "run": str(run),
            "batch": config.batch,
            "algorithm": original.algorithm,
            "staleness": original.train.staleness,
            "repeated": {
                "from": None if part.checkpoint is None else part.checkpoint.name,
                "batches": config.batch - start,
                "after": max(ours) - config.batch,
                "compared": [batch for batch in ours if batch in logged],
            },
            **(_life_of(repetition, part, config.sample) if config.sample else {}),
            **({} if config.sample else _taken_apart(repetition, config, otherwise, other)),
        }
    _write(files, account, ours[config.batch])
    return account


def _part(config: ExplainConfig, run: Path, original: RunConfig, last: int) -> Part:
    """What is repeated of a run that has logged so many batches."""
    rule = f"must be 1 to {last}, the last batch that {config.run!r} has logged"
    require(config.batch <= last, "batch", config.batch, rule)
    first = max(1, config.batch - max(config.before, 1) + 1)
    checkpoint = checkpoint_before(run, original, first)
    window = range(first, config.batch + 1) if config.before and config.sample is None else range(0)
    after = config.after if config.sample is None else 0
    return Part(run, original, checkpoint, config.batch, min(config.batch + after, last), window)


def _require_answers(config: ExplainConfig, part: Part) -> None:
    """Require that the batch has these completions, and that with other scores nobody has to answer anew."""
    train = part.original.train
    most = train.batch_size * train.samples_per_prompt
    rule = f"must be of completions 1 to {most}, which a batch of {config.run!r} has"
    require((config.sample or 1) <= most, "sample", config.sample, rule)
    require(config.sample is None or not config.asks_what_if, "sample", config.sample, "must be null with what_if")
    highest = max(map(int, config.what_if), default=0)
    require(highest <= most, "what_if", config.what_if, rule)
    require(max(config.without, default=0) <= most, "without", config.without, rule)


def _say_from(part: Part, start: int, run: Path) -> None:
    """Say what will be repeated, and how long the run took for it."""
    repeats, later = count(part.batch - start, "batch", "batches"), part.last - part.batch
    after = f", and {later} later" if later else ""
    rows = [row for row in json_lines(run / METRICS, []) if start < row.get("batch", 0) <= part.last]
    seconds = sum(row.get("time/batch", 0.0) for row in rows)
    took = f"; the run took {seconds:.0f} s for them" if seconds >= 1 else ""
    if part.checkpoint is None:
        what = "explain: there is no checkpoint before batch %d; repeats %s from the beginning%s%s"
        logger.info(what, part.batch, repeats, after, took)
    else:
        logger.info("explain: repeats %s from %s%s%s", repeats, part.checkpoint.name, after, took)


def _life_of(repetition: Repetition, part: Part, which: int) -> dict[str, Any]:
    """What is known of one sample; with as many threads as in training, for sums depend on them."""
    run, update = repetition.trainer.run, repetition.update
    later = {batch_of(path.name) or 0: path for path in Checkpoints(part.run).all()}
    later = {batch: path for batch, path in later.items() if batch >= part.batch and (path / "config.json").is_file()}
    with shared_cores(run.config, run.device):
        scored = repetition.course.scored[part.batch]
        experience = update.annotate(scored)
        weights = run.scorer.weights
        account = life(update, scored, experience, repetition.after, which, run.tokenizer, weights, later)
    repetition.trainer.learner.optimizer.zero_grad()
    return account


def _taken_apart(
    repetition: Repetition, config: ExplainConfig, otherwise: Otherwise, other: Course | None
) -> dict[str, Any]:
    """With as many threads as in training, for sums depend on them."""
    run, learner, update = repetition.trainer.run, repetition.trainer.learner, repetition.update
    with shared_cores(run.config, run.device):
        scored = repetition.course.scored[config.batch]
        experience = update.annotate(scored)
        again = update.take(experience)
        if not all(map(torch.equal, again, repetition.after)):
            raise RepetitionDiffersError("the update cannot be repeated bit for bit: on a GPU, set train.deterministic")
        logger.info("explain: the update repeats bit for bit; taking it apart")
        account = explained(update, scored, experience, run.scorer, run.tokenizer, repetition.after, config.top)
        account["later"] = repetition.later
        repetition.later[-1]["kl_per_token"] = distance(update, experience, repetition.end, repetition.end_without).kl
        account["before"] = _ranked(repetition, experience) if repetition.without else None
        account["what_if"] = None if other is None else _what_changes(repetition, other, experience, otherwise)
    learner.optimizer.zero_grad()
    return account


def _ranked(repetition: Repetition, experience: Experience) -> dict[str, Any]:
    """The batches that were left out in turn, by their share of the way of all, and the share of those before them."""
    way, rows = difference(repetition.after, repetition.start), []
    for batches, weights in repetition.without:
        kl = distance(repetition.update, experience, repetition.after, weights).kl
        rows.append(
            {"batch": batches[-1], "share": share(difference(repetition.after, weights), way), "kl_per_token": kl}
        )
    together, *rows = rows
    rest = None if together["share"] is None else 1 - together["share"]
    rows.sort(key=lambda row: -(row["share"] or 0.0))
    return {"norm": norm(way), "earlier": rest, "batches": rows}


def _what_changes(was: Repetition, now: Course, experience: Experience, otherwise: Otherwise) -> dict[str, Any]:
    """How a run with other scores differs, as JSON can hold it.

    Args:
        was: the run as it was, with its weights.
        now: what became of it with the other scores.
        experience: the rows on which policies are compared, of the batch as it was.
        otherwise: what it has that is.

    Returns:
        ``changes``, by completion; ``completions_differ_from``, the first batch in which a completion is another; and
        for each of ``batches`` means of scores and of the KL from the reference, how many completions are others, how
        the update differs, and the KL in nats a token from the policy as it was to the other one.
    """
    update, batches = was.update, sorted(was.course.scored.keys() & now.scored.keys())
    first = was.course.scored[batches[0]]
    rows = []
    for batch in batches:
        theirs, ours = was.course.weights, now.weights
        change, cosine = compared(*(difference(of[batch], of[batch - 1]) for of in (ours, theirs)))
        old, new = was.course.metrics[batch], now.metrics[batch]
        rows.append(
            {
                "batch": batch,
                **{name: {"was": old.get(key), "is": new.get(key)} for name, key in _METRICS.items()},
                "completions": len(first.batch.samples),
                "others": _others(was.course.scored[batch], now.scored[batch]),
                "update": {"change": change, "cosine": cosine},
                "kl_per_token": distance(update, experience, theirs[batch], ours[batch]).kl,
            }
        )
    scores_R = first.scores_PK.flatten()
    return {
        "changes": [
            {"completion": n, "was": number(scores_R[n - 1].item()), "is": x} for n, x in otherwise.scores.items()
        ],
        "without": list(otherwise.without),
        "settings": dict(otherwise.settings),
        "completions_differ_from": next((each["batch"] for each in rows if each["others"]), None),
        "batches": rows,
    }


def _others(was: ScoredBatch, now: ScoredBatch) -> int:
    """How many completions are others, or of other prompts."""
    pairs = zip(was.batch.samples, now.batch.samples, strict=True)
    return sum(not np.array_equal(ours.tokens, theirs.tokens) for ours, theirs in pairs)


def _write(files: Sequence[Path], account: dict[str, Any], metrics: Line) -> None:
    text = page(account)
    account["metrics"] = metrics
    write_file(files[0], json.dumps(account, indent=1, allow_nan=False) + "\n")
    write_file(files[1], text)
    print(text)
    logger.info("explain: written to %s and %s", *files)
