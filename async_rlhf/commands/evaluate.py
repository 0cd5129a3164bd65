"""Evaluation of models on held-out prompts: reward, win-rates, KL to a reference, perplexity."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from async_rlhf.commands.distributed import done_by, on_ranks
from async_rlhf.commands.evaluation import statistics
from async_rlhf.commands.evaluation.answers import HUMAN, Answers, Evaluation, collected
from async_rlhf.commands.evaluation.generations import Generation, generation_files
from async_rlhf.commands.evaluation.kl import about_lengths, add_likelihoods
from async_rlhf.commands.evaluation.reward_judge import RewardJudge
from async_rlhf.commands.evaluation.tables import WIDTH, format_table, of_today, side_by_side
from async_rlhf.commands.evaluation.tracking import log_to_trackers
from async_rlhf.commands.evaluation.training import reward_name, training_penalties
from async_rlhf.commands.generate import models_of, with_first_gpu, with_prompt_cap
from async_rlhf.commands.stage import Source, Stage, json_lines
from async_rlhf.commands.table import EVALUATION_PLOT, import_attribute
from async_rlhf.config import ConfigError, EvaluateConfig
from async_rlhf.config.base import require
from async_rlhf.config.episodes import KINDS
from async_rlhf.data.formats import MESSAGES
from async_rlhf.data.rendering import as_columns
from async_rlhf.data.tokenizer import Rendered
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.learner.launch import rank_device
from async_rlhf.rewards.judge import Pair, PairwiseJudge
from async_rlhf.run.episodes import conversation
from async_rlhf.system.names import check_source

__all__ = ["format_table", "run_evaluate", "side_by_side"]

logger = logging.getLogger(__name__)

_SAMPLES, _TEXT = "samples.jsonl", "evaluation.txt"


def run_evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Have every model answer the same prompts with the same random numbers, judge the answers, and compare.

    Writes evaluation.json (the results, under "results"; also the marker that the evaluation is done), samples.jsonl
    (every prompt with every completion and its score), evaluation.txt (a table, and ``num_samples`` prompts side by
    side), with vl-convert evaluation.png, and the completions themselves in generations/, in ``config.output_dir``.

    Returns:
        {"reference": name, "reward": what it is called, "prompts": n, "dropped": n, "reference_response":
        {"reward_mean"} or None, "models": {name: {...}}}; docs/commands/evaluate.md describes the values of each model.

    Raises:
        ConfigError: see the message.
    """
    config = with_first_gpu(config)
    check_source(config.ref_model, "ref_model")
    with on_ranks(config, "evaluate") as ranks:
        models = ranks.broadcast("models", lambda: {} if config.generations is not None else models_of(config))
        if config.generations is None:
            config = with_prompt_cap(config, models)
        folder = Path(config.output_dir)
        outputs = (folder / _SAMPLES, folder / _TEXT)
        stage = Stage(folder, "evaluation", config, _inputs(config, models), outputs=outputs)
        if (results := done_by(stage, ranks)) is None:
            results = _evaluated(config, models, stage, ranks)
    return of_today(results)


def _evaluated(config: EvaluateConfig, models: Mapping[str, str], stage: Stage, ranks: Ranks) -> dict[str, Any]:
    """All ranks share sampling, scoring by a reward model and likelihoods; rank 0 does the rest."""
    device, folder = rank_device(config, ranks), stage.folder
    judge = pairwise = None
    if config.judge.url is None:  # first, so that errors show before anything is sampled; the engine needs the GPU
        judge = RewardJudge.of(config, torch.device("cpu"), ranks)
    elif ranks.is_main:
        pairwise = PairwiseJudge(config.judge, folder / "verdicts.jsonl")
    evaluation = collected(config, models, folder, ranks)
    reference = config.reference or next(iter(evaluation.answers))
    rule = f"must be one of the models: {', '.join(evaluation.answers)}"
    require(reference in evaluation.answers, "reference", reference, rule)
    if judge is None and len(evaluation.everyone) < 2:
        raise ConfigError("judge.url: there is one model and no human response; must have something to compare it with")
    notes = []
    if judge is not None:
        judge.to(device)
        notes = _score(evaluation, judge)
    scoring = {} if evaluation.plays and config.generations is not None else vars(config)  # the world is not known
    results: dict[str, Any] = {
        "reference": reference,
        "reward": reward_name(
            scoring, [answers.source for answers in evaluation.answers.values() if answers.source is not None]
        ),
        "prompts": len(evaluation.lines),
        "dropped": evaluation.dropped,
        "reference_response": None if evaluation.human is None else evaluation.reward(evaluation.human),
        "models": ranks.broadcast("comparisons", lambda: _comparisons(evaluation, reference, pairwise)),
        "notes": notes,
    }
    if evaluation.plays:
        results["notes"] = [*notes, "KL and perplexities are of single answers, and left out here."]
        for name, answers in evaluation.answers.items():
            results["models"][name] |= about_lengths(answers)
    else:
        add_likelihoods(evaluation, results["models"], reference, device, Parallel(ranks))
    if ranks.is_main:
        _publish(config, stage, results, _sample_rows(evaluation))
    return results


def _comparisons(evaluation: Evaluation, reference: str, pairwise: PairwiseJudge | None) -> dict[str, dict[str, Any]]:
    """By model, its reward, and how it compares with the human and with the reference."""
    comparisons = {name: evaluation.reward(answers) for name, answers in evaluation.answers.items()}
    for name, answers in evaluation.answers.items():
        for opponent in (HUMAN, reference):
            if opponent in evaluation.everyone and opponent != name:
                label = f"evaluate: {name} and {opponent}"
                comparisons[name] |= _compared(
                    opponent, evaluation, answers, evaluation.everyone[opponent], pairwise, label
                )
    return comparisons


