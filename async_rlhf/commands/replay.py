"""Repeats a run and checks that the result is the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rlhf.commands.rerun import ReplayDiffersError, read_metrics, read_run, require_equal, without_uploads
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError
from async_rlhf.run.config import ReplayConfig
from async_rlhf.run.folder import SCHEDULE

logger = logging.getLogger(__name__)


def run_replay(config: ReplayConfig) -> dict[str, Any]:
    """Repeat a run with the versions that it recorded, and compare all metrics except times.

    Raises:
        ReplayDiffersError: names the first difference.
    """
    run, original = Path(config.run), read_run(config.run, "replayed")
    if original.train.resume_from is not None:
        raise ConfigError(f"run: {config.run!r} was branched from a checkpoint of another run, and cannot be replayed")
    bounded = original.train.staleness_mode == "bounded"
    train = without_uploads(
        original.train,
        run,
        Path(config.output_dir or run / "replay"),
        overwrite_output_dir=config.overwrite,
        replay_from=str(run / SCHEDULE) if bounded else None,
    )
    repeated = replace(original, train=train)
    results = run_train(repeated)
    found, expected = read_metrics(Path(repeated.train.output_dir)), read_metrics(run)
    require_equal(found, expected)
    if len(found) != len(expected):
        raise ReplayDiffersError(f"the replay has {len(found)} lines of metrics, the run {len(expected)}")
    results.pop("nothing_learnt", None)  # the same is what was asked for
    logger.info("replay: %d lines of metrics, all identical", len(found))
    return results
