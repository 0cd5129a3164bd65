"""The loop of the supervised stages: batches of similar length, one normaliser a step, on one rank or several.

All ranks run the same loop. A step's rows are the same however many ranks there are; they are cut into passes, and the
passes are dealt out. What a model draws (noise on routers, say; dropout is off) depends on the step and the number of
the pass alone. So a step can be repeated after a restart, and by any number of ranks, which sum in another order.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from async_rlhf.commands.stage import Stage
from async_rlhf.commands.stage_reports import StageReports
from async_rlhf.commands.unfinished import LOGS, Unfinished
from async_rlhf.config.stages import StageConfig
from async_rlhf.learner.launch import rank_device
from async_rlhf.learner.strategies.choice import from_accelerate, spread_over
from async_rlhf.models.budget import PassMemory, bytes_to_come, fitting_tokens, memory_of
from async_rlhf.models.loading import require_alike
from async_rlhf.models.packing import choose, is_packed
from async_rlhf.models.passes import Passes
from async_rlhf.models.rows import dealt
from async_rlhf.models.saving import write_model
from async_rlhf.ranks.collectives import Ranks
from async_rlhf.ranks.parallel import Parallel, decayed_groups, trainable

logger = logging.getLogger(__name__)

_POOL = 50  # batches sorted together: enough to waste little on padding, few enough to stay random
_ON_CPU = ("labels", "lengths")  # only say where to look


class LengthBatches(Sampler[list[int]]):
    """Batches of rows of similar length, in a random order that depends only on the seed and the epoch.

    Args:
        lengths: tokens of each row.
        size: rows of a batch; the last batch of an epoch may be smaller.
        seed: of the order. Each pass over the sampler is the next epoch.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, size: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.size = size
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.lengths), generator=self._generator).numpy()
        # Full batches and one remainder, as pools are multiples of the batch.
        for start in range(0, len(order), _POOL * self.size):
            pool = order[start : start + _POOL * self.size]
            pool[:] = pool[np.argsort(self.lengths[pool], kind="stable")]
        for number in torch.randperm(len(self), generator=self._generator).numpy():
            yield order[number * self.size : (number + 1) * self.size].tolist()


