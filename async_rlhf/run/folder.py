"""The output folder of a run: which files belong to the run, what it resumes from, and what it may delete.

A run deletes only what a run has written. Checkpoints and the final policy are recognised by their exact names and
their manifests; the log files are listed in ``run_files.json`` before they are made, and the
page has a mark. Links are not followed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.run.episodes import EPISODES
from async_rlhf.run.manifest import CheckpointError, delete_whole, stranger_in, verify
from async_rlhf.system.files import from_json, whole_file
from async_rlhf.system.lock import Hold, hold, refuse_in_use

logger = logging.getLogger(__name__)

FINAL = "final"
"""The folder of the policy after the last batch."""
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
DIGESTS = "digests.jsonl"
"""Checksums of what each batch was made of."""
EVAL_SAMPLES = "eval_samples.jsonl"
ROLLOUTS = "rollouts"
"""The folder of all samples, in a file for each batch; see run/rollouts.py."""
REPORT = "report.html"
"""The page about the run (``async-rlhf report``), which the command writes at the end."""
PROOF = "proof.json"
"""What was checked in the run, beside its page."""
REPORT_MARK = '<meta name="generator" content="async-rlhf report">'
"""By this, at its top, a page is known to be ours."""
_LOCK = ".run.lock"
_WRITTEN = "run_files.json"
_CHECKPOINT = re.compile(r"checkpoint-([1-9][0-9]*)")
_LOG = re.compile(
    r"(metrics|samples|eval_samples|schedule|episodes|digests)\.jsonl|trace(-from-[1-9][0-9]*)?\.json|report\.html|proof\.json"
)
_ROLLOUTS = re.compile(r"batch-([0-9]{8,})\.parquet")
_HALF_WRITTEN = re.compile(rf"\.({_CHECKPOINT.pattern}|{FINAL})\.(tmp|old|hub)")


def hold_folder(folder: Path) -> Hold:
    """Make the folder of a run and lock it against other writers. A folder that is still empty at the end is deleted.

    Raises:
        ConfigError: it cannot be made or written to, or another process writes there.
    """
    try:
        return hold(folder / _LOCK, "output_dir", folder)
    except OSError as error:
        cannot = "be written to" if folder.is_dir() else "be made"
        raise ConfigError(f"output_dir: {str(folder)!r} cannot {cannot}: {error}") from error


def refuse_second(folder: Path) -> None:
    """Require that no living process of this host writes to the folder. Writes nothing.

    Raises:
        InUseError: one does.
    """
    refuse_in_use(folder / _LOCK, "output_dir", folder)


def log_names(config: OnlineConfig, evaluates: bool) -> list[str]:
    """The log files that a run writes; one that ``evaluates`` has held-out prompts."""
    more = [EPISODES] if config.generation.max_turns is not None else []
    return [METRICS, SAMPLES, DIGESTS, *([EVAL_SAMPLES] if evaluates else []), *more]


def rollouts_file(folder: Path, batch: int) -> Path:
    """The file with the samples of a batch, of a run in this folder."""
    return folder / ROLLOUTS / f"batch-{batch:08}.parquet"


def is_report(path: Path) -> bool:
    """Whether a file is a page that ``async-rlhf report`` has written."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return REPORT_MARK in file.read(2000)


def batch_of(name: str) -> int | None:
    """The batch number in a checkpoint's name; None for other names."""
    match = _CHECKPOINT.fullmatch(name)
    return None if match is None else int(match[1])


