"""What an evaluation measures with models: KL to the reference and perplexities."""

from __future__ import annotations

import logging
from typing import Any

import torch

from async_rlhf.commands.evaluation import statistics
from async_rlhf.commands.evaluation.answers import Answers, Evaluation
from async_rlhf.commands.evaluation.likelihood import loss_and_perplexity, original_perplexity, response_logprob_sums
from async_rlhf.config import ConfigError, EvaluateConfig
from async_rlhf.config.base import require
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.generation.sampling import Distribution
from async_rlhf.models.loading import load_policy
from async_rlhf.system.progress import progress_bar

logger = logging.getLogger(__name__)


def add_likelihoods(
    evaluation: Evaluation, results: dict[str, dict[str, Any]], reference: str, device: torch.device, parallel: Parallel
) -> None:
    """Add the results that need models: KL to the reference, perplexities, and lengths. The ranks share the passes."""
    config, distribution, answers, human = (
        evaluation.config,
        evaluation.distribution,
        evaluation.answers,
        evaluation.human,
    )
    for name, model_answers in answers.items():
        if config.generations is None:  # by the models themselves, without the sampling engine's rounding
            assert model_answers.source is not None
            model = load_policy(model_answers.source, device, key=f"models.{name}", trust=config.trust_remote_code)
            model_answers.logprobs = _logprobs(
                model, model_answers, config, distribution, parallel, f"log-probabilities of {name}"
            )
            if human is not None:
                longest = max(len(row.tokens) for row in human.rows)
                limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or longest
                rule = f"tokens of a prompt with its reference response; {name} has {limit} positions"
                require(longest <= limit, "data", longest, rule)
                results[name]["perplexity"] = loss_and_perplexity(model, human.rows, config.batch_size, parallel)[1]
            del model
    whole = Distribution(distribution.temperature)  # the reference draws nothing: the KL would be infinite
    source = config.ref_model or answers[reference].source
    try:
        assert source is not None
        model = load_policy(source, device, key="ref_model", trust=config.trust_remote_code)
    except ConfigError as error:
        if config.ref_model is not None or config.generations is None:
            raise
        logger.warning("no KL and no perplexity under the reference: give ref_model (%s)", error)
        model = None
    for name, model_answers in answers.items():
        if model is not None:
            reference_sums = _logprobs(model, model_answers, config, whole, parallel, f"KL of {name} to the reference")
            kl = [ours - theirs for ours, theirs in zip(model_answers.logprobs, reference_sums, strict=True)]
            results[name]["kl_to_reference"] = statistics.clustered_mean_interval(kl, evaluation.clusters)._asdict()
            if distribution.temperature != 1.0:
                label = f"perplexity of {name} under the reference"
                reference_sums = _logprobs(model, model_answers, config, Distribution(1.0), parallel, label)
            nats = -torch.tensor(reference_sums, dtype=torch.float64)
            results[name]["perplexity_under_reference"] = (nats.sum() / sum(model_answers.lengths)).exp().item()
            results[name]["ppl_original"] = original_perplexity(-nats, model_answers.rows)
        results[name] |= about_lengths(model_answers)


def about_lengths(answers: Answers) -> dict[str, float]:
    count = len(answers.ended)
    return {"mean_length": sum(answers.lengths) / count, "ended_share": sum(answers.ended) / count, **answers.played}


def _logprobs(
    model: Any, answers: Answers, config: EvaluateConfig, distribution: Distribution, parallel: Parallel, label: str
) -> list[float]:
    with progress_bar(f"evaluate: {label}", len(answers.rows), parallel.ranks.is_main) as progress:
        sums_R = response_logprob_sums(
            model,
            answers.rows,
            batch_size=config.batch_size,
            progress=progress,
            parallel=parallel,
            **distribution._asdict(),
        )
    return sums_R.tolist()