class _Loss(nn.Module):
    """A model with its loss as the forward pass, which is what DDP and DeepSpeed follow."""

    def __init__(self, model: PreTrainedModel, loss_sum: Callable[[Any, Mapping[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.model, self._loss_sum = model, loss_sum

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self._loss_sum(self.model, batch)


class StageTrainer:
    """Trains a model. The loss of an optimiser step is a sum over its items divided by their number.

    A subclass defines :meth:`collate`, :meth:`loss_sum`, :meth:`items` and :meth:`sizes`. All ranks must make it, with
    the same arguments, and call its methods.

    Args:
        model: the model to train. Its weights may be sharded afterwards.
        examples: any number.
        lengths: tokens of each example.
        config: of the stage.
        evaluate: returns `eval_loss` and other metrics of held-out data.
        ranks: who share the work; None for this process alone.
        unfinished: where checkpoints and the loss history go; None for nowhere.

    Raises:
        ConfigError: the checkpoint is of other data.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        examples: Sequence[Any],
        lengths: Sequence[int] | np.ndarray,
        config: StageConfig,
        evaluate: Callable[[], dict[str, Any]] = dict,
        ranks: Ranks | None = None,
        unfinished: Unfinished | None = None,
    ) -> None:
        self.model, self.examples, self.config, self.evaluate = model, examples, config, evaluate
        self.ranks = ranks or Ranks()
        self.unfinished = unfinished
        self.batches = LengthBatches(lengths, config.per_device_train_batch_size, config.seed)
        begun = None if unfinished is None else unfinished.begin(examples, self.batches.lengths)
        self.done = 0 if begun is None else begun.step
        """Optimiser steps so far."""
        values: dict[str, Any] = {"loss": 0.0, "recent_loss": 0.0, "logged": 0, "tokens": 0}
        self.values = values if begun is None else begun.values
        """Sum of the losses of all steps, and of those that are not logged yet; the last step that is; tokens so far,
        without padding."""
        self._prepare(begun)
        self._new_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        """Of this rank's passes, since the ranks last met."""
        logs = Path() if unfinished is None else unfinished.folder / LOGS
        self.reports = StageReports(config, model, self.steps, self.done, logs) if self.ranks.leads else None

    def collate(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """A batch on the CPU, with ``input_ids``."""
        raise NotImplementedError

    def loss_sum(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        """Sum of the losses of the batch's items, differentiable. ``labels`` and ``lengths`` stay on the CPU."""
        raise NotImplementedError

    def items(self, example: Any) -> int:
        """How many losses an example has."""
        raise NotImplementedError

    def sizes(self, example: Any) -> list[int]:
        """Tokens of each of an example's rows; all examples have as many rows."""
        raise NotImplementedError

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of a pass over the data."""
        return math.ceil(len(self.batches) / self._at_once)

    @property
    def steps(self) -> int:
        """Optimiser steps in all."""
        return math.ceil(self.config.num_epochs * self.steps_per_epoch)

    @property
    def _at_once(self) -> int:
        """Batches of the sampler in a step."""
        return self.config.gradient_accumulation_steps * self.ranks.count

    def _prepare(self, begun: Any) -> None:
        """Place the weights, shard them, and make the optimiser; all of it as a checkpoint says, if there is one."""
        config, model = self.config, self.model
        self.device = rank_device(config, self.ranks)
        model.to(self.device).eval()
        require_alike(self.ranks, model=model)
        if begun is not None:
            begun.load_weights(model)
        choose("auto", config.max_tokens_per_pass is not None, {"model": model}, config.bf16)
        if config.gradient_checkpointing:  # the re-entrant kind finds no gradient below adapters
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.parallel = Parallel(self.ranks)
        if self.ranks.count > 1:
            strategy = from_accelerate(config.parallel, config.bf16)
            self.parallel = spread_over(strategy, self.ranks, self.device, config)
        self.optimizer = self.parallel.prepare(_Loss(model, self.loss_sum), [model], self._adamw)
        warm_up = config.warmup_steps or math.ceil(config.warmup_ratio * self.steps)
        self.scheduler: Any = get_scheduler(config.lr_scheduler_type, self.optimizer, warm_up, self.steps)
        if begun is not None:
            self.parallel.load_moments(begun.part("optimizer."))
            self.scheduler.last_epoch = self.done
            for group, factor in zip(self.optimizer.param_groups, self.scheduler.lr_lambdas, strict=True):
                group["lr"] = group["initial_lr"] * factor(self.done)
            self.scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]
            begun.tensors = {}

    def _adamw(self) -> torch.optim.Optimizer:
        config = self.config
        groups = decayed_groups(trainable(self.model), config.learning_rate, config.weight_decay)
        return torch.optim.AdamW(groups, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)

    def train(self) -> float:
        """Train to the end. Returns the mean loss of all steps.

        Raises:
            FloatingPointError: a gradient is no finite number.
        """
        started, begun, config = time.monotonic(), self.done, self.config
        if self.reports is not None:
            self.reports.begin()
        log_every, evaluate_every = (self._whole(every) for every in (config.logging_steps, config.eval_steps))
        rows = 0
        for batches in islice(self._batches(), self.done, self.steps):
            norm = self._step(batches)
            rows += sum(map(len, batches))
            self.done += 1
            epoch, last = self.done / self.steps_per_epoch, self.done == self.steps
            if self.reports is not None:
                self.reports.step_end(self.done, epoch)
            if self.done % log_every == 0 or last:
                self._log(norm)
            if evaluate_every and self.done % evaluate_every == 0 and not last:
                self.log_evaluation(self.evaluate())
            if config.save_steps and self.done % config.save_steps == 0 and not last:
                self._save()
        loss, seconds = self.values["loss"] / self.steps, time.monotonic() - started
        if self.reports is not None:
            self.reports.log({"train_loss": loss, "train_runtime": seconds, "train_samples_per_second": rows / seconds})
            self.reports.end()
        again = f", {begun} of them before" if begun else ""
        logger.info("%d steps%s, loss %.4f, %.1f rows/s", self.done, again, loss, rows / seconds)
        return loss

    def _whole(self, every: float) -> int:
        """A number of steps that may be a share of all."""
        return int(every) if every >= 1 else math.ceil(every * self.steps)

    def _batches(self) -> Iterator[list[list[int]]]:
        """Numbers of the rows of each step, for ever. A step has several of the sampler's batches."""
        while True:
            batches = iter(self.batches)
            while found := list(islice(batches, self._at_once)):
                yield found

    def _step(self, batches: list[list[int]]) -> float:
        """One optimiser step. Returns the gradient's norm."""
        parts = list(enumerate(self._passes(batches)))
        mine = [
            (number, [self.examples[i] for i in part], counts)
            for (number, part), counts in dealt(parts, self.ranks.rank, self.ranks.count)
        ]
        examples = [example for _, part, counts in mine if counts for example in part]
        counted = (sum(map(self.items, examples)), sum(sum(self.sizes(example)) for example in examples))
        items, tokens = map(sum, zip(*self.ranks.gather("rows of a step", counted), strict=True))
        self.model.train()
        for place, (number, part, counts) in enumerate(mine, start=1):
            torch.manual_seed(_seed_of(self.config.seed, self.done, number))  # for what the model may draw
            batch = {
                name: tensor if name in _ON_CPU else tensor.to(self.device, non_blocking=True)
                for name, tensor in self.collate(part).items()
            }
            with self.parallel.accumulating(last=place == len(mine)):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bf16):
                    loss_sum = self.parallel.forward(batch)
                loss = loss_sum / items if counts else loss_sum * 0
                self.parallel.backward(loss)
            self._new_loss += loss.detach()
        try:
            norms = self.parallel.step(self.config.max_grad_norm)
        except FloatingPointError as error:
            lower = f"lower learning_rate ({self.config.learning_rate})"
            raise FloatingPointError(f"step {self.done + 1}: {error}; {lower}") from error
        assert norms is not None  # there is no loss scale that a step could be skipped for
        self._rate = float(self.optimizer.param_groups[0]["lr"])
        self.scheduler.step()
        self.values["tokens"] += tokens
        return norms[0]

    def _passes(self, batches: list[list[int]]) -> list[list[int]]:
        """A step's rows, in passes."""
        if self._limits is None:
            return batches
        rows = [number for batch in batches for number in batch]
        sizes = [self.sizes(self.examples[number]) for number in rows]
        lengths = torch.tensor([length for each in sizes for length in each])
        parts = self._limits.split(lengths, len(sizes[0]), self.ranks.count)
        return [[rows[i] for i in part.tolist()] for part in parts]

    @cached_property
    def _limits(self) -> Passes | None:
        """The limits of a pass, if tokens limit it. Every rank must ask: with "auto" each says what fits."""
        tokens = self.config.max_tokens_per_pass
        if tokens is None:
            return None
        if tokens == "auto":
            memory = memory_of(self.model, self.config, self.parallel, self.config.gradient_checkpointing)
            to_come = bytes_to_come(self.parallel.trained, bool(self.optimizer.state))
            name = "max_tokens_per_pass"
            fits = fitting_tokens(name, PassMemory((memory,), with_gradient=True), self.device, to_come)
            tokens = min(self.ranks.gather(name, fits))
        width = self.model.config.get_text_config().hidden_size
        return Passes(None, tokens, is_packed(self.model), width)

    def _meet(self) -> None:
        """Add up the losses of all ranks."""
        found = sum(self.ranks.gather("losses", self._new_loss.item()))
        self._new_loss.zero_()
        self.values["loss"] += found
        self.values["recent_loss"] += found

    def _log(self, norm: float) -> None:
        """Log the mean loss since the last time."""
        self._meet()
        loss = self.values["recent_loss"] / (self.done - self.values["logged"])
        self.values |= {"recent_loss": 0.0, "logged": self.done}
        self._write({"loss": loss, "grad_norm": norm, "lr": self._rate, "tokens": self.values["tokens"]})
        if self.reports is not None:
            self.reports.log({"loss": loss, "grad_norm": norm, "learning_rate": self._rate})

    def log_evaluation(self, found: Mapping[str, Any]) -> None:
        """Log metrics of held-out data; those that are no numbers are left out."""
        numbers = {name: value for name, value in found.items() if isinstance(value, (int, float))}
        self._write(numbers)
        if self.done < self.steps:  # the command's results say the rest
            logger.info("step %d of %d: held-out loss %.4f", self.done, self.steps, numbers["eval_loss"])
            if self.reports is not None:
                self.reports.log(numbers)

    def _write(self, values: Mapping[str, Any]) -> None:
        if self.unfinished is not None:
            self.unfinished.log({"step": self.done, "epoch": self.done / self.steps_per_epoch, **values})

    def _save(self) -> None:
        """Write a checkpoint, on rank 0."""
        self._meet()
        self.parallel.meet("saving", self.model)
        tensors = {f"optimizer.{name}": tensor for name, tensor in self.parallel.moments().items()}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                with self.parallel.gathered([parameter]):
                    whole = self.parallel.whole(parameter.data)
                    if self.ranks.leads:
                        tensors[f"weights.{name}"] = whole.cpu()
        if self.ranks.leads and self.unfinished is not None:
            self.unfinished.save(self.done, self.values, tensors)

    def publish(self, stage: Stage, tokenizer: PreTrainedTokenizerBase, results: Mapping[str, Any]) -> None:
        """Save model, tokenizer, the marker, metrics.jsonl and what integrations wrote: whole or not at all."""
        self.parallel.meet("publishing", self.model)
        if not self.ranks.leads:
            write_model(self.model, tokenizer, stage.folder, self.parallel)  # rank 0 writes
            return
        with stage.publish_folder(results) as folder:
            write_model(self.model, tokenizer, folder, self.parallel)
            if self.unfinished is not None:
                self.unfinished.publish(folder)
        if self.unfinished is not None:
            self.unfinished.delete()


def _seed_of(*numbers: int) -> int:
    """A seed of a pass's own."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def train(trainer: StageTrainer) -> float:
    """Run the training and return its mean loss; see :meth:`StageTrainer.train`."""
    return trainer.train()
