"""The only training loop, and what happens around it after each batch: log, evaluate, save."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from async_rlhf import random_state
from async_rlhf.callbacks import Callbacks, OnlineTrainerState
from async_rlhf.checkpoint import FINAL, ResumeState, as_saved, write_whole
from async_rlhf.config import OnlineConfig
from async_rlhf.data.stream import PromptStream
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.generation.protocol import Sampler
from async_rlhf.learner import Learner
from async_rlhf.reports.log import JsonLines
from async_rlhf.reports.trace import Trace
from async_rlhf.rollouts import Rollouts
from async_rlhf.run_folder import METRICS, SAMPLES, SCHEDULE, Checkpoints, log_names
from async_rlhf.scoring import Scorer
from async_rlhf.types import Batch, Group, ScoredBatch

logger = logging.getLogger(__name__)

PHASES = ("wait", "mismatch", "score", "annotate", "train", "publish")
"""Spans of the learner whose seconds are logged."""


class TrainingLoop:
    """Batches in, a better policy out.

    Args:
        config: of the run.
        rollouts: the batches, in order.
        scorer: rollouts to scores.
        learner: scores to updates.
        tokenizer: of the policy.
        callbacks: transformers' callbacks.
        trace: where the spans go.
        eval_prompts: held-out prompts, if there are any, with the engine that samples for them.
        inputs: fingerprints of what came from outside, for checkpoints.
        stop_asked: True once the run shall save and end.
        require_folder: raises OSError where the folder is gone, or another process has taken it over.
    """

    def __init__(
        self,
        config: OnlineConfig,
        rollouts: Rollouts,
        scorer: Scorer,
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
        callbacks: Callbacks,
        trace: Trace,
        eval_prompts: tuple[PromptStream, Sampler] | None = None,
        inputs: Mapping[str, str] | None = None,
        stop_asked: Callable[[], bool] = lambda: False,
        require_folder: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.rollouts = rollouts
        self.scorer = scorer
        self.learner = learner
        self.tokenizer = tokenizer
        self.callbacks = callbacks
        self.trace = trace
        self.eval_prompts = eval_prompts
        self.inputs = dict(inputs or {})
        self.stop_asked = stop_asked
        self.require_folder = require_folder
        self.folder = Path(config.output_dir)
        self.checkpoints = Checkpoints(self.folder)

    def run(self, resumed: ResumeState | None = None, logs: Mapping[str, int] | None = None) -> OnlineTrainerState:
        """Train on every batch that is left and save the final policy.

        Args:
            resumed: the state that learner and callbacks have been put into.
            logs: bytes of each log file to go on behind.
        """
        with self._open_logs(logs or {}):
            self.callbacks.begin()
            if resumed is not None:  # only now: a callback may have drawn from the generators as the run began
                random_state.restore(resumed.tensors, resumed.values["random"])
            self.rollouts.publish(self.learner.policy, version=self.callbacks.state.global_step)
            started = time.monotonic()
            for batch in self.rollouts:
                self.callbacks.step_begin()
                with self.trace.span("score", batch=batch.index):
                    scored = self.scorer(batch)
                with self.trace.span("annotate", batch=batch.index):
                    experience, metrics = self.learner.annotate(scored)
                with self.trace.span("train", batch=batch.index):
                    metrics |= self.learner.update(experience, batch.index)
                self.rollouts.publish(self.learner.policy, version=batch.index)
                metrics |= scored.metrics | self._schedule_metrics(batch, time.monotonic() - started)
                started = time.monotonic()
                if self._after_batch(scored, metrics):
                    break
            self.require_folder()
            write_whole(self.folder / FINAL, [self._write_policy])
            self.callbacks.end()
        return self.callbacks.state

    @contextmanager
    def _open_logs(self, keep: Mapping[str, int]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(closing(self.callbacks))
            self._logs = {
                name: stack.enter_context(closing(JsonLines(self.folder / name, keep.get(name, 0))))
                for name in log_names(self.config)
            }
            yield

    def _write_policy(self, folder: Path) -> None:
        self.learner.save(folder, self.tokenizer)
        self.callbacks.save_state(folder)

    def save(self) -> None:
        """Write a checkpoint that the run can go on from, bit for bit, and delete old ones."""
        state, config = self.callbacks.state, self.config
        batch, path = state.global_step, self.checkpoints.path(state.global_step)
        tensors, values = self.learner.state()
        random_tensors, random_values = random_state.capture()
        self.require_folder()
        with self.trace.span("save", batch=batch):
            ahead = self.rollouts.ahead(batch)  # first: it adds to what the agreement has found
            resume = ResumeState(
                batch=batch,
                config=as_saved(config),
                inputs=self.inputs,
                values={
                    "learner": values,
                    "random": random_values,
                    "rewards": self.scorer.state(),
                    "agreement": self.rollouts.generator.agreement.state(),
                },
                logs={name: log.position() for name, log in self._logs.items()},
                tensors=tensors | random_tensors,
                ahead=ahead,
            )
            self.callbacks.note_best(path)
            write_whole(path, [self._write_policy, resume.write])
            self.checkpoints.delete_old(config.save_total_limit, state.best_model_checkpoint)
        self.callbacks.saved()

    def _after_batch(self, scored: ScoredBatch, metrics: dict[str, float]) -> bool:
        """Log, evaluate and save as the callbacks say. True where the run shall stop."""
        groups = scored.batch.groups
        control = self.callbacks.step_end(len(groups), sum(len(group.samples) for group in groups))
        state = self.callbacks.state
        self.require_folder()
        if SCHEDULE in self._logs:
            self._logs[SCHEDULE].write({"batch": scored.batch.index, "versions": scored.batch.shares})
        counters = {"batch": float(state.global_step), "episode": float(state.episode)}
        if control.should_log:
            logs = {**counters, "completions": float(state.completions), **metrics}
            self._logs[METRICS].write(logs)
            self._log_samples(scored)
            self.callbacks.log(logs)
            self.trace.flush()
        last = state.global_step == state.max_steps or control.should_training_stop
        if self.eval_prompts is not None and (control.should_evaluate or last):
            evaluation = self.evaluate()
            self._logs[METRICS].write({**counters, **evaluation})
            self.callbacks.log({**counters, **evaluation})
            self.callbacks.evaluated(evaluation)
        stop = self.stop_asked()  # asked once: it may become true at any moment
        if control.should_save or stop:
            self.save()
        if stop:
            raise SystemExit(0)
        return control.should_training_stop

    def evaluate(self) -> dict[str, float]:
        """Scores of the policy as it is now on the held-out prompts, one completion each."""
        assert self.eval_prompts is not None
        stream, engine = self.eval_prompts
        prompts = [stream.prompt(draw) for draw in range(len(stream))]
        with self.trace.span("evaluate"):
            completions = engine.generate(prompts)
            groups = tuple(Group(p, c) for p, c in zip(prompts, completions, strict=True))
            scored = self.scorer(Batch(0, self.callbacks.state.global_step, groups, 0.0))
        return {f"eval_{name}": value for name, value in scored.metrics.items()}

    def _schedule_metrics(self, batch: Batch, seconds: float) -> dict[str, float]:
        spans = self.trace.take_seconds()
        versions = np.concatenate([sample.versions[sample.sampled] for sample in batch.samples])
        return {
            "schedule/version": float(batch.version),
            "schedule/lag": float(batch.index - 1 - batch.version),
            "schedule/lag_mean": batch.index - 1 - int(versions.sum()) / len(versions),
            **batch.metrics,
            "eps": len(batch.groups) / seconds,
            "time/batch": seconds,
            "time/generate": batch.generation_seconds,
            **{f"time/{name}": spans.get(name, 0.0) for name in PHASES},
        }

    def _log_samples(self, scored: ScoredBatch) -> None:
        batch = scored.batch
        samples = [
            (group, sample, score)
            for group, scores in zip(batch.groups, scored.scores_PK.tolist(), strict=True)
            for sample, score in zip(group.samples, scores, strict=True)
        ][: self.config.num_samples_logged]
        texts = decode_samples(self.tokenizer, [sample for _, sample, _ in samples])
        for (group, sample, score), text in zip(samples, texts, strict=True):
            # A completion without a reward has the score null: JSON knows no NaN.
            reward = None if math.isnan(score) else score
            row = {"batch": batch.index, "draw": group.prompt.draw, "version": batch.version, "score": reward}
            prompt = self.tokenizer.decode(group.prompt.tokens)
            row |= {"prompt": prompt, "completion": text, "finish_reason": sample.finish_reason}
            self._logs[SAMPLES].write(row)
