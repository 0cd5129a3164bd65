"""The whole pipeline on the built-in docstring task, from source code to a report, on a laptop's CPU."""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

from async_rlhf import OnlineDPOConfig
from async_rlhf.commands.table import function_of
from async_rlhf.config import EvaluateConfig, GenerationConfig, NewModelConfig, PairsConfig, RewardConfig, SFTConfig
from async_rlhf.config.base import require
from async_rlhf.config.parallel import launched_ranks
from async_rlhf.config.rewards import GOLD_REWARD
from async_rlhf.run.config import DataConfig, RunConfig
from async_rlhf.run.folder import FINAL, METRICS, REPORT
from async_rlhf.system.errors import NothingLearntError
from async_rlhf.system.files import write_file
from async_rlhf.tasks.docstrings.config import DocstringsConfig, QuickstartConfig

logger = logging.getLogger(__name__)

RESPONSE_LENGTH = 32
MAX_PROMPT_LENGTH = 128
RUNS = {"synchronous": 0, "asynchronous": 1}
"""Name of each online run, and its staleness."""


def stage_configs(config: QuickstartConfig) -> dict[str, Any]:
    """The configuration of every stage, in the order in which they run."""
    out = Path(config.out)
    data, pairs = out / "data", out / "pairs" / "pairs.jsonl"
    again: dict[str, Any] = {"seed": config.seed, "overwrite": config.overwrite}
    sampling = {"response_length": RESPONSE_LENGTH, "max_prompt_length": MAX_PROMPT_LENGTH, **again}
    stages: dict[str, Any] = {
        "data": DocstringsConfig(out=str(data), source=list(config.source), overwrite=config.overwrite),
        "sft": SFTConfig(
            train=str(data / "sft.jsonl"),
            eval=str(data / "heldout.jsonl"),
            output_dir=str(out / "sft"),
            new_model=NewModelConfig(),
            num_epochs=2 * config.scale,
            learning_rate=3e-3,
            per_device_train_batch_size=16,
            max_length=MAX_PROMPT_LENGTH + RESPONSE_LENGTH,
            **again,
        ),
        "pairs": PairsConfig(
            model=str(out / "sft"),
            prompts=str(data / "preference_prompts.jsonl"),
            output=str(pairs),
            reward_funcs=[GOLD_REWARD],
            samples_per_prompt=8,
            pairs_per_prompt=3,
            max_prompts=max(100, round(1200 * config.scale)),
            **sampling,
        ),
        "reward": RewardConfig(
            model=str(out / "sft"),
            train=str(pairs),
            output_dir=str(out / "reward"),
            num_epochs=1,
            learning_rate=1e-3,
            max_length=MAX_PROMPT_LENGTH + RESPONSE_LENGTH,
            center=False,  # few samples are trained on, and nothing here needs the zero point
            **again,
        ),
    }
    stages |= {name: _online(out, name, staleness, config) for name, staleness in RUNS.items()}
    stages["evaluate"] = EvaluateConfig(
        models={"sft": str(out / "sft"), **{name: str(out / name / FINAL) for name in RUNS}},
        data=str(data / "heldout.jsonl"),
        output_dir=str(out / "evaluation"),
        max_prompts=max(100, min(1000, round(500 * config.scale))),
        reward_funcs=[GOLD_REWARD],
        **sampling,
    )
    return stages


def _online(out: Path, name: str, staleness: int, config: QuickstartConfig) -> RunConfig:
    return RunConfig(
        model=str(out / "sft"),
        reward_model=str(out / "reward"),
        data=DataConfig(train=str(out / "data" / "rl.jsonl")),
        train=OnlineDPOConfig(
            output_dir=str(out / name),
            overwrite_output_dir=config.overwrite,
            # An interrupted run resumes from its last checkpoint.
            resume=not config.overwrite and (out / name).exists(),
            save_steps=20,
            save_total_limit=1,
            staleness=staleness,
            completions_per_batch=64,
            batches=max(2, round(60 * config.scale)),
            # Small micro-batches, sorted by length, save more on padding than they lose by being small.
            per_device_train_batch_size=8,
            learning_rate=2e-4,
            max_prompt_length=MAX_PROMPT_LENGTH,
            annotate_batch_size=16,
            seed=config.seed,
            generation=GenerationConfig(response_length=RESPONSE_LENGTH),
        ),
    )


