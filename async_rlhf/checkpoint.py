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
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_rlhf.config import ALGORITHM_CONFIGS, ConfigError, OnlineConfig
from async_rlhf.config.base import dotted, may_change, require
from async_rlhf.config.secrets import without_secrets
from async_rlhf.data.stream import PromptStream
from async_rlhf.files import naming, whole_folder
from async_rlhf.types import Batch, Group, Sample

logger = logging.getLogger(__name__)

FINAL = "final"
"""The folder of the policy after the last batch."""
FORMAT = 3
"""Of what is written for resuming. It changes with every change that an older or newer version could not read."""
_MANIFEST = "manifest.json"
_DELETED = ".deleted.json"
"""The name of the manifest while its checkpoint is being deleted."""
_SAMPLE_TYPES = {
    "tokens": "int64",
    "sampled": "bool",
    "logprobs": "float32",
    "versions": "int64",
    "rewards": "float32",
}


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
    ahead: list[Batch] = field(default_factory=list)
    """Batches that are sampled but not trained on."""

    def write(self, folder: Path) -> None:
        """Write everything into ``folder/resume``."""
        folder = folder / "resume"
        folder.mkdir()
        _save(self.tensors, folder / "tensors.safetensors")
        path = folder / "rollouts.jsonl"
        with naming(path), path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in _rollout_rows(self.ahead))
        names = ("batch", "config", "inputs", "values", "logs")
        text = json.dumps({"format": FORMAT, **{name: getattr(self, name) for name in names}}, indent=1)
        path = folder / "state.json"
        with naming(path):
            path.touch(mode=0o600)  # options of vLLM may be secrets that we do not know
            path.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> ResumeState:
        """What :meth:`write` wrote, but for the batches that are sampled already: see :meth:`read_ahead`.

        Raises:
            CheckpointError: it cannot be read.
            ConfigError: another version of this package has written it, in another format.
        """
        folder = folder / "resume"
        try:
            values = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            written = values.pop("format", 1)
            if written == FORMAT:
                state = cls(**values)
                state.tensors = load_file(folder / "tensors.safetensors")
                return state
        except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
            raise CheckpointError(f"{str(folder)!r} cannot be read: {type(error).__name__}: {error}") from error
        raise ConfigError(
            f"resume: {str(folder.parent)!r} is a checkpoint of format {written}; must be of format {FORMAT}: go on "
            "with the version of async_rlhf that has written it, or start a new run from its policy (model)"
        )

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
        old, new = (
            {key: value for key, value in values.items() if not may_change(config, key)}
            for values in (without_secrets(self.config), as_saved(config))
        )
        _require_same(old, new, config.resume_anyway)

    def check_inputs(self, inputs: Mapping[str, str], anyway: bool) -> None:
        """Require data, models and rewards to be the same, as :meth:`check` does for the configuration."""
        _require_same(self.inputs, inputs, anyway)


def as_saved(config: OnlineConfig) -> dict[str, Any]:
    """A configuration as JSON gives it back, keys with dots, with what follows from it and may not change."""
    algorithm = next(name for name, kind in ALGORITHM_CONFIGS.items() if isinstance(config, kind))
    derived = {
        "algorithm": algorithm,
        "number of generation.urls": len(config.generation.urls),
        "prompts per batch": config.batch_size,
    }
    return json.loads(json.dumps({**derived, **without_secrets(dotted(asdict(config)))}))


def _require_same(old: Mapping[str, Any], new: Mapping[str, Any], anyway: bool) -> None:
    differences = [
        f"{key}: was {old.get(key)!r}, is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
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


def _rollout_rows(batches: Iterable[Batch]) -> Iterator[dict[str, Any]]:
    names = ("index", "version", "generation_seconds", "shares", "metrics")
    for batch in batches:
        groups = [
            {"draw": group.prompt.draw, "samples": [_sample_row(sample) for sample in group.samples]}
            for group in batch.groups
        ]
        yield {**{name: getattr(batch, name) for name in names}, "groups": groups}


def _sample_row(sample: Sample) -> dict[str, Any]:
    values = {item.name: getattr(sample, item.name) for item in fields(sample)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def _rollout_batch(row: dict[str, Any], stream: PromptStream) -> Batch:
    groups = tuple(Group(stream.prompt(g["draw"]), tuple(map(_sample_of, g["samples"]))) for g in row["groups"])
    return Batch(**{**row, "groups": groups, "shares": tuple(row["shares"])})


def _sample_of(row: dict[str, Any]) -> Sample:
    arrays = {name: np.array(row[name], kind) for name, kind in _SAMPLE_TYPES.items() if row[name] is not None}
    return Sample(**{**row, **arrays})


def write_whole(folder: Path, write: Iterable[Any]) -> None:
    """Write a folder, with its manifest, that appears under its name only when all of it is on the disk.

    It takes the place of one that was written in the same way. Anything else is set aside under another name.

    Args:
        folder: its place.
        write: functions that each write into the folder they are given.
    """
    if (stranger := stranger_in(folder)) is not None:
        numbers = (f"{folder.name}.kept-{number}" for number in count(1))
        aside = next(path for name in numbers if not os.path.lexists(path := folder.with_name(name)))
        logger.warning("WARNING: %s was not written by a run; %s is kept, as %s", stranger, folder, aside.name)
        folder.rename(aside)
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


def stranger_in(folder: Path) -> Path | None:
    """What nobody may delete with a folder that :func:`write_whole` would write: the folder itself, where it is a link
    or was not written so, or the first thing in it that its manifest does not list. None where there is no such thing.
    """
    if not os.path.lexists(folder):
        return None
    if folder.is_symlink() or not folder.is_dir():
        return folder
    inside = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    lists = [folder / _DELETED, folder / _MANIFEST]
    listing = next((path for path in lists if path.is_file()), None)
    if listing is None:
        return folder if inside else None  # nothing is left where deleting was interrupted at its end
    try:
        listed = {folder / name for name in dict(json.loads(listing.read_text(encoding="utf-8")))}
    except (ValueError, TypeError):  # damaged: what it said can no longer be told
        return None
    return next((path for path in inside if path not in {*listed, *lists}), None)


def delete_whole(folder: Path) -> None:
    """Delete a folder in which there is no stranger. When that is interrupted it is no checkpoint any more, whatever is
    left, but still says what was in it.
    """
    listing = folder / _DELETED
    with suppress(FileNotFoundError):
        (folder / _MANIFEST).replace(listing)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != listing:
            path.unlink()
    listing.unlink(missing_ok=True)
    folder.rmdir()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{path.stat().st_size} bytes, xxh3 {digest.hexdigest()}"
