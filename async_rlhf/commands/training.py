"""Supervised stages: rows that are given, trained on by the learner and with the loop of online training.

All that a stage has on disk until it is done is in a folder beside its output folder:

    .sft.unfinished/
      metrics.jsonl              loss, learning rate and evaluations
      logs/, trackers.json       what trackers write, and how they find their run again
      checkpoint-40/             the newest; see run/checkpoint.py

The output folder appears only when the stage is done, with metrics.jsonl and logs/ in it.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from transformers import PreTrainedModel

from async_rlhf.commands.distributed import done_by, lead_first, on_ranks
from async_rlhf.commands.stage import Stage
from async_rlhf.commands.stage_loop import StageLoop, Task
from async_rlhf.config import ConfigError
from async_rlhf.config.base import dotted, may_change
from async_rlhf.config.secrets import HIDDEN, without_secrets
from async_rlhf.config.stages import StageConfig
from async_rlhf.data.views import Examples
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.learner.launch import rank_device
from async_rlhf.learner.learner import Learner
from async_rlhf.learner.strategies.choice import make_parallel, shards_weights
from async_rlhf.models.budget import with_recorded, with_sizes
from async_rlhf.models.gpu_defaults import with_gpu_defaults
from async_rlhf.models.saving import write_model
from async_rlhf.models.sharded_loading import on_every_rank, require_alike
from async_rlhf.run.async_checkpoint import saving
from async_rlhf.run.build import Training, restore_trained
from async_rlhf.run.callbacks import TRACKERS, Callbacks, tracked_runs
from async_rlhf.run.checkpoint import ResumeState, load_weights, require_same
from async_rlhf.run.folder import METRICS, Checkpoints, RunFolder
from async_rlhf.run.manifest import delete_whole, stranger_in
from async_rlhf.system.files import JsonLines
from async_rlhf.system.names import check_integrations
from async_rlhf.system.signals import ending_on_signals
from async_rlhf.system.trace import Trace

logger = logging.getLogger(__name__)

_LOGS = "logs"
_LOOKED_AT = 64


_Read: TypeAlias = Callable[[PreTrainedModel | None, datetime], Task]
"""Reads data, and the model unless it is given one, which rank 0 alone has loaded; the time is what templates see."""


def run_stage(stage: Stage, read: _Read) -> dict[str, Any]:
    """Train, and write the model with its tokenizer, the marker and the logs into the stage's folder: whole or not at
    all. With several ranks, all must call it.

    Args:
        stage: of a :class:`StageConfig`.
        read: called by rank 0 first.

    Returns:
        The results, those of before if the stage is done already.

    Raises:
        ConfigError: there is a checkpoint, and neither ``resume`` nor ``overwrite`` is set; or it is of another
            configuration, or of other data.
    """
    with on_ranks(stage.config, stage.name) as ranks:
        config, device = stage.config, rank_device(stage.config, ranks)
        here = partial(with_gpu_defaults, config, config.model, device)
        stage = replace(stage, config=ranks.broadcast("what the GPU decides", here))
        if (results := done_by(stage, ranks)) is None:
            check_integrations(stage.config.report_to)
            results = _train(stage, ranks, read)
    return results


def _train(stage: Stage, ranks: Ranks, read: _Read) -> dict[str, Any]:
    config, folder, anyway = stage.config, _unfinished(stage), stage.config.resume_anyway
    checkpoint = ranks.broadcast("checkpoint", lambda: _to_resume(stage, folder))
    resumed = None if checkpoint is None else ResumeState.read(checkpoint)
    if resumed is not None:
        config = with_recorded(config, resumed.config)
    compared = ranks.broadcast("what is compared", lambda: _compared(replace(stage, config=config)))
    if resumed is not None:
        require_same(resumed.config, compared, anyway)
    before = None if resumed is None else resumed.values["seen"].get("started")
    now = ranks.broadcast("the time", lambda: config.chat.time_of(before))
    if shards_weights(config.parallel, config.in_bfloat16, ranks):
        first = read(None, now) if ranks.is_main else None
        model = on_every_rank(ranks, "model", None if first is None else first.model)
        task = read(model, now) if first is None else first
    else:
        task = lead_first(ranks, "reading", partial(read, None, now))
    run = _prepared(config, task, ranks, folder, checkpoint, resumed)
    seen = {"loss": 0.0, "recent_loss": 0.0, "logged": 0, "tokens": 0} if resumed is None else resumed.values["seen"]
    seen = {**seen, "started": now.isoformat()}
    compared["max_tokens_per_pass"] = run.config.max_tokens_per_pass
    with ExitStack() as stack:
        logs = {}
        if ranks.is_main:
            kept = 0 if resumed is None else resumed.logs[METRICS]
            logs[METRICS] = stack.enter_context(closing(JsonLines(folder / METRICS, kept)))
        with closing(run.callbacks), ending_on_signals() as asked, saving(run) as saves:
            loop = StageLoop(run, Trace(), logs, asked, saves, task, config, compared, seen)
            results = {"train_loss": loop.train(), **task.counts}
        results |= task.finish(run.learner.parallel)
        metrics, _ = loop.evaluate()
        results |= metrics
        if metrics:
            logger.info("%s: %s", stage.name, task.summary(results))
        results = ranks.broadcast("results", lambda: results)
        _publish(stage, run, folder, results)
    return results


def _prepared(
    config: StageConfig, task: Task, ranks: Ranks, folder: Path, checkpoint: Path | None, resumed: ResumeState | None
) -> Training:
    """The learner and what is about it, restored if there is a checkpoint."""
    learner_config = config.for_learner(len(task.examples), str(folder))
    parallel, device = make_parallel(learner_config, ranks), rank_device(learner_config, ranks)
    # A sharded model reaches the device piece by piece.
    (task.model if parallel.is_sharded else task.model.to(device)).eval()
    require_alike(ranks, model=task.model)
    learner_config = with_sizes(learner_config, [task.model], [], parallel, device, task.algorithm.rows_per_unit)
    load = None
    if checkpoint is not None and resumed is not None and not resumed.sharded:
        load = partial(load_weights, folder=checkpoint, tensors=resumed.tensors, trust=config.trust_remote_code)
    learner = Learner(task.model, None, task.algorithm, learner_config, parallel=parallel, load=load)
    if ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
    shown = {**dotted(without_secrets(asdict(config), HIDDEN)), "num_train_epochs": config.num_epochs}
    callbacks = Callbacks(
        learner_config, learner, task.tokenizer, (), shown, tracked_runs(folder) if ranks.is_main else {}
    )
    callbacks.arguments.output_dir = str(folder / _LOGS)
    run = Training(
        config=learner_config,
        ranks=ranks,
        folder=RunFolder(learner_config, checkpoint, 0 if resumed is None else resumed.batch),
        tokenizer=task.tokenizer,
        learner=learner,
        callbacks=callbacks,
        fingerprints={"rows, as tokens": _digest(task.examples)},
    )
    if resumed is not None:
        restore_trained(run, resumed)
    return run


def _publish(stage: Stage, run: Training, folder: Path, results: dict[str, Any]) -> None:
    model, parallel, dtype = run.learner.policy, run.learner.parallel, getattr(torch, run.config.export_dtype)
    parallel.barrier("publishing", model)
    if not run.ranks.is_main:
        write_model(model, run.tokenizer, stage.folder, parallel, dtype)  # rank 0 writes
        return
    with stage.publish_folder(results) as output:
        write_model(model, run.tokenizer, output, parallel, dtype)
        shutil.copy2(folder / METRICS, output / METRICS)
        if (logs := folder / _LOGS).is_dir() and any(logs.iterdir()):
            shutil.copytree(logs, output / _LOGS)
    _delete(folder)


def _unfinished(stage: Stage) -> Path:
    folder = stage.folder.resolve()
    return folder.with_name(f".{folder.name}.unfinished")


def _to_resume(stage: Stage, folder: Path) -> Path | None:
    """The checkpoint to go on from; without one, what is left of an interrupted command is deleted."""
    config, checkpoints = stage.config, Checkpoints(folder)
    newest, there = checkpoints.newest_whole() if config.resume else None, checkpoints.all()
    if newest is not None:
        return newest
    if there and not config.overwrite:
        if config.resume:
            raise ConfigError(
                f"resume: {there[-1].name} in {str(folder)!r} is damaged, and there is no other; set "
                "overwrite, too, to start at the beginning"
            )
        raise ConfigError(
            f"output_dir: {str(stage.folder)!r} is unfinished, with {there[-1].name} in {str(folder)!r}; "
            "set resume to go on with it, or overwrite to start at the beginning"
        )
    if config.resume:
        logger.warning("resume: there is no checkpoint of %s; starting at the beginning", stage.folder)
    _delete(folder)
    return None


def _delete(folder: Path) -> None:
    """Delete what an unfinished stage has written into its folder, and the folder if nothing else is in it."""
    if not folder.is_dir():
        return
    for path in Checkpoints(folder).all():
        if stranger_in(path) is None:
            delete_whole(path)
    for path in (*folder.glob(".checkpoint-*.tmp"), folder / _LOGS):
        shutil.rmtree(path, ignore_errors=True)
    for name in (METRICS, TRACKERS):
        (folder / name).unlink(missing_ok=True)
    left = sorted(path.name for path in folder.iterdir())
    if left:
        logger.warning("WARNING: %s is kept, for %s was not written by a stage", folder, left[0])
    else:
        folder.rmdir()


def _compared(stage: Stage) -> dict[str, Any]:
    """What has to stay on resume, as read back from JSON: keys, and inputs by their content."""
    config = stage.config
    values = {
        key: value
        for key, value in dotted(asdict(config)).items()
        if key not in stage.inputs and not may_change(config, key)
    }
    values |= dotted({"inputs": stage.identity["inputs"]})
    return json.loads(json.dumps(without_secrets(values)))


def _digest(examples: Examples[Any]) -> str:
    """A checksum of all lengths, and of some of the examples: another tokenizer would give others."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(examples.lengths, dtype=np.int64).tobytes())
    for number in np.linspace(0, len(examples) - 1, min(_LOOKED_AT, len(examples))).astype(int):
        digest.update(repr(examples[int(number)]).encode())
    return digest.hexdigest()
