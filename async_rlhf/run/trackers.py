"""The trackers of ``report_to``: transformers' callbacks, and for W&B and TensorBoard what RL needs besides.

Each logs the metrics and, from the arguments, the configuration. Added for these two: a run that is resumed, or whose
checkpoints are evaluated later, goes on in the tracker's same run; tables of completions; and a run that ends with an
error is ended in the tracker too.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
    WandbCallback,
    default_logdir,
)

logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]
"""Rows of a table, which all have the same columns: texts, numbers and None."""


@contextmanager
def forgiving(tracker: str, what: str) -> Iterator[None]:
    """Within, an error is a warning: what is logged here is in files of the run, too."""
    try:
        yield
    except Exception as error:  # of any kind: what a network or a service does
        logger.warning("WARNING: %s has no %s: %s: %s", tracker, what, type(error).__name__, error)


class Wandb(WandbCallback):
    """A run of W&B, online or offline. One that the user's program has begun is used, and left to the program.

    Args:
        identity: what :meth:`identity` returned when the run was begun; None begins a new run.
    """

    def __init__(self, identity: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.resumed, self._begun_here, self._client = identity or {}, False, importlib.import_module("wandb")

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Begin the run, or go on with it; then as transformers does."""
        if self._client.run is None:
            where = {key: self.resumed.get(key) for key in ("id", "entity")}
            project = (
                self.resumed.get("project") or args.online_config.project or os.getenv("WANDB_PROJECT", "huggingface")
            )
            self._client.init(project=project, name=args.run_name, resume="allow", **where)
            self._begun_here = True
        super().setup(args, state, model, **kwargs)

    def reopen(self, folder: Path) -> None:
        """Go on with a run that has ended, without a model and without changing its configuration."""
        args = SimpleNamespace(run_name=None, online_config=SimpleNamespace(project=None), to_dict=dict)
        self.setup(args, SimpleNamespace(is_world_process_zero=True, trial_name=None, logging_steps=1), None)

    def identity(self) -> dict[str, Any]:
        """How the run is found again: its id, and where it is."""
        run = self._client.run
        return {"id": run.id, "project": run.project, "entity": run.entity or None}

    def table(self, name: str, rows: Rows, step: int) -> None:
        """Log a table with at least one row."""
        values = [list(row.values()) for row in rows]
        self.scalars({name: self._client.Table(columns=list(rows[0]), data=values, allow_mixed_types=True)}, step)

    def scalars(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers under just these names; the step, in batches, may be an earlier one."""
        self._client.log({**values, "train/global_step": step})

    def close(self, whole: bool) -> None:
        """End the run, if it was begun here; ``whole`` says that all has gone well."""
        if self._begun_here and self._client.run is not None:
            self._client.finish(exit_code=0 if whole else 1)
        self._begun_here = False


def _event_file(folder: str, **options: Any) -> Any:
    """An open event file, by either of the packages with which transformers' callback is content."""
    package = "torch.utils.tensorboard" if importlib.util.find_spec("tensorboard") else "tensorboardX"
    return importlib.import_module(package).SummaryWriter(log_dir=folder, **options)


class TensorBoard(TensorBoardCallback):
    """Event files in the run's folder. A resumed run hides what was logged after its checkpoint.

    Args:
        identity: see :class:`Wandb`.
    """

    tb_writer: Any

    def __init__(self, identity: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.resumed = identity or {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the event file, and write the configuration as text and for the tab "hparams"."""
        if self.resumed:
            self.logging_dir = os.path.join(args.output_dir, self.resumed["folder"])
        elif self.logging_dir is None:
            self.logging_dir = os.path.join(args.output_dir, default_logdir())
        self._output_dir = args.output_dir
        if self.tb_writer is None:
            purged = state.global_step + 1 if self.resumed else None
            self.tb_writer = _event_file(self.logging_dir, purge_step=purged)
        super().on_train_begin(args, state, control, **kwargs)
        kinds = (bool, int, float, str)
        values = {key: v if isinstance(v, kinds) else str(v) for key, v in args.to_dict().items()}
        # In the same folder: by default it would be a run of its own.
        self.tb_writer.add_hparams(values, {}, run_name=os.path.abspath(self.logging_dir))

    def reopen(self, folder: Path) -> None:
        """A second event file in the folder; nothing in the first is hidden."""
        self.tb_writer = _event_file(str(folder / self.resumed["folder"]))

    def identity(self) -> dict[str, Any]:
        """The folder, relative to the run's: the run may be moved."""
        return {"folder": os.path.relpath(self.logging_dir, self._output_dir)}

    def table(self, name: str, rows: Rows, step: int) -> None:
        """Log the table as text, which TensorBoard shows as one."""
        lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
        self.tb_writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
        self.tb_writer.flush()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers."""
        for name, value in values.items():
            self.tb_writer.add_scalar(name, value, step)
        self.tb_writer.flush()

    def close(self, whole: bool) -> None:
        """Close the event file."""
        if self.tb_writer is not None:
            self.tb_writer.close()
            self.tb_writer = None


TRACKED: dict[str, type[Wandb | TensorBoard]] = {"wandb": Wandb, "tensorboard": TensorBoard}
"""Those with tables, whose runs are found again, by transformers' names of the integrations."""


def tracker_callbacks(
    names: Sequence[str], project: str | None, identities: Mapping[str, Mapping[str, Any]]
) -> dict[str, TrainerCallback | type[TrainerCallback]]:
    """The callbacks of integrations by name, to go on with the runs in ``identities``.

    Raises:
        RuntimeError: a package is not installed.
    """
    if "mlflow" in names and project and "MLFLOW_EXPERIMENT_NAME" not in os.environ:
        importlib.import_module("mlflow").set_experiment(project)
    return {
        name: TRACKED[name](identities.get(name)) if name in TRACKED else INTEGRATION_TO_CALLBACK[name]
        for name in names
        if name != "none"
    }


def in_unicode(rows: Rows) -> Rows:
    """Rows whose texts every tracker can write: a lone surrogate becomes its escape, and NUL its picture."""

    def text(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return value.encode(errors="backslashreplace").decode().replace("\0", "\N{SYMBOL FOR NULL}")

    return [{key: text(value) for key, value in row.items()} for row in rows]


def report(
    identities: Mapping[str, Mapping[str, Any]],
    folder: Path,
    scalars: Mapping[int, Mapping[str, float]],
    tables: Mapping[str, Rows],
) -> list[str]:
    """Log into the trackers' runs of a training that has ended. What fails is said in a warning.

    Args:
        identities: tracker -> its :meth:`Wandb.identity`.
        folder: of the run.
        scalars: step -> name -> value.
        tables: name -> rows, logged at the last step.

    Returns:
        The trackers that have it.
    """
    logged = []
    for name, identity in identities.items():
        with forgiving(name, "results"):
            tracker = TRACKED[name](identity)
            tracker.reopen(folder)
            try:
                for step, values in sorted(scalars.items()):
                    tracker.scalars(values, step)
                for title, rows in tables.items():
                    if rows:
                        tracker.table(title, in_unicode(rows), max(scalars, default=0))
            finally:
                tracker.close(whole=True)
            logged.append(name)
    return logged


def _cell(value: Any) -> str:
    """A value in a table of Markdown, on one line, shown as it is."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = html.escape("" if value is None else str(value), quote=False)
    return text.replace("|", "&#124;").replace("\r", "").replace("\n", "<br>").replace("  ", "&nbsp; ")
