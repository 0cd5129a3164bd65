"""What a supervised stage has on disk until it is done, in a folder beside its output folder:

    .sft.unfinished/
      metrics.jsonl              loss, learning rate and evaluations
      logs/                      what trackers write
      checkpoint-40/             the newest, with a manifest
        state.json               step, configuration, inputs, position of metrics.jsonl
        tensors.safetensors      trained weights, the optimiser's state

The output folder appears only when the stage is done, with metrics.jsonl and logs/ in it.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from async_rlhf.commands.stage import Stage
from async_rlhf.config import ConfigError
from async_rlhf.config.base import dotted, may_change
from async_rlhf.config.secrets import without_secrets
from async_rlhf.ranks.collectives import Ranks
from async_rlhf.reports.log import JsonLines
from async_rlhf.run.checkpoint import require_same
from async_rlhf.run.folder import METRICS, Checkpoints
from async_rlhf.run.manifest import delete_whole, stranger_in, write_whole
from async_rlhf.system.files import naming

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the checkpoints. Raise it with every change that an older or newer version could not read."""
LOGS = "logs"
_STATE, _TENSORS = "state.json", "tensors.safetensors"
_LOOKED_AT = 64


@dataclass
class StageState:
    """What a stage needs to go on, beside the weights that it started from."""

    step: int
    """Optimiser steps done."""
    values: dict[str, Any]
    """The trainer's numbers."""
    rows: str
    """A checksum of what is trained on, as tokens."""
    config: dict[str, Any]
    """The configuration, keys with dots, without those that may change."""
    inputs: dict[str, Any]
    """Fingerprints of data and models."""
    metrics: int
    """Bytes of metrics.jsonl."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Trained weights and the optimiser's state: ``weights.<name>``, ``optimizer.<number>.<name>``."""

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose name has a prefix, without it."""
        return {name[len(prefix) :]: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def load_weights(self, model: nn.Module) -> None:
        """Copy the trained weights into the model, before it is sharded."""
        saved = self.part("weights.")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(saved[name])


class Unfinished:
    """The folder of a stage that is not done.

    All ranks must make it, after rank 0 has the stage's lock. It finds the checkpoint to resume from; without
    ``resume`` it deletes what is left of an interrupted command.

    Args:
        stage: of a configuration with ``resume`` and ``overwrite``, whose output is a folder.
        ranks: rank 0 writes.

    Raises:
        ConfigError: there is a checkpoint, and neither ``resume`` nor ``overwrite`` is set; or it is of another
            configuration, or of other data.
    """

    def __init__(self, stage: Stage, ranks: Ranks) -> None:
        self.stage, self.leads = stage, ranks.leads
        self.folder = unfinished_folder(stage)
        self._rows = ""
        self._history: JsonLines | None = None
        found = ranks.from_lead("checkpoint", self._found)
        self.state = None if found is None else self._read(found)

    def _found(self) -> Path | None:
        config, own = self.stage.config, Checkpoints(self.folder)
        if config.resume:
            newest = own.newest_whole()
            if newest is None and (there := own.all()) and not config.overwrite:
                raise ConfigError(
                    f"resume: {there[-1].name} in {str(self.folder)!r} is damaged, and there is no other; set "
                    "overwrite, too, to start at the beginning"
                )
            if newest is None:
                logger.warning("resume: there is no checkpoint of %s; starting at the beginning", self.stage.folder)
                self.delete()
            return newest
        if (there := own.all()) and not config.overwrite:
            raise ConfigError(
                f"output_dir: {str(self.stage.folder)!r} is unfinished, with {there[-1].name} in {str(self.folder)!r}; "
                "set resume to go on with it, or overwrite to start at the beginning"
            )
        self.delete()
        return None

    def _read(self, checkpoint: Path) -> StageState:
        values = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
        if (written := values.pop("format")) != FORMAT:
            raise ConfigError(
                f"resume: {str(checkpoint)!r} is a checkpoint of format {written}; must be of format {FORMAT}: go on "
                "with the version of async_rlhf that has written it, or set overwrite to start at the beginning"
            )
        state = StageState(**values)
        if self.leads:
            both = (state, self._state_now())
            old, new = ({**one.config, **dotted({"inputs": one.inputs})} for one in both)
            require_same(old, new, self.stage.config.resume_anyway)
        state.tensors = load_file(checkpoint / _TENSORS)
        return state

    def _state_now(self) -> StageState:
        """The state before the first step."""
        return StageState(0, {}, self._rows, _compared(self.stage), self.stage.identity["inputs"], 0)

    def begin(self, examples: Sequence[Any], lengths: np.ndarray) -> StageState | None:
        """Open metrics.jsonl.

        Args:
            examples: what is trained on.
            lengths: tokens of each.

        Returns:
            What to go on from, if anything.

        Raises:
            ConfigError: these are other examples than those of the checkpoint.
        """
        self._rows, anyway = _digest(examples, lengths), self.stage.config.resume_anyway
        if self.state is not None:
            require_same({"rows, as tokens": self.state.rows}, {"rows, as tokens": self._rows}, anyway)
        if self.leads:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._history = JsonLines(self.folder / METRICS, 0 if self.state is None else self.state.metrics)
        return self.state

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl, on rank 0."""
        if self._history is not None:
            self._history.write(row)

    def save(self, step: int, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint on rank 0, and delete the one before it."""
        assert self._history is not None
        state = self._state_now()
        state.step, state.values, state.metrics = step, dict(values), self._history.position()
        text = json.dumps({"format": FORMAT, **{k: v for k, v in vars(state).items() if k != "tensors"}}, indent=1)

        def write(folder: Path) -> None:
            with naming(folder / _STATE):
                (folder / _STATE).write_text(text, encoding="utf-8")
            try:
                save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / _TENSORS)
            except SafetensorError as error:  # a full disk comes as this, not as an OSError
                raise OSError(f"{str(folder / _TENSORS)!r} could not be written: {error}") from error

        own = Checkpoints(self.folder)
        write_whole(own.path(step), [write])
        own.delete_old(1, ())

    def publish(self, folder: Path) -> None:
        """Copy metrics.jsonl and logs/ into the output folder, on rank 0."""
        if self._history is not None:
            self._history.close()
            shutil.copy2(self.folder / METRICS, folder / METRICS)
        if (logs := self.folder / LOGS).is_dir() and any(logs.iterdir()):
            shutil.copytree(logs, folder / LOGS)

    def delete(self) -> None:
        """Delete what a stage has written here, and nothing else."""
        delete_unfinished(self.folder)


def unfinished_folder(stage: Stage) -> Path:
    """Where a stage keeps what it has until it is done."""
    place = stage.folder.resolve()
    return place.with_name(f".{place.name}.unfinished")


def delete_unfinished(folder: Path) -> None:
    """Delete what an unfinished stage has written into its folder, and the folder if nothing else is in it."""
    if not folder.is_dir():
        return
    for path in Checkpoints(folder).all():
        if stranger_in(path) is None:
            delete_whole(path)
    for path in folder.glob(".checkpoint-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    (folder / METRICS).unlink(missing_ok=True)
    shutil.rmtree(folder / LOGS, ignore_errors=True)
    left = sorted(path.name for path in folder.iterdir())
    if left:
        logger.warning("WARNING: %s is kept, for %s was not written by a stage", folder, left[0])
    else:
        folder.rmdir()


def _compared(stage: Stage) -> dict[str, Any]:
    """The keys that have to stay, as read back from JSON. Inputs are compared by content."""
    config = stage.config
    values = {
        key: value
        for key, value in dotted(asdict(config)).items()
        if key not in stage.inputs and not may_change(config, key)
    }
    return json.loads(json.dumps(without_secrets(values)))


def _digest(examples: Sequence[Any], lengths: np.ndarray) -> str:
    """A checksum of all lengths, and of some of the examples: another tokenizer would give others."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(lengths, dtype=np.int64).tobytes())
    for number in np.linspace(0, len(examples) - 1, min(_LOOKED_AT, len(examples))).astype(int):
        digest.update(repr(examples[int(number)]).encode())
    return digest.hexdigest()
