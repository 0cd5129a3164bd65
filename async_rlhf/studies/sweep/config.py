"""Configuration of a sweep: many runs that differ in a few keys."""

from __future__ import annotations

import re
from typing import Any, Literal

from async_rlhf.config.base import EACH_ONCE, REQUIRED, Rule, configuration, key, require
from async_rlhf.config.common import ResultsConfig

_SHARE = Rule(
    lambda value: (match := re.fullmatch(r"([0-9]+)/([0-9]+)", value)) is not None and int(match[1]) < int(match[2]),
    'must be "i/n" with i from 0 to n - 1, such as "3/16"',
)


@configuration(kw_only=True)
class ManyRunsConfig(ResultsConfig):
    """What commands that train and judge many policies share."""

    base: dict[str, Any] | str = key(REQUIRED, main="runs")
    """What all runs share: the keys of ``train`` as a mapping, or the name of a file with them, whose seed, folder and
    threads count for nothing here."""
    held_out: dict[str, Any] = key(REQUIRED, main="runs")
    """How each policy is judged: the keys of ``evaluate``, such as data, max_prompts, reward_funcs or reward_model, and
    response_length. All policies answer the same prompts with the same random numbers."""
    parallel: int = key(1, ge=1, le=1024, why="each is a process", role="speed", main="machine")
    """Runs at a time on this machine; as many as devices, if these are given."""
    threads: int = key(1, ge=1, le=4096, why="no machine has more", main="machine")
    """CPU threads of each run. Sums depend on it, so it decides the results' last digits."""
    devices: list[str] = key([], EACH_ONCE, role="place", main="machine")
    """GPUs to divide among the runs at a time, as in CUDA_VISIBLE_DEVICES: ["0", "1"] gives each run one of them,
    ["0,1"] both. Empty: every run sees all."""
    executor: Literal["local", "ray"] = key("local", role="place", main="machine")
    """ "local" starts processes on this machine; "ray" starts tasks on the nodes of a Ray cluster, which must share the
    folders: that of $RAY_ADDRESS, else the one that this host is a node of, else a new one on this host."""
    gpus: float = key(0.0, ge=0, role="place")
    """GPUs that each run reserves with executor "ray", possibly a fraction of one."""
    keep: Literal["results", "final", "all"] = key("final", role="place", main="output")
    """What stays of a run that has been judged: its logs and results alone, also its final policy, or its checkpoints
    too."""

    def check(self) -> None:
        for name in ("models", "run", "checkpoints", "generations", "reference", "output_dir", "overwrite"):
            rule = "must be left out: what is judged, and where the results go, is known"
            require(name not in self.held_out, f"held_out.{name}", self.held_out.get(name), rule)
        on_ray = self.executor == "ray"
        rule = 'must be left out with executor "ray", which places as many runs as fit'
        require(not on_ray or not self.devices, "devices", self.devices, rule)
        require(not on_ray or self.parallel == 1, "parallel", self.parallel, rule)
        require(on_ray or self.gpus == 0, "gpus", self.gpus, 'must be 0 with executor "local"; devices says which')
        rule = f"must be as many as devices, which are {len(self.devices)}: each run has one at a time"
        require(not self.devices or self.parallel == len(self.devices), "parallel", self.parallel, rule)


@configuration(kw_only=True)
class SweepConfig(ManyRunsConfig):
    """Many runs over a grid or a list of settings, with several seeds each: ``async-rlhf sweep FILE``.

    Runs that are done are not done again, so an interrupted sweep continues where it stopped.
    """

    grid: dict[str, Any] = key({}, main="runs")
    """Axes: every combination is a setting. A key and its values, {"train.staleness": [0, 1, 4]}; or a name of your
    own and, for each label, the keys that it sets, {"N": {"4": {"train.num_mini_batches": 4, "train.batches": 10}}}."""
    settings: list[dict[str, Any]] = key([], main="runs")
    """Settings one by one, each with the keys that it sets; with a grid, each is combined with all of the grid."""
    seeds: list[int] = key([0], EACH_ONCE, Rule(lambda seeds: len(seeds) > 0, "must name one at least"), main="runs")
    """Every setting is run once with each seed. Runs of equal seeds see the same prompts and random numbers, whatever
    else differs."""
    baseline: dict[str, Any] = key({}, main="runs")
    """Labels on some axes, {"train.staleness": 0}: each setting is compared, seed by seed and prompt by prompt, with
    the one that differs from it in these alone."""
    checkpoints: bool = key(False, main="runs")
    """Judge the checkpoints of each run too, every base.train.save_steps batches: reward against KL over training."""
    plot_axis: str | None = key(None, role="log")
    """The axis that goes on the horizontal of the picture; null for that of numbers with the most values."""
    share: str | None = key(None, _SHARE, role="place", main="machine")
    """Only the runs with these numbers, "i/n" for i, i + n, i + 2n ...: several machines can share a sweep, and a last
    one without a share makes the table."""

    def check(self) -> None:
        super().check()
        for name, values in self.grid.items():
            lists = isinstance(values, list) or (
                isinstance(values, dict) and all(isinstance(keys, dict) for keys in values.values())
            )
            rule = "must be a list of values, or for each label the keys that it sets"
            require(lists and len(values) > 0, f"grid.{name}", values, rule)
        for name in self.baseline:
            rule = f"must be one of the axes: {', '.join(self.axes)}"
            require(name in self.axes, f"baseline.{name}", self.baseline[name], rule)
        known = self.plot_axis is None or self.plot_axis in self.axes
        require(known, "plot_axis", self.plot_axis, f"must be one of the axes: {', '.join(self.axes)}")

    @property
    def axes(self) -> list[str]:
        """What settings differ in, in order: the keys of ``settings``, then the axes of the grid."""
        return list(dict.fromkeys([*(key for setting in self.settings for key in setting), *self.grid]))
