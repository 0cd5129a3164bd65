"""Samples completions of held-out prompts from several models, one file each; existing ones are not sampled again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from async_rlhf.commands.distributed import on_ranks
from async_rlhf.commands.evaluation.generations import (
    Generation,
    append,
    begun_lines,
    first_time,
    played,
    publish_generations,
    read_lines,
)
from async_rlhf.commands.evaluation.sampling import Engines, first_prompts, sampled_in_shares
from async_rlhf.commands.stage import Source, Stage
from async_rlhf.config import ConfigError, EvaluateConfig, GenerateConfig, GenerationConfig
from async_rlhf.config.base import require
from async_rlhf.config.engines import find
from async_rlhf.config.episodes import KINDS, World
from async_rlhf.config.evaluation import HeldOutConfig
from async_rlhf.data.formats import load_prompts
from async_rlhf.data.held_out import hold_out
from async_rlhf.data.rendering import Renderer
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.episodes.spec import spec_of, tools_of, world_named
from async_rlhf.generation.vllm_engine import gpu_environment
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import sampling_prompt_cap, shared_room
from async_rlhf.models.loading import check_vocabulary, load_tokenizer
from async_rlhf.run.folder import FINAL, Checkpoints
from async_rlhf.system.lock import InUseError
from async_rlhf.system.progress import progress_bar
from async_rlhf.types import Prompt

logger = logging.getLogger(__name__)

_CHUNK = 8
"""Batches per chunk: samples are written to disk after each chunk."""


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
        prompts, dropped, generations = generate(config, models, folder, ranks)
    summary = {
        name: {
            "mean_length": sum(len(line.tokens) for line in lines) / len(lines),
            "ended_share": sum(line.finish_reason == "stop" for line in lines) / len(lines),
            **played(lines),
        }
        for name, lines in generations.items()
    }
    for name, figures in summary.items():
        logger.info(
            "%s: %.1f tokens on average, %.1f%% ended", name, figures["mean_length"], 100 * figures["ended_share"]
        )
        if "mean_turns" in figures:
            logger.info("%s: %.1f turns on average, reward %.3f", name, figures["mean_turns"], figures["mean_reward"])
    logger.info("generate: %d prompts, %d models, in %s", len(prompts), len(generations), folder)
    return {"prompts": len(prompts), "dropped": dropped, "models": summary}


def generate(
    config: GenerateConfig | EvaluateConfig, models: Mapping[str, str], folder: Path, ranks: Ranks
) -> tuple[list[Prompt], int, dict[str, list[Generation]]]:
    """The prompts, how many were dropped, and every model's answers, from the files in ``folder`` or sampled now.

    Every rank must call it, and gets all of them; rank 0 reads the data, and writes.
    """
    config = with_prompt_cap(config, models)
    tokenizer = shared_tokenizer(models, config.trust_remote_code)
    world = world_named(config.environment, config.tools, config.agent)
    now = ranks.broadcast("the time", lambda: config.chat.time_of(first_time(folder, config.overwrite)))
    chat = ChatTemplate(tokenizer, config.chat, now)
    prompts, dropped = ranks.broadcast("prompts", lambda: _prompts(config, chat, world))
    is_judged = not isinstance(config, EvaluateConfig) or len(config.reward_funcs) > 0
    episodes = spec_of(_limits(config), world, chat, config.prompt_field, is_judged) if config.plays else None
    judged = isinstance(config, EvaluateConfig)
    if judged and len(prompts) < 2:
        raise ConfigError(f"data: got {len(prompts)} prompt; must be 2 at least, for intervals")
    settings = {item.name: getattr(config, item.name) for item in fields(HeldOutConfig)}
    if judged:  # judging again needs no new sampling, unless the samples would differ
        settings["overwrite"] = False
    generations = {}
    with closing(Engines(config, max(len(prompt.tokens) for prompt in prompts), ranks, episodes)) as engines:
        for name, source in models.items():
            each = GenerateConfig(**{**settings, "models": {name: source}, "run": None, "checkpoints": []})
            anew = judged and config.overwrite
            generations[name] = _generated(name, each, prompts, tokenizer, engines, folder, anew)
    return prompts, dropped, generations


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
    rule = "must be the first GPU with vLLM: this process has used GPUs already; or show it no others from its start"
    require(not torch.cuda.is_initialized(), "device", config.device, rule)
    gpus = range(device.index, device.index + config.vllm.tensor_parallel_size)
    os.environ.update(gpu_environment([f"cuda:{gpu}" for gpu in gpus], "device"))
    return replace(config, device="cuda")


def with_prompt_cap(config: Config, models: Mapping[str, str]) -> Config:
    """The configuration with ``max_prompt_length`` and ``episode_length`` resolved."""
    by_key = {f"models.{name}": source for name, source in models.items()}
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
    require(bool(there), "run", config.run, f"must be the output folder of train, with checkpoints or {FINAL!r} in it")
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


def _generated(
    name: str,
    config: GenerateConfig,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    engines: Engines,
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
    inputs |= {key: getattr(config, key) for key in KINDS if getattr(config, key)}
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
        return begun_lines(partial, json.dumps(stage.identity), size, len(prompts))

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
                        append(partial, chunk, [group[0] for group in groups], renderer, config.prompt_field)
        if ranks.is_main:
            publish_generations(stage, partial, output, len(prompts), config.models[name], config)
    return ranks.broadcast(f"answers of {name}", lambda: read_lines(output))


def _behind(progress: Callable[[int], None], start: int) -> Callable[[int], None]:
    """The progress of what comes after so many prompts."""
    return lambda done: progress(start + done)
