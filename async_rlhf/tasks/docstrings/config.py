"""Configuration of the built-in task: its data, and the pipeline that is run on it."""

from __future__ import annotations

from async_rlhf.config.base import FOLDER, REQUIRED, configuration, key
from async_rlhf.config.common import RepeatableConfig, SeededConfig


@configuration
class HarvestConfig(SeededConfig, RepeatableConfig):
    """What the data are made of."""

    out: str = key(REQUIRED, *FOLDER, role="place")
    """The folder for everything."""
    source: list[str] = key([])
    """Packages or paths to harvest; none takes the standard library and the installed dependencies."""
    seed = key(0)
    """Seed of everything that is drawn, such as the split into train, preference and held-out."""


@configuration
class DocstringsConfig(HarvestConfig):
    """Data of the built-in docstring task: ``async-rlhf data``.

    Signatures of functions are the prompts, the summary lines of their docstrings are the completions.
    """

    out = key(REQUIRED)
    """The folder to write sft.jsonl, rl.jsonl, preference_prompts.jsonl and heldout.jsonl to."""
    max_functions: int | None = key(None, ge=100)
    """Use only this many functions, drawn with the seed; null for all."""


@configuration
class QuickstartConfig(HarvestConfig):
    """The whole pipeline on the built-in task: ``async-rlhf quickstart``.

    Data, SFT, preference pairs, reward model, online DPO synchronous and one step off-policy, evaluation, report.
    Finished stages are skipped, so an interrupted quickstart continues where it stopped.
    """

    out = key("runs/quickstart")
    scale: float = key(1.0, gt=0, le=1000, why="the built-in data are soon used up")
    """Multiplies the amount of work; below 1 for a quick look, above for better models."""
