"""Samples of a saved model on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import PairsConfig
from async_rlhf.config.evaluation import HeldOutConfig
from async_rlhf.data.loading import Rows
from async_rlhf.data.stream import PromptStream
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.episodes.sampler import EpisodeSampler
from async_rlhf.generation.episodes.spec import EpisodeSpec
from async_rlhf.generation.protocol import Completions, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import check_positions
from async_rlhf.models.loading import stop_token_ids
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
        found: list[tuple[Sample, ...]] = []
        size = max(1, self.params.batch_size // self.params.samples_per_prompt)
        for start in range(0, len(prompts), size):
            found += self._sampler.generate(prompts[start : start + size])
            if progress is not None:
                progress(len(found))
        return found


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
    at_once = max(1, engine.params.batch_size // engine.params.samples_per_prompt)
    size = min(at_once, -(-len(order) // ranks.count))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    mine = [number for batch in batches[ranks.rank :: ranks.count] for number in batch]
    found = engine.generate(
        [prompts[number] for number in mine], progress=lambda done: progress(min(done * ranks.count, len(prompts)))
    )
    everyone = ranks.gather("samples", list(zip(mine, found, strict=True)))
    sampled = {number: group for part in everyone for number, group in part}
    return [sampled[number] for number in range(len(prompts))]
