"""What evaluated models were trained on: whether it is the judge, and how penalties made other scores of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.commands.stage import fingerprint
from async_rlhf.config import ConfigError
from async_rlhf.config.online import NonEosPenalty
from async_rlhf.config.yaml_text import read_yaml
from async_rlhf.run.record import RUN_FILE, unnamed_in

_REWARDS = ("reward_model", "reward_funcs", "environment", "agent")


@dataclass(frozen=True)
class Penalties:
    """What a run does to the rewards of its answers; the keys of ``train`` of these names."""

    non_eos_penalty: NonEosPenalty = False
    penalty_reward_value: float = 0.0
    length_penalty: float = 0.0

    def applied(self, scores: Sequence[float], ended: Sequence[bool], lengths: Sequence[int]) -> list[float]:
        """The scores as training has them.

        Args:
            scores: one for each answer.
            ended: whether it ended by itself.
            lengths: its tokens, the stop token included.
        """
        penalised = []
        for score, one_ended, length in zip(scores, ended, lengths, strict=True):
            less = score - self.length_penalty * length
            if self.non_eos_penalty and not one_ended:
                less = (less if self.non_eos_penalty == "add" else 0.0) + self.penalty_reward_value
            penalised.append(less)
        return penalised

    def __str__(self) -> str:
        parts = []
        if self.non_eos_penalty:
            does = "adds" if self.non_eos_penalty == "add" else "scores"
            parts.append(f"training {does} {self.penalty_reward_value:g} to what is cut off (non_eos_penalty)")
        if self.length_penalty:
            parts.append(f"training takes {self.length_penalty:g} off for each token (length_penalty)")
        return " and ".join(parts)


def training_penalties(models: Iterable[str]) -> Penalties | None:
    """The penalties of the runs whose checkpoints or final policies these folders are; None without such a run, or
    where the runs have none.

    Raises:
        ConfigError: the runs have different penalties.
    """
    files: dict[Penalties, Path] = {}
    for file in _run_files(models):
        files.setdefault(_read(file), file)
    if len(files) > 1:
        first, second, *_ = files.values()
        both = f"{str(first)!r} and {str(second)!r}"
        raise ConfigError(f"penalties: {both} have different ones; must be null, or the models of runs with the same")
    penalties = next(iter(files), Penalties())
    return penalties if str(penalties) else None


def reward_name(judge: Mapping[str, Any], models: Iterable[str]) -> str:
    """What to call the scores: "gold reward" if no run of the models was trained on any part of the judge."""
    parts, runs = _rewards(judge), [_trained_on(file) for file in _run_files(models)]
    trained = {reward for run in runs for reward in run}
    if parts and parts <= trained:
        return "reward (trained on)"
    # What is only a name may be what is judged by: a path from another folder, or a model on the hub and its copy.
    unsure = {key for key, _, is_content in parts if is_content} & {key for key, _, there in trained if not there}
    return "gold reward" if parts and runs and all(runs) and not unsure and not parts & trained else "reward"


def _trained_on(file: Path) -> set[tuple[str, str, bool]]:
    """Nothing if a run.yml does not say it, for it cannot be read, or the run was given objects in Python."""
    with suppress(ConfigError):
        rewards = _rewards(read_yaml(str(file), "models"))
        return set() if any(what.startswith(_REWARDS) for what in unnamed_in(file)) else rewards
    return set()


def _rewards(values: Any) -> set[tuple[str, str, bool]]:
    """The key of each reward, what identifies it, and whether that is its content."""
    listed = {key: values.get(key) for key in _REWARDS} if isinstance(values, Mapping) else {}
    named = [(key, reward) for key, each in listed.items() for reward in (each if isinstance(each, list) else [each])]
    return {
        (key, identity := fingerprint(reward), identity != reward) for key, reward in named if isinstance(reward, str)
    }


def _run_files(models: Iterable[str]) -> Iterator[Path]:
    files = (Path(model).expanduser().parent / RUN_FILE for model in models)
    return (file for file in files if file.is_file())


def _read(file: Path) -> Penalties:
    values = read_yaml(str(file), "penalties")
    train = values.get("train") if isinstance(values, dict) else None
    known = train if isinstance(train, dict) else {}
    return Penalties(**{name: known[name] for name in Penalties.__dataclass_fields__ if name in known})