def _batch_of_rollouts(path: Path) -> int:
    """The batch whose samples are in a file; 0 for other files."""
    match = _ROLLOUTS.fullmatch(path.name)
    return 0 if match is None or path.parent.name != ROLLOUTS else int(match[1])


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, as folders ``checkpoint-<batches>``.

    Args:
        folder: the run's.
    """

    folder: Path

    def path(self, batch: int) -> Path:
        """The path of the checkpoint after that many batches."""
        return self.folder / f"checkpoint-{batch}"

    def all(self) -> list[Path]:
        """All checkpoints, the oldest first."""
        paths = {batch: path for path in _listed(self.folder) if (batch := batch_of(path.name)) and path.is_dir()}
        return [path for _, path in sorted(paths.items())]

    def newest_whole(self, until: float = math.inf) -> Path | None:
        """The newest undamaged one of at most ``until`` batches; logs a warning about each newer, damaged one."""
        for path in [path for path in reversed(self.all()) if (batch_of(path.name) or 0) <= until]:
            try:
                verify(path)
            except CheckpointError as error:
                logger.warning("WARNING: %s is damaged and is passed over: %s", path.name, error)
            else:
                return path
        return None

    def delete_old(self, config: OnlineConfig, wanted: Collection[str]) -> None:
        """Keep as many checkpoints as the configuration says: the newest, those that are wanted however old, and what
        no run has written. A run that says nothing of checkpoints keeps its newest, and all of runs that did.
        """
        by_default = config.save_steps is None and config.save_total_limit is None
        limit = 1 if by_default else config.save_total_limit
        if limit is None:
            return
        paths = [path for path in self.all() if not by_default or _is_by_default(path)]
        names = {Path(path).name for path in wanted}
        kept = [path for path in paths if path.name in names or path == paths[-1]]
        room = max(limit - len(kept), 0)
        kept += [path for path in reversed(paths) if path not in kept][:room]
        for path in paths:
            if path not in kept and (stranger := stranger_in(path)) is None:
                delete_whole(path)
            elif path not in kept:
                logger.warning("WARNING: %s is kept, for %s was not written by a run", path.name, stranger)


def _is_by_default(checkpoint: Path) -> bool:
    """Whether the run that wrote it said nothing of checkpoints."""
    with suppress(OSError, ValueError, KeyError):  # a damaged one stays
        state = json.loads((checkpoint / "resume" / "state.json").read_text(encoding="utf-8"))
        return state["config"].get("save_steps", 0) is None
    return False


@dataclass(frozen=True)
class RunFolder:
    """What a starting run finds in its folder.

    Args:
        config: of the run.
        checkpoint: what it resumes from, if anything.
        batch: batches that the checkpoint was trained on, else 0.
    """

    config: OnlineConfig
    checkpoint: Path | None
    batch: int

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.config.output_dir)

    @property
    def goes_on(self) -> bool:
        """Whether the checkpoint is in this folder, so its logs are continued. Else the run starts afresh here."""
        path = Checkpoints(self.path).path(self.batch)
        return self.checkpoint is not None and path.exists() and path.samefile(self.checkpoint)

    @property
    def trace(self) -> str:
        """The name of its trace."""
        return "trace.json" if self.checkpoint is None else f"trace-from-{self.batch}.json"

    def check(self) -> None:
        """Refuse a folder that holds an earlier run, unless it may be overwritten or has ended before its first batch,
        or where something else would have to be deleted or overwritten.

        Raises:
            ConfigError: names what is in the way.
        """
        afresh = self.config.overwrite_output_dir or (self.config.resume and self.checkpoint is None)
        earlier = self._earlier()
        if earlier and not (afresh or self.goes_on) and self._has_trained(earlier):
            seen = METRICS if self.path / METRICS in earlier else earlier[0].name
            raise ConfigError(
                f"output_dir: {str(self.path)!r} holds an earlier run ({seen}); choose another folder, set "
                "resume to go on with it, or set overwrite_output_dir to delete it"
            )
        for path in self._superseded() if self.goes_on else earlier:
            if (stranger := self._stranger(path)) is not None:
                raise ConfigError(
                    f"output_dir: {str(self.path)!r} holds {str(stranger.relative_to(self.path))!r}, which would have "
                    f"to be deleted and which no run has written; move it away, or choose another folder"
                )

    def clear(self, wanted: Collection[str], evaluates: bool) -> None:
        """Delete what an earlier run left and this one does not resume from.

        Args:
            wanted: the checkpoints to keep, however old.
            evaluates: whether this one has held-out prompts.
        """
        going_on = self.goes_on
        self.check()  # some time has passed since the run was made
        # Checkpoints first: else, after an interrupted deletion, a run could resume from one that has lost its logs.
        for path in self._superseded() if going_on else self._earlier():
            if going_on and path.name == FINAL:
                continue  # the new one will take its place
            if going_on and batch_of(path.name) is not None:
                logger.warning("deleting %s: the run goes on from batch %d", path.name, self.batch)
            delete_whole(path) if path.is_dir() else path.unlink()
        with suppress(OSError):  # it is not there, or not empty
            (self.path / ROLLOUTS).rmdir()
        for path in _listed(self.path):
            if _HALF_WRITTEN.fullmatch(path.name):
                path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
        if going_on:  # the run may have been killed between the last checkpoint and the deletion of old ones
            Checkpoints(self.path).delete_old(self.config, wanted)
        with whole_file(self.path / _WRITTEN) as file:
            json.dump(sorted({*(self._written() or ()), *self._writes(evaluates)}), file)

    def _writes(self, evaluates: bool) -> list[str]:
        """What is not known by a manifest."""
        more = [ROLLOUTS] if self.config.rollouts == "all" else []
        return [*log_names(self.config, evaluates), self.trace, PROOF, *more]

    def _superseded(self) -> list[Path]:
        """What a resumed run will write again: all that came after its checkpoint, checkpoints first."""
        newer = [path for path in self._earlier() if (batch_of(path.name) or _batch_of_rollouts(path)) > self.batch]
        return [*newer, *(path for path in (self.path / FINAL, self.path / self.trace) if os.path.lexists(path))]

    def _earlier(self) -> list[Path]:
        """Everything whose name a run would give, checkpoints first."""
        paths = list(_listed(self.path))
        checkpoints = [path for path in paths if batch_of(path.name) is not None]
        final = [path for path in paths if path.name == FINAL]
        logs = [path for path in paths if _LOG.fullmatch(path.name)]
        rollouts = self.path / ROLLOUTS
        kept = [rollouts] if rollouts.is_symlink() else filter(_batch_of_rollouts, _listed(rollouts))
        return [*checkpoints, *logs, *kept, *final]

    def _has_trained(self, earlier: Iterable[Path]) -> bool:
        """Whether a checkpoint, a policy or a line of a batch would be lost."""
        metrics = self.path / METRICS
        logged = metrics.is_file() and b'"completions"' in metrics.read_bytes()
        return logged or not all(_LOG.fullmatch(path.name) for path in earlier)

    def _stranger(self, path: Path) -> Path | None:
        written = self._written()
        if _batch_of_rollouts(path):
            return None if ROLLOUTS in (written or ()) and path.is_file() and not path.is_symlink() else path
        if not _LOG.fullmatch(path.name):
            return stranger_in(path)
        if path.name == REPORT:  # the command report may have written it, after the run
            ours = is_report(path)
        elif written is None:  # a run by an older version, which wrote no list; checkpoints show whose folder it is
            places = [*Checkpoints(self.path).all(), self.path / FINAL]
            ours = any(folder.is_dir() and stranger_in(folder) is None for folder in places)
        else:
            ours = path.name in written
        return None if ours and path.is_file() and not path.is_symlink() else path

    def _written(self) -> Collection[str] | None:
        try:
            return set(from_json((self.path / _WRITTEN).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def _listed(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.iterdir()) if folder.is_dir() else ()


def checkpoint_to_resume(config: OnlineConfig) -> Path | None:
    """The checkpoint that a run resumes from; None if it starts at the beginning.

    With both ``resume`` and ``resume_from``, a run that started from elsewhere resumes from its own newest checkpoint.

    Raises:
        ConfigError: there is something to resume from, but no whole checkpoint.
    """
    if not config.resuming:
        return None
    output_dir = Path(config.output_dir)
    checkpoints = Checkpoints(output_dir)
    if config.resume and (config.resume_from is None or checkpoints.all()):
        newest = checkpoints.newest_whole()
        if newest is None and (checkpoints.all() or (output_dir / FINAL).exists()):
            raise ConfigError(
                f"resume: {str(output_dir)!r} holds a run but no whole checkpoint to go on from; set "
                "overwrite_output_dir instead to delete it and start at the beginning"
            )
        if newest is None:
            logger.warning("resume: there is no checkpoint in %s; starting at the beginning", output_dir)
        return newest
    folder = Path(str(config.resume_from)).expanduser()
    try:
        verify(folder)
        if not (folder / "resume").is_dir():
            raise CheckpointError("it holds a policy, but not the state of a run")
    except CheckpointError as error:
        raise ConfigError(f"resume_from: got {str(folder)!r}; must be a whole checkpoint: {error}") from error
    return folder