def run_quickstart(config: QuickstartConfig) -> dict[str, Any]:
    """Run every stage that is not done yet, and report. Returns the content of ``summary.json``."""
    rule = "must be 1: start quickstart without torchrun or accelerate"
    require(launched_ranks() == 1, "the number of processes", launched_ranks(), rule)
    stages = stage_configs(config)
    results, seconds = {}, {}
    for number, (name, stage) in enumerate(stages.items(), start=1):
        logger.info("\n[%d/%d] %s", number, len(stages), name)
        started = time.monotonic()
        results[name] = function_of("train" if name in RUNS else name)(stage)
        seconds[name] = round(time.monotonic() - started, 1)
        if "nothing_learnt" in results[name]:
            raise NothingLearntError(f"{name}: {results[name]['nothing_learnt']}")
    return _report(Path(config.out), {"results": results, "seconds": seconds})


def _gold_difference(samples: Path) -> str:
    """What asynchrony cost in gold reward, on the held-out prompts."""
    from async_rlhf.commands.evaluation.statistics import paired_difference

    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    synchronous, asynchronous = ([row["models"][name]["score"] for row in rows] for name in RUNS)
    difference = paired_difference(asynchronous, synchronous, [row["query"] for row in rows])
    between = f"{difference.estimate:+.3f} ({difference.low:+.3f} to {difference.high:+.3f}, 95%)"
    return f"Gold reward: {between} one step off-policy against in turn, {len(rows)} held-out prompts, one run of each."


def _report(out: Path, summary: dict[str, Any]) -> dict[str, Any]:
    import torch

    from async_rlhf.commands.evaluation.tables import WIDTH, format_table
    from async_rlhf.generation.placement import available_cores
    from async_rlhf.run.summary import asynchrony, read_rows
    from async_rlhf.studies.report.charts import INSTALL, Series
    from async_rlhf.studies.report.command import run_report
    from async_rlhf.studies.report.config import ReportConfig
    from async_rlhf.studies.report.plots import plot_training

    evaluation = out / "evaluation" / "evaluation.json"
    write_file(out / "summary.json", json.dumps(summary, indent=2))
    print(format_table(summary["results"]["evaluate"], shutil.get_terminal_size((WIDTH, 0)).columns))
    picture, page = out / "training.png", out / REPORT
    try:
        runs = {Series(name, "online_dpo", lag): out / name / METRICS for name, lag in RUNS.items()}
        plot_training(runs, picture, evaluation)
        run_report(ReportConfig([str(out / name) for name in RUNS], str(page)))
    except ImportError:
        logger.warning("no picture and no page: %s brings what draws them", INSTALL)
    except Exception as error:  # of any kind: all stages are done, and what they found is still to be said
        logger.warning("WARNING: no picture or no page was made: %s: %s", type(error).__name__, error)
    accuracy = summary["results"]["reward"]["eval_accuracy"]
    print(f"reward model: {accuracy:.1%} of held-out pairs right")
    synchronous, asynchronous = (read_rows(out / name / METRICS) for name in RUNS)
    print(asynchrony(synchronous, asynchronous, cores=available_cores(), gpus=torch.cuda.device_count()))
    print(_gold_difference(out / "evaluation" / "samples.jsonl"))
    print(f"{sum(summary['seconds'].values()):.0f} s in all, by stage: {summary['seconds']}")
    made = {
        "summary": out / "summary.json",
        "picture": picture,
        "warnings, timeline and samples of both runs": page,
        "samples": out / "evaluation" / "samples.jsonl",
        "traces for ui.perfetto.dev": out / "*" / "trace.json",
        "models": out / "{sft,reward,synchronous/final,asynchronous/final}",
    }
    for text, path in made.items():
        if path.exists() or path not in (picture, page):
            print(f"{text}: {path}")
    return summary
