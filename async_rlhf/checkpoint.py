"""Checkpoints: the policy in the standard format with the trainer's state, written whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase, TrainerState

from async_rlhf.config import ConfigError
from async_rlhf.files import whole_folder
from async_rlhf.learner import Learner

FINAL = "final"
"""The folder of the policy after the last batch."""


def save_checkpoint(folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase, state: TrainerState) -> None:
    """Write a folder that ``from_pretrained`` loads, with ``trainer_state.json`` beside the weights."""
    with whole_folder(folder) as temporary:
        learner.save(temporary, tokenizer)
        state.save_to_json(str(temporary / "trainer_state.json"))


def check_output_dir(folder: Path, overwrite: bool) -> None:
    """Make the folder of a run, and refuse one that holds an earlier run, unless that may be overwritten."""
    earlier = _earlier_run(folder)
    if earlier and not overwrite:
        raise ConfigError(
            f"output_dir: {str(folder)!r} holds an earlier run ({earlier[0].name}); choose another folder, or set "
            "overwrite_output_dir to delete it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir: {str(folder)!r} cannot be made: {error}") from error


def delete_earlier_run(folder: Path) -> None:
    """Delete what an earlier run left."""
    for path in _earlier_run(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _earlier_run(folder: Path) -> list[Path]:
    names = ("metrics.jsonl", "samples.jsonl", "trace.json", FINAL)
    return [path for path in (*(folder / name for name in names), *folder.glob("checkpoint-*")) if path.exists()]
