"""What ``replay`` and ``explain`` share: they read a run from its folder, and compare metrics."""

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


class ReplayDiffersError(DiffersError):
    """A replay's metrics differ from those of the run."""


def read_run(run: str, cannot: str) -> RunConfig:
    """The configuration of a run, which must say all that is needed to repeat it.

    Args:
        run: its output folder.
        cannot: what else cannot be done with it, for errors, such as "replayed".

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
        raise ConfigError(f"run: {run!r} {why}, and cannot be {cannot}")
    original, _ = parse(RunConfig, "train", ["--config", str(folder / RUN_FILE)])
    if not original.train.generation.seed_per_request:
        why = "sampled with train.generation.seed_per_request false, so that nothing says what was drawn"
        raise ConfigError(f"run: {run!r} {why}, and cannot be {cannot}")
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
        ReplayDiffersError: names the first difference.
    """
    for ours, theirs in zip(found, expected, strict=False):
        keys = [key for key in theirs if ours.get(key) != theirs[key]]
        if keys:
            raise ReplayDiffersError(
                f"batch {theirs['batch']:g}: {keys[0]} is {ours.get(keys[0])!r}, was {theirs[keys[0]]!r} "
                f"({len(keys)} metrics differ)"
            )


def of_training(lines: Sequence[Mapping[str, float]]) -> dict[int, Line]:
    """The lines of batches that were trained on, by batch, without those of evaluations."""
    return {int(line["batch"]): dict(line) for line in lines if "completions" in line}
