"""One run of many, in a process of its own: trains a policy, judges it, and keeps what is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from async_rlhf.commands.stage import Stage
from async_rlhf.run.folder import FINAL, METRICS, Checkpoints, batch_of
from async_rlhf.run.manifest import delete_whole
from async_rlhf.run.summary import read_rows
from async_rlhf.studies.report.drift import values_of
from async_rlhf.studies.sweep.trials import Trial

POLICY = "policy"
LAST_SHARE = 0.1
"""Of the batches, at the end of the run, over which metrics are averaged."""


def stage_of(trial: Trial) -> Stage:
    """The marker of a finished trial: ``trial.json`` in its folder, with its results."""
    names = [f"run.{name}" for name in ("model", "ref_model", "value_model", "reward_model", "reward_funcs")]
    names += ["run.data.train", "run.data.eval", *(["run.callbacks"] if trial.run.callbacks else [])]
    names += [f"held_out.{name}" for name in ("data", "reward_model", "reward_funcs")]
    inputs = {name: attrgetter(name)(trial) for name in names}
    return Stage(Path(trial.folder), "trial", trial, inputs, one_of_many=True)


def run_trial(trial: Trial) -> dict[str, Any]:
    """Train and judge, unless that is done; returns the results, which the marker holds too.

    Returns:
        "name", "setting", "seed"; "gold", "kl", "win_rate_vs_human" (if there are human answers), "length", "ended":
        of the final policy on the held-out prompts, with intervals over prompts; "path": the same of each checkpoint;
        "scores": gold reward of each prompt; "metrics": means of the last tenth of the batches; "nothing_learnt": why,
        if no batch had a gradient.
    """
    stage = stage_of(trial)
    if (results := stage.done()) is not None:
        return results
    from async_rlhf.commands.train import run_train

    run = trial.run
    if trial.overwrite:
        run = replace(run, train=replace(run.train, resume=False, overwrite_output_dir=True))
    trained_so = run_train(run)
    trained = Path(run.train.output_dir)
    models = {POLICY: str(trained / FINAL)}
    if trial.checkpoints:
        by_data = run.train.epochs is not None
        last = read_rows(trained / METRICS)[-1]["batch"] if by_data else run.train.num_batches
        earlier = [path for path in Checkpoints(trained).all() if batch_of(path.name) != last]
        models |= {path.name: str(path) for path in earlier}
    reference = trial.held_out.ref_model or run.ref_model or run.model
    results = {name: getattr(trial, name) for name in ("name", "setting", "seed")}
    results |= _judged(trial, models, Path(trial.folder) / "evaluation", ref_model=reference)
    results |= {"metrics": last_metrics(trained / METRICS)}
    results |= {name: why for name, why in trained_so.items() if name == "nothing_learnt"}
    stage.publish_files({}, results)
    if trial.keep != "all":
        for path in [*Checkpoints(trained).all(), *([trained / FINAL] if trial.keep == "results" else [])]:
            delete_whole(path)
    return results


def run_start(trial: Trial) -> dict[str, Any]:
    """Judge the model that a run starts from; the same keys as :func:`run_trial`."""
    return _judged(trial, {POLICY: trial.run.model}, Path(trial.folder))


def _judged(trial: Trial, models: dict[str, str], folder: Path, **changes: Any) -> dict[str, Any]:
    """Evaluate models, and keep what is asked for: most of the policy, less of its checkpoints."""
    from async_rlhf.commands.evaluate import run_evaluate

    where: dict[str, Any] = {"models": models, "output_dir": str(folder), "overwrite": trial.overwrite}
    evaluations = run_evaluate(replace(trial.held_out, **where, **changes))["models"]
    path = {name: _kept(evaluation) for name, evaluation in evaluations.items()}
    # The gold reward of the policy's answer to each prompt, in the order of the prompts.
    with (folder / "samples.jsonl").open(encoding="utf-8") as file:
        scores = [json.loads(line)["models"][POLICY]["score"] for line in file]
    return {**path.pop(POLICY), "path": path, "scores": scores}


def _kept(evaluation: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an evaluation of one model."""
    names = {"gold": "reward_mean", "kl": "kl_to_reference", "win_rate_vs_human": "win_rate_vs_reference_response"}
    kept = {name: evaluation[key] for name, key in names.items() if key in evaluation}
    return kept | {"length": evaluation["mean_length"], "ended": evaluation["ended_share"]}


def last_metrics(path: Path) -> dict[str, float]:
    """Means of each metric over those of the last tenth of the logged batches that have it: one with nothing but ties,
    for example, has none of training."""
    rows = read_rows(path)
    rows = rows[-max(1, round(LAST_SHARE * len(rows))) :]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(values) for name in names if (values := values_of(rows, name))}
