"""Checkpoints that are written beside training: what goes into one is copied at once, and written by a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from async_rlhf.config import OnlineConfig
from async_rlhf.distributed.parallel import Parallel, trainable
from async_rlhf.learner.launch import rank_device
from async_rlhf.models.saving import ModelCopies, Write, WriteWith
from async_rlhf.run.build import Training
from async_rlhf.run.manifest import appearing, require_written, seal
from async_rlhf.run.shards import SHARDS, WEIGHT, make_stager, own_state, whole_weights, write_shards
from async_rlhf.system.lock import require_hold
from async_rlhf.system.signals import RankError

logger = logging.getLogger(__name__)

_LARGE = 3_000_000_000
"""Trained parameters from which rank 0 had better not gather a checkpoint: with the optimiser's state it is 36 GB."""


class ShardedSaves:
    """Writes sharded checkpoints, one at a time. Every rank has one, and starts and awaits the same ones.

    A checkpoint appears when all ranks have written their files and rank 0 the manifest: until then it has a name that
    does not count. If a rank cannot write, all ranks raise the error when they next ask.

    Args:
        run: the run.
    """

    def __init__(self, run: Training) -> None:
        self._run = run
        self._group = run.ranks.new_group()
        self._stager = make_stager(rank_device(run.config, run.ranks))
        copies = partial(ModelCopies, tokenizer=run.tokenizer, parallel=run.learner.parallel)
        self._models = {"": ("policy.", copies(run.learner.policy))}
        """By its place in a checkpoint: how a model's parameters begin in the learner's, and what copies it."""
        if run.learner.value is not None:
            self._models["value_model"] = ("value.", copies(run.learner.value))
        self._save: Future[int] | None = None
        self._path = Path()

    def start(
        self, path: Path, batch: int, now: Sequence[Write], later: Sequence[Write], then: Callable[[], None]
    ) -> None:
        """Copy what is trained, and begin to write it. Every rank must call it, when no other save is under way.

        Args:
            path: of the checkpoint.
            batch: after which it is.
            now: functions that write into the folder what may change at once; on rank 0.
            later: functions that write what stays as it is.
            then: called on rank 0 when the checkpoint is whole.
        """
        assert self._save is None, "a save is under way"
        ranks, is_main = self._run.ranks, self._run.ranks.is_main
        with ExitStack() as stack:
            made = [stack.enter_context(appearing(path))] if is_main else []
            for part in now if made else ():
                part(made[0])
            folder = ranks.broadcast("folder of a checkpoint", lambda: made[0])
            state: Any = self._stager.stage(own_state(self._run.learner))
            models = {subfolder: self._copy(subfolder, state) for subfolder in self._models}
            self._path, whole = path, stack.pop_all()
        shards = folder / "resume" / SHARDS

        def write_models(in_shards: bool) -> None:
            for subfolder, write in models.items():
                prefix, copies = self._models[subfolder]
                if is_main and copies.in_shards == in_shards:
                    write(folder / subfolder, whole_weights(shards, prefix, copies.names) if in_shards else ())

        def write_rest() -> None:
            write_models(in_shards=False)
            for part in later if is_main else ():
                part(folder)

        def commit(digests: Mapping[str, str]) -> None:
            require_written(shards, digests)
            write_models(in_shards=True)
            require_hold(self._run.hold)
            seal(folder, {str(Path("resume", SHARDS, name)): digest for name, digest in digests.items()})
            whole.close()

        save: Future[int] = Future()

        def work() -> None:
            try:
                with whole:  # if anything fails, nothing is left of the folder
                    write_shards(state, shards, self._group, write_rest, commit)
                if is_main:
                    then()
                save.set_result(batch)
            except BaseException as error:  # of any kind: it is raised where the run next asks
                save.set_exception(error)

        self._save = save
        threading.Thread(target=work, name=f"saving {path.name}", daemon=True).start()

    def _copy(self, subfolder: str, state: Mapping[str, Tensor]) -> WriteWith:
        prefix, copies = self._models[subfolder]
        name = f"{WEIGHT}{prefix}"
        return copies.take({key.removeprefix(name): tensor for key, tensor in state.items() if key.startswith(name)})

    def finished(self, wait: bool = False) -> int | None:
        """The batch of a checkpoint that has become whole since the last call, if one has.

        Args:
            wait: for the save that is under way.

        Raises:
            OSError: it could not be written.
        """
        if self._save is None or not (wait or self._save.done()):
            return None
        wait_for([self._save])  # interrupted, it is still under way
        save, self._save = self._save, None
        return save.result()

    @contextmanager
    def finishing(self) -> Iterator[ShardedSaves]:
        """Within, saves may be started. One that is under way when an error ends the run is finished first, unless
        another rank has failed, without which it cannot be.
        """
        try:
            yield self
        except RankError:
            self._give_up()
            raise
        except BaseException:
            if self._save is not None:
                logger.warning("finishing %s before the run ends", self._path.name)
                try:
                    self.finished(wait=True)
                except KeyboardInterrupt:
                    self._give_up()
                except BaseException as error:  # the run ends with its own
                    logger.error("%s was not written: %s: %s", self._path.name, type(error).__name__, error)
            raise
        self._stager.close()

    def _give_up(self) -> None:
        if self._save is not None:
            logger.error("%s is not whole, and does not count", self._path.name)


def saving(run: Training) -> AbstractContextManager[ShardedSaves | None]:
    """Within, what writes the run's checkpoints beside training; None for whole ones. Every rank must enter it."""
    size = sum(parameter.numel() for parameter in trainable(run.learner.policy))
    sharded = writes_shards(run.config, run.learner.parallel, size)
    return ShardedSaves(run).finishing() if sharded else nullcontext()


def writes_shards(config: OnlineConfig, parallel: Parallel, trained: int) -> bool:
    """Whether each rank writes its own part of a policy with so many trained parameters."""
    spread = parallel.is_sharded and parallel.takes_shards and not config.parallel.cpu_offload
    wanted = config.checkpoint_format
    return wanted == "sharded" or (wanted == "auto" and spread and trained >= _LARGE)
