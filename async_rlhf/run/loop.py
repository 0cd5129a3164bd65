"""The training loop: train on each batch, then log, evaluate and save; the latter also for the supervised stages."""

from __future__ import annotations

import json
import logging
import math
import random
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import TrainerControl

from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.models.context_length import positions_of
from async_rlhf.models.saving import Write
from async_rlhf.run.async_checkpoint import ShardedSaves
from async_rlhf.run.build import Run, Training
from async_rlhf.run.callbacks import OnlineTrainerState
from async_rlhf.run.card import Card
from async_rlhf.run.checkpoint import ResumeState, as_saved, learner_state, save_learner
from async_rlhf.run.episodes import EPISODES, conversation, episode_rows
from async_rlhf.run.folder import DIGESTS, EVAL_SAMPLES, FINAL, METRICS, SAMPLES, Checkpoints
from async_rlhf.run.held_out import Evaluations, answer_rows
from async_rlhf.run.manifest import write_whole
from async_rlhf.run.schedule import RolloutSchedule
from async_rlhf.run.warnings import (
    cut_off_episodes_warning,
    cut_off_warning,
    idle_warning,
    no_room_warning,
    nothing_learnt,
    tied_warning,
)
from async_rlhf.system import random_state
from async_rlhf.system.files import JsonLines
from async_rlhf.system.lock import require_hold
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Experience, Sample, ScoredBatch, drawn_versions

logger = logging.getLogger(__name__)

PHASES = ("wait", "mismatch", "score", "annotate", "train", "publish")
"""Spans of the learner whose durations are logged."""
TABLE_ROWS = 200
"""Rows of an evaluation that trackers show; all are in a file of the run."""


def write_learner(run: Training, folder: Path, dtype: torch.dtype | None, more: Sequence[Write] = ()) -> None:
    """Write the policy, and what ``more`` writes, as one folder. All ranks gather weights; rank 0 writes."""
    policy = partial(save_learner, run.learner, run.tokenizer, dtype=dtype)
    if run.ranks.is_main:
        write_whole(folder, [policy, *more])
    else:
        policy(folder)


