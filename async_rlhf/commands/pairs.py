"""Preference pairs from a model's own samples: the best and the worst of K, by a reward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rlhf.commands.distributed import done_by, on_ranks
from async_rlhf.commands.evaluation.reward_judge import RewardJudge
from async_rlhf.commands.evaluation.sampling import first_prompts, sample
from async_rlhf.commands.ratings import run_pairs_from_ratings
from async_rlhf.commands.stage import Stage, json_lines
from async_rlhf.config import PairsConfig
from async_rlhf.data.formats import MESSAGES, load_prompts
from async_rlhf.data.rendering import Renderer, conversations
from async_rlhf.data.tokenizer import decode_samples, encode_texts
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.learner.launch import rank_device
from async_rlhf.models.chats import ChatTemplate, setting_of
from async_rlhf.models.context_length import sampling_prompt_cap
from async_rlhf.models.loading import load_policy, load_tokenizer
from async_rlhf.types import Prompt, Sample

logger = logging.getLogger(__name__)


def run_pairs(config: PairsConfig) -> dict[str, float]:
    """Sample, judge, and write ``config.output``: one JSON object per line with `prompt`, `chosen`, `rejected`,
    `chosen_score`, `rejected_score`, `chosen_finish_reason` and `rejected_finish_reason` ("stop" or "length"). Where a
    text would be read as other tokens than were sampled, `chosen_tokens` or `rejected_tokens` has these. If the prompt
    is a chat, `prompt` is its text, and `prompt_messages` the chat. With ``from_ratings`` see
    :func:`~async_rlhf.commands.ratings.run_pairs_from_ratings`.

    Returns:
        prompts, dropped (prompts too long), pairs, ties (pairs dropped because both score the same),
        ended_share (samples that ended by themselves), score_mean and score_margin (mean of best minus worst).
    """
    if config.from_ratings is not None:
        with on_ranks(config, "pairs") as ranks:  # by rank 0 alone: nothing is computed by a model
            return ranks.broadcast("pairs", lambda: run_pairs_from_ratings(config))
    assert config.model is not None
    config = replace(config, max_prompt_length=sampling_prompt_cap(config, {"model": config.model}))
    output = Path(config.output)
    inputs = {key: getattr(config, key) for key in ("model", "prompts", "reward_model", "reward_funcs")}
    stage = Stage(output.parent, "pairs", config, inputs, outputs=(output,), marker_name=output.name)
    with on_ranks(config, "pairs") as ranks:
        if (results := done_by(stage, ranks)) is None:
            results = _sampled(config, stage, output, ranks)
    return results


def _sampled(config: PairsConfig, stage: Stage, output: Path, ranks: Ranks) -> dict[str, float]:
    assert config.model is not None
    device = rank_device(config, ranks)
    tokenizer = load_tokenizer(config.model, trust=config.trust_remote_code)
    chat = ChatTemplate(tokenizer, config.chat, ranks.broadcast("the time", config.chat.time_of))
    prompts, dropped = ranks.broadcast("prompts", lambda: _prompts(config, chat))
    judge = RewardJudge.of(config, device, ranks)
    policy = load_policy(config.model, device, trust=config.trust_remote_code)
    completions = sample(policy, tokenizer, prompts, config, config.samples_per_prompt, "pairs: sampling", ranks)
    samples = [sample for group in completions for sample in group]
    texts = decode_samples(tokenizer, samples)
    each = [prompt for prompt in prompts for _ in range(config.samples_per_prompt)]
    columns = [{k: value for k, value in prompt.columns.items() if k != config.prompt_field} for prompt in each]
    queries = [prompt.columns[config.prompt_field] for prompt in each]
    renderer = Renderer(tokenizer, (), chat)
    more = conversations(renderer, each, samples)
    scores = judge(queries, columns, texts, [sample.finish_reason == "stop" for sample in samples], more)
    read = encode_texts(tokenizer, [str(text) for text in texts])
    tokens = [None if text.tokens == alone else text.tokens for text, alone in zip(texts, read, strict=True)]
    pairs = best_and_worst(prompts, samples, texts, scores, config.pairs_per_prompt, config.prompt_field, tokens)
    results = {
        "prompts": len(prompts),
        "dropped": dropped,
        "pairs": len(pairs),
        "ties": len(prompts) * config.pairs_per_prompt - len(pairs),
        "ended_share": sum(sample.finish_reason == "stop" for sample in samples) / len(samples),
        "score_mean": sum(scores) / len(scores),
        "score_margin": sum(pair["chosen_score"] - pair["rejected_score"] for pair in pairs) / max(1, len(pairs)),
    }
    logger.info("pairs: %d from %d prompts, %d ties", len(pairs), len(prompts), results["ties"])
    if ranks.is_main:
        stage.publish_files({output: json_lines(pairs)}, results)
    return results


def _prompts(config: PairsConfig, chat: ChatTemplate) -> tuple[list[Prompt], int]:
    """The prompts, and how many were too long."""
    assert config.prompts is not None
    rows = load_prompts(config.prompts, config.split, config.prompt_field, config.prompt_words, "prompts")
    return first_prompts(rows, chat, config)


def best_and_worst(
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    texts: Sequence[str],
    scores: Sequence[float],
    pairs_per_prompt: int = 1,
    prompt_field: str = "query",
    tokens: Sequence[tuple[int, ...] | None] | None = None,
) -> list[dict[str, Any]]:
    """Pairs from the K samples of each prompt (adjacent in the other arguments): the best against the worst, the second
    best against the second worst, and so on. A pair of equal scores is dropped; samples of equal score stay in order.
    """
    k = len(samples) // len(prompts)
    pairs = []
    for i, prompt in enumerate(prompts):
        rows = range(i * k, (i + 1) * k)
        best_first = sorted(rows, key=lambda row: -scores[row])
        worst_first = sorted(rows, key=scores.__getitem__)
        for best, worst in zip(best_first[:pairs_per_prompt], worst_first, strict=False):
            if scores[best] > scores[worst]:
                chat = {} if prompt.messages is None else {MESSAGES: list(prompt.messages)}
                chat |= setting_of(prompt.columns, prompt.messages)
                pairs.append(
                    {
                        "prompt": prompt.columns[prompt_field],
                        **chat,
                        "chosen": texts[best],
                        "rejected": texts[worst],
                        "chosen_score": scores[best],
                        "rejected_score": scores[worst],
                        "chosen_finish_reason": samples[best].finish_reason,
                        "rejected_finish_reason": samples[worst].finish_reason,
                        **_tokens("chosen", best, tokens),
                        **_tokens("rejected", worst, tokens),
                    }
                )
    return pairs


def _tokens(side: str, row: int, tokens: Sequence[tuple[int, ...] | None] | None) -> dict[str, list[int]]:
    ids = None if tokens is None else tokens[row]
    return {} if ids is None else {f"{side}_tokens": list(ids)}
