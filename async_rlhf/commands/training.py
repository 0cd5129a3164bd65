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
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerControl

from async_rlhf.algorithms.record import Algorithm
from async_rlhf.commands.distributed import done_by, lead_first, on_ranks
from async_rlhf.commands.evaluation.likelihood import EncodedRow, row_tensors
from async_rlhf.commands.stage import Stage
from async_rlhf.config import ConfigError
from async_rlhf.config.base import dotted, may_change
from async_rlhf.config.secrets import HIDDEN, without_secrets
from async_rlhf.config.stages import StageConfig
from async_rlhf.data.views import Examples
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.learner.launch import rank_device
from async_rlhf.learner.learner import Learner
from async_rlhf.learner.strategies.choice import make_parallel, reads_shares
from async_rlhf.models.budget import with_recorded, with_sizes
from async_rlhf.models.gpu_defaults import with_gpu_defaults
from async_rlhf.models.loading import placed, require_alike
from async_rlhf.models.saving import write_model
from async_rlhf.run.async_checkpoint import saving
from async_rlhf.run.build import Training, restore_trained
from async_rlhf.run.callbacks import TRACKERS, Callbacks, tracked_runs
from async_rlhf.run.checkpoint import ResumeState, load_weights, require_same
from async_rlhf.run.folder import METRICS, Checkpoints, RunFolder
from async_rlhf.run.loop import Loop
from async_rlhf.run.manifest import delete_whole, stranger_in
from async_rlhf.system.files import JsonLines
from async_rlhf.system.names import check_integrations
from async_rlhf.system.signals import ending_on_signals
from async_rlhf.system.trace import Trace
from async_rlhf.types import Experience

logger = logging.getLogger(__name__)

_LOGS = "logs"
_LOOKED_AT = 64
_POOL = 50  # batches sorted together: enough to waste little on padding, few enough to stay random


@dataclass(frozen=True)
class Task:
    """What a stage trains, and on what."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    algorithm: Algorithm
    examples: Examples[Any]
    rows: Callable[[Sequence[Any]], Experience]
    """The rows to train on, of some examples, each of which is a unit."""
    counts: dict[str, Any]
    """Of the results."""
    evaluate: Callable[[Parallel], dict[str, Any]]
    """`eval_loss` and other metrics of held-out data; nothing if there are none."""
    summary: Callable[[dict[str, Any]], str]
    """The results in one line."""
    finish: Callable[[Parallel], dict[str, Any]] = lambda parallel: {}
    """What is done to the trained model, and its results."""


def weighted_rows(
    rows: Sequence[EncodedRow], weights: Sequence[float], targets: Sequence[float] | None = None, rows_per_unit: int = 1
) -> Experience:
    """Rows to train on.

    Args:
        rows: those of a unit are adjacent.
        weights: what each unit adds to the normaliser of the loss.
        targets: what the scores are to be; None if nothing says.
        rows_per_unit: of each unit.
    """
    tokens_BT, mask_BT = row_tensors(rows)
    nothing_BT = torch.zeros(1, 1).expand(tokens_BT.shape)
    return Experience(
        tokens_BT=tokens_BT,
        lengths_B=torch.tensor([len(row.tokens) for row in rows], dtype=torch.long),
        sampled_BT=mask_BT.float(),
        behaviour_logprobs_BT=nothing_BT,
        rewards_BT=nothing_BT,
        scores_B=torch.zeros(len(rows)) if targets is None else torch.tensor(targets, dtype=torch.float32),
        loss_weights_U=torch.tensor(weights, dtype=torch.float32),
        rows_per_unit=rows_per_unit,
    )


def steps_of(lengths: np.ndarray, size: int, at_once: int, seed: int) -> Iterator[list[int]]:
    """Numbers of the rows of each step, for ever, in a random order that depends only on seed and epoch.

    Args:
        lengths: tokens of each row.
        size: rows of a batch, which are of similar length; the last batch of an epoch may be smaller.
        at_once: batches of a step; the last step of an epoch may have fewer.
        seed: of the order.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(lengths), generator=generator).numpy()
        # Full batches and one remainder, as pools are multiples of the batch.
        for start in range(0, len(order), _POOL * size):
            pool = order[start : start + _POOL * size]
            pool[:] = pool[np.argsort(lengths[pool], kind="stable")]
        batches = iter(torch.randperm(math.ceil(len(order) / size), generator=generator).tolist())
        while numbers := list(islice(batches, at_once)):
            yield np.concatenate([order[number * size : (number + 1) * size] for number in numbers]).tolist()