@dataclass(frozen=True)
class Loop:
    """What follows each batch, whatever is trained: it is logged, and there may be an evaluation, a checkpoint, an end.

    Every rank of the learner runs it. Only rank 0 has callbacks and logs and writes files. It broadcasts the callbacks'
    decisions, which all ranks follow.

    Args:
        run: this rank's part of what is trained.
        trace: records the spans.
        logs: open files by name, on rank 0.
        stop_asked: returns the number of the signal that has told this rank to save and end, or 0.
        saves: writes sharded checkpoints beside training; None for whole ones.
    """

    run: Training
    trace: Trace
    logs: Mapping[str, JsonLines]
    stop_asked: Callable[[], int]
    saves: ShardedSaves | None

    @abstractmethod
    def _log(self, batch: Any, metrics: dict[str, float], everything: bool) -> None:
        """Log the batch, on rank 0; its metrics too if ``everything``."""

    @abstractmethod
    def _evaluate(self, control: TrainerControl, batch: int) -> None:
        """Evaluate, as the callbacks say."""

    @property
    def _saves_now(self) -> bool:
        """Whether a checkpoint that the callbacks ask for is of use."""
        return True

    @abstractmethod
    def _own_state(self, batch: int) -> dict[str, Any]:
        """On rank 0, fields of the state to resume from; their values are added to those that all have."""

    @property
    def _other_writers(self) -> list[Write]:
        """Functions that write what else is in a checkpoint, on rank 0."""
        return []

    @property
    def _evaluating(self) -> bool:
        """Whether answers of an evaluation are under way."""
        return False

    def _write(self, folder: Path, resume: ResumeState | None = None, dtype: torch.dtype | None = None) -> None:
        """Write policy, callbacks' state and any ``resume`` as one folder. All ranks gather weights; rank 0 writes."""
        run = self.run
        self._finish_save(wait=True)
        require_hold(run.hold)
        more = [] if resume is None else [resume.write]
        write_learner(run, folder, dtype, [run.callbacks.save_state, *self._other_writers, *more])

    def save(self) -> None:
        """Write a checkpoint from which the run can resume bit for bit, and delete old ones."""
        run, state = self.run, self.run.callbacks.state
        checkpoints = Checkpoints(run.folder.path)
        path = checkpoints.path(state.global_step)
        with self.trace.span("save", batch=state.global_step):
            self._finish_save(wait=True)
            if run.ranks.is_main:
                run.callbacks.note_best(path, self._evaluating)
            resume = self._resume_state(state.global_step)
            delete_old = partial(checkpoints.delete_old, run.config, run.callbacks.kept)
            if self.saves is not None:  # all that goes into a checkpoint is copied, and written beside training
                require_hold(run.hold)
                now = [] if resume is None else [run.callbacks.save_state, *self._other_writers, resume.write_state]
                self.saves.start(
                    path, state.global_step, now, [] if resume is None else [resume.write_ahead], delete_old
                )
                return
            self._write(path, resume)
            if run.ranks.is_main:
                delete_old()
        run.callbacks.saved(state.global_step)

    def _finish_save(self, wait: bool = False) -> None:
        """Say it to the callbacks if a sharded checkpoint has become whole, and raise the error if it could not."""
        if self.saves is not None and (batch := self.saves.finished(wait)) is not None:
            self.run.callbacks.saved(batch)

    def _resume_state(self, batch: int) -> ResumeState | None:
        """On rank 0, the state to resume from after a batch. All ranks must call it: they have parts of it."""
        run = self.run
        tensors, values = learner_state(run.learner, with_tensors=self.saves is None)
        state = self._own_state(batch)
        if not run.ranks.is_main:
            return None
        state["values"] = {"learner": values, "unjudged": run.callbacks.pending_eval, **state["values"]}
        state["tensors"] = tensors | state.get("tensors", {})
        return ResumeState(
            batch=batch,
            inputs=dict(run.fingerprints),
            logs={name: log.position() for name, log in self.logs.items()},
            sharded=self.saves is not None,
            **state,
        )

    def _after_batch(self, batch: Any, metrics: dict[str, float]) -> bool:
        """Log, evaluate and save as the callbacks say. Returns whether the run must stop."""
        run, state, prompts = self.run, self.run.callbacks.state, self.run.config.batch_size
        self._finish_save()
        control = run.callbacks.step_end(prompts, prompts * run.config.samples_per_prompt)
        require_hold(run.hold)
        if run.ranks.is_main:
            self._log(batch, metrics, control.should_log)
        self._evaluate(control, state.global_step)
        # Asked once: it may become true at any moment, and on one rank alone.
        asked = run.ranks.gather("end?", self.stop_asked())
        stop = any(asked)
        if run.ranks.broadcast("save?", lambda: stop or (control.should_save and self._saves_now)):
            self.save()
        if stop:
            self._finish_save(wait=True)
            path = Checkpoints(run.folder.path).path(state.global_step)
            saved = f"{path.name} is saved; resume goes on from there (--resume, or resume=True in Python): {path}"
            if signal.SIGINT in asked:
                raise KeyboardInterrupt(saved)
            logger.warning("%s", saved)  # a program in Python that sets up no logging shows warnings alone
            raise SystemExit(0)
        return run.ranks.broadcast("stop?", lambda: control.should_training_stop)


