"""Repeats one update of a run, bit for bit, and says what moved the policy, and what would have moved it without."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from async_rlhf.commands.rerun import (
    Line,
    ReplayDiffersError,
    of_training,
    read_metrics,
    read_run,
    require_equal,
    without_uploads,
)
from async_rlhf.commands.train import make_trainer
from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.config.parallel import launched_ranks
from async_rlhf.generation.placement import shared_cores
from async_rlhf.models.context_length import with_prompt_cap
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.run.config import RunConfig
from async_rlhf.run.folder import SCHEDULE, Checkpoints, batch_of
from async_rlhf.run.record import ENVIRONMENT
from async_rlhf.run.schedule import version_for
from async_rlhf.run.trainer import OnlineTrainer, train
from async_rlhf.studies.explain.config import ExplainConfig
from async_rlhf.studies.explain.explanation import explained
from async_rlhf.studies.explain.page import page
from async_rlhf.studies.explain.update import RepeatableUpdate, clones
from async_rlhf.system.files import whole_file
from async_rlhf.types import Batch, ScoredBatch

logger = logging.getLogger(__name__)


def run_explain(config: ExplainConfig) -> dict[str, Any]:
    """Explain one update of a run. Nothing in the run's folder changes but ``explain``.

    Returns:
        What explain-BATCH.json holds.

    Raises:
        ConfigError: the run cannot be repeated, or has no such batch.
        ReplayDiffersError: what was repeated is not what the run had logged.
    """
    run, original = Path(config.run), read_run(config.run, "explained")
    _require_one_rank(run, original)
    folder = run / "explain" if config.output_dir is None else Path(config.output_dir)
    files = [folder / f"explain-{config.batch}.{kind}" for kind in ("json", "txt")]
    for file in files:
        free = config.overwrite or not file.exists()
        require(free, "output_dir", str(folder), f"has {file.name} already; set overwrite, or choose another folder")
    logged = of_training(read_metrics(run))
    last = max(logged, default=0)
    right = f"must be 1 to {last}, the last batch that {config.run!r} has logged"
    require(config.batch <= last, "batch", config.batch, right)
    checkpoint = Checkpoints(run).newest_whole(until=config.batch - 1)
    branched = checkpoint is None and original.train.resume_from is not None
    if branched:
        why = "was branched from a checkpoint of another run, and has none of its own before that batch"
        raise ConfigError(f"run: {config.run!r} {why}; must have one, to be explained there")
    start = 0 if checkpoint is None else batch_of(checkpoint.name) or 0
    _say_from(checkpoint, start, config.batch)
    with tempfile.TemporaryDirectory(prefix="explain-") as scratch:
        repeated = _repeated(original, run, Path(scratch), checkpoint, config.batch)
        found = _Repetition.of(repeated, config.batch)
        ours = of_training(read_metrics(Path(repeated.train.output_dir)))
    both = [batch for batch in ours if batch in logged]
    require_equal([ours[batch] for batch in both], [logged[batch] for batch in both])
    account = {
        "run": str(run),
        "batch": config.batch,
        "algorithm": original.algorithm,
        "staleness": original.train.staleness,
        "repeated": {
            "from": None if checkpoint is None else checkpoint.name,
            "batches": config.batch - start,
            "compared": both,
        },
        **found.explain(config.top),
    }
    _write(files, account, ours[config.batch])
    return account


def _require_one_rank(run: Path, original: RunConfig) -> None:
    path, ranks = run / ENVIRONMENT, original.train.parallel.ranks
    starts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    most = max([ranks, launched_ranks(), *(int(start.get("ranks", 1)) for start in starts)])
    if most > 1:
        raise ConfigError(
            f"run: {str(run)!r} has a learner on {most} ranks; must be on one: an update is explained where one "
            "process has all weights and all rows"
        )


def _say_from(checkpoint: Path | None, start: int, batch: int) -> None:
    repeats = f"{batch - start} {'batch' if batch - start == 1 else 'batches'}"
    if checkpoint is None:
        logger.info("explain: there is no checkpoint before batch %d; repeats %s from the beginning", batch, repeats)
    else:
        logger.info("explain: repeats %s from %s", repeats, checkpoint.name)


def _repeated(original: RunConfig, run: Path, scratch: Path, checkpoint: Path | None, batch: int) -> RunConfig:
    """The run's configuration, to be repeated elsewhere from a checkpoint of it."""
    bounded = original.train.staleness_mode == "bounded"
    train = without_uploads(
        original.train,
        run,
        scratch / "run",
        replay_from=str(_schedule(original, run, scratch, batch)) if bounded else None,
        resume_from=None if checkpoint is None else str(checkpoint),
        logging_steps=1,
        trace=False,
    )
    return replace(original, train=with_prompt_cap(train, original.model))