@dataclass(frozen=True)
class StageLoop(Loop):
    """Trains on the rows of a task.

    Args:
        task: says which.
        config: of the stage.
        compared: what must stay on resume.
        seen: rank 0's sum of the losses of all steps, and of those that are not logged yet; the last step that is;
            tokens so far, without padding.
    """

    task: Task
    config: StageConfig
    compared: dict[str, Any]
    seen: dict[str, Any]

    def train(self) -> float:
        """Train to the end. Returns the mean loss of all steps, on rank 0."""
        run, config, learner = self.run, self.config, self.run.learner
        started, begun, rows = time.monotonic(), run.callbacks.state.global_step, 0
        size, steps = config.per_device_train_batch_size, run.config.num_batches
        run.callbacks.begin()
        order = steps_of(self.task.examples.lengths, size, config.batch_size // size, config.seed)
        for step, numbers in enumerate(islice(order, begun, steps), start=begun + 1):
            run.callbacks.step_begin()
            experience = self.task.rows([self.task.examples[i] for i in numbers] if run.ranks.is_main else [])
            rate = float(learner.optimizer.param_groups[0]["lr"])
            metrics = learner.update(experience, step) | {"lr": rate}
            rows += len(numbers)
            self._after_batch(experience, metrics)
        self._finish_save(wait=True)
        loss, seconds = self.seen["loss"] / steps, time.monotonic() - started
        run.callbacks.log({"train_loss": loss, "train_runtime": seconds, "train_samples_per_second": rows / seconds})
        run.callbacks.end()
        again = f", {begun} of them before" if begun else ""
        logger.info("%d steps%s, loss %.4f, %.1f rows/s", steps, again, loss, rows / seconds)
        return loss

    def _log(self, batch: Experience, metrics: dict[str, float], everything: bool) -> None:
        """Count, and log the mean loss since the last time."""
        seen, state = self.seen, self.run.callbacks.state
        seen["tokens"] += int(batch.lengths_B.sum())
        for name in ("loss", "recent_loss"):
            seen[name] += metrics["loss"]
        if everything or state.global_step == state.max_steps:
            line = {"loss": seen["recent_loss"] / (state.global_step - seen["logged"])}
            line["grad_norm"] = metrics["grad_norm"]
            seen |= {"recent_loss": 0.0, "logged": state.global_step}
            epoch = self._write_line({**line, "lr": metrics["lr"], "tokens": seen["tokens"]})
            self.run.callbacks.log({**line, "learning_rate": metrics["lr"], "epoch": epoch})

    def _evaluate(self, control: TrainerControl, batch: int) -> None:
        steps = self.run.config.num_batches
        wanted = self.run.ranks.broadcast("evaluate?", lambda: control.should_evaluate)
        if wanted and batch < steps:
            found, epoch = self.evaluate()
            logger.info("step %d of %d: held-out loss %.4f", batch, steps, found["eval_loss"])
            self.run.callbacks.log({**_numbers(found), "epoch": epoch})

    def evaluate(self) -> tuple[dict[str, Any], float]:
        """Metrics of held-out data, if there are any, and the epoch; what are numbers is written into metrics.jsonl."""
        found = self.task.evaluate(self.run.learner.parallel)
        self.run.learner.model.train()
        return found, self._write_line(_numbers(found)) if found else 0.0

    def _write_line(self, values: dict[str, Any]) -> float:
        """Add step and epoch, which is returned."""
        step = self.run.callbacks.state.global_step
        epoch = step / self.config.steps_per_epoch(len(self.task.examples))
        if METRICS in self.logs:
            self.logs[METRICS].write({"step": step, "epoch": epoch, **values})
        return epoch

    @property
    def _saves_now(self) -> bool:
        """Not after the last step: the result is published, and all checkpoints go."""
        return self.run.callbacks.state.global_step < self.run.config.num_batches

    def _own_state(self, batch: int) -> dict[str, Any]:
        return {"config": self.compared, "values": {"seen": dict(self.seen)}}


def _numbers(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def run_stage(stage: Stage, read: Callable[[bool, datetime], Task]) -> dict[str, Any]:
    """Train, and write the model with its tokenizer, the marker and the logs into the stage's folder: whole or not at
    all. With several ranks, all must call it.

    Args:
        stage: of a :class:`StageConfig`.
        read: reads data and models; called by rank 0 first. It is given whether each rank will read its share of the
            weights, once the model is sharded, and the time that chat templates see.

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


def _train(stage: Stage, ranks: Ranks, read: Callable[[bool, datetime], Task]) -> dict[str, Any]:
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
    on_meta = reads_shares(config.parallel, config.in_bfloat16, ranks)
    task = lead_first(ranks, "reading", partial(read, on_meta, now))
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
        found, _ = loop.evaluate()
        results |= found
        if found:
            logger.info("%s: %s", stage.name, task.summary(results))
        results = ranks.broadcast("results", lambda: results)
        _publish(stage, run, folder, results)
    return results


def _prepared(
    config: StageConfig, task: Task, ranks: Ranks, folder: Path, checkpoint: Path | None, resumed: ResumeState | None
) -> Training:
    """The learner and what is about it, restored if there is a checkpoint."""
    own = config.for_learner(len(task.examples), str(folder))
    parallel, device = make_parallel(own, ranks), rank_device(own, ranks)
    # A sharded model reaches the device piece by piece.
    placed(task.model, torch.device("cpu") if parallel.is_sharded else device).eval()
    require_alike(ranks, model=task.model)
    own = with_sizes(own, [task.model], [], parallel, device, task.algorithm.rows_per_unit)
    load = None
    if checkpoint is not None and resumed is not None and not resumed.sharded:
        load = partial(load_weights, folder=checkpoint, tensors=resumed.tensors, trust=config.trust_remote_code)
    learner = Learner(task.model, None, task.algorithm, own, parallel=parallel, load=load)
    if ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
    shown = {**dotted(without_secrets(asdict(config), HIDDEN)), "num_train_epochs": config.num_epochs}
    callbacks = Callbacks(own, learner, task.tokenizer, (), shown, tracked_runs(folder) if ranks.is_main else {})
    callbacks.arguments.output_dir = str(folder / _LOGS)
    run = Training(
        config=own,
        ranks=ranks,
        folder=RunFolder(own, checkpoint, 0 if resumed is None else resumed.batch),
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
    with stage.publish_folder(results) as place:
        write_model(model, run.tokenizer, place, parallel, dtype)
        shutil.copy2(folder / METRICS, place / METRICS)
        if (logs := folder / _LOGS).is_dir() and any(logs.iterdir()):
            shutil.copytree(logs, place / _LOGS)
    _delete(folder)


def _unfinished(stage: Stage) -> Path:
    place = stage.folder.resolve()
    return place.with_name(f".{place.name}.unfinished")


def _to_resume(stage: Stage, folder: Path) -> Path | None:
    """The checkpoint to go on from; without one, what is left of an interrupted command is deleted."""
    config, own = stage.config, Checkpoints(folder)
    newest, there = own.newest_whole() if config.resume else None, own.all()
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
