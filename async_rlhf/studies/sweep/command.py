"""Many runs: trains and judges them, and shows them together."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from async_rlhf.commands.stage import json_lines
from async_rlhf.data import checksums
from async_rlhf.studies.report.charts import INSTALL, can_draw
from async_rlhf.studies.sweep.config import ManyRunsConfig, SweepConfig
from async_rlhf.studies.sweep.one_trial import POLICY, run_start, run_trial, stage_of
from async_rlhf.studies.sweep.pictures import draw
from async_rlhf.studies.sweep.results import Results, summaries, table
from async_rlhf.studies.sweep.running import Job, Outcome, run_alone, run_jobs
from async_rlhf.studies.sweep.trials import Trial, labels_of, trials_of, unlike
from async_rlhf.system.errors import UserCodeError
from async_rlhf.system.files import write_file
from async_rlhf.system.lock import hold
from async_rlhf.system.names import check_names

TABLE, RESULTS, PICTURE = "table.md", "results.jsonl", "sweep.png"

logger = logging.getLogger(__name__)


class FailedRunsError(UserCodeError):
    """Some runs of a sweep have failed."""


def run_sweep(config: SweepConfig) -> dict[str, Any]:
    """Run what is not done yet, then write the table, the picture and results.jsonl, and print the table.

    Returns:
        Run's name -> its results; with a share, of the runs in it.

    Raises:
        ConfigError: a setting that cannot be run, before any model is loaded.
        FailedRunsError: some runs failed; all others are done, and the table has them.
    """
    trials = trials_of(config)
    check_trials(trials)
    if differences := unlike(config, trials):
        why = "set a key in base, or in each setting, to have it alike"
        logger.warning(
            "WARNING: settings differ in keys that the sweep does not set; %s:\n  %s", why, "\n  ".join(differences)
        )
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    ours = share_of(trials, config.share)
    lock = ".sweep.lock" if config.share is None else f".sweep-{config.share.replace('/', '-of-')}.lock"
    results_of: dict[str, Results] = {}
    failed: dict[str, str] = {}
    with hold(folder / lock, "output_dir", folder):
        starts = start_jobs(config, trials) if config.share is None else []
        for name, results, error in run_trials(ours, config, starts):
            if results is None:
                failed[name] = error
            else:
                results_of[name] = results
        if config.share is None:
            _show(config, trials, results_of)
    if failed:
        failures = "\n  ".join(f"{name}: {error}" for name, error in failed.items())
        raise FailedRunsError(f"{len(failed)} runs failed; start the sweep again to repeat them:\n  {failures}")
    return results_of


def run_trials(
    trials: Sequence[Trial], config: ManyRunsConfig, first: Sequence[Job] = ()
) -> Generator[tuple[str, Results | None, str]]:
    """Run trials, and other jobs before them; those that are done are read back at once.

    Yields:
        Name, results and error, as each ends; either results or the error is there.
    """
    before = {trial.name: stage_of(trial).done() for trial in trials if not trial.overwrite}
    known = {name: results for name, results in before.items() if results is not None}
    yield from ((name, results, "") for name, results in known.items())
    new = (Job(trial.name, run_trial, trial, Path(trial.folder)) for trial in trials if trial.name not in known)
    jobs = [*first, *new]
    if known:
        logger.info("%d of %d runs are done already", len(known), len(trials))
    for number, (job, results, error) in enumerate(_outcomes(jobs, config), start=1):
        outcome = f"failed: {error}" if results is None else f"gold reward {results['gold']['estimate']:.3f}"
        logger.info("%d of %d: %s: %s", number, len(jobs), job.name, outcome)
        if results is not None and "nothing_learnt" in results:
            logger.warning("WARNING: %s: %s", job.name, results["nothing_learnt"])
        yield job.name, results, error


def _outcomes(jobs: Sequence[Job], config: ManyRunsConfig) -> Iterator[Outcome]:
    if config.executor == "local" or not jobs:
        yield from run_jobs(jobs, config.parallel, config.threads, config.devices)
        return
    from async_rlhf.distributed.ray_tasks import run_tasks

    work = partial(run_alone, threads=config.threads)
    for job, outcome, error in run_tasks(work, jobs, config.threads, config.gpus):
        yield Outcome(job, None, error) if outcome is None else outcome


def share_of(trials: Sequence[Trial], share: str | None) -> list[Trial]:
    """Those of the trials that "i/n" takes."""
    first, _, step = (share or "0/1").partition("/")
    return list(trials[int(first) :: int(step)])


def check_trials(trials: Sequence[Trial]) -> None:
    """Require that what the runs read is there. Raises ConfigError."""
    judging = [replace(trial.held_out, models={POLICY: trial.run.model}) for trial in trials]
    check_names(*((trial.run, "base.") for trial in trials), *((each, "held_out.") for each in judging))


def start_jobs(config: ManyRunsConfig, trials: Sequence[Trial]) -> list[Job]:
    """The judging of each model that the trials start from."""
    folders = {_start_name(trial): trial for trial in trials}
    places = {name: Path(config.output_dir) / name for name in folders}
    return [Job(name, run_start, replace(folders[name], folder=str(at)), at) for name, at in places.items()]


def _start_name(trial: Trial) -> str:
    """The folder of a starting model's judging: its name, and a checksum of where it is."""
    model = trial.run.model
    return f"start-{Path(model).name}-{checksums.digest_of(str(Path(model).expanduser().resolve()))[:8]}"


def _show(config: SweepConfig, trials: Sequence[Trial], results: Mapping[str, Results]) -> None:
    """Write table, picture and all results, and print the table."""
    done = [trial for trial in trials if trial.name in results]
    settings = list(dict.fromkeys(tuple(trial.setting.items()) for trial in trials))
    done.sort(key=lambda trial: settings.index(tuple(trial.setting.items())))
    if not done:
        return
    starts = {trial.name: results[_start_name(trial)] for trial in done if _start_name(trial) in results}
    summarised = summaries([results[trial.name] for trial in done], starts, labels_of(config.baseline))
    folder, text = Path(config.output_dir), table(summarised, labels_of(config.baseline))
    write_file(folder / TABLE, text)
    write_file(folder / RESULTS, json_lines(results[trial.name] for trial in done))
    files = {"table": TABLE, "every run": RESULTS}
    if not can_draw():
        logger.info("no picture: %s brings what draws it", INSTALL)
    elif draw(summarised, config.plot_axis, folder / PICTURE):
        files["picture"] = PICTURE
    print(text)
    logger.info("%s", "\n".join(f"{what}: {folder / name}" for what, name in files.items()))
