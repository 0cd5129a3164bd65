"""Samples completions of held-out prompts from several models, one file each; existing ones are not sampled again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from async_rlhf.commands.distributed import on_ranks
from async_rlhf.commands.evaluation.sampling import Played, first_prompts, sampled_in_shares, sampling_params
from async_rlhf.commands.stage import Source, Stage
from async_rlhf.config import ConfigError, EvaluateConfig, GenerateConfig, GenerationConfig
from async_rlhf.config.base import require
from async_rlhf.config.engines import find
from async_rlhf.config.episodes import World
from async_rlhf.config.evaluation import HeldOutConfig
from async_rlhf.data.formats import MESSAGES, load_prompts
from async_rlhf.data.held_out import hold_out
from async_rlhf.data.rendering import Renderer, said_of
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.engines import ModelSpec, make_engine
from async_rlhf.generation.episodes.spec import EpisodeSpec, spec_of, tools_of, world_named
from async_rlhf.generation.sampling import Distribution
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.generation.vllm_engine import gpu_environment
from async_rlhf.learner.launch import rank_device
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import sampling_prompt_cap, shared_room
from async_rlhf.models.loading import check_vocabulary, load_policy, load_tokenizer
from async_rlhf.models.weights import named_weights
from async_rlhf.run.folder import FINAL, Checkpoints, batch_of
from async_rlhf.system.files import whole_lines, write_file
from async_rlhf.system.lock import InUseError
from async_rlhf.system.progress import progress_bar
from async_rlhf.types import FinishReason, Prompt, Sample

logger = logging.getLogger(__name__)

_CHUNK = 8
"""Batches per chunk: samples are written to disk after each chunk."""


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


def run_generate(config: GenerateConfig) -> dict[str, Any]:
    """Sample from every model on the same prompts with the same random numbers, into ``<output_dir>/<name>.jsonl``.

    Returns:
        {"prompts": n, "dropped": prompts too long, "models": {name: {"mean_length": tokens with the stop token,
        "ended_share": share that ended by themselves}}}.

    Raises:
        ConfigError: see the message.
    """
    config, folder = with_first_gpu(config), Path(config.output_dir)
    with on_ranks(config, "generate") as ranks:
        models = ranks.broadcast("models", lambda: models_of(config))
        prompts, dropped, found = generate(config, models, folder, ranks)
    summary = {
        name: {
            "mean_length": sum(len(one.tokens) for one in lines) / len(lines),
            "ended_share": sum(one.finish_reason == "stop" for one in lines) / len(lines),
            **played(lines),
        }
        for name, lines in found.items()
    }
    for name, one in summary.items():
        logger.info("%s: %.1f tokens on average, %.1f%% ended", name, one["mean_length"], 100 * one["ended_share"])
        if "mean_turns" in one:
            logger.info("%s: %.1f turns on average, reward %.3f", name, one["mean_turns"], one["mean_reward"])
    logger.info("generate: %d prompts, %d models, in %s", len(prompts), len(found), folder)
    return {"prompts": len(prompts), "dropped": dropped, "models": summary}


def played(lines: Sequence[Generation]) -> dict[str, float]:
    """Of episodes the means of their turns and of their own rewards; nothing of plain answers."""
    episodes = [line.episode for line in lines if line.episode is not None]
    if not episodes:
        return {}
    turns, rewards = ([one["metrics"]["turns"] for one in episodes], [sum(one["rewards"]) for one in episodes])
    return {"mean_turns": sum(turns) / len(turns), "mean_reward": sum(rewards) / len(rewards)}


def generate(
    config: GenerateConfig | EvaluateConfig, models: Mapping[str, str], folder: Path, ranks: Ranks
) -> tuple[list[Prompt], int, dict[str, list[Generation]]]:
    """The prompts, how many were dropped, and every model's answers, from the files in ``folder`` or sampled now.

    Every rank must call it, and gets all of them; rank 0 reads the data, and writes.
    """
    config = with_prompt_cap(config, models)
    tokenizer = shared_tokenizer(models, config.trust_remote_code)
    world = world_named(config.environment, config.tools, config.agent)
    now = ranks.broadcast("the time", lambda: config.chat.time_of(_first_time(folder, config.overwrite)))
    chat = ChatTemplate(tokenizer, config.chat, now)
    prompts, dropped = ranks.broadcast("prompts", lambda: _prompts(config, chat, world))
    is_judged = not isinstance(config, EvaluateConfig) or len(config.reward_funcs) > 0
    episodes = spec_of(_limits(config), world, chat, config.prompt_field, is_judged) if config.plays else None
    judged = isinstance(config, EvaluateConfig)
    if judged and len(prompts) < 2:
        raise ConfigError(f"data: got {len(prompts)} prompt; must be 2 at least, for intervals")
    own = {item.name: getattr(config, item.name) for item in fields(HeldOutConfig)}
    if judged:  # judging again needs no new sampling, unless the samples would differ
        own["overwrite"] = False
    found = {}
    with closing(_Engines(config, max(len(prompt.tokens) for prompt in prompts), ranks, episodes)) as engines:
        for name, source in models.items():
            each = GenerateConfig(**{**own, "models": {name: source}, "run": None, "checkpoints": []})
            anew = judged and config.overwrite
            found[name] = _generated(name, each, prompts, tokenizer, engines, folder, anew)
    return prompts, dropped, found


def _first_time(folder: Path, anew: bool) -> str:
    """When models first answered into a folder: others that answer later read the same prompts."""
    path = folder / ".started"
    if anew or not path.is_file():
        write_file(path, datetime.now().isoformat())
    return path.read_text(encoding="utf-8")


def _limits(config: HeldOutConfig) -> GenerationConfig:
    """Of episodes."""
    names = ("temperature", "top_p", "top_k", "response_length", "max_turns", "episode_length", "step_timeout")
    return GenerationConfig(**{name: getattr(config, name) for name in names})


def _prompts(config: GenerateConfig | EvaluateConfig, chat: ChatTemplate, world: World) -> tuple[list[Prompt], int]:
    rows = load_prompts(config.data, config.split, config.prompt_field, config.prompt_words, "data")
    if config.eval_fraction is not None:
        rows = hold_out(rows, config.eval_fraction, "data", config.prompt_field)[1]
    return first_prompts(rows, chat, config, tools_of(world))


Config = TypeVar("Config", bound=HeldOutConfig)


def with_first_gpu(config: Config) -> Config:
    """The same, on the first GPU: vLLM takes no other, so that with vLLM this process sees none from now on but those
    that the configuration names.

    Raises:
        ConfigError: the process has used GPUs already, or does not see these.
    """
    device = torch.device(config.device or "cpu")
    if find(config.engine).environment is None or device.type != "cuda" or not device.index:
        return config
    right = "must be the first GPU with vLLM: this process has used GPUs already; or show it no others from its start"
    require(not torch.cuda.is_initialized(), "device", config.device, right)
    gpus = range(device.index, device.index + config.vllm.tensor_parallel_size)
    os.environ.update(gpu_environment([f"cuda:{gpu}" for gpu in gpus], "device"))
    return replace(config, device="cuda")


def with_prompt_cap(config: Config, models: Mapping[str, str]) -> Config:
    """The configuration with ``max_prompt_length`` and ``episode_length`` resolved."""
    by_key = {f"models.{name}": place for name, place in models.items()}
    if config.plays and config.episode_length is None:
        longest = _limits(config).longest_episode
        prompt, length = shared_room(by_key, longest, config.max_prompt_length, config.trust_remote_code)
        config = replace(config, max_prompt_length=prompt, episode_length=length)
    return replace(config, max_prompt_length=sampling_prompt_cap(config, by_key))


def models_of(config: HeldOutConfig) -> dict[str, str]:
    """Name -> folder or hub name: the given models, then the run's checkpoints, oldest first, then its final model.

    Raises:
        ConfigError: the run has no such checkpoint.
    """
    models = dict(config.models)
    if config.run is None:
        return models
    run = Path(config.run)
    paths = [*Checkpoints(run).all(), *([run / FINAL] if (run / FINAL).is_dir() else [])]
    there = {path.name: str(path) for path in paths}
    right = f"must be the output folder of train, with checkpoints or {FINAL!r} in it"
    require(bool(there), "run", config.run, right)
    for name in config.checkpoints:
        require(name in there, "checkpoints", name, f"must be among {', '.join(there)}")
    chosen = {name: path for name, path in there.items() if not config.checkpoints or name in config.checkpoints}
    twice = next((name for name in chosen if name in models), None)
    if twice is not None:
        raise ConfigError(f"models: got {twice!r}, which is the name of one in run; must be another name")
    return models | chosen


def shared_tokenizer(models: Mapping[str, str], trust: bool = False) -> PreTrainedTokenizerBase:
    """The models' tokenizer. They need the same one: the KL compares the probabilities of the same tokens."""
    tokenizers = [load_tokenizer(source, key=f"models.{name}", trust=trust) for name, source in models.items()]
    for name, other in zip(models, tokenizers, strict=True):
        check_vocabulary(tokenizers[0], other, f"models.{name}")
    return tokenizers[0]


