"""Penalties of training in an evaluation: how its scores differ from those of the run, and the same scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rlhf.config import ConfigError
from async_rlhf.config.online import NonEosPenalty
from async_rlhf.config.yaml_text import read_yaml
from async_rlhf.run.record import RUN_FILE


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
        found = []
        for score, one_ended, length in zip(scores, ended, lengths, strict=True):
            less = score - self.length_penalty * length
            if self.non_eos_penalty and not one_ended:
                less = (less if self.non_eos_penalty == "add" else 0.0) + self.penalty_reward_value
            found.append(less)
        return found

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
    found: dict[Penalties, Path] = {}
    for model in models:
        file = Path(model).expanduser().parent / RUN_FILE
        if file.is_file():
            found.setdefault(_read(file), file)
    if len(found) > 1:
        first, second, *_ = found.values()
        both = f"{str(first)!r} and {str(second)!r}"
        raise ConfigError(f"penalties: {both} have different ones; must be null, or the models of runs with the same")
    one = next(iter(found), Penalties())
    return one if str(one) else None


def _read(file: Path) -> Penalties:
    values = read_yaml(str(file), "penalties")
    train = values.get("train") if isinstance(values, dict) else None
    known = train if isinstance(train, dict) else {}
    return Penalties(**{name: known[name] for name in Penalties.__dataclass_fields__ if name in known})
