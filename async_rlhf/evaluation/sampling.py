"""Samples of a saved model on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import PairsConfig
from async_rlhf.config.evaluation import HeldOutConfig
from async_rlhf.data.loading import Rows
from async_rlhf.data.stream import PromptStream
from async_rlhf.generation.protocol import Completions, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.loading import check_positions, stop_token_ids
from async_rlhf.reports.progress import progress_bar
from async_rlhf.types import Prompt


def first_prompts(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, config: HeldOutConfig | PairsConfig
) -> tuple[list[Prompt], int]:
    """The first ``max_prompts`` rows that fit, in order, and how many of all rows were dropped for their length."""
    assert config.max_prompt_length is not None
    stream = PromptStream(
        rows,
        tokenizer,
        prompt_field=config.prompt_field,
        max_length=config.max_prompt_length,
        shuffle=False,
        key="prompts" if isinstance(config, PairsConfig) else "data",
    )
    count = len(stream) if config.max_prompts is None else min(config.max_prompts, len(stream))
    return [stream.prompt(draw) for draw in range(count)], stream.dropped


def sampling_params(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: HeldOutConfig | PairsConfig,
    samples_per_prompt: int,
    longest: int,
) -> SamplingParams:
    """How to sample, after checking that prompts of up to ``longest`` tokens leave room for a response.

    Raises:
        ConfigError: they do not.
    """
    check_positions(model, longest, config.response_length)
    return SamplingParams(
        samples_per_prompt=samples_per_prompt,
        temperature=config.temperature,
        response_length=config.response_length,
        stop_token_ids=stop_token_ids(model, tokenizer),
        seed=config.seed,
        batch_size=config.batch_size,
        top_p=config.top_p,
        top_k=config.top_k,
    )


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: HeldOutConfig | PairsConfig,
    samples_per_prompt: int,
    label: str,
) -> Completions:
    """Completions of each prompt, with a progress bar. All models have one seed, and so the same random numbers."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    params = sampling_params(model, tokenizer, config, samples_per_prompt, longest)
    with progress_bar(label, len(prompts)) as progress:
        return TransformersEngine(model, params).generate(prompts, progress=progress)