def _schedule(original: RunConfig, run: Path, scratch: Path, batch: int) -> Path:
    """The run's schedule up to a batch. What comes later is not repeated, and gets the newest versions, so that nothing
    is sampled for it.
    """
    lines = (run / SCHEDULE).read_text(encoding="utf-8").splitlines()[:batch]
    right = f"has no batch {batch}; must have it, to be repeated with the versions that it had"
    require(len(lines) == batch, "run", str(run / SCHEDULE), right)
    config = original.train
    requests = config.generation.requests(config.batch_size)
    later = range(len(lines) + 1, config.num_batches + 1)
    lines += [json.dumps({"batch": b, "versions": [version_for(b, 0)] * requests}) for b in later]
    path = scratch / SCHEDULE
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


class _Witness:
    """A scorer that keeps one batch as it was scored, and is else the one that it wraps."""

    def __init__(self, scorer: Scorer, batch: int) -> None:
        self._scorer, self._batch = scorer, batch
        self.seen: ScoredBatch | None = None

    def __call__(self, batch: Batch) -> ScoredBatch:
        scored = self._scorer(batch)
        if batch.index == self._batch:
            self.seen = scored
        return scored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)


class _Stop(TrainerCallback):
    """Keeps the learner as it is before a batch, and the policy after it, and ends the run there."""

    def __init__(self, trainer: OnlineTrainer, batch: int) -> None:
        self._trainer, self._batch = trainer, batch
        self.update: RepeatableUpdate | None = None
        self.after: list[Tensor] = []

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before a batch is scored."""
        if state.global_step == self._batch - 1:
            self.update = RepeatableUpdate(self._trainer.learner, self._batch)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the update."""
        if self.update is not None:
            self.after = clones(self.update.policy)
            control.should_training_stop = True


@dataclass(frozen=True)
class _Repetition:
    """A run that has been repeated up to a batch."""

    trainer: OnlineTrainer
    update: RepeatableUpdate
    scored: ScoredBatch
    after: Sequence[Tensor]

    @classmethod
    def of(cls, config: RunConfig, batch: int) -> _Repetition:
        trainer = make_trainer(config)
        stop, witness = _Stop(trainer, batch), _Witness(trainer.run.scorer, batch)
        trainer.add_callback(stop)
        train(replace(trainer.run, scorer=cast(Scorer, witness)))
        if stop.update is None or witness.seen is None:
            raise ReplayDiffersError(f"the run has ended before batch {batch}: a callback has stopped it")
        return cls(trainer, stop.update, witness.seen, stop.after)

    def explain(self, top: int) -> dict[str, Any]:
        """With as many threads as in training, for sums depend on them."""
        run, learner = self.trainer.run, self.trainer.learner
        with shared_cores(run.config, run.device):
            experience = self.update.annotate(self.scored)
            again = self.update.take(experience)
            if not all(map(torch.equal, again, self.after)):
                raise ReplayDiffersError("the update cannot be repeated bit for bit: on a GPU, set train.deterministic")
            logger.info("explain: the update repeats bit for bit; taking it apart")
            found = explained(self.update, self.scored, experience, run.scorer, run.tokenizer, self.after, top)
        learner.optimizer.zero_grad()
        return found


def _write(files: Sequence[Path], account: dict[str, Any], metrics: Line) -> None:
    text = page(account)
    account["metrics"] = metrics
    with whole_file(files[0]) as file:
        json.dump(account, file, indent=1, allow_nan=False)
        file.write("\n")
    with whole_file(files[1]) as file:
        file.write(text)
    print(text)
    logger.info("explain: written to %s and %s", *files)
