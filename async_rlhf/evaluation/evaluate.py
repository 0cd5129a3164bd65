"""Evaluation of models on held-out prompts: gold reward, win-rates, KL to a reference, perplexity."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from async_rlhf.config import ConfigError, EvaluateConfig
from async_rlhf.data.loading import check_columns, load_rows
from async_rlhf.data.tokenizer import decode_responses, encode_responses, split_text, strip_eos
from async_rlhf.evaluation.judge import Judge
from async_rlhf.evaluation.likelihood import EncodedRow, loss_and_perplexity, response_logprob_sums
from async_rlhf.evaluation.sampling import first_prompts, sample
from async_rlhf.evaluation.statistics import Interval, mean_interval, win_rate
from async_rlhf.evaluation.tables import format_table, side_by_side
from async_rlhf.models import check_vocabulary, default_device, load_policy, load_tokenizer
from async_rlhf.reports.progress import progress_bar
from async_rlhf.stage import Stage, json_lines
from async_rlhf.types import Prompt, Rollout

__all__ = ["format_table", "run_evaluate", "side_by_side"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Answers:
    """What one model, or the human, answered: one entry per prompt."""

    texts: list[str]
    ended: list[bool]
    scores: list[float] = field(default_factory=list)
    rows: list[EncodedRow] = field(default_factory=list)
    logprobs: torch.Tensor | None = None
    perplexity: float | None = None


def run_evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Sample from every model on the same prompts with the same random numbers, and compare.

    Writes evaluation.json (the results, under "results"; also the marker that the evaluation is done), samples.jsonl
    (every prompt with every completion and its score) and evaluation.txt (a table and ``num_samples`` prompts side by
    side) in ``config.output_dir``.

    Returns:
        {"reference": name, "prompts": n, "dropped": n, "reference_response": {"gold_mean"} or None,
        "models": {name: {...}}}. Of each model: gold_mean, win_rate_vs_reference_response, win_rate_vs_<reference>
        (not of the reference), kl_to_reference (nats per completion) as {"estimate", "low", "high"} with 95% intervals;
        perplexity of the human responses (per response token, end of sequence counted), mean_length (tokens, stop
        token counted), ended_share. What needs human responses is absent without them.

    Raises:
        ConfigError: see the message.
    """
    folder = Path(config.output_dir)
    keys = ("models", "data", "reward_model", "reward_funcs")
    inputs = {key: getattr(config, key) for key in keys}
    paths = {"samples": folder / "samples.jsonl", "text": folder / "evaluation.txt"}
    stage = Stage(folder, "evaluation", config, inputs, outputs=tuple(paths.values()))
    if (done := stage.done()) is not None:
        return done
    device = torch.device(config.device) if config.device else default_device()
    rows = load_rows(config.data, config.split, columns=["query"], key="data")
    tokenizer = _shared_tokenizer(config)
    judge = Judge(config.reward_model, config.reward_funcs, config.batch_size, device)
    prompts, dropped = first_prompts(rows, tokenizer, config)
    if len(prompts) < 2:
        raise ConfigError(f"data: got {len(prompts)} prompt; must be 2 at least, for intervals")

    human = _human_answers(prompts, tokenizer)
    answers = {name: _answer(name, config, prompts, human, tokenizer, device) for name in config.models}
    for label, one in [("reference responses", human), *answers.items()]:
        if one is not None:
            logger.info("evaluate: scoring %s", label)
            one.scores = judge([prompt.columns for prompt in prompts], one.texts, one.ended)
    reference = config.reference or next(iter(config.models))
    results = {
        "reference": reference,
        "prompts": len(prompts),
        "dropped": dropped,
        "reference_response": None if human is None else {"gold_mean": _plain(mean_interval(human.scores))},
        "models": _compare(config, answers, human, reference, device),
    }
    samples = _sample_rows(prompts, answers, human)
    text = f"{format_table(results)}\n\n{side_by_side(samples, config.num_samples)}"
    stage.publish_files({paths["samples"]: json_lines(samples), paths["text"]: text}, results)
    logger.info("%s", text)
    return results


