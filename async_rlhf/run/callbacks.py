"""Runs transformers' callbacks in the loop: anything written for its Trainer (wandb, tensorboard, trackio) works."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from async_rlhf.config import OnlineConfig
from async_rlhf.config.base import dotted
from async_rlhf.config.secrets import HIDDEN, without_secrets
from async_rlhf.learner.learner import Learner
from async_rlhf.run.hub import HubUploads
from async_rlhf.run.record import derived
from async_rlhf.run.trackers import TRACKED, Rows, TensorBoard, Wandb, forgiving, in_unicode, tracker_callbacks
from async_rlhf.system.files import from_json, naming, write_file
from async_rlhf.system.progress import progress_bar

logger = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state.json"
TRACKERS = "trackers.json"
"""In a run's folder: in which runs of trackers it is logged."""
KEPT_LOGS = 200
"""Lines of ``log_history``. All lines are in metrics.jsonl; without a limit every checkpoint would repeat them."""


@dataclass
class OnlineTrainerState(TrainerState):
    """transformers' state, and the number of prompts trained on. ``global_step`` counts batches, and ``log_history``
    holds the newest :data:`KEPT_LOGS` lines.
    """

    episode: int = 0
    """Prompts trained on so far."""
    completions: int = 0
    """Completions sampled for them."""
    newest: dict[str, float] = field(default_factory=dict)
    """The last value of every metric that was ever logged."""
    optimizer_steps: int | None = None
    """Taken so far; None where an older version has not counted them."""
    idle_batches: int = 0
    """Batches without an optimiser step since the last one."""
    tied_batches: int = 0
    """Batches with a step since the last one in which a prompt's completions scored differently."""
    unrewarded: dict[str, int] = field(default_factory=dict)
    """Completions without a reward, by the cause."""

    def count(self, steps: int, missing: Mapping[str, int], tied: bool = False) -> None:
        """Count the optimiser steps of a batch, and its completions without a reward; whether all its prompts tie."""
        self.optimizer_steps = (self.optimizer_steps or 0) + steps
        self.idle_batches = 0 if steps else self.idle_batches + 1
        self.tied_batches = self.tied_batches + 1 if tied and steps else 0
        for cause, number in missing.items():
            self.unrewarded[cause] = self.unrewarded.get(cause, 0) + number

    def note(self, logs: Mapping[str, float], step: int) -> None:
        """Store what was logged of a step, this one or an earlier one."""
        earlier = {"batch", "episode"} if step < self.global_step else set()
        self.newest |= {name: value for name, value in logs.items() if name not in earlier}
        self.log_history.append({**logs, "step": step})
        del self.log_history[:-KEPT_LOGS]


class OnlineTrainingArguments(TrainingArguments):
    """The arguments as transformers' callbacks know them, with the whole configuration under ``online_config``.

    What callbacks log as the configuration is that of the run, with dotted keys. transformers' own keys without a
    meaning here, such as those of its data loader, are left out.
    """

    online_config: OnlineConfig
    logged_config: Mapping[str, Any]
    """See :meth:`to_dict`."""

    def to_dict(self) -> dict[str, Any]:
        """The configuration that callbacks log."""
        return dict(self.logged_config)