def read_generations(folder: Path) -> tuple[Distribution, dict[str, tuple[str, list[Generation]]]]:
    """Read every finished file of ``generate``, in the models' order.

    Returns:
        The distribution that all were drawn from, and by model its folder or hub name and its lines.

    Raises:
        ConfigError: there are none, or they do not answer the same prompts, or were drawn in different ways.
    """
    found: dict[str, tuple[str, list[Generation]]] = {}
    drawn = {}
    for path in generation_files(folder):
        results = json.loads(path.with_suffix(".json").read_text("utf-8"))["results"]
        found[path.stem] = (results["model"], _read(path))
        # A file of an earlier version has no top_p and no top_k.
        drawn[path.stem] = Distribution(results["temperature"], results.get("top_p", 1.0), results.get("top_k", 0))
    require(bool(found), "generations", str(folder), "must be the output folder of async-rlhf generate")
    first = next(iter(found))
    asked = [(one.query, one.prompt_tokens) for one in found[first][1]]
    for name, (_, lines) in found.items():
        if [(one.query, one.prompt_tokens) for one in lines] != asked:
            raise ConfigError(f"generations: {name} and {first} in {str(folder)!r} do not answer the same prompts")
        for what, here, there in zip(Distribution._fields, drawn[name], drawn[first], strict=True):
            if here != there:
                raise ConfigError(
                    f"generations: {name} and {first} in {str(folder)!r} have {what} {here:g} and {there:g}"
                )
    return drawn[first], found


