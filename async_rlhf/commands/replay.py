"""Repeats a run and checks that the result is the same."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError
from async_rlhf.config.parsing import parse
from async_rlhf.run.config import ReplayConfig, RunConfig
from async_rlhf.run.record import RUN_FILE

logger = logging.getLogger(__name__)


class ReplayDiffersError(RuntimeError):
    """A replay's metrics differ from those of the run."""


def run_replay(config: ReplayConfig) -> dict[str, Any]:
    """Repeat a run with the versions that it recorded, and compare all metrics except times.

    Raises:
        ReplayDiffersError: names the first difference.
    """
    run = Path(config.run)
    if not (run / RUN_FILE).is_file() or not (run / "metrics.jsonl").is_file():
        raise ConfigError(f"run: got {config.run!r}; must be the output folder of a run, with {RUN_FILE} in it")
    original, _ = parse(RunConfig, "train", ["--config", str(run / RUN_FILE)])
    if original.train.resume_from is not None:
        raise ConfigError(f"run: {config.run!r} was branched from a checkpoint of another run, and cannot be replayed")
    if not original.train.generation.seed_per_request:
        why = "sampled with train.generation.seed_per_request false, so that nothing says what was drawn"
        raise ConfigError(f"run: {config.run!r} {why}, and cannot be replayed")
    changes: dict[str, Any] = {
        "output_dir": config.output_dir or str(run / "replay"),
        "overwrite_output_dir": config.overwrite,
        "replay_from": str(run / "schedule.jsonl") if original.train.staleness_mode == "bounded" else None,
        "resume": False,
        "resume_from": None,
        "save_steps": 0,
        "report_to": [],
    }
    repeated = replace(original, train=replace(original.train, **changes))
    results = run_train(repeated)
    found, expected = _metrics(Path(repeated.train.output_dir)), _metrics(run)
    for ours, theirs in zip(found, expected, strict=False):
        keys = [key for key in theirs if ours.get(key) != theirs[key]]
        if keys:
            raise ReplayDiffersError(
                f"batch {theirs['batch']:g}: {keys[0]} is {ours.get(keys[0])!r}, was {theirs[keys[0]]!r} "
                f"({len(keys)} metrics differ)"
            )
    if len(found) != len(expected):
        raise ReplayDiffersError(f"the replay has {len(found)} lines of metrics, the run {len(expected)}")
    logger.info("replay: %d lines of metrics, all identical", len(found))
    return results


def _metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {key: x for key, x in row.items() if not key.startswith(("time/", "eval_time/")) and key != "eps"}
        for row in rows
    ]
