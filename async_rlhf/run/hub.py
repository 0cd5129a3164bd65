"""Uploads to the Hugging Face Hub beside training, by huggingface_hub. A failed upload is a warning, never the end."""

from __future__ import annotations

import logging
import os
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import TrainerCallback

from async_rlhf.config import OnlineConfig
from async_rlhf.config.secrets import masked
from async_rlhf.run.folder import FINAL, Checkpoints

logger = logging.getLogger(__name__)

LAST = "last-checkpoint"
"""The folder on the Hub of the newest checkpoint, with the strategy "checkpoint"."""
_OURS = ["resume/*", "manifest.json", "trainer_state.json"]
"""Files of a checkpoint that are not part of the model."""


@dataclass
class _Push:
    """An upload that is waiting or under way."""

    future: Future[None]
    staged: Path
    replaceable: bool
    """Whether a newer one makes it superfluous."""


class HubUploads(TrainerCallback):
    """Uploads the checkpoints and the final policy of a run, one after another, in a thread. For rank 0 alone.

    What is uploaded is first linked into a folder of its own, so that the run may delete the checkpoint meanwhile.

    Args:
        config: of the run, with ``push_to_hub``.
    """

    def __init__(self, config: OnlineConfig) -> None:
        self.config = config
        self.folder = Path(config.output_dir)
        self.url: str | None = None
        """Of the newest commit."""
        self.failure: str | None = None
        """The last thing that went wrong."""
        self._api = HfApi(token=config.hub_token)
        self._name = config.hub_model_id or self.folder.resolve().name
        self._pushes: list[_Push] = []
        self._bars = not are_progress_bars_disabled()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the repository, so that a wrong token or name is said at the beginning."""
        disable_progress_bars()  # they would cut through the run's own
        self._api.run_as_future(self._attempt, "the repository", lambda: self._repository)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upload the checkpoint, as the strategy says."""
        if self.config.hub_strategy != "end":
            self._push(Checkpoints(self.folder).path(state.global_step), f"After batch {state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upload the final policy."""
        self._push(self.folder / FINAL, "End of training")

    def close(self) -> None:
        """Wait for the uploads, and say how they went."""
        waiting = [push for push in self._pushes if not push.future.done()]
        if waiting:
            logger.info("hub: waiting for the upload of %s", ", ".join(_label(push.staged) for push in waiting))
        for push in self._pushes:
            if not push.future.cancelled():
                push.future.result()  # raises nothing
        self._pushes.clear()
        if self._bars:
            enable_progress_bars()
        if self.failure is not None:
            by_hand = f"hf upload {self._name} {self.folder / FINAL}"
            logger.warning("WARNING: hub: %s; by hand: %s", self.failure, by_hand)
        if self.url is not None:
            logger.info("hub: the newest upload is %s", self.url)

    def _push(self, folder: Path, message: str) -> None:
        for older in self._pushes:
            if older.replaceable and older.future.cancel():
                shutil.rmtree(older.staged, ignore_errors=True)
        self._pushes = [push for push in self._pushes if not push.future.done()]
        try:
            staged = _staged(folder)
        except OSError as error:
            self._fail(folder.name, error)
            return
        future = self._api.run_as_future(self._attempt, folder.name, self._upload, staged, folder.name, message)
        self._pushes.append(_Push(future, staged, self.config.hub_strategy != "all_checkpoints"))

    def _attempt(self, what: str, action: Any, *values: Any) -> None:
        try:
            action(*values)
        except Exception as error:  # of any kind: what a network or a service does
            self._fail(what, error)

    def _fail(self, what: str, error: Exception) -> None:
        first = (str(error).strip() or "no reason given").splitlines()[0]
        self.failure = masked(f"{what} is not on the Hub: {type(error).__name__}: {first}")
        logger.warning("WARNING: hub: %s; the run goes on", self.failure)

    def _upload(self, staged: Path, name: str, message: str) -> None:
        try:
            repository = self._repository
            self.url = _upload_model(self._api, repository, staged, message)
            folder = {"checkpoint": LAST, "all_checkpoints": name}.get(self.config.hub_strategy)
            if folder is not None and name != FINAL:
                done = self._api.upload_folder(
                    repo_id=repository,
                    folder_path=staged,
                    path_in_repo=folder,
                    delete_patterns=["*.safetensors", "*.safetensors.index.json"],
                    commit_message=f"{message}, with all that resuming needs",
                )
                self.url = done.commit_url
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    @cached_property
    def _repository(self) -> str:
        """The repository's whole name; it is made if need be."""
        return self._api.create_repo(self._name, private=self.config.hub_private_repo, exist_ok=True).repo_id


def push_policy(folder: Path, repository: str, private: bool | None, token: str | None, message: str) -> str:
    """Upload the policy in a folder that a run has written, and wait for it.

    Returns:
        The commit's URL.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses it.
    """
    api = HfApi(token=token)
    return _upload_model(api, api.create_repo(repository, private=private, exist_ok=True).repo_id, folder, message)


def _upload_model(api: HfApi, repository: str, folder: Path, message: str) -> str:
    # A model that is in several files now, or was: transformers would load the single one that is left.
    replaced = ["model*.safetensors", "model.safetensors.index.json"]
    done = api.upload_folder(
        repo_id=repository, folder_path=folder, commit_message=message, ignore_patterns=_OURS, delete_patterns=replaced
    )
    return str(done.commit_url)


def _staged(folder: Path) -> Path:
    """A copy of a folder beside it, by links: its files are never written to again."""
    staged = folder.with_name(f".{folder.name}.hub")
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(folder, staged, copy_function=_link)
    return staged


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _label(staged: Path) -> str:
    return staged.name.removeprefix(".").removesuffix(".hub")
