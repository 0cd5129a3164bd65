"""Samples of a saved model on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import PairsConfig
from async_rlhf.config.engines import find
from async_rlhf.config.evaluation import HeldOutConfig
from async_rlhf.data.loading import Rows
from async_rlhf.data.stream import PromptStream
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.engines import ModelSpec, make_engine
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.episodes.spec import EpisodeSpec
from async_rlhf.generation.protocol import Completions, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.learner.launch import rank_device
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import check_positions
from async_rlhf.models.loading import load_policy, stop_token_ids
from async_rlhf.models.weights import named_weights
from async_rlhf.system.progress import progress_bar
from async_rlhf.types import Prompt, Sample


def first_prompts(
    rows: Rows, chat: ChatTemplate, config: HeldOutConfig | PairsConfig, tools: Sequence[dict[str, Any]] = ()
) -> tuple[list[Prompt], int]:
    """The first ``max_prompts`` rows that fit, in order, and how many of all rows were dropped for their length.
    ``tools`` are schemas of what the prompts tell the models of.
    """
    assert config.max_prompt_length is not None
    stream = PromptStream(
        rows,
        chat.tokenizer,
        prompt_field=config.prompt_field,
        max_length=config.max_prompt_length,
        shuffle=False,
        key="prompts" if isinstance(config, PairsConfig) else "data",
        chat=chat,
        tools=list(tools),
    )
    count = len(stream) if config.max_prompts is None else min(config.max_prompts, len(stream))
    return [stream.prompt(draw) for draw in range(count)], stream.dropped


def sampling_params(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: HeldOutConfig | PairsConfig,
    samples_per_prompt: int,
    longest: int,
    episodes: EpisodeSpec | None = None,
) -> SamplingParams:
    """How to sample, after checking that prompts of up to ``longest`` tokens leave room for a response or an episode.

    Raises:
        ConfigError: they do not.
    """
    if episodes is None:
        check_positions(model, longest, config.response_length)
    else:
        check_positions(model, longest, episodes.generation.longest_episode, "episode_length")
    return SamplingParams(
        samples_per_prompt=samples_per_prompt,
        temperature=config.temperature,
        response_length=config.response_length,
        stop_token_ids=stop_token_ids(model, tokenizer, ids=ChatTemplate(tokenizer, config.chat).ends),
        seed=config.seed,
        batch_size=config.batch_size,
        top_p=config.top_p,
        top_k=config.top_k,
        episodes=episodes,
    )


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: HeldOutConfig | PairsConfig,
    samples_per_prompt: int,
    label: str,
    ranks: Ranks | None = None,
) -> Completions:
    """Completions of each prompt, with a progress bar. All models have one seed, and so the same random numbers. Every
    rank must call it, and gets all of them.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    params = sampling_params(model, tokenizer, config, samples_per_prompt, longest)
    ranks = ranks or Ranks()
    with progress_bar(label, len(prompts), ranks.is_main) as progress:
        return sampled_in_shares(TransformersEngine(model, params), prompts, ranks, progress)


class Played:
    """An engine whose answers are episodes."""

    def __init__(self, engine: Any) -> None:
        self.params: SamplingParams = engine.params
        self._sampler = EpisodeSampler(engine)

    def generate(self, prompts: Sequence[Prompt], progress: Callable[[int], None] | None = None) -> Completions:
        """Episodes of each prompt, so many at a time as one batch of the engine has."""
        completions: list[tuple[Sample, ...]] = []
        size = max(1, self.params.batch_size // self.params.samples_per_prompt)
        for start in range(0, len(prompts), size):
            completions += self._sampler.generate(prompts[start : start + size])
            if progress is not None:
                progress(len(completions))
        return completions


def sampled_in_shares(
    engine: TransformersEngine | Played, prompts: Sequence[Prompt], ranks: Ranks, progress: Callable[[int], None]
) -> Completions:
    """Completions of each prompt, on every rank. All ranks must call it.

    A rank decodes some of the batches that one rank would decode. So what it samples is the same bit for bit, unless
    there are fewer prompts for a rank than a batch has: then batches are smaller, and log-probabilities can differ in
    their last digits.

    Args:
        engine: of this rank; its weights are those of the others'.
        prompts: the same on all ranks.
        ranks: who share them.
        progress: called with the number of prompts done so far, by all ranks together if they are equally fast.
    """
    if ranks.count == 1:
        return engine.generate(prompts, progress=progress)
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number].tokens))
    most = max(1, engine.params.batch_size // engine.params.samples_per_prompt)
    size = min(most, -(-len(order) // ranks.count))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    mine = [number for batch in batches[ranks.rank :: ranks.count] for number in batch]
    groups = engine.generate(
        [prompts[number] for number in mine], progress=lambda done: progress(min(done * ranks.count, len(prompts)))
    )
    everyone = ranks.gather("samples", list(zip(mine, groups, strict=True)))
    sampled = {number: group for part in everyone for number, group in part}
    return [sampled[number] for number in range(len(prompts))]


class Engines:
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
