"""Checkpoints: the policy in the standard format, and beside it everything else that decides the future of the run.

    checkpoint-12/
      model.safetensors, config.json, tokenizer.json ...   the policy, as ``from_pretrained`` loads it
      adapter/, value_model/                                where there are such
      trainer_state.json                                    transformers' state
      resume/state.json, tensors.safetensors                optimiser, schedules, random generators, log positions
      resume/rollouts.jsonl                                 what older weights have sampled for the next S batches
      manifest.json                                         size and checksum of every file, written last

Nothing here is ever unpickled: safetensors and JSON only.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_rlhf.config import ALGORITHM_CONFIGS, ConfigError, OnlineConfig
from async_rlhf.config.base import dotted, require
from async_rlhf.config.secrets import without_secrets
from async_rlhf.data.stream import PromptStream
from async_rlhf.files import whole_folder
from async_rlhf.types import Rollout, RolloutBatch, RolloutGroup

logger = logging.getLogger(__name__)

FINAL = "final"
"""The folder of the policy after the last batch."""
_MANIFEST = "manifest.json"
_MAY_CHANGE = {
    "output_dir",
    "overwrite_output_dir",
    "resume",
    "resume_from",
    "resume_anyway",
    "total_episodes",
    "save_steps",
    "save_total_limit",
    "metric_for_best_model",
    "greater_is_better",
    "logging_steps",
    "eval_steps",
    "num_samples_logged",
    "report_to",
    "run_name",
    "progress",
    "trace",
    "trust_remote_code",
    "reward_timeout",
    "parallel.ranks",
    "parallel.timeout",
    "generation.max_restarts",
    "generation.timeout",
    "generation.heartbeat_timeout",
    "generation.probe_steps",
    "generation.mismatch_samples",
    "generation.urls",
    "generation.weights_dir",
    "launch",
    "generation.weights_road",
    "generation.vllm.gpu_memory_utilization",
    "generation.vllm.kv_cache_gb",
    "generation.vllm.sleep",
}
"""Keys that do not change what is computed, and the length of the run."""


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged or no checkpoint at all. The message names the file."""


@dataclass
class ResumeState:
    """What a run needs to go on as if it had never stopped, beside the models themselves."""

    batch: int
    """Batches trained on."""
    config: dict[str, Any]
    """The configuration, keys with dots."""
    inputs: dict[str, str]
    """Fingerprints of what came from outside: prompts, reference policy, reward model."""
    values: dict[str, Any]
    """Of the learner, the random generators and the reward functions: all that is no tensor."""
    logs: dict[str, int]
    """Bytes of each log file."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ahead: list[RolloutBatch] = field(default_factory=list)
    """Batches that are sampled but not trained on."""

    def write(self, folder: Path) -> None:
        """Write everything into ``folder/resume``."""
        folder = folder / "resume"
        folder.mkdir()
        _save(self.tensors, folder / "tensors.safetensors")
        with (folder / "rollouts.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in _rollout_rows(self.ahead))
        names = ("batch", "config", "inputs", "values", "logs")
        text = json.dumps({name: getattr(self, name) for name in names}, indent=1)
        state = folder / "state.json"
        state.touch(mode=0o600)  # options of vLLM may be secrets that we do not know
        state.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> ResumeState:
        """What :meth:`write` wrote, but for the batches that are sampled already: see :meth:`read_ahead`.

        Raises:
            CheckpointError: it cannot be read.
        """
        folder = folder / "resume"
        try:
            state = cls(**json.loads((folder / "state.json").read_text(encoding="utf-8")))
            state.tensors = load_file(folder / "tensors.safetensors")
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"{str(folder)!r} cannot be read: {type(error).__name__}: {error}") from error
        return state

    def read_ahead(self, folder: Path, stream: PromptStream) -> None:
        """Read the batches that are sampled already; the stream gives their prompts."""
        lines = (folder / "resume" / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
        self.ahead = [_rollout_batch(json.loads(line), stream) for line in lines]

    def forget_weights(self) -> None:
        """Let go of what the learner has taken; the random generators are still to be restored."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name.startswith("random.")}

    def check(self, config: OnlineConfig) -> None:
        """Require the configuration to be the same, but for keys that may change.

        Raises:
            ConfigError: names every key that differs, unless ``resume_anyway``.
        """
        seen = self.batch * config.batch_size
        right = f"must be at least the {seen} that the checkpoint has seen"
        require(self.batch <= config.num_batches, "total_episodes", config.total_episodes, right)
        _require_same(without_secrets(self.config), as_saved(config), config.resume_anyway)

    def check_inputs(self, inputs: Mapping[str, str], anyway: bool) -> None:
        """Require data, models and rewards to be the same, as :meth:`check` does for the configuration."""
        _require_same(self.inputs, inputs, anyway)


