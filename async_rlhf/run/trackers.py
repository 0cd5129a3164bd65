"""W&B, TensorBoard, MLflow and trackio: transformers' callbacks, with what RL needs besides.

Each of the four is transformers' own, which logs the metrics and, from the arguments, the configuration. Added here: a
run that is resumed, or whose checkpoints are evaluated later, goes on in the tracker's same run; tables of completions;
and a run that ends with an error is ended in the tracker too.
"""

from __future__ import annotations

import html
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from transformers import TrainerCallback
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    MLflowCallback,
    TensorBoardCallback,
    TrackioCallback,
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


class Tracker:
    """What the four have in common, beside being transformers' callbacks.

    Args:
        found: what :meth:`identity` returned when the run was begun; None begins a new run.
    """

    found: Mapping[str, Any]
    begun = False
    """Whether there is a run now."""
    table_options: ClassVar[Mapping[str, Any]] = {}
    """Of a client's tables."""

    def __init__(self, found: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.found = found or {}

    def identity(self) -> dict[str, Any]:
        """How this run is found again."""
        raise NotImplementedError

    @property
    def client(self) -> Any:
        """What logs tables and numbers: a module such as wandb. Or else a tracker does that itself."""
        raise NotImplementedError

    def table(self, name: str, rows: Rows, step: int) -> None:
        """Log a table with at least one row."""
        values = [list(row.values()) for row in rows]
        table = self.client.Table(columns=list(rows[0]), data=values, **self.table_options)
        self.client.log({name: table, "train/global_step": step})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers under just these names; the step, in batches, may be an earlier one."""
        self.client.log({**values, "train/global_step": step})

    def close(self, whole: bool) -> None:
        """End the tracker's run, if it was begun here; ``whole`` says that all has gone well."""


class Wandb(Tracker, WandbCallback):
    """A run of W&B, online or offline. One that the user's program has begun is used, and left to the program."""

    _own, table_options = False, {"allow_mixed_types": True}

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Begin the run, or go on with it; then as transformers does."""
        if self._wandb.run is None:
            where = {key: self.found.get(key) for key in ("id", "entity")}
            project = self.found.get("project") or args.tracker_project or os.getenv("WANDB_PROJECT", "huggingface")
            self._wandb.init(project=project, name=args.run_name, resume="allow", **where)
            self._own = True
        super().setup(args, state, model, **kwargs)
        self.begun = True

    def identity(self) -> dict[str, Any]:
        """The run's id, and where it is."""
        run = self._wandb.run
        return {"id": run.id, "project": run.project, "entity": run.entity or None}

    @property
    def client(self) -> Any:
        """wandb."""
        return self._wandb

    def close(self, whole: bool) -> None:
        """Finish the run."""
        if self._own and self._wandb.run is not None:
            self._wandb.finish(exit_code=0 if whole else 1)
        self._own = self.begun = False


class TensorBoard(Tracker, TensorBoardCallback):
    """Event files in the run's folder. A resumed run hides what was logged after its checkpoint."""

    tb_writer: Any

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the event file, and write the configuration as text and for the tab "hparams"."""
        if self.found:
            self.logging_dir = os.path.join(args.output_dir, self.found["folder"])
        elif self.logging_dir is None:
            self.logging_dir = os.path.join(args.output_dir, default_logdir())
        self._output_dir = args.output_dir
        if self.tb_writer is None:
            purged = state.global_step + 1 if self.found else None
            self.tb_writer = self._SummaryWriter(log_dir=self.logging_dir, purge_step=purged)
        super().on_train_begin(args, state, control, **kwargs)
        kinds = (bool, int, float, str)
        values = {key: v if isinstance(v, kinds) else str(v) for key, v in args.to_dict().items()}
        # In the same folder: by default it would be a run of its own.
        self.tb_writer.add_hparams(values, {}, run_name=os.path.abspath(self.logging_dir))
        self.begun = True

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
        self.begun = False


class MLflow(Tracker, MLflowCallback):
    """A run of MLflow. Tables are kept until the next checkpoint, evaluation or end: MLflow appends to one by reading
    and writing all of it.
    """

    def __init__(self, found: Mapping[str, Any] | None = None) -> None:
        super().__init__(found)
        self._waiting: dict[str, list[Mapping[str, Any]]] = {}
        self._suffix = ""

    def setup(self, args: Any, state: Any, model: Any) -> None:
        """Go on with the run, if there is one; else begin it as transformers does."""
        mlflow, own = self._ml_flow, False
        if self.found:
            if not mlflow.is_tracking_uri_set():
                mlflow.set_tracking_uri(self.found["tracking_uri"])
            if own := mlflow.active_run() is None:
                mlflow.start_run(run_id=self.found["run_id"])
            self._suffix = f"-from-{state.global_step}"
            args = _changed(args, mlflow.active_run().data.params)
        elif args.tracker_project and "MLFLOW_EXPERIMENT_NAME" not in os.environ and mlflow.active_run() is None:
            mlflow.set_experiment(args.tracker_project)
        super().setup(args, state, model)
        self._auto_end_run |= own
        self.begun = True

    def identity(self) -> dict[str, Any]:
        """The run's id, and where it is."""
        return {"run_id": self._ml_flow.active_run().info.run_id, "tracking_uri": self._ml_flow.get_tracking_uri()}

    def table(self, name: str, rows: Rows, step: int) -> None:
        """Keep the rows for the artifact ``<name>.json``."""
        self._waiting.setdefault(name, []).extend({"step": step, **row} for row in rows)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers."""
        self._ml_flow.log_metrics(dict(values), step=step)

    def _write_tables(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for name, rows in waiting.items():
            columns = {column: [row[column] for row in rows] for column in rows[0]}
            with forgiving("mlflow", name):
                self._ml_flow.log_table(columns, f"{name}{self._suffix}.json")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the tables."""
        self._write_tables()
        super().on_save(args, state, control, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the tables."""
        self._write_tables()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the tables and end the run."""
        self._write_tables()
        super().on_train_end(args, state, control, **kwargs)

    def close(self, whole: bool) -> None:
        """Write the tables and end the run, if it has not ended."""
        if self.begun and self._ml_flow.active_run() is not None:
            self._write_tables()
            if self._auto_end_run:
                self._ml_flow.end_run("FINISHED" if whole else "FAILED")
        self.begun = False


class Trackio(Tracker, TrackioCallback):
    """A run of trackio, which finds runs by their names: a new run whose name is taken gets a number."""

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Begin the run, or go on with it."""
        trackio = self._trackio
        project = self.found.get("project") or args.tracker_project or args.project
        # Once more what is known of the run: trackio replaces its configuration as a whole.
        config = {**self.found.get("config", {}), **args.to_dict()}
        if getattr(model, "config", None) is not None:
            config = {**model.config.to_dict(), **config}
        # Keys that begin with "_" are trackio's own.
        self._config = {key: value for key, value in config.items() if not key.startswith("_")}
        name = self.found.get("name")
        if name is None and args.run_name is not None:
            try:
                taken = [run.name for run in trackio.Api().runs(project)]
            except ValueError:  # there is no such project yet
                taken = []
            name = _free_name(args.run_name, taken)
        where = {"space_id": args.trackio_space_id, "private": args.hub_private_repo, "embed": False}
        resume = "allow" if self.found else "never"
        self._run = trackio.init(project, name, config=self._config, resume=resume, **where)
        self._space_id = trackio.context_vars.current_space_id.get()
        self._initialized = self.begun = True

    def identity(self) -> dict[str, Any]:
        """Project, name and configuration."""
        return {"project": self._run.project, "name": self._run.name, "config": self._config}

    @property
    def client(self) -> Any:
        """trackio."""
        return self._trackio

    def close(self, whole: bool) -> None:
        """Write what is waiting, and end the run."""
        if self._initialized:
            self._trackio.finish()
        self._initialized = self.begun = False


TRACKED: dict[str, type[Any]] = {"wandb": Wandb, "tensorboard": TensorBoard, "mlflow": MLflow, "trackio": Trackio}
"""By transformers' names of the integrations."""


def tracker_callbacks(
    names: Sequence[str], found: Mapping[str, Mapping[str, Any]]
) -> dict[str, TrainerCallback | type[TrainerCallback]]:
    """The callbacks of integrations by name, to go on with the runs in ``found``.

    Raises:
        RuntimeError: a package is not installed.
    """
    return {
        name: TRACKED[name](found.get(name)) if name in TRACKED else INTEGRATION_TO_CALLBACK[name] for name in names
    }


def in_unicode(rows: Rows) -> Rows:
    """Rows whose texts every tracker can write: a lone surrogate becomes its escape, and NUL its picture."""

    def text(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return value.encode(errors="backslashreplace").decode().replace("\0", "\N{SYMBOL FOR NULL}")

    return [{key: text(value) for key, value in row.items()} for row in rows]


def report(
    found: Mapping[str, Mapping[str, Any]],
    folder: Path,
    scalars: Mapping[int, Mapping[str, float]],
    tables: Mapping[str, Rows],
) -> list[str]:
    """Log into the trackers' runs of a training that has ended. What fails is said in a warning.

    Args:
        found: tracker -> its :meth:`Tracker.identity`.
        folder: of the run.
        scalars: step -> name -> value.
        tables: name -> rows, logged at the last step.

    Returns:
        The trackers that have it.
    """
    told = []
    for name, identity in found.items():
        with forgiving(name, "results"):
            tracker = TRACKED[name](identity)
            _go_on(tracker, folder)
            try:
                for step, values in sorted(scalars.items()):
                    tracker.scalars(values, step)
                for title, rows in tables.items():
                    if rows:
                        tracker.table(title, in_unicode(rows), max(scalars, default=0))
            finally:
                tracker.close(whole=True)
            told.append(name)
    return told


def _go_on(tracker: Any, folder: Path) -> None:
    """Open a run that has ended, without a model and without changing its configuration."""
    unknown = dict.fromkeys(("run_name", "tracker_project", "trackio_space_id", "hub_private_repo"))
    args = SimpleNamespace(output_dir=str(folder), **unknown, to_dict=dict, to_json_string=lambda: "{}")
    if isinstance(tracker, TensorBoard):  # a second event file in the folder; nothing in the first is hidden
        tracker.logging_dir = str(folder / tracker.found["folder"])
        tracker.tb_writer = tracker._SummaryWriter(log_dir=tracker.logging_dir)
        return
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, trial_name=None, logging_steps=1)
    tracker.setup(args, state, None)
    if isinstance(tracker, MLflow):
        tracker._suffix = ""


def _changed(args: Any, old: Mapping[str, str]) -> Any:
    """The arguments that MLflow does not have yet. It refuses a second value, so a changed one gets another name."""
    new = {key: value for key, value in args.to_dict().items() if old.get(key) != str(value)}
    named = {f"{key}.resumed" if key in old else key: value for key, value in new.items()}
    known = {key: value for key, value in named.items() if key not in old}
    return SimpleNamespace(run_name=args.run_name, output_dir=args.output_dir, to_dict=lambda: known)


def _free_name(name: str, taken: Sequence[str]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def _cell(value: Any) -> str:
    """A value in a table of Markdown, on one line, shown as it is."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = html.escape("" if value is None else str(value), quote=False)
    return text.replace("|", "&#124;").replace("\r", "").replace("\n", "<br>").replace("  ", "&nbsp; ")