def generation_files(folder: Path) -> list[Path]:
    """The finished files of ``generate`` in a folder."""
    found = []
    for path in sorted(folder.glob("*.jsonl"), key=_in_order):
        marker = path.with_suffix(".json")
        if marker.is_file() and json.loads(marker.read_text("utf-8")).get("stage") == "generate":
            found.append(path)
    return found


def _in_order(path: Path) -> tuple[int, int, str]:
    """Models by name, then checkpoints by number, then the final model."""
    if (batch := batch_of(path.stem)) is not None:
        return (1, batch, "")
    return (2, 0, "") if path.stem == FINAL else (0, 0, path.stem)


def _generated(
    name: str,
    config: GenerateConfig,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    engines: _Engines,
    folder: Path,
    anew: bool,
) -> list[Generation]:
    """One model's answers, from its file, from the part that an interrupted command left, or newly sampled.

    Args:
        name: the model's.
        config: of this model alone.
        prompts: all prompts.
        tokenizer: the models'.
        engines: sample from the models.
        folder: where the file is.
        anew: replace a file that has another configuration.
    """
    output, partial, ranks = folder / f"{name}.jsonl", folder / f".{name}.jsonl.part", engines.ranks
    inputs: dict[str, Source] = {"models": config.models, "data": config.data}
    inputs |= {key: getattr(config, key) for key in ("environment", "tools", "agent") if getattr(config, key)}
    stage = Stage(folder, "generate", config, inputs, outputs=(output,), marker_name=name)
    size = _CHUNK * config.batch_size

    def begun() -> int | None:
        """How many are there already; None if the file is complete."""
        try:
            if stage.done() is not None:
                return None
        except ConfigError as error:
            if not anew or isinstance(error, InUseError):
                raise
            stage.hold()
        return _begun(partial, json.dumps(stage.identity), size, len(prompts))

    there = ranks.broadcast(f"samples of {name}", begun)
    if there is not None:
        renderer = Renderer(tokenizer, (), ChatTemplate(tokenizer, config.chat))
        if (left := len(prompts) - there) > 0:
            engine = engines.of(name, config.models[name], tokenizer)
            with progress_bar(f"generate: {name}", left, ranks.is_main) as progress:
                for start in range(0, left, size):
                    chunk = prompts[there + start :][:size]
                    groups = sampled_in_shares(engine, chunk, ranks, _behind(progress, start))
                    if ranks.is_main:
                        _append(partial, chunk, [group[0] for group in groups], renderer, config.prompt_field)
        if ranks.is_main:
            _publish(stage, partial, output, len(prompts), config.models[name], config)
    return ranks.broadcast(f"answers of {name}", lambda: _read(output))


