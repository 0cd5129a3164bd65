"""The model card: README.md beside a saved policy, with the metadata that the Hub reads."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from async_rlhf.config import OnlineConfig
from async_rlhf.config.base import decides_result, default_of, dotted
from async_rlhf.run.record import Record, without_text_arguments
from async_rlhf.system.versions import code, version_of

CARD = "README.md"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SHOWN = ("objective/scores", "objective/kl", "objective/entropy", "eval_objective/scores", "schedule/lag_mean")
_PACKAGES = ("torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class Card:
    """What a model card says beside the metrics."""

    name: str
    """Its title."""
    config: OnlineConfig
    record: Record
    prompts: int | None
    """Rows of the training data."""

    def write(self, folder: Path, metrics: Path, last: Mapping[str, Any]) -> None:
        """Write the card beside a policy.

        Args:
            folder: of the policy.
            metrics: the run's metrics.jsonl, whose first line shows where the run began.
            last: the newest value of every metric.
        """
        text = self.text(_first_line(metrics), last)
        (folder / CARD).write_text(text.encode(errors="replace").decode(), encoding="utf-8")

    def text(self, first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
        """The card, with metrics of the first logged batch and the newest ones."""
        values = self.record.flat()
        versions = {"async_rlhf": _version(code()), **{name: str(version_of(name)) for name in _PACKAGES}}
        card = ModelCard.from_template(
            self._metadata(values),
            template_path=str(Path(__file__).with_name("card.md")),
            name=self.name,
            facts=self._facts(values),
            done=last.get("batch"),
            results=[(metric, first.get(metric), last[metric]) for metric in _SHOWN if metric in last],
            command=" \\\n  ".join(_command(self.config, values)),
            versions=versions,
        )
        return str(card)

    def _metadata(self, values: Mapping[str, Any]) -> ModelCardData:
        model, data = values["model"], str(values.get("data.train"))
        algorithm = str(values["algorithm"]).rpartition(":")[2].replace("_", "-").lower()
        return ModelCardData(
            base_model=model if _on_hub(model) else None,
            datasets=[data] if _on_hub(data) else None,
            tags=["async-rlhf", "rlhf", "reinforcement-learning", algorithm, f"staleness-{self.config.staleness}"],
            library_name="transformers",
            pipeline_tag="text-generation",
            model_name=self.name,
        )

    def _facts(self, values: Mapping[str, Any]) -> dict[str, str]:
        config = self.config
        lag = f"{config.staleness}, {'at most' if config.generation.in_flight else 'exactly'}, for every token"
        named = {key: values.get(key) for key in ("environment", "agent")}
        rewards = [values.get("reward_model"), *map(without_text_arguments, values["reward_funcs"])]
        rewards += [f"the {key} {_place(without_text_arguments(name))}" for key, name in named.items() if name]
        prompts = _place(values.get("data.train")) or "rows given in Python"
        return {
            "algorithm": _place(str(values["algorithm"])),
            "staleness in batches": lag if config.staleness else "0: sampling and training in turn",
            "started from": _place(values["model"]) or "a model made in Python",
            "prompts": prompts + (f", {self.prompts:,} of them" if self.prompts else ""),
            "rewards": ", ".join(_place(reward) for reward in rewards if reward) or "a model made in Python",
            **({"tools": ", ".join(map(_place, values["tools"]))} if values.get("tools") else {}),
            "size": f"{config.num_batches:,} batches of {config.batch_size} prompts with {config.samples_per_prompt} "
            f"completions each; {config.num_optimizer_steps:,} optimiser steps",
            "seed": str(config.seed),
        }


def _first_line(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            return dict(json.loads(file.readline()))
    except (OSError, ValueError, TypeError):
        return {}


def _command(config: OnlineConfig, values: Mapping[str, Any]) -> Iterator[str]:
    """The command of the run, with every key that decides the result and differs from its default. A card is public, so
    free texts, which may be secrets, are left out: options of engines, and texts as arguments of rewards.
    """
    yield "async-rlhf train"
    for key in ("model", "reward_model", "ref_model", "value_model", "data.train", "data.eval", "data.prompt_field"):
        if values.get(key) is not None and not (key == "data.prompt_field" and values[key] == "query"):
            yield f"--{key} {shlex.quote(_place(values[key]))}"
    for name in values["reward_funcs"]:
        yield f"--reward {shlex.quote(_place(without_text_arguments(name)))}"
    for key in ("environment", "agent"):
        if values.get(key):
            yield f"--{key} {shlex.quote(_place(without_text_arguments(values[key])))}"
    if values.get("tools"):
        yield f"--tools {shlex.quote(json.dumps([_place(without_text_arguments(name)) for name in values['tools']]))}"
    yield f"--algorithm {shlex.quote(_place(str(values['algorithm'])))}"
    for key, value in dotted(asdict(config)).items():
        if value != default_of(config, key) and decides_result(config, key) and ".options." not in key:
            shown = values.get(key)  # without its secrets
            yield f"--train.{key} {shlex.quote(shown if isinstance(shown, str) else json.dumps(shown))}"


def _on_hub(name: Any) -> bool:
    return isinstance(name, str) and _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _place(name: Any) -> str:
    """A name on the Hub or of a module as it is; of a local file or folder the last part."""
    if not isinstance(name, str):
        return ""
    path, colon, rest = name.partition(":")
    local = path.startswith(("/", "~", ".")) or Path(path).expanduser().exists()
    return f"{Path(path).name}{colon}{rest}" if local else name


def _version(package: Mapping[str, Any]) -> str:
    commit = package["commit"]
    return package["version"] + (f", commit {commit}" if commit else "") + (" with changes" if package["dirty"] else "")
