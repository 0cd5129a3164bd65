"""The loop of a supervised stage: online training's, on rows that are given."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerControl

from async_rlhf.algorithms.record import Algorithm
from async_rlhf.commands.evaluation.likelihood import EncodedRow, row_tensors
from async_rlhf.config.stages import StageConfig
from async_rlhf.data.views import Examples
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.run.folder import METRICS
from async_rlhf.run.loop import Loop
from async_rlhf.types import Experience

logger = logging.getLogger(__name__)

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


def steps_of(lengths: np.ndarray, size: int, per_step: int, seed: int) -> Iterator[list[int]]:
    """Numbers of the rows of each step, for ever, in a random order that depends only on seed and epoch.

    Args:
        lengths: tokens of each row.
        size: rows of a batch, which are of similar length; the last batch of an epoch may be smaller.
        per_step: batches of a step; the last step of an epoch may have fewer.
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
        while numbers := list(islice(batches, per_step)):
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
            experience = self.task.rows([self.task.examples[i] for i in numbers])
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
            metrics, epoch = self.evaluate()
            logger.info("step %d of %d: held-out loss %.4f", batch, steps, metrics["eval_loss"])
            self.run.callbacks.log({**_numbers(metrics), "epoch": epoch})

    def evaluate(self) -> tuple[dict[str, Any], float]:
        """Metrics of held-out data, if there are any, and the epoch; what are numbers is written into metrics.jsonl."""
        metrics = self.task.evaluate(self.run.learner.parallel)
        self.run.learner.model.train()
        return metrics, self._write_line(_numbers(metrics)) if metrics else 0.0

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


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
