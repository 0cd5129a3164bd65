"""Files of generations: what models answered, one file a model, and the unfinished file of one that is interrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from async_rlhf.commands.stage import Stage
from async_rlhf.config import ConfigError, GenerateConfig
from async_rlhf.config.base import require
from async_rlhf.data.formats import MESSAGES
from async_rlhf.data.rendering import Renderer, said_of
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.generation.sampling import Distribution
from async_rlhf.run.folder import FINAL, batch_of
from async_rlhf.system.files import whole_lines, write_file
from async_rlhf.types import FinishReason, Prompt, Sample


@dataclass(frozen=True, slots=True)
class Generation:
    """One line of a file that ``generate`` wrote."""

    query: str
    completion: str
    """Without the stop token."""
    finish_reason: FinishReason
    tokens: tuple[int, ...]
    """Including the stop token."""
    logprobs: tuple[float, ...]
    """Of each token, by the engine that sampled it, under the distribution that it drew from."""
    prompt_tokens: tuple[int, ...]
    row: int
    """Index of the prompt in its data set."""
    columns: dict[str, Any]
    """The row's columns, except the prompt."""
    episode: dict[str, Any] | None = None
    """Of an episode its messages after the prompt, the reward of each answer, and its metrics; ``completion`` and
    ``tokens`` are then all that the model wrote."""
    said: list[dict[str, Any]] | None = None
    """Of a chat and of an episode, the messages after the prompt."""

    @classmethod
    def read(cls, line: str) -> Generation:
        """Parse a line."""
        values = json.loads(line)
        tuples = {name: tuple(values[name]) for name in ("tokens", "logprobs", "prompt_tokens")}
        known = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        return cls(**{**known, **tuples})


def played(lines: Sequence[Generation]) -> dict[str, float]:
    """Of episodes the means of their turns and of their own rewards; nothing of plain answers."""
    episodes = [line.episode for line in lines if line.episode is not None]
    if not episodes:
        return {}
    turns, rewards = (
        [episode["metrics"]["turns"] for episode in episodes],
        [sum(episode["rewards"]) for episode in episodes],
    )
    return {"mean_turns": sum(turns) / len(turns), "mean_reward": sum(rewards) / len(rewards)}


def read_generations(folder: Path) -> tuple[Distribution, dict[str, tuple[str, list[Generation]]]]:
    """Read every finished file of ``generate``, in the models' order.

    Returns:
        The distribution that all were drawn from, and by model its folder or hub name and its lines.

    Raises:
        ConfigError: there are none, or they do not answer the same prompts, or were drawn in different ways.
    """
    generations: dict[str, tuple[str, list[Generation]]] = {}
    drawn = {}
    for path in generation_files(folder):
        results = json.loads(path.with_suffix(".json").read_text("utf-8"))["results"]
        generations[path.stem] = (results["model"], read_lines(path))
        # A file of an earlier version has no top_p and no top_k.
        drawn[path.stem] = Distribution(results["temperature"], results.get("top_p", 1.0), results.get("top_k", 0))
    require(bool(generations), "generations", str(folder), "must be the output folder of async-rlhf generate")
    first = next(iter(generations))
    asked = [(line.query, line.prompt_tokens) for line in generations[first][1]]
    for name, (_, lines) in generations.items():
        if [(line.query, line.prompt_tokens) for line in lines] != asked:
            raise ConfigError(f"generations: {name} and {first} in {str(folder)!r} do not answer the same prompts")
        for what, here, there in zip(Distribution._fields, drawn[name], drawn[first], strict=True):
            if here != there:
                raise ConfigError(
                    f"generations: {name} and {first} in {str(folder)!r} have {what} {here:g} and {there:g}"
                )
    return drawn[first], generations


def generation_files(folder: Path) -> list[Path]:
    """The finished files of ``generate`` in a folder."""
    files = []
    for path in sorted(folder.glob("*.jsonl"), key=_in_order):
        marker = path.with_suffix(".json")
        if marker.is_file() and json.loads(marker.read_text("utf-8")).get("stage") == "generate":
            files.append(path)
    return files


def _in_order(path: Path) -> tuple[int, int, str]:
    """Models by name, then checkpoints by number, then the final model."""
    if (batch := batch_of(path.stem)) is not None:
        return (1, batch, "")
    return (2, 0, "") if path.stem == FINAL else (0, 0, path.stem)


def read_lines(path: Path) -> list[Generation]:
    with path.open(encoding="utf-8") as file:
        return [Generation.read(line) for line in file]


def begun_lines(partial: Path, identity: str, chunk: int, prompts: int) -> int:
    """Completions in the complete chunks of an unfinished file, if it has the same identity; else it is started afresh.

    An incomplete chunk is sampled again as a whole, because the last digits of log-probabilities depend on which
    completions share a batch.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    lines = whole_lines(partial)
    mine = bool(lines) and lines[0] == identity
    done = len(lines) - 1
    kept = lines[: 1 + (done if done == prompts else done // chunk * chunk)] if mine else [identity]
    if kept != lines:
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    return len(kept) - 1


def append(
    partial: Path, prompts: Sequence[Prompt], samples: Sequence[Sample], renderer: Renderer, prompt_field: str
) -> None:
    """Add answers to an unfinished file, on disk when this returns."""
    texts = decode_samples(renderer.tokenizer, samples)
    with partial.open("a", encoding="utf-8") as file:
        for prompt, sample, text in zip(prompts, samples, texts, strict=True):
            columns = dict(prompt.columns)
            query = str(columns.pop(prompt_field))
            if prompt.messages is not None:
                columns[MESSAGES] = list(prompt.messages)
            generation = Generation(
                query,
                text,
                sample.finish_reason,
                tuple(sample.drawn.tolist()),
                tuple(sample.logprobs[sample.sampled].tolist()),
                prompt.tokens,
                prompt.row,
                columns,
                sample.episode or None,
                None if prompt.messages is None is sample.messages else said_of(renderer, prompt, sample),
            )
            file.write(json.dumps(asdict(generation), default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def publish_generations(
    stage: Stage, partial: Path, output: Path, prompts: int, model: str, config: GenerateConfig
) -> None:
    """Make the file of the unfinished one."""
    lines = whole_lines(partial)[1:]
    if len(lines) != prompts:
        raise RuntimeError(f"{partial} has {len(lines)} lines for {prompts} prompts; delete it")
    drawn = {name: getattr(config, name) for name in Distribution._fields}
    results = {"prompts": prompts, "model": model, **drawn}
    stage.publish_files({output: "".join(f"{line}\n" for line in lines)}, results)
    partial.unlink()


def first_time(folder: Path, anew: bool) -> str:
    """When models first answered into a folder: others that answer later read the same prompts."""
    path = folder / ".started"
    if anew or not path.is_file():
        write_file(path, datetime.now().isoformat())
    return path.read_text(encoding="utf-8")
