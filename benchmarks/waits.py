"""What the benchmarks that wait (waits_*.py) share: a run, what the planner predicts, and the command line."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from smallest import parse
from waiting import waiting_policy
from workload import PROMPT_TOKENS, VOCABULARY, Run, prompts, reward, train

from async_rlhf.studies.plan.command import find_times, with_recipe
from async_rlhf.studies.plan.config import PlanConfig, ScalingConfig, SecondsConfig, WorkloadConfig
from async_rlhf.studies.plan.search import try_split
from async_rlhf.studies.plan.times import Split

_SPANS = ("wait", "score", "annotate", "train", "publish")
Figures = Mapping[str, float]


def waiting_run(
    algorithm: str, response_tokens: int, options: Mapping[str, Any], reward_funcs: Any = reward, **of_trainer: Any
) -> Run:
    """A run whose model waits as on a device of its own, always as long."""
    model = waiting_policy(VOCABULARY, PROMPT_TOKENS + response_tokens)
    options = {"max_prompt_length": PROMPT_TOKENS, **options}
    generation = {"response_length": response_tokens, "probe_steps": 0}
    return train(algorithm, model, prompts(), generation, options, reward_funcs=reward_funcs, **of_trainer)


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