@dataclass(frozen=True)
class TrainingLoop(Loop):
    """Trains the policy on one batch after another.

    Args:
        rollouts: the batches, in order.
        evaluations: on held-out prompts.
    """

    run: Run
    rollouts: RolloutSchedule
    evaluations: Evaluations

    def train(self) -> OnlineTrainerState:
        """Train on all remaining batches and save the final policy."""
        run, rollouts, trace = self.run, self.rollouts, self.trace
        run.callbacks.begin()
        rollouts.publish(run.learner.policy, version=run.callbacks.state.global_step)
        # Only now: a callback may have drawn random numbers in begin(), and so may an environment of the batch that is
        # sampled again.
        if run.resumed is not None and run.ranks.is_main:
            random_state.restore(run.resumed.tensors, run.resumed.values["random"])
        self.evaluations.begin()  # behind the batches that this version samples, as before the run was stopped
        if run.resumed is None and run.config.eval_on_start:
            self.evaluations.ask(0)
            if self.evaluations.is_due(0):
                self._take_evaluation()
        keeps = run.ranks.is_main and run.config.rollouts == "all"
        if keeps:
            batch_mb, batches = run.config.rollout_bytes / 1e6, run.config.num_batches - run.callbacks.state.global_step
            most = "rollouts: at most about %.2f MB a batch before compression, %.3f GB in all"
            logger.info(most, batch_mb, batch_mb * batches / 1e3)
        started = time.monotonic()
        for batch in rollouts:
            run.callbacks.step_begin()
            with trace.span("score", batch=batch.index):
                scored = run.scorer(batch)
            with trace.span("annotate", batch=batch.index):
                experience, metrics = run.learner.annotate(scored)
            with trace.span("train", batch=batch.index):
                metrics |= run.learner.update(experience, batch.index)
            rollouts.publish(run.learner.policy, version=batch.index)
            if run.ranks.is_main:
                self._log_digests(scored, experience)
                tied = metrics.get("objective/ties") == len(batch.groups) and not run.learner.needs.values
                run.callbacks.state.count(int(metrics["optimizer_steps"]), scored.missing, tied)
            metrics |= scored.metrics | self._schedule_metrics(batch, time.monotonic() - started)
            started = time.monotonic()
            if keeps:
                self._keep(scored, experience)
            if self._after_batch(scored, metrics):
                break
        self._write(run.folder.path / FINAL, dtype=getattr(torch, run.config.export_dtype))
        if run.callbacks.state.optimizer_steps == 0:  # as counted on rank 0
            logger.warning("WARNING: %s", nothing_learnt(run.callbacks.state))
        run.callbacks.end()
        return run.ranks.broadcast("final state", lambda: run.callbacks.state)

    @property
    def _other_writers(self) -> list[Write]:
        return [self._write_card]

    @property
    def _evaluating(self) -> bool:
        return self.evaluations.asked is not None

    def _write_card(self, folder: Path) -> None:
        run, stream = self.run, self.run.prompts.stream
        policy = f"{Path(run.record.values['model'] or 'policy').name}-{run.algorithm.name}"
        name = run.config.run_name or (run.config.hub_model_id or policy).rpartition("/")[2]
        rows = None if stream is None else len(stream)
        card = Card(name, run.config, run.record, rows)
        card.write(folder, run.folder.path / METRICS, run.callbacks.state.newest)

    def _own_state(self, batch: int) -> dict[str, Any]:
        ahead = self.rollouts.ahead(batch)  # before agreement.state(): collecting adds to it
        evaluation = self.evaluations.under_way(batch)
        if not self.run.ranks.is_main:
            return {}
        random_tensors, random_values = random_state.capture()
        values = {
            "random": random_values,
            "rewards": self.run.scorer.state(),
            "agreement": self.rollouts.generator.agreement.state(),
            "started": self.run.chat.now.isoformat(),
        }
        config = as_saved(self.run.config, self.run.algorithm.name)
        state = {"config": config, "values": values, "tensors": random_tensors}
        return {**state, "ahead": ahead, "evaluation": evaluation}

    def _log(self, scored: ScoredBatch, metrics: dict[str, float], everything: bool) -> None:
        """Log the batch's schedule; if ``everything``, its metrics and samples too."""
        for row in episode_rows(scored.batch.index, scored.batch.groups) if EPISODES in self.logs else ():
            self.logs[EPISODES].write(row)
        state = self.run.callbacks.state
        for warning in filter(None, (idle_warning(state), tied_warning(self.run.config, state))):
            logger.warning("%s", warning)
        if scored.batch.index == 1:
            config, model = self.run.config, self.run.learner.policy
            turns, room = (metrics.get(f"episode/out_of_{what}", 0.0) for what in ("turns", "room"))
            whole = metrics["val/ended_share"] + turns + room
            warnings = [cut_off_warning(config, whole), no_room_warning(config, room, positions_of(model))]
            if "episode/out_of_room" in metrics:
                episodes = sum(len(group.samples) for group in scored.batch.groups)
                cut = round((1 - whole) * episodes - metrics.get("episode/failed", 0.0))
                warnings.append(cut_off_episodes_warning(config, cut, episodes))
            for warning in filter(None, warnings):
                logger.warning("%s", warning)
        if everything:
            logs = self._log_metrics({"completions": float(state.completions), **metrics}, state.global_step)
            self._log_samples(scored)
            self.run.callbacks.log(logs)
            self.trace.flush()

    def _log_digests(self, scored: ScoredBatch, experience: Experience) -> None:
        """Log checksums of what the batch was made of, on rank 0: what two runs are compared by."""
        batch = scored.batch.index
        tensors = self.rollouts.generator.digests(batch - 1)
        weights = {"weights": digest(json.dumps(tensors, sort_keys=True))} if tensors else {}
        each = {"tensors": dict(tensors)} if tensors and batch == 1 else {}
        kind, keys, *rest = np.random.get_state(legacy=True)
        state = repr((random.getstate(), kind, np.asarray(keys).tolist(), rest))
        states = {"random": digest(state, torch.get_rng_state().numpy())}
        drawn_N = np.concatenate([sample.versions[sample.sampled] for sample in scored.batch.samples])
        versions, tokens = np.unique(drawn_N, return_counts=True)
        drawn = {"drawn": dict(zip(map(str, versions.tolist()), tokens.tolist(), strict=True))}
        row = {"batch": batch, **weights, **digests_of(scored, experience), **states, **drawn, **each}
        self.logs[DIGESTS].write(row)

    def _log_metrics(self, metrics: Mapping[str, float], batch: int) -> dict[str, float]:
        logs = {"batch": float(batch), "episode": float(batch * self.run.config.batch_size), **metrics}
        self.logs[METRICS].write(logs)
        return logs

    def _evaluate(self, control: TrainerControl, batch: int) -> None:
        """Take the answers to held-out prompts that are due, and ask for new ones, as the callbacks say."""
        ranks, evaluations, state = self.run.ranks, self.evaluations, self.run.callbacks.state
        if self.run.eval_prompts is None:
            return

        def last() -> bool:
            return state.global_step == state.max_steps or control.should_training_stop

        wanted = ranks.broadcast("evaluate?", lambda: control.should_evaluate or last())
        if evaluations.is_due(batch) or (evaluations.asked is not None and wanted):
            self._take_evaluation()
        ends = ranks.broadcast("last?", last)  # a callback may just have seen enough
        if wanted or ends:
            evaluations.ask(batch)
            if ends or evaluations.is_due(batch):
                self._take_evaluation()

    def _take_evaluation(self) -> None:
        """Score the answers that were asked for, and log them as of the batch after which they were."""
        with self.trace.span("evaluate"):
            metrics, scored = self.evaluations.take()
        if not self.run.ranks.is_main:
            return
        callbacks, batch = self.run.callbacks, scored.batch.version
        rows = list(answer_rows(self.run, scored))
        for row in rows:
            self.logs[EVAL_SAMPLES].write(row)
        for row in episode_rows(batch, scored.batch.groups, batch) if EPISODES in self.logs else ():
            self.logs[EPISODES].write(row)
        callbacks.table("eval_completions", rows[:TABLE_ROWS], batch)
        callbacks.log(self._log_metrics(metrics, batch), batch)
        if batch > 0:
            callbacks.evaluated(metrics, batch)

    def _schedule_metrics(self, batch: Batch, seconds: float) -> dict[str, float]:
        spans = self.trace.take_seconds()
        if not self.run.ranks.is_main:
            return {}
        drawn = [(int(s.versions.sum(where=s.sampled)), np.count_nonzero(s.sampled)) for s in batch.samples]
        versions, tokens = map(sum, zip(*drawn, strict=True))
        return {
            "schedule/version": float(batch.version),
            "schedule/lag": float(batch.index - 1 - batch.version),
            "schedule/lag_mean": batch.index - 1 - versions / tokens,
            **batch.metrics,
            "eps": len(batch.groups) / seconds,
            "time/batch": seconds,
            "time/generate": batch.generation_seconds,
            **{f"time/{name}": spans.get(name, 0.0) for name in PHASES},
        }

    def _keep(self, scored: ScoredBatch, experience: Experience) -> None:
        """Write every sample of a batch, before a checkpoint that has trained on it."""
        from async_rlhf.run.rollouts import write_rollouts

        require_hold(self.run.hold)
        with self.trace.span("rollouts", batch=scored.batch.index):
            write_rollouts(self.run, scored, experience)

    def _log_samples(self, scored: ScoredBatch) -> None:
        batch, config = scored.batch, self.run.config
        samples = [
            (group, sample, score)
            for group, scores in zip(batch.groups, scored.scores_PK.tolist(), strict=True)
            for sample, score in zip(group.samples, scores, strict=True)
        ][: 0 if config.rollouts == "none" else config.num_samples_logged]
        texts = decode_samples(self.run.tokenizer, [sample for _, sample, _ in samples])
        table = []
        for (group, sample, score), text in zip(samples, texts, strict=True):
            # A completion without a reward has the score null: JSON knows no NaN.
            reward = None if math.isnan(score) else score
            row = {"batch": batch.index, "draw": group.prompt.draw, "version": batch.version, "score": reward}
            prompt = self.run.tokenizer.decode(group.prompt.tokens)
            row |= {"prompt": prompt, "completion": text, "finish_reason": sample.finish_reason}
            more = sample.episode
            self.logs[SAMPLES].write(row | more)
            row |= {"completion": conversation(more["messages"], more["rewards"])} if more else {}
            lag = batch.index - 1 - float(sample.versions[sample.sampled].mean())
            table.append({**row, "episode": self.run.callbacks.state.episode, "lag": lag})
        self.run.callbacks.table("completions", table)


