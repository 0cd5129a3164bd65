"""A run as its folder has it, to be repeated; and the comparison of metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.config.parsing import parse
from async_rlhf.config.yaml_text import read_yaml
from async_rlhf.run.config import RunConfig
from async_rlhf.run.episodes import EPISODES
from async_rlhf.run.folder import METRICS
from async_rlhf.run.record import RUN_FILE, first_time, unnamed_in
from async_rlhf.system.errors import DiffersError

Line: TypeAlias = dict[str, float]
"""Of metrics.jsonl, without times."""


class RepetitionDiffersError(DiffersError):
    """The metrics of what was repeated differ from those of the run."""


def read_run(run: str) -> RunConfig:
    """The configuration of a run, by its output folder. It must say all that is needed to repeat the run.

    Raises:
        ConfigError: there is no run, or it cannot be repeated from its record.
    """
    folder = Path(run)
    if not (folder / RUN_FILE).is_file() or not (folder / METRICS).is_file():
        raise ConfigError(f"run: got {run!r}; must be the output folder of a run, with {RUN_FILE} in it")
    read_yaml(str(folder / RUN_FILE), "run")  # refused here if it is none, or no text
    objects = unnamed_in(folder / RUN_FILE)
    if objects:
        why = f"was started from Python with objects that {RUN_FILE} cannot name ({'; '.join(objects)})"
        raise ConfigError(f"run: {run!r} {why}, and cannot be explained")
    original, _ = parse(RunConfig, "train", ["--config", str(folder / RUN_FILE)])
    how = original.train.generation
    for key, unknown in (("seed_per_request", not how.seed_per_request), ("in_flight", how.in_flight)):
        if unknown:
            why = f"sampled with train.generation.{key} {str(key == 'in_flight').lower()}"
            raise ConfigError(f"run: {run!r} {why}, so that nothing says what was drawn, and cannot be explained")
    chat = replace(original.train.chat, now=original.train.chat.now or first_time(folder))
    return replace(original, train=replace(original.train, chat=chat))


def without_uploads(config: OnlineConfig, run: Path, output_dir: Path, **changes: Any) -> OnlineConfig:
    """How a run is repeated in another folder, from its beginning: it saves no checkpoints, and sends nothing anywhere.

    Args:
        config: of the run, whose environments say what they said there.
        run: its folder, where it is now.
        output_dir: the other folder.
        changes: more keys, which come before these.
    """
    hub = {each.name: each.default for each in fields(OnlineConfig) if each.name.startswith("hub_")}
    common: dict[str, Any] = {
        "resume": False,
        "resume_from": None,
        "save_steps": 0,
        "report_to": [],
        "push_to_hub": False,
    }
    replies = run / EPISODES
    if replies.is_file():
        common["generation"] = replace(config.generation, replies_from=str(replies))
    return replace(config, **{"output_dir": str(output_dir), **common, **hub, **changes})


def read_metrics(folder: Path) -> list[Line]:
    """The lines of a run's metrics, without times. One that was written only in part is left out."""
    text = (folder / METRICS).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].split("\n") if line]
    return [
        {key: x for key, x in row.items() if not key.startswith(("time/", "eval_time/")) and key != "eps"}
        for row in rows
    ]


def require_equal(found: Sequence[Line], expected: Sequence[Line]) -> None:
    """Compare lines of metrics.

    Raises:
        RepetitionDiffersError: names the first difference.
    """
    for ours, theirs in zip(found, expected, strict=False):
        keys = [key for key in theirs if ours.get(key) != theirs[key]]
        if keys:
            raise RepetitionDiffersError(
                f"batch {theirs['batch']:g}: {keys[0]} is {ours.get(keys[0])!r}, was {theirs[keys[0]]!r} "
                f"({len(keys)} metrics differ)"
            )


def of_training(lines: Sequence[Mapping[str, float]]) -> dict[int, Line]:
    """The lines of batches that were trained on, by batch, without those of evaluations."""
    return {int(line["batch"]): dict(line) for line in lines if "completions" in line}