def _publish(stage: Stage, partial: Path, output: Path, prompts: int, model: str, config: GenerateConfig) -> None:
    """Make the file of the unfinished one."""
    lines = whole_lines(partial)[1:]
    if len(lines) != prompts:
        raise RuntimeError(f"{partial} has {len(lines)} lines for {prompts} prompts; delete it")
    drawn = {name: getattr(config, name) for name in Distribution._fields}
    results = {"prompts": prompts, "model": model, **drawn}
    stage.publish_files({output: "".join(f"{line}\n" for line in lines)}, results)
    partial.unlink()


def _read(path: Path) -> list[Generation]:
    with path.open(encoding="utf-8") as file:
        return [Generation.read(line) for line in file]


def _begun(partial: Path, identity: str, chunk: int, prompts: int) -> int:
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


def _behind(progress: Callable[[int], None], start: int) -> Callable[[int], None]:
    """The progress of what comes after so many prompts."""
    return lambda done: progress(start + done)


def _append(
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


class _Engines:
    """The engine of one model after another; a copy is reused for the next model if it has the same shape.

    Args:
        config: how to sample.
        longest: tokens of the longest prompt.
        ranks: each of which has an engine of its own.
        episodes: how they are played; None for plain answers.
    """

    def __init__(self, config: HeldOutConfig, longest: int, ranks: Ranks, episodes: EpisodeSpec | None = None) -> None:
        self.config, self.longest, self.ranks, self.episodes = config, longest, ranks, episodes
        self.device = rank_device(config, ranks)
        self._copy: Any = None
        self._shape: dict[str, Any] = {}

    def of(self, name: str, source: str, tokenizer: PreTrainedTokenizerBase) -> Any:
        """What samples from the model of that folder or hub name."""
        engine = self._engine(name, source, tokenizer)
        return engine if self.episodes is None else Played(engine)

    def _engine(self, name: str, source: str, tokenizer: PreTrainedTokenizerBase) -> Any:
        config, copies = self.config, "policy" not in find(self.config.engine).supports
        device, dtype = torch.device("cpu") if copies else self.device, getattr(torch, config.dtype)
        model = load_policy(source, device, key=f"models.{name}", trust=config.trust_remote_code)
        params = sampling_params(model, tokenizer, config, 1, self.longest, self.episodes)
        if not copies:
            return TransformersEngine(model.to(dtype), params)
        unlike = ("_name_or_path", "name_or_path", "dtype", "torch_dtype", "architectures", "transformers_version")
        shape = {key: value for key, value in model.config.to_dict().items() if key not in unlike}
        if self._copy is None or shape != self._shape:
            self.close()
            engine, vllm = config.engine, config.vllm
            length = self.longest + (config.episode_length or config.response_length)
            kind = self.device.type
            spec = ModelSpec(type(model), model.config, dtype, kind, engine=engine, vllm=vllm, max_length=length)
            self._copy, self._shape = make_engine(spec, params), shape
        self._copy.params = replace(params)
        self._copy.load(named_weights(model), self._copy.version + 1)
        return self._copy

    def close(self) -> None:
        """End the engine."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None
