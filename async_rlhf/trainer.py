"""The only training loop, and what happens around it after each batch: log, evaluate, save."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from async_rlhf.callbacks import Callbacks, OnlineTrainerState
from async_rlhf.checkpoint import FINAL, save_checkpoint
from async_rlhf.config import OnlineConfig
from async_rlhf.data.stream import PromptStream
from async_rlhf.data.tokenizer import decode_responses
from async_rlhf.generation.protocol import Engine
from async_rlhf.learner import Learner
from async_rlhf.reports.log import JsonLines
from async_rlhf.reports.trace import Trace
from async_rlhf.rollouts import Rollouts
from async_rlhf.scoring import Scorer
from async_rlhf.types import RolloutBatch, RolloutGroup, ScoredBatch

logger = logging.getLogger(__name__)


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
        eval_prompts: tuple[PromptStream, Engine] | None = None,
    ) -> None:
        self.config = config
        self.rollouts = rollouts
        self.scorer = scorer
        self.learner = learner
        self.tokenizer = tokenizer
        self.callbacks = callbacks
        self.trace = trace
        self.eval_prompts = eval_prompts
        self.folder = Path(config.output_dir)

    def run(self) -> OnlineTrainerState:
        """Train on every batch and save the final policy."""
        with self._open_logs():
            self.callbacks.begin()
            self.rollouts.publish(self.learner.policy, version=0)
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
            save_checkpoint(self.folder / FINAL, self.learner, self.tokenizer, self.callbacks.state)
            self.callbacks.end()
        return self.callbacks.state

    @contextmanager
    def _open_logs(self) -> Iterator[None]:
        with (
            closing(self.callbacks),
            closing(JsonLines(self.folder / "metrics.jsonl")) as self._metrics,
            closing(JsonLines(self.folder / "samples.jsonl")) as self._samples,
        ):
            yield

    def _after_batch(self, scored: ScoredBatch, metrics: dict[str, float]) -> bool:
        """Log, evaluate and save as the callbacks say. True where the run shall stop."""
        groups = scored.batch.groups
        control = self.callbacks.step_end(len(groups), sum(len(group.rollouts) for group in groups))
        state = self.callbacks.state
        counters = {"batch": float(state.global_step), "episode": float(state.episode)}
        if control.should_log:
            logs = {**counters, "completions": float(state.completions), **metrics}
            self._metrics.write(logs)
            self._log_samples(scored)
            self.callbacks.log(logs)
            self.trace.flush()
        last = state.global_step == state.max_steps or control.should_training_stop
        if self.eval_prompts is not None and (control.should_evaluate or last):
            evaluation = self.evaluate()
            self._metrics.write({**counters, **evaluation})
            self.callbacks.log({**counters, **evaluation})
            self.callbacks.evaluated(evaluation)
        if control.should_save:
            name = f"checkpoint-{state.global_step}"
            save_checkpoint(self.folder / name, self.learner, self.tokenizer, state)
            self.callbacks.saved()
        return control.should_training_stop

    def evaluate(self) -> dict[str, float]:
        """Scores of the policy as it is now on the held-out prompts, one completion each."""
        assert self.eval_prompts is not None
        stream, engine = self.eval_prompts
        prompts = [stream.prompt(draw) for draw in range(len(stream))]
        with self.trace.span("evaluate"):
            completions = engine.generate(prompts)
            groups = tuple(RolloutGroup(p, c) for p, c in zip(prompts, completions, strict=True))
            scored = self.scorer(RolloutBatch(0, self.callbacks.state.global_step, groups, 0.0))
        return {f"eval_{name}": value for name, value in scored.metrics.items()}

    def _schedule_metrics(self, batch: RolloutBatch, seconds: float) -> dict[str, float]:
        spans = self.trace.take_seconds()
        return {
            "schedule/version": float(batch.version),
            "schedule/lag": float(batch.index - 1 - batch.version),
            "eps": len(batch.groups) / seconds,
            "time/batch": seconds,
            "time/generate": batch.generation_seconds,
            **{f"time/{name}": spans.get(name, 0.0) for name in ("wait", "score", "annotate", "train", "publish")},
        }

    def _log_samples(self, scored: ScoredBatch) -> None:
        batch = scored.batch
        samples = [
            (group, rollout, score)
            for group, scores in zip(batch.groups, scored.scores_PK.tolist(), strict=True)
            for rollout, score in zip(group.rollouts, scores, strict=True)
        ][: self.config.num_samples_logged]
        texts = decode_responses(self.tokenizer, [rollout for _, rollout, _ in samples])
        for (group, rollout, score), text in zip(samples, texts, strict=True):
            # A completion without a reward has the score null: JSON knows no NaN.
            reward = None if math.isnan(score) else score
            row = {"batch": batch.index, "draw": group.prompt.draw, "version": batch.version, "score": reward}
            prompt = self.tokenizer.decode(group.prompt.tokens)
            self._samples.write({**row, "prompt": prompt, "completion": text, "finish_reason": rollout.finish_reason})
