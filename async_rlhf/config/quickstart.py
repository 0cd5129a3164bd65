"""Configuration of the built-in task: its data, and the pipeline that is run on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from async_rlhf.config.base import Checked
from async_rlhf.config.online import MAX_SEED


@dataclass(frozen=True)
class DocstringsConfig(Checked):
    """Data of the built-in docstring task: ``async-rlhf data``.

    Signatures of functions are the prompts, the summary lines of their docstrings the completions.

    Args:
        out: the folder to write sft.jsonl, rl.jsonl, preference_prompts.jsonl and heldout.jsonl to.
        source: packages or paths to harvest; none takes the standard library and the installed dependencies.
        max_functions: use only so many functions, drawn by the seed; null for all.
        seed: of the split into train, preference and held-out.
        overwrite: do it again where it is done already.
    """

    out: str
    source: list[str] = field(default_factory=list)
    max_functions: int | None = None
    seed: int = 0
    overwrite: bool = False

    def check(self) -> None:
        self.at_least(100, "max_functions")
        self.at_least(0, "seed")
        self.at_most(MAX_SEED, "numpy's generators take no larger", "seed")
        self.is_folder("out")


@dataclass(frozen=True)
class QuickstartConfig(Checked):
    """The whole pipeline on the built-in task: ``async-rlhf quickstart``.

    Data, SFT, preference pairs, reward model, online DPO synchronous and one step off-policy, evaluation, report.
    What is done already is skipped, so that an interrupted quickstart goes on where it stopped.

    Args:
        out: the folder for everything.
        source: packages or paths to harvest; none takes the standard library and the installed dependencies.
        seed: of everything.
        scale: multiplies the amount of work; below 1 for a quick look, above for better models.
        overwrite: do every stage again.
    """

    out: str = "runs/quickstart"
    source: list[str] = field(default_factory=list)
    seed: int = 0
    scale: float = 1.0
    overwrite: bool = False

    def check(self) -> None:
        self.at_least(0, "seed")
        self.at_most(MAX_SEED, "numpy's generators take no larger", "seed")
        self.above(0, "scale")
        self.at_most(1000, "the built-in data are soon used up", "scale")
        self.is_folder("out")
