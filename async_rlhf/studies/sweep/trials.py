"""Which runs a sweep has: their settings, names and whole configurations."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from async_rlhf.config import ConfigError, EvaluateConfig
from async_rlhf.config.base import REQUIRED, dotted, key, require
from async_rlhf.config.parsing import parse
from async_rlhf.run.config import RunConfig
from async_rlhf.studies.sweep.config import ManyRunsConfig, SweepConfig

RESERVED = {
    "train.seed": "seeds says which",
    "train.output_dir": "each run has a folder of its own in output_dir",
    "train.num_threads": "threads says how many",
    "train.generation.num_threads": "threads says how many",
    "train.resume": "a run that was interrupted is resumed",
    "train.overwrite_output_dir": "overwrite says whether runs are done again",
}
"""Keys of ``train`` that no setting may have, and what decides them."""
_LONGEST_NAME = 120


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of many, and how its policy is judged."""

    held_out: EvaluateConfig
    """How it is judged, without the policies."""
    folder: str = key(REQUIRED, role="place")
    """Where everything of it goes."""
    overwrite: bool = key(False, role="place")
    """Do it again even if it is done already."""
    name: str
    """Of its folder."""
    setting: dict[str, str]
    """Axis -> label; runs that differ in the seed alone have the same."""
    seed: int
    """Of the run. The seed of the judging is the same for all."""
    run: RunConfig
    """What is trained."""
    threads: int = 1
    """CPU threads."""
    checkpoints: bool = False
    """Whether its checkpoints are judged too."""
    keep: str = key("final", role="place")
    """See :class:`ManyRunsConfig`."""


def trials_of(config: SweepConfig) -> list[Trial]:
    """All runs of a sweep: of the first seed all settings, then of the next, so that settings can be compared if it is
    stopped early.

    Raises:
        ConfigError: a setting that cannot be run; the message names it.
    """
    held_out, settings = parsed_held_out(config), list(settings_of(config))
    for axis, label in labels_of(config.baseline).items():
        known = list(dict.fromkeys(labels.get(axis, "") for labels, _ in settings))
        require(label in known, f"baseline.{axis}", label, f"must be one of {', '.join(known)}")
    trials = [
        trial
        for labels, keys in settings
        for trial in of_setting(config, held_out, labels, keys, config.seeds, config.checkpoints)
    ]
    twice = [trial.name for trial in trials if [other.name for other in trials].count(trial.name) > 1]
    require(not twice, "settings", twice[:1], "must differ from each other: two settings have the same name")
    return sorted(trials, key=lambda trial: config.seeds.index(trial.seed))


def unlike(config: SweepConfig, trials: Sequence[Trial]) -> list[str]:
    """The keys in which the settings differ and which none of them sets, with their values: algorithms have defaults of
    their own.
    """
    said = {name for _, keys in settings_of(config) for name in keys} | {*RESERVED}
    runs = {"/".join(trial.setting.values()): dotted(asdict(trial.run)) for trial in trials}
    differences = []
    for name in dict.fromkeys(name for run in runs.values() for name in run):
        if not any(f"{name}.".startswith(f"{each}.") for each in said):
            values: dict[str, list[str]] = {}
            for setting, run in runs.items():
                values.setdefault(label_of(run[name]) if name in run else "no such key", []).append(setting)
            text = "; ".join(f"{value} ({', '.join(those)})" for value, those in values.items())
            differences += [f"{name}: {text}"] if len(values) > 1 else []
    return differences