def as_saved(config: OnlineConfig) -> dict[str, Any]:
    """A configuration as JSON gives it back, keys with dots, with what follows from it and may not change."""
    algorithm = next(name for name, kind in ALGORITHM_CONFIGS.items() if isinstance(config, kind))
    derived = {
        "algorithm": algorithm,
        "number of generation.urls": len(config.generation.urls),
        "number of ranks": config.parallel.count,
        "prompts per batch": config.batch_size,
    }
    return json.loads(json.dumps({**derived, **without_secrets(dotted(asdict(config)))}))


def _require_same(old: Mapping[str, Any], new: Mapping[str, Any], anyway: bool) -> None:
    differences = [
        f"{key}: was {old.get(key)!r}, is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if key not in _MAY_CHANGE and not key.startswith("ray.") and old.get(key) != new.get(key)
    ]
    if differences and not anyway:
        raise ConfigError(
            "resume: the checkpoint is of another run, which could not be continued exactly:\n  "
            + "\n  ".join(differences)
            + "\nset them back, or set resume_anyway to go on with the new ones"
        )
    for difference in differences:
        logger.warning("resume_anyway: %s", difference)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # a full disk comes as this, not as an OSError
        raise OSError(f"{str(path)!r} could not be written: {error}") from error


def _rollout_rows(batches: Iterable[RolloutBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        groups = [
            {
                "draw": group.prompt.draw,
                "rollouts": [[r.tokens, r.logprobs, r.versions, r.finish_reason] for r in group.rollouts],
            }
            for group in batch.groups
        ]
        names = ("index", "version", "generation_seconds", "shares", "metrics")
        yield {**{name: getattr(batch, name) for name in names}, "groups": groups}


def _rollout_batch(row: dict[str, Any], stream: PromptStream) -> RolloutBatch:
    groups = tuple(
        RolloutGroup(
            stream.prompt(group["draw"]),
            tuple(Rollout(tuple(t), tuple(p), tuple(v), reason) for t, p, v, reason in group["rollouts"]),
        )
        for group in row["groups"]
    )
    return RolloutBatch(**{**row, "groups": groups, "shares": tuple(row["shares"])})


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, as folders ``checkpoint-<batches>``.

    Args:
        folder: the run's.
    """

    folder: Path

    def path(self, batch: int) -> Path:
        """Where the checkpoint after so many batches lies."""
        return self.folder / f"checkpoint-{batch}"

    def all(self) -> list[Path]:
        """The oldest first."""
        found = [path for path in self.folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
        return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))

    def newest_whole(self) -> Path | None:
        """The newest that is undamaged; what is wrong with newer ones is said as a warning."""
        for path in reversed(self.all()):
            try:
                verify(path)
            except CheckpointError as error:
                logger.warning("WARNING: %s is damaged and is passed over: %s", path.name, error)
            else:
                return path
        return None

    def delete_old(self, limit: int | None, best: str | None) -> None:
        """Keep the newest ``limit``, of which the best is one, however old it is."""
        if limit is None:
            return
        paths = self.all()
        kept = [path for path in paths if best is not None and path.name == Path(best).name]
        room = limit - len(kept)
        kept += [path for path in reversed(paths) if path not in kept][: max(room, 1)]
        for path in paths:
            if path not in kept:
                _delete(path)

    def delete_newer(self, batch: int) -> None:
        """Delete the checkpoints of a future that a run has gone back from, and what killed runs left half-written."""
        for path in self.all():
            if int(path.name.rpartition("-")[2]) > batch:
                logger.warning("deleting %s: the run goes on from batch %d", path.name, batch)
                _delete(path)
        for pattern in (".checkpoint-*.tmp", ".checkpoint-*.old", f".{FINAL}.tmp", f".{FINAL}.old"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path)


def _delete(checkpoint: Path) -> None:
    # Without its manifest it is no checkpoint any more, whatever is left when deleting is interrupted.
    (checkpoint / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def write_whole(folder: Path, write: Iterable[Any]) -> None:
    """Write a folder, with its manifest, that appears under its name only when all of it is on the disk.

    Args:
        folder: its place.
        write: functions that each write into the folder they are given.
    """
    with whole_folder(folder) as temporary:
        for part in write:
            part(temporary)
        files = {str(path.relative_to(temporary)): _digest(path) for path in _files(temporary)}
        (temporary / _MANIFEST).write_text(json.dumps(files, indent=1, sort_keys=True), encoding="utf-8")


def verify(folder: Path) -> None:
    """Require every file of the manifest to be as it was written.

    Raises:
        CheckpointError: names the first that is not.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        names = dict(manifest).items()
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{str(folder / _MANIFEST)!r} cannot be read: {error}") from error
    for name, digest in names:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{str(path)!r} is missing")
        if _digest(path) != digest:
            raise CheckpointError(f"{str(path)!r} is not what was written: its checksum differs")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{path.stat().st_size} bytes, xxh3 {digest.hexdigest()}"


def checkpoint_to_resume(config: OnlineConfig) -> Path | None:
    """The checkpoint that a run goes on from; None where it starts at the beginning.

    With ``resume`` and ``resume_from`` a run that was started from elsewhere goes on from its own newest checkpoint.

    Raises:
        ConfigError: there is something to go on from, but no whole checkpoint.
    """
    if not config.resuming:
        return None
    output_dir = Path(config.output_dir)
    own = Checkpoints(output_dir)
    if config.resume and (config.resume_from is None or own.all()):
        found = own.newest_whole()
        if found is None and (own.all() or (output_dir / FINAL).exists()):
            raise ConfigError(
                f"resume: {str(output_dir)!r} holds a run but no whole checkpoint to go on from; set "
                "overwrite_output_dir instead to delete it and start at the beginning"
            )
        if found is None:
            logger.warning("resume: there is no checkpoint in %s; starting at the beginning", output_dir)
        return found
    folder = Path(str(config.resume_from)).expanduser()
    try:
        verify(folder)
        if not (folder / "resume").is_dir():
            raise CheckpointError("it holds a policy, but not the state of a run")
    except CheckpointError as error:
        raise ConfigError(f"resume_from: got {str(folder)!r}; must be a whole checkpoint: {error}") from error
    return folder


def check_output_dir(folder: Path, overwrite: bool) -> None:
    """Make the folder of a run, and refuse one that holds an earlier run, unless that may be overwritten."""
    earlier = _earlier_run(folder)
    if earlier and not overwrite:
        raise ConfigError(
            f"output_dir: {str(folder)!r} holds an earlier run ({earlier[0].name}); choose another folder, set resume "
            "to go on with it, or set overwrite_output_dir to delete it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir: {str(folder)!r} cannot be made: {error}") from error
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"output_dir: {str(folder)!r} cannot be written to: {error}") from error


def delete_earlier_run(folder: Path) -> None:
    """Delete what an earlier run left."""
    for path in _earlier_run(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _earlier_run(folder: Path) -> list[Path]:
    names = ("metrics.jsonl", "samples.jsonl", "schedule.jsonl", FINAL)
    return [
        path
        # Checkpoints first: were deleting interrupted, one without its logs could be resumed from.
        for path in (*folder.glob("checkpoint-*"), *(folder / name for name in names), *folder.glob("trace*.json"))
        if path.exists()
    ]