def _shared_tokenizer(config: EvaluateConfig) -> PreTrainedTokenizerBase:
    """The models' tokenizer. They need the same one: the KL compares the probabilities of the same tokens."""
    tokenizers = [load_tokenizer(source, key=f"models.{name}") for name, source in config.models.items()]
    for name, other in zip(config.models, tokenizers, strict=True):
        check_vocabulary(tokenizers[0], other, f"models.{name}")
    return tokenizers[0]


def _human_answers(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> _Answers | None:
    """The human texts: `reference_response`, or `query_reference_response` without the query; None without both."""
    rows = [prompt.columns for prompt in prompts]
    column = next((name for name in ("reference_response", "query_reference_response") if name in rows[0]), None)
    if column is None:
        return None
    check_columns(rows, [column], "data")
    if column == "reference_response":
        texts = [str(row[column]) for row in rows]
    else:
        texts = [split_text(prompt.columns, f"data: row {prompt.row + 1}")[1] for prompt in prompts]
    texts = [strip_eos(tokenizer, text) for text in texts]
    encoded = zip(prompts, encode_responses(tokenizer, texts), strict=True)
    rows_encoded = [EncodedRow(prompt.tokens + response, len(prompt.tokens)) for prompt, response in encoded]
    return _Answers(texts, [True] * len(texts), rows=rows_encoded)


def _answer(
    name: str,
    config: EvaluateConfig,
    prompts: Sequence[Prompt],
    human: _Answers | None,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> _Answers:
    """Everything that needs this model's weights; they are free afterwards."""
    model = load_policy(config.models[name], device, key=f"models.{name}")
    completions = sample(model, tokenizer, prompts, config, 1, f"evaluate: sampling {name}")
    rollouts: list[Rollout] = [group[0] for group in completions]
    answers = _Answers(
        texts=decode_responses(tokenizer, rollouts),
        ended=[rollout.finish_reason == "stop" for rollout in rollouts],
        rows=[EncodedRow(p.tokens + r.tokens, len(p.tokens)) for p, r in zip(prompts, rollouts, strict=True)],
    )
    with progress_bar(f"evaluate: log-probabilities of {name}", len(prompts)) as progress:
        answers.logprobs = response_logprob_sums(
            model, answers.rows, temperature=config.temperature, batch_size=config.batch_size, progress=progress
        )
    if human is not None:
        _, answers.perplexity = loss_and_perplexity(model, human.rows, config.batch_size)
    return answers


def _compare(
    config: EvaluateConfig,
    answers: Mapping[str, _Answers],
    human: _Answers | None,
    reference: str,
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    model = load_policy(config.models[reference], device, key=f"models.{reference}")
    compared = {}
    for name, one in answers.items():
        found: dict[str, Any] = {"gold_mean": _plain(mean_interval(one.scores))}
        if human is not None:
            found["win_rate_vs_reference_response"] = _plain(win_rate(one.scores, human.scores))
            found["perplexity"] = one.perplexity
        if name != reference:
            found[f"win_rate_vs_{reference}"] = _plain(win_rate(one.scores, answers[reference].scores))
        with progress_bar(f"evaluate: KL of {name} to {reference}", len(one.rows)) as progress:
            reference_logprobs = response_logprob_sums(
                model, one.rows, temperature=config.temperature, batch_size=config.batch_size, progress=progress
            )
        assert one.logprobs is not None
        found["kl_to_reference"] = _plain(mean_interval((one.logprobs - reference_logprobs).tolist()))
        found["mean_length"] = sum(len(row.tokens) - row.start for row in one.rows) / len(one.rows)
        found["ended_share"] = sum(one.ended) / len(one.ended)
        compared[name] = found
    return compared


def _plain(interval: Interval) -> dict[str, float]:
    return interval._asdict()


def _sample_rows(
    prompts: Sequence[Prompt], answers: Mapping[str, _Answers], human: _Answers | None
) -> list[dict[str, Any]]:
    return [
        {
            "query": prompt.columns["query"],
            "reference_response": None if human is None else human.texts[i],
            "reference_score": None if human is None else human.scores[i],
            "models": {
                name: {"completion": one.texts[i], "score": one.scores[i], "ended": one.ended[i]}
                for name, one in answers.items()
            },
        }
        for i, prompt in enumerate(prompts)
    ]