def settings_of(config: SweepConfig) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Of each setting, its labels by axis, and the keys that it sets."""
    axes = []
    for name, values in config.grid.items():
        if isinstance(values, list):
            axes.append([({name: label_of(value)}, {name: value}) for value in values])
        else:
            axes.append([({name: str(label)}, keys) for label, keys in values.items()])
    listed = [(labels_of(setting), setting) for setting in config.settings]
    for parts in itertools.product(listed or [({}, {})], *axes):
        labels, keys = dict[str, str](), dict[str, Any]()
        for some_labels, some_keys in parts:
            for name, value in some_keys.items():
                require(name not in keys, name, value, "must be set by one axis alone, or by settings alone")
                require(name not in RESERVED, name, value, f"must be left out: {RESERVED.get(name)}")
            labels |= some_labels
            keys |= some_keys
        yield labels, keys


def of_setting(
    config: ManyRunsConfig,
    held_out: EvaluateConfig,
    labels: Mapping[str, str],
    keys: Mapping[str, Any],
    seeds: Sequence[int],
    checkpoints: bool = False,
) -> list[Trial]:
    """The runs of one setting, one for each seed.

    Args:
        config: of the sweep.
        held_out: of :func:`parsed_held_out`.
        labels: axis -> label, for names and tables.
        keys: dotted keys of ``train`` that the setting changes.
        seeds: of the runs.
        checkpoints: whether the runs' checkpoints are judged.
    """
    run = parsed_run(config, keys, ", ".join(f"{name} {label}" for name, label in labels.items()) or "base")
    rule = "must be above 0 with checkpoints: they are what is judged"
    require(not checkpoints or (run.train.save_steps or 0) > 0, "base.train.save_steps", run.train.save_steps, rule)
    rule = "must be null with checkpoints, which are deleted when they have been judged (keep)"
    limit = run.train.save_total_limit
    require(not checkpoints or limit is None, "base.train.save_total_limit", limit, rule)
    shared: dict[str, Any] = {"setting": dict(labels), "held_out": held_out, "overwrite": config.overwrite}
    shared |= {"threads": config.threads, "checkpoints": checkpoints, "keep": config.keep}
    trials = []
    for seed in seeds:
        name = name_of(labels, seed)
        folder = Path(config.output_dir) / "runs" / name
        train = replace(run.train, seed=seed, output_dir=str(folder / "train"), resume=True, report=False)
        trials.append(Trial(name=name, seed=seed, run=replace(run, train=train), folder=str(folder), **shared))
    return trials


def parsed_run(config: ManyRunsConfig, keys: Mapping[str, Any], prefix: str = "base") -> RunConfig:
    """The configuration of a run with these keys, from ``base``; its folder and seed are not those of any run yet.

    Args:
        config: of the sweep.
        keys: dotted keys of ``train``.
        prefix: what an error begins with.
    """
    if isinstance(config.base, str):  # a file that train may run, too
        require(Path(config.base).is_file(), "base", config.base, "must be a file with the keys of train, or a mapping")
    else:
        flat = dotted(config.base)
        for name, why in RESERVED.items():
            require(name not in flat, f"base.{name}", flat.get(name), f"must be left out: {why}")
    threads = {"train.num_threads": config.threads, "train.generation.num_threads": config.threads}
    wanted = {**threads, **keys, "train.output_dir": str(Path(config.output_dir) / "runs" / "any")}
    words = [f"--{name}={label_of(value)}" for name, value in wanted.items()]
    return _parsed(RunConfig, "train", config.base, prefix, words)


def parsed_held_out(config: ManyRunsConfig) -> EvaluateConfig:
    """How policies are judged; the model in it is a placeholder."""
    values = {**config.held_out, "models": {"policy": "policy"}, "output_dir": str(Path(config.output_dir) / "any")}
    held_out = _parsed(EvaluateConfig, "evaluate", values, "held_out")
    rule = "must be left out: policies are compared by a gold reward; give reward_funcs or reward_model"
    require(held_out.judge.url is None, "held_out.judge.url", held_out.judge.url, rule)
    rule = "must be left out: the starting model is judged, too, and no run has trained it"
    require(held_out.penalties is None, "held_out.penalties", held_out.penalties, rule)
    return held_out


def _parsed(
    kind: type[Any], command: str, values: str | Mapping[str, Any], prefix: str, words: Sequence[str] = ()
) -> Any:
    with tempfile.TemporaryDirectory() as folder:  # the parser reads only files
        path = Path(folder) / "config.yml"
        if not isinstance(values, str):
            path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
        file = values if isinstance(values, str) else str(path)
        try:
            return parse(kind, command, ["--config", file, *words], translated=True)[0]
        except ConfigError as error:
            raise ConfigError(f"{prefix}: {error}") from error


def number_of(label: str) -> float | None:
    """The number that a label is, if it is one."""
    try:
        return float(label)
    except ValueError:
        return None


def label_of(value: Any) -> str:
    """A value as tables and names show it."""
    return value if isinstance(value, str) else json.dumps(value)


def labels_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Axis -> label."""
    return {axis: label_of(value) for axis, value in values.items()}


def name_of(labels: Mapping[str, str], seed: int) -> str:
    """A folder's name for one run: ``algorithm=ppo,staleness=4,seed=0``."""
    parts = [f"{axis.rpartition('.')[2]}={label}" for axis, label in labels.items()]
    name = re.sub(r"[^\w.=,+-]+", "_", ",".join([*parts, f"seed={seed}"]))
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 40]}...{name[-36:]}"
