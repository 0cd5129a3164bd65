"""All commands by name: what each is, and where it is. The one place where the core knows of studies, tasks and formats
of others, which import the core."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A one-line description, and where to find the configuration, and the module with ``run_NAME``."""

    summary: str
    config: str
    module: str = ""
    """If empty, ``command`` beside the configuration of a study, else ``commands.NAME``."""


COMMANDS = {
    "quickstart": Command(
        "run the whole pipeline on the built-in task",
        "tasks.docstrings.config:QuickstartConfig",
        "tasks.docstrings.quickstart",
    ),
    "data": Command(
        "make the data of the built-in task from Python source code",
        "tasks.docstrings.config:DocstringsConfig",
        "tasks.docstrings.harvest",
    ),
    "sft": Command("fine-tune a language model on demonstrations", "config:SFTConfig"),
    "pairs": Command("sample completions and label them into preference pairs", "config:PairsConfig"),
    "reward": Command("train a reward model on preference pairs", "config:RewardConfig"),
    "relabel": Command("label preference pairs anew by a gold reward", "config:RelabelConfig"),
    "train": Command("train a policy online, synchronously or asynchronously", "run.config:RunConfig"),
    "sweep": Command("train and judge many runs, and show them together", "studies.sweep.config:SweepConfig"),
    "certify": Command("decide what staleness costs, by pairs of runs", "studies.certify.config:CertifyConfig"),
    "plan": Command(
        "predict speed and the best split of devices from measured or given times", "studies.plan.config:PlanConfig"
    ),
    "diff": Command("say where runs part, and why", "studies.diff.config:DiffConfig"),
    "explain": Command("repeat one update of a run, and say what moved it", "studies.explain.config:ExplainConfig"),
    "serve": Command("start a vLLM server that samples for runs on other devices or hosts", "config:ServeConfig"),
    "workers": Command("say how many generators a run has, or start or stop some", "commands.workers:WorkersConfig"),
    "generate": Command("sample from models or a run's checkpoints on held-out prompts", "config:GenerateConfig"),
    "evaluate": Command("compare models on held-out prompts: reward, win-rates, KL", "config:EvaluateConfig"),
    "report": Command(
        "make one HTML page of runs: warnings, staleness, timeline, samples", "studies.report.config:ReportConfig"
    ),
    "doctor": Command("say what this machine has for a run, and what will not work", "commands.doctor:DoctorConfig"),
    "recipes": Command("list the recipes, or copy one to here", "commands.recipes:RecipesConfig"),
    "config": Command(
        "migrate FILE: rewrite the original's YAML in our format",
        "compat.original.command:MigrateConfig",
        "compat.original.command",
    ),
}


ORIGINAL = "compat.original:parse_either"
"""Reads a configuration file, also one of the original project."""
EVALUATION_PLOT = "studies.report.plots:plot_evaluation"
"""Draws the results of an evaluation."""


def import_attribute(reference: str) -> Any:
    """An attribute of a module of this package, "module:attribute"."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(f"async_rlhf.{module}"), attribute)


def function_of(name: str, attribute: str | None = None) -> Any:
    """What runs a command, or another attribute of its module."""
    room = COMMANDS[name].config.partition(".config:")[0]
    module = COMMANDS[name].module or (f"{room}.command" if room.startswith("studies.") else f"commands.{name}")
    return import_attribute(f"{module}:{attribute or f'run_{name}'}")
