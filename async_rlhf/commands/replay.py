"""Repeats a run and checks that the result is the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rlhf.commands.repeating import ReplayDiffersError, read_metrics, read_run, require_equal
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError
from async_rlhf.run.config import ReplayConfig

logger = logging.getLogger(__name__)


def run_replay(config: ReplayConfig) -> dict[str, Any]:
    """Repeat a run with the versions that it recorded, and compare all metrics except times.

    Raises:
        ReplayDiffersError: names the first difference.
    """
    run, original = Path(config.run), read_run(config.run, "replayed")
    if original.train.resume_from is not None:
        raise ConfigError(f"run: {config.run!r} was branched from a checkpoint of another run, and cannot be replayed")
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
    found, expected = read_metrics(Path(repeated.train.output_dir)), read_metrics(run)
    require_equal(found, expected)
    if len(found) != len(expected):
        raise ReplayDiffersError(f"the replay has {len(found)} lines of metrics, the run {len(expected)}")
    logger.info("replay: %d lines of metrics, all identical", len(found))
    return results