def digests_of(scored: ScoredBatch, experience: Experience) -> dict[str, str]:
    """64-bit checksums of a batch's parts, in the order in which they come to be; docs/commands/diff.md lists them."""
    samples = scored.batch.samples
    tokens_N, sampled_N, logprobs_N = (
        np.concatenate([getattr(sample, name) for sample in samples]) for name in ("tokens", "sampled", "logprobs")
    )
    ended = repr([(len(sample), sample.finish_reason) for sample in samples])
    parts: dict[str, list[str | np.ndarray]] = {
        "prompts": [repr([(g.prompt.draw, g.prompt.row, g.prompt.tokens) for g in scored.batch.groups])],
        "versions": [repr([sorted(drawn_versions([sample])) for sample in samples])],
        "tokens": [ended, tokens_N, sampled_N],
        "logprobs": [logprobs_N],
    }
    if any(sample.rewards is not None for sample in samples):
        firsts = [sample.tokens[: end_of_first_answer(sample)] for sample in samples]
        said = [repr([sample.rewards is None or sample.rewards.tolist() for sample in samples])]
        parts |= {"tokens": [repr([*map(len, firsts)]), *firsts], "episodes": [*parts["tokens"], *said]}
        parts["logprobs"] = parts.pop("logprobs")
    parts |= {f"reward/{name}": [rewards_R.numpy()] for name, rewards_R in scored.rewards.items()}
    parts |= {"scores": [scored.scores_PK.numpy()], "learner": [], "credit": []}
    for name, tensor in experience.tensors().items():
        parts["learner" if name in _BY_THE_LEARNER else "credit"] += [name, tensor.numpy()]
    return {name: digest(*each) for name, each in parts.items()}


_BY_THE_LEARNER = {"reference_logprobs_BT", "old_logprobs_BT", "values_BT", "end_values_B"}


def end_of_first_answer(sample: Sample) -> int:
    """How many tokens a sample has up to what the policy drew first."""
    first = int(sample.sampled.argmax())
    return first + int(np.append(~sample.sampled[first:], True).argmax())


def digest(*parts: str | np.ndarray) -> str:
    """A 64-bit checksum of texts and of the bytes of arrays, one after the other."""
    hashed = xxhash.xxh3_64()
    for part in parts:
        hashed.update(part.encode(errors="surrogatepass") if isinstance(part, str) else np.ascontiguousarray(part).data)
    return hashed.hexdigest()
