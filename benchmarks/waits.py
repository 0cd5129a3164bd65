"""What the benchmarks that wait (waits_*.py) share: prompts, what the planner predicts, and the command line."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smallest import parse

from async_rlhf.studies.plan.command import find_times, with_recipe
from async_rlhf.studies.plan.config import PlanConfig, ScalingConfig, SecondsConfig, WorkloadConfig
from async_rlhf.studies.plan.search import try_split
from async_rlhf.studies.plan.times import Split

_SPANS = ("wait", "score", "annotate", "train", "publish")
Figures = Mapping[str, float]


def prompts(tokens: int) -> list[dict[str, str]]:
    """256 prompts of so many tokens, which differ in the first."""
    words = " ".join(f"w{i}" for i in range(1, tokens))
    return [{"query": f"w{i + 20} {words}"} for i in range(256)]


def mean_times(logs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over batches of what metrics.jsonl has of times, without the "time/" of their names."""
    names = [name for name in logs[0] if name.startswith("time/")]
    return {name.removeprefix("time/"): statistics.fmean(log[name] for log in logs) for name in names}


def seconds_of(mean: Mapping[str, float], **more: float) -> SecondsConfig:
    """A run's times, as a user would give them to ``async-rlhf plan``, and some that another run would have besides."""
    other = max(0.0, mean["batch"] - sum(mean[name] for name in _SPANS))
    train = mean["annotate"] + mean["train"]
    return SecondsConfig(generate=mean["generate"], train=train, other=other, **more)


def predicted(seconds: SecondsConfig, staleness: int, workload: WorkloadConfig | None = None, **scaling: Any) -> float:
    """Seconds of a batch by ``async-rlhf plan``, for as many generators as the seconds are of."""
    config = PlanConfig(seconds=seconds, workload=workload or WorkloadConfig(), scaling=ScalingConfig(**scaling))
    split = Split(config.scaling.generators or 1, 1)
    return try_split(find_times(with_recipe(config)).times, split, config).outcomes[staleness].step_seconds


def main(doc: str | None, measure: Callable[..., Mapping[str, Figures]], smallest: Mapping[str, float]) -> None:
    """Measure with the options that ``measure`` takes, and print a line for each of its results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    for name, option in inspect.signature(measure).parameters.items():
        words = f"--{name.replace('_', '-')}"
        parser.add_argument(words, type=type(option.default), default=option.default, help="%(default)s")
    options = vars(parse(parser, **smallest))
    as_json, _ = options.pop("json"), options.pop("smallest")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = measure(**options)
    if as_json:
        print(json.dumps(found))
        return
    width = max(map(len, found))
    for name, figures in found.items():
        print(f"{name:<{width}}  " + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()))
