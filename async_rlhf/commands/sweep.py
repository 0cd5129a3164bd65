"""Many runs: trains and judges them, and shows them together."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.config import ConfigError
from async_rlhf.config.sweep import ManyRunsConfig, SweepConfig
from async_rlhf.data import cache
from async_rlhf.models.loading import check_source
from async_rlhf.reports.charts import INSTALL, can_draw
from async_rlhf.sweeps.one_trial import Start, run_start, run_trial, stage_of
from async_rlhf.sweeps.pictures import draw
from async_rlhf.sweeps.results import Results, Summary, summaries, table
from async_rlhf.sweeps.running import Job, run_jobs
from async_rlhf.sweeps.trials import Trial, label_of, trials_of
from async_rlhf.system.files import whole_file
from async_rlhf.system.lock import hold

TABLE, RESULTS, PICTURE = "table.md", "results.jsonl", "sweep.png"

logger = logging.getLogger(__name__)


class FailedRunsError(RuntimeError):
    """Some runs of a sweep have failed."""


def run_sweep(config: SweepConfig) -> dict[str, Any]:
    """Run what is not done yet, then write the table, the picture and results.jsonl, and print the table.

    Returns:
        Run's name -> its results.

    Raises:
        ConfigError: a setting that cannot be run, before any model is loaded.
        FailedRunsError: some runs failed; all others are done, and the table has them.
    """
    trials = trials_of(config)
    check_trials(trials)
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    ours = share_of(trials, config.share)
    lock = f".sweep-{config.share.replace('/', '-of-')}.lock" if config.share else ".sweep.lock"
    failed = {}
    with hold(folder / lock, "output_dir", folder):
        starts = start_jobs(config, trials)
        found: dict[str, Results] = {}
        for name, results, error in run_trials(ours, config, list(starts.values())):
            if error:
                failed[name] = error
            elif results is not None:
                found[name] = results
        baseline = {axis: label_of(value) for axis, value in config.baseline.items()}
        by_trial = {one.name: found[_start_name(one)] for one in trials if _start_name(one) in found}
        settings = list({tuple(one.setting.items()): None for one in trials})
        done = [found[one.name] for one in trials if one.name in found]
        done.sort(key=lambda one: settings.index(tuple(one["setting"].items())))
        if done:
            _show(config, summaries(done, by_trial, baseline), baseline, done)
    if failed:
        told = "\n  ".join(f"{name}: {error}" for name, error in failed.items())
        raise FailedRunsError(f"{len(failed)} runs failed; start the sweep again to repeat them:\n  {told}")
    return found


def run_trials(
    trials: Sequence[Trial], config: ManyRunsConfig, first: Sequence[Job] = ()
) -> Generator[tuple[str, Results | None, str]]:
    """Run trials, and other jobs before them; those that are done are read back at once.

    Yields:
        Name, results and error, as each ends; either results or the error is there.
    """
    jobs = list(first)
    for trial in trials:
        results = stage_of(trial).done() if not trial.overwrite else None
        if results is not None:
            yield trial.name, results, ""
        else:
            jobs.append(Job(trial.name, run_trial, trial, Path(trial.folder)))
    for number, outcome in enumerate(run_jobs(jobs, config.parallel, config.threads, config.devices), start=1):
        gold = (outcome.results or {}).get("gold")
        told = f"failed: {outcome.error}" if gold is None else f"gold reward {gold['estimate']:.3f}"
        logger.info("%d of %d: %s: %s", number, len(jobs), outcome.job.name, told)
        yield outcome.job.name, outcome.results, outcome.error


def share_of(trials: Sequence[Trial], share: str | None) -> list[Trial]:
    """Those of the trials that "i/n" takes."""
    first, _, step = (share or "0/1").partition("/")
    return list(trials[int(first) :: int(step)])


def check_trials(trials: Sequence[Trial]) -> None:
    """Require that what the runs read is there. Raises ConfigError."""
    for trial in {trial.run.model + str(trial.run.reward_model): trial for trial in trials}.values():
        for name in ("model", "reward_model", "ref_model", "value_model"):
            check_source(getattr(trial.run, name), f"base.{name}")
        for key, source in (("base.data.train", trial.run.data.train), ("held_out.data", trial.held_out.data)):
            looks_local = source.startswith((".", "/", "~")) or Path(source).suffix in (
                ".jsonl",
                ".json",
                ".csv",
                ".parquet",
            )
            if looks_local and not Path(source).expanduser().exists():
                raise ConfigError(f"{key}: got {source!r}; there is no such file or folder")


def start_jobs(config: ManyRunsConfig, trials: Sequence[Trial]) -> dict[str, Job]:
    """The judging of each model that the trials start from, by model."""
    found = {}
    for trial in trials:
        folder = Path(config.output_dir) / _start_name(trial)
        start = Start(trial.run.model, trial.held_out, str(folder), config.overwrite)
        found[trial.run.model] = Job(_start_name(trial), run_start, start, folder)
    return found


def _start_name(trial: Trial) -> str:
    """The folder of a starting model's judging: its name, and a checksum of where it is."""
    model = trial.run.model
    return f"start-{Path(model).name}-{cache.digest_of(str(Path(model).expanduser().resolve()))[:8]}"


def _show(
    config: SweepConfig, found: Sequence[Summary], baseline: Mapping[str, str], done: Sequence[Results]
) -> None:
    """Write table, picture and all results, and print the table."""
    folder, text = Path(config.output_dir), table(found, baseline)
    with whole_file(folder / TABLE) as file:
        file.write(text)
    with whole_file(folder / RESULTS) as file:
        for one in done:
            file.write(json.dumps(one) + "\n")
    told = {"table": TABLE, "every run": RESULTS}
    if not can_draw():
        logger.info("no picture: %s brings what draws it", INSTALL)
    elif draw(found, config.plot_axis, folder / PICTURE):
        told["picture"] = PICTURE
    print(text)
    logger.info("%s", "\n".join(f"{what}: {folder / name}" for what, name in told.items()))