_TRANSLATED = {
    *("output_dir", "report_to", "save_steps", "eval_steps", "lr_scheduler_type", "per_device_train_batch_size"),
    *("run_name", "project", "num_train_epochs", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token"),
}
"""Keys that transformers spells in another way, or would act on."""


def training_arguments(
    config: OnlineConfig, known: Mapping[str, Any] | None = None, rows: int | None = None
) -> OnlineTrainingArguments:
    """A configuration as the arguments that transformers' callbacks read.

    Args:
        config: of the run.
        known: what is to be logged of it and of what else decides the run; None for the configuration, and what
            follows from it.
        rows: prompts of one pass over the data, if that is known.
    """
    arguments = OnlineTrainingArguments(
        output_dir=config.output_dir,
        run_name=config.run_name,
        project=config.project or "huggingface",
        report_to=config.report_to or "none",
        max_steps=config.num_batches,
        logging_strategy="steps",
        logging_steps=config.logging_steps,
        save_strategy="steps" if config.saves_every else "no",
        save_steps=config.saves_every or 500,
        metric_for_best_model=config.metric_for_best_model,
        eval_strategy="steps" if config.eval_steps else "no",
        eval_steps=config.eval_steps or None,
        per_device_train_batch_size=config.units_by_pass,
        lr_scheduler_type=config.lr_scheduler_type,
        disable_tqdm=not config.progress,
        use_cpu=not torch.cuda.is_available(),
    )
    # After its own checks, which are about what its Trainer does with bf16.
    values = asdict(config)
    passed = {item.name for item in fields(TrainingArguments)} & {item.name for item in fields(config)}
    for name in passed - _TRANSLATED:
        setattr(arguments, name, values[name])
    if known is None:
        known = {**dotted(without_secrets(values, HIDDEN)), **derived(config, rows)}
    arguments.num_train_epochs = known.get("num_train_epochs") or 1.0
    arguments.online_config, arguments.logged_config = config, known
    return arguments


_SHOWN = {
    "loss": "loss {:.3f}",
    "objective/scores": "score {:.3f}",
    "objective/kl": "kl {:.2f}",
    "val/ended_share": "ended {:.0%}",
}


class ProgressCallback(TrainerCallback):
    """Batches done, with the rate, the time left and the latest scores: a bar on a terminal, else lines in the log.

    Args:
        unit: what is counted.
    """

    def __init__(self, unit: str = "batch") -> None:
        self._what = f"train: {unit}"
        self._shown = ExitStack()
        self._say: Callable[..., None]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar."""
        bar = progress_bar(self._what, state.max_steps, done=state.global_step, brief=False)
        self._say = self._shown.enter_context(bar)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance by one batch."""
        if not control.should_log:  # else it waits for the batch's scores
            self._say(state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Show loss, or score, KL and the share of ended answers, of the latest batch."""
        known = logs or {}
        if shown := [form.format(round(known[key], 3) + 0.0) for key, form in _SHOWN.items() if key in known]:
            self._say(state.global_step, ", ".join(shown))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the finished bar."""
        self.stop()

    def stop(self) -> None:
        """Release the terminal; safe to call twice."""
        with suppress(OSError):  # the terminal may have been closed
            self._shown.close()


class StopAtPeak(TrainerCallback, ExportableState):
    """Stops after ``early_stopping_patience`` evaluations in a row without a new best of ``metric_for_best_model``.

    transformers' EarlyStoppingCallback compares with the best checkpoint, so a peak without one would not count.

    Args:
        config: of the run.
    """

    def __init__(self, config: OnlineConfig) -> None:
        assert config.metric_for_best_model is not None
        assert config.early_stopping_patience is not None
        self.name, self.patience = config.metric_for_best_model, config.early_stopping_patience
        self.sign = 1 if config.greater_is_better else -1
        self.best: float | None = None
        self.best_batch = 0
        self.waited = 0

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"args": {}, "attributes": {name: getattr(self, name) for name in ("best", "best_batch", "waited")}}

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Compare; a result that is missing, because no completion has a score, is no new best."""
        metric = (metrics or {}).get(self.name)
        if metric is not None and (self.best is None or self.sign * metric > self.sign * self.best):
            self.best, self.best_batch, self.waited = metric, state.global_step, 0
            return
        self.waited += 1
        if self.waited < self.patience:
            return
        control.should_training_stop = True
        if self.waited == self.patience:  # the policy at the end is evaluated once more
            peak = "has no value" if self.best is None else f"peaked at batch {self.best_batch} with {self.best:.6g}"
            logger.info("stopped: %s %s; %d evaluations since were no better", self.name, peak, self.waited)


class Callbacks:
    """The callbacks of a run and the state that they see.

    Args:
        config: of the run.
        learner: its policy, optimiser and scheduler are passed to callbacks.
        processing_class: the tokenizer.
        callbacks: the user's, classes or instances, called only on rank 0. The other ranks have only the state.
        known: what trackers show as the configuration; None for ``config`` alone.
        identities: the runs of trackers to go on with, from :func:`tracked_runs`.
    """

    def __init__(
        self,
        config: OnlineConfig,
        learner: Learner,
        processing_class: Any,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
        known: Mapping[str, Any] | None = None,
        identities: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.arguments = training_arguments(config, known)
        self.state = OnlineTrainerState(
            max_steps=config.num_batches,
            logging_steps=config.logging_steps,
            save_steps=config.saves_every or 500,
            eval_steps=config.eval_steps or 500,
        )
        self.control = TrainerControl()
        self._leads = is_main = learner.ranks.is_main
        unit = "step" if learner.algorithm.supervised else "batch"
        self._progress = ProgressCallback(unit) if config.progress and is_main else None
        integrations = tracker_callbacks(config.report_to if is_main else (), config.project, identities or {})
        self._trackers = {name: run for name, run in integrations.items() if isinstance(run, (Wandb, TensorBoard))}
        self._identities, self._whole = dict(identities or {}), False
        self.uploads = HubUploads(config) if config.push_to_hub and is_main else None
        self.pending_eval: str | None = None
        """The first checkpoint since an evaluation was asked for whose answers are not here yet."""
        peak = StopAtPeak(config) if config.early_stopping_patience is not None else None
        ours = [self._progress, *integrations.values(), *callbacks, self.uploads, peak] if is_main else []
        called = [DefaultFlowCallback, *(callback for callback in ours if callback is not None)]
        self._handler = CallbackHandler(called, learner.policy, processing_class, learner.optimizer, learner.scheduler)
        self.control = self._handler.on_init_end(self.arguments, self.state, self.control)

    def save_state(self, folder: Path) -> None:
        """Write ``trainer_state.json``, with the states of callbacks that have one."""
        self.state.stateful_callbacks |= {name: callback.state() for name, callback in self._stateful().items()}
        path = folder / TRAINER_STATE
        with naming(path):
            self.state.save_to_json(str(path))

    def restore_state(self, folder: Path) -> None:
        """Restore a state that :meth:`save_state` wrote; values from the current configuration stay."""
        saved = OnlineTrainerState.load_from_json(str(folder / TRAINER_STATE))
        for name in ("max_steps", "logging_steps", "save_steps", "eval_steps"):
            setattr(saved, name, getattr(self.state, name))
        if not saved.newest:  # an older version's, which kept every line
            saved.newest = {name: value for logs in saved.log_history for name, value in logs.items()}
        self.state = saved
        for name, callback in self._stateful().items():
            vars(callback).update(saved.stateful_callbacks.get(name, {}).get("attributes", {}))

    def _stateful(self) -> dict[str, Any]:
        """Callbacks that have a state, by class name and, of the user's, number among all callbacks."""
        stateful = {i: c for i, c in enumerate(self._handler.callbacks) if isinstance(c, ExportableState)}
        return {f"{type(c).__name__}{'' if isinstance(c, StopAtPeak) else f'_{i}'}": c for i, c in stateful.items()}

    def begin(self) -> None:
        """Before the first batch."""
        self.control = self._handler.on_train_begin(self.arguments, self.state, self.control)
        identities = self._identities | {name: tracker.identity() for name, tracker in self._trackers.items()}
        path = Path(self.arguments.online_config.output_dir) / TRACKERS
        if identities:
            write_file(path, json.dumps(identities, indent=1, default=str))
        elif self._leads and tracked_runs(path.parent):  # an earlier run's
            path.unlink()

    def step_begin(self) -> None:
        """Before each batch."""
        self.control = self._handler.on_step_begin(self.arguments, self.state, self.control)

    def step_end(self, prompts: int, completions: int) -> TrainerControl:
        """After each batch. The control says whether to log, save, evaluate or stop."""
        self.state.global_step += 1
        self.state.episode += prompts
        self.state.completions += completions
        self.state.epoch = self.state.global_step / self.state.max_steps * self.arguments.num_train_epochs
        self.control = self._handler.on_step_end(self.arguments, self.state, self.control)
        return self.control

    def log(self, logs: dict[str, float], batch: int | None = None) -> None:
        """Metrics have been logged: of this batch, or of an earlier one, and are shown as that one's."""
        state = self._at(batch)
        self.state.note(logs, state.global_step)
        self.control = self._handler.on_log(self.arguments, state, self.control, logs)

    def table(self, name: str, rows: Rows, batch: int | None = None) -> None:
        """Show a table in all trackers that can."""
        step = self.state.global_step if batch is None else batch
        for tracker, callback in self._trackers.items() if rows else ():
            with forgiving(tracker, f"table of batch {step}"):
                callback.table(name, in_unicode(rows), step)

    def evaluated(self, metrics: dict[str, float], batch: int) -> None:
        """The evaluation of the policy after a batch is done, and :meth:`log` has its metrics."""
        self.control = self._handler.on_evaluate(self.arguments, self._at(batch), self.control, metrics)
        pending_eval, self.pending_eval = self.pending_eval, None
        if pending_eval is not None:
            self._judge(Path(pending_eval))

    def note_best(self, checkpoint: Path, evaluating: bool = False) -> None:
        """Remember a checkpoint if it is better than all earlier ones, by ``metric_for_best_model``. A result of an
        evaluation counts for the first checkpoint from its batch on; while one is under way, that checkpoint waits.
        """
        name = self.arguments.online_config.metric_for_best_model
        if not evaluating or name is None or not name.startswith("eval_"):
            self._judge(checkpoint)
        elif self.pending_eval is None:
            self.pending_eval = str(checkpoint)

    @property
    def kept(self) -> list[str]:
        """The checkpoints that stay, however old they are."""
        return [path for path in (self.state.best_model_checkpoint, self.pending_eval) if path is not None]

    def _judge(self, checkpoint: Path) -> None:
        config = self.arguments.online_config
        name = config.metric_for_best_model
        if name is None:
            return
        metric = self.state.newest.get(name)
        if metric is None:  # not evaluated yet, or no such metric: in either case the checkpoint itself is good
            logger.warning("metric_for_best_model: %r has not been logged so far", name)
            return
        best = self.state.best_metric
        if best is None or (metric > best if config.greater_is_better else metric < best):
            self.state.best_metric, self.state.best_model_checkpoint = metric, str(checkpoint)

    def saved(self, batch: int) -> None:
        """The checkpoint after a batch is whole; callbacks are shown the state with that batch as ``global_step``."""
        self.control = self._handler.on_save(self.arguments, self._at(batch), self.control)

    def _at(self, batch: int | None) -> OnlineTrainerState:
        """The state as callbacks are shown it with what is about an earlier batch."""
        if batch is None or batch == self.state.global_step:
            return self.state
        state = copy(self.state)
        state.global_step = batch
        return state

    def end(self) -> None:
        """After the last batch."""
        self.control = self._handler.on_train_end(self.arguments, self.state, self.control)
        self._whole = True

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Call one more, on rank 0."""
        if self._leads:
            self._handler.add_callback(callback)

    def pop(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Call it no more, and return it; None if there is none such."""
        return self._handler.pop_callback(callback)

    def close(self) -> None:
        """Release the terminal and end the trackers' runs, however the run ended."""
        if self._progress is not None:
            self._progress.stop()
        for name, tracker in self._trackers.items():
            with forgiving(name, "end of the run"):
                tracker.close(self._whole)


def tracked_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs of trackers in which the run in this folder is logged: tracker -> how to find it."""
    try:
        trackers = from_json((folder / TRACKERS).read_text(encoding="utf-8"))
        return {name: dict(identity) for name, identity in trackers.items() if name in TRACKED}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
