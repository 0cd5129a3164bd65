"""Makes one page of runs, and follows them while they train."""

from __future__ import annotations

import json
import logging
import time
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.run.folder import METRICS, PROOF, REPORT, is_report
from async_rlhf.studies.report.charts import INSTALL, can_draw
from async_rlhf.studies.report.config import ReportConfig
from async_rlhf.studies.report.html import page
from async_rlhf.studies.report.proof import document
from async_rlhf.studies.report.reading import EVALUATION, ReadRun, evaluations_of, read_run
from async_rlhf.system.files import write_file

logger = logging.getLogger(__name__)


def run_report(config: ReportConfig) -> Path:
    """Write the page, and with ``live`` again and again. Returns its path.

    Raises:
        ConfigError: a folder is of no run, the file is not a page of ours, or vl-convert is not installed.
    """
    if not can_draw():
        raise ConfigError(f"report: the charts need vl-convert-python; install it with: {INSTALL}")
    folders = [Path(name).expanduser() for name in config.runs]
    evaluations = [folder for folder in folders if (folder / EVALUATION).is_file() and not (folder / METRICS).is_file()]
    names = _names([folder for folder in folders if folder not in evaluations])
    rule = "must have at least one output folder of a run; of evaluations alone there is evaluation.txt"
    require(len(names) > 0, "runs", config.runs, rule)
    default = next(iter(names)) / REPORT if len(names) == 1 else Path(REPORT)
    out = default if config.out is None else Path(config.out).expanduser()
    runs = _write(names, evaluations, out, config.every if config.live else None)
    logger.info("report: %s", out)
    if config.open:
        webbrowser.open(out.absolute().as_uri())
    if config.live:
        _follow(names, evaluations, out, config.every, runs)
    return out


def report_of_run(folder: Path) -> str:
    """After a run has ended: write its page if that is possible here, and say where it is or how to get it.

    A run that went well must not fail because its page did.
    """
    command = f"async-rlhf report {folder}"
    try:
        write_file(folder / PROOF, json.dumps(document(read_run(folder, folder.name, True)), indent=1) + "\n")
    except Exception as error:
        logger.warning("WARNING: %s was not written: %s: %s", PROOF, type(error).__name__, error)
    if not can_draw():
        return f"warnings, timeline and samples: {command} (after {INSTALL})"
    try:
        _write({folder: folder.name}, [], folder / REPORT, ended=True)
    except Exception as error:
        logger.warning("WARNING: no page was made of the run: %s: %s; try: %s", type(error).__name__, error, command)
        return f"warnings, timeline and samples: {command}"
    return f"warnings, timeline and samples: {folder / REPORT}"


def _write(
    names: Mapping[Path, str], evaluations: Sequence[Path], out: Path, refresh: float | None = None, ended: bool = False
) -> list[ReadRun]:
    if out.exists() and not is_report(out):
        raise ConfigError(f"out: got {str(out)!r}; is there and is no page of async-rlhf report; choose another name")
    runs = [read_run(folder, name, ended) for folder, name in names.items()]
    follows = any(run.state == "running" for run in runs)
    text = page(runs, evaluations_of(runs, evaluations), refresh if follows else None)
    # Two processes may write it: the run that has just ended, and a report that follows it.
    write_file(out, text)
    return runs


def _follow(
    names: Mapping[Path, str], evaluations: Sequence[Path], out: Path, every: float, runs: list[ReadRun]
) -> None:
    """Write the page whenever a run has written something, until all have ended."""
    seen = _news(names)
    with suppress(KeyboardInterrupt):
        while any(run.state == "running" for run in runs):
            time.sleep(every)
            if (now := _news(names)) != seen or not all(run.state == "running" for run in runs):
                seen, runs = now, _write(names, evaluations, out, every)
        logger.info("report: no run is training (any more); %s is the last state", out)
        return
    _write(names, evaluations, out)
    logger.info("report: %s does not follow any more", out)


def _news(names: Mapping[Path, str]) -> list[tuple[str, int, int]]:
    """What changes when a run writes, or ends."""
    files = []
    for path in sorted(path for folder in names for path in folder.iterdir()):
        with suppress(OSError):
            if not path.name.startswith((".report", REPORT)):
                files.append((str(path), path.stat().st_size, path.stat().st_mtime_ns))
    return files


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """Each folder's name, with as many of its parents as tell it from the others."""
    places = [folder.absolute() for folder in folders]
    require(len({*places}) == len(places), "runs", [str(folder) for folder in folders], "must name each once")
    deep = 1
    while len({path.parts[-deep:] for path in places}) < len(places):
        deep += 1
    return {folder: "/".join(path.parts[-deep:]) for folder, path in zip(folders, places, strict=True)}