def _publish(config: EvaluateConfig, stage: Stage, results: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Write and show the results."""
    shown = side_by_side(samples, config.num_samples)
    import_attribute(EVALUATION_PLOT)(results, stage.folder / "evaluation.png")
    text = f"{format_table(results)}\n\n{shown}"
    stage.publish_files({stage.folder / _SAMPLES: json_lines(samples), stage.folder / _TEXT: text}, results)
    logger.info("%s\n\n%s", format_table(results, shutil.get_terminal_size((WIDTH, 0)).columns), shown)
    if config.track and config.run is not None:
        log_to_trackers(Path(config.run), results, samples[: config.num_samples])


def _score(evaluation: Evaluation, judge: RewardJudge) -> list[str]:
    """Score all answers; returns how the scores differ from those of training, in words."""
    config, lines, everyone = evaluation.config, evaluation.lines, evaluation.everyone
    try:
        penalties = training_penalties(
            answers.source for answers in evaluation.answers.values() if answers.source is not None
        )
    except ConfigError:
        if config.penalties is not None:
            raise
        penalties = None
    for name, answers in everyone.items():
        logger.info("evaluate: scoring %s", name)
        queries = [Rendered(line.query) if line.columns.get(MESSAGES) else line.query for line in lines]
        more = _conversations(lines, answers)
        if answers.episodes:
            more["metrics"] = [episode["metrics"] for episode in answers.episodes]
        # Their own, to which others are added.
        answers.scores = [sum(episode["rewards"]) for episode in answers.episodes]
        if judge.model is not None or config.reward_funcs:
            judged = judge(queries, [line.columns for line in lines], answers.texts, answers.ended, more)
            answers.scores = [
                score + other for score, other in zip(answers.scores or [0.0] * len(judged), judged, strict=True)
            ]
        require(
            len(answers.scores) > 0, "reward_funcs", [], "must be given, or a reward_model: no answer is an episode"
        )
    if penalties is None:
        rule = "must be null: no model is in the folder of a run with penalties, beside its run.yml"
        require(config.penalties is None, "penalties", config.penalties, rule)
        return []
    penalised = {
        name: penalties.applied(answers.scores or (), answers.ended, answers.lengths)
        for name, answers in everyone.items()
    }
    if config.penalties is None:
        means = ", ".join(f"{name} {sum(penalised[name]) / len(lines):.3f}" for name in evaluation.answers)
        without = f"Scores here are without penalties; {penalties}"
        return [f"{without}. With that the means are: {means} (--penalties training)."]
    for name, answers in everyone.items():
        answers.scores = penalised[name]
    return [f"Scores here are those of training: {penalties}."]


def _conversations(lines: Sequence[Generation], answers: Answers) -> dict[str, list[Any]]:
    """See :func:`~async_rlhf.data.rendering.conversations`."""
    return as_columns([line.columns.get(MESSAGES) or () for line in lines], answers.said) if answers.said else {}


def _inputs(config: EvaluateConfig, models: Mapping[str, str]) -> dict[str, Source]:
    """The inputs that are read, to be compared by content."""
    inputs: dict[str, Source] = {"models": models, "data": config.data or None}
    keys = ("ref_model", "reward_model", "reward_funcs", "reward_tokenizer", *KINDS)
    inputs |= {key: getattr(config, key) for key in keys}
    inputs["judge.prompt_file"] = config.judge.prompt_file
    if config.generations is not None:  # not files that this command may write beside them
        inputs["generations"] = [str(path) for path in generation_files(Path(config.generations))]
    return inputs


def _compared(
    opponent: str, evaluation: Evaluation, ours: Answers, theirs: Answers, pairwise: PairwiseJudge | None, label: str
) -> dict[str, Any]:
    """Win-rates and the difference of scores against one opponent."""
    comparison: dict[str, Any] = {}
    if pairwise is not None:
        pairs = [Pair(line.query, a, b) for line, a, b in zip(evaluation.lines, ours.texts, theirs.texts, strict=True)]
        won, shares = pairwise.outcomes(pairs, label)
        comparison |= {f"{name}_vs_{opponent}": share for name, share in shares.items()}
    else:
        assert ours.scores is not None
        assert theirs.scores is not None
        won = statistics.outcomes(ours.scores, theirs.scores)
        difference = statistics.paired_difference(ours.scores, theirs.scores, evaluation.clusters)
        comparison[f"reward_difference_vs_{opponent}"] = difference._asdict()
    longer = [a - b for a, b in zip(ours.lengths, theirs.lengths, strict=True)]
    return {
        f"win_rate_vs_{opponent}": statistics.win_rate(won, evaluation.clusters)._asdict(),
        f"ties_vs_{opponent}": won.count(0.5) / len(won),
        f"length_controlled_win_rate_vs_{opponent}": statistics.length_controlled_win_rate(won, longer)._asdict(),
        **comparison,
    }


def _episode(answers: Answers, i: int) -> dict[str, Any]:
    """What an episode's row has besides, and in place of the completion: the conversation, who said what."""
    if not answers.episodes:
        return {}
    episode = answers.episodes[i]
    return {"completion": conversation(episode["messages"], episode["rewards"]), **episode}


def _sample_rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    human = evaluation.human

    def score(answers: Answers, i: int) -> float | None:
        return None if answers.scores is None else answers.scores[i]

    return [
        {
            "query": line.query,
            "reference_response": None if human is None else human.texts[i],
            "reference_score": None if human is None else score(human, i),
            "models": {
                name: {
                    "completion": answers.texts[i],
                    "score": score(answers, i),
                    "ended": answers.ended[i],
                    **_episode(answers, i),
                }
                for name, answers in evaluation.answers.items()
            },
        }
        for i, line in enumerate(evaluation.lines)
    ]
