"""What two runs are compared by: what their folders say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.config import ConfigError
from async_rlhf.config.base import dotted, require
from async_rlhf.config.yaml_text import read_yaml
from async_rlhf.run.folder import DIGESTS, METRICS, refuse_second
from async_rlhf.run.record import ENVIRONMENT, RUN_FILE, starts_of
from async_rlhf.studies.explain.repetition import Line, read_metrics
from async_rlhf.studies.report.reading import DIGEST, json_lines

UPDATE = "metrics"
"""The last part of a batch: all else that its line in metrics.jsonl says."""


@dataclass(frozen=True)
class ReadRun:
    """What the folder of a run says of it.

    Args:
        name: as the user gave it.
        config: of run.yml, with dotted keys.
        starts: of environment.json, the first one first.
        digests: by batch, the lines of digests.jsonl; none of a run by an older version.
        metrics: by batch, without times.
    """

    name: str
    config: Mapping[str, Any]
    starts: list[dict[str, Any]]
    digests: Mapping[int, Mapping[str, Any]]
    metrics: Mapping[int, Line]

    @property
    def first(self) -> Mapping[str, Any]:
        """The first start; empty if the folder does not say."""
        return self.starts[0] if self.starts else {}

    @property
    def code(self) -> Mapping[str, Any]:
        """Version and commit of this package."""
        code = self.first.get("async_rlhf")
        return code if isinstance(code, dict) else {}

    @property
    def inputs(self) -> Mapping[str, str]:
        """Checksums of what it was given."""
        inputs = self.first.get("inputs")
        return inputs if isinstance(inputs, dict) else {}

    @property
    def batches(self) -> set[int]:
        """That it has trained on, as far as it says anything of them."""
        return {*self.digests, *self.metrics}


def read_run(name: str) -> ReadRun:
    """Read the folder of a run that has ended.

    Raises:
        ConfigError: it is no run, or has trained on no batch.
        InUseError: it is still training.
    """
    folder = Path(name).expanduser()
    whole = (folder / RUN_FILE).is_file() and (folder / METRICS).is_file()
    require(whole, "runs", name, f"must be the output folder of a run, with {RUN_FILE} and {METRICS} in it")
    refuse_second(folder)
    config = read_yaml(str(folder / RUN_FILE), "runs")
    require(isinstance(config, dict), "runs", name, f"must have a {RUN_FILE} with keys: this one is damaged")
    lines = json_lines(folder / DIGESTS, [], DIGEST) if (folder / DIGESTS).is_file() else ()
    digests = {int(row["batch"]): row for row in lines if isinstance(row.get("batch"), int)}
    run = ReadRun(name, dotted(config), starts_of(folder / ENVIRONMENT) or [], digests, read_metrics(folder))
    require(bool(run.batches), "runs", name, "has trained on no batch; must have one, to be compared")
    return run


def require_comparable(a: ReadRun, b: ReadRun) -> None:
    """Require that two runs are of one algorithm and of one version of this package.

    Raises:
        ConfigError: they are not.
    """
    for what, ours, theirs in (
        ("algorithm", a.config.get("algorithm"), b.config.get("algorithm")),
        ("version of async_rlhf", a.code.get("version"), b.code.get("version")),
    ):
        if ours != theirs:
            raise ConfigError(f"runs: {a.name!r} is of {what} {ours}, {b.name!r} of {theirs}; must be of one {what}")
    if not a.batches & b.batches:
        raise ConfigError(f"runs: {a.name!r} and {b.name!r} have no batch in common; must have one, to be compared")


_OF_COPIES = ("generation.dtype", "generation.engine", "generation.placement", "device", "lora.publish")


def parts(a: ReadRun, b: ReadRun, batch: int) -> Iterator[tuple[str, Any, Any]]:
    """What both say of a batch, in the order in which it came to be: name, and both values."""
    ours, theirs = (run.digests.get(batch, {}) for run in (a, b))
    # What is published is rounded, and only some engines need a copy: other copies say nothing of the policy.
    alike = all(a.config.get(f"train.{key}") == b.config.get(f"train.{key}") for key in _OF_COPIES)
    names = [name for name in ours if name not in ("batch", "drawn", "tensors", "random")]
    for name in [*names, "random"]:
        if name in ours and name in theirs and (name != "weights" or alike):
            yield name, ours[name], theirs[name]
    mine, other = (run.metrics.get(batch) for run in (a, b))
    if mine is not None and other is not None:
        both = [name for name in mine if name in other]  # what is measured beside training need not be the same
        yield UPDATE, {name: mine[name] for name in both}, {name: other[name] for name in both}


def first_difference(a: ReadRun, b: ReadRun) -> tuple[int, str] | None:
    """The first batch that differs, and what in it differs first; None if all is equal that both have."""
    for batch in sorted(a.batches & b.batches):
        for name, ours, theirs in parts(a, b, batch):
            if ours != theirs:
                return batch, name
    return None
