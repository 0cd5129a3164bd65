"""Evaluation of models on held-out prompts: gold reward, win-rates, KL to a reference, perplexity."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from async_rlhf.commands.distributed import done_by, on_ranks
from async_rlhf.commands.evaluation import statistics
from async_rlhf.commands.evaluation.likelihood import (
    EncodedRow,
    loss_and_perplexity,
    original_perplexity,
    response_logprob_sums,
)
from async_rlhf.commands.evaluation.penalties import training_penalties
from async_rlhf.commands.evaluation.reward_judge import RewardJudge
from async_rlhf.commands.evaluation.tables import WIDTH, format_table, side_by_side
from async_rlhf.commands.evaluation.tracking import log_to_trackers
from async_rlhf.commands.generate import (
    Generation,
    generate,
    generation_files,
    models_of,
    played,
    read_generations,
    shared_tokenizer,
    with_first_gpu,
    with_prompt_cap,
)
from async_rlhf.commands.stage import Source, Stage, json_lines
from async_rlhf.commands.table import EVALUATION_PLOT, import_attribute
from async_rlhf.config import ConfigError, EvaluateConfig
from async_rlhf.config.base import require
from async_rlhf.data.formats import MESSAGES
from async_rlhf.data.loading import check_columns
from async_rlhf.data.rendering import Renderer, as_columns
from async_rlhf.data.tokenizer import TEXT, Rendered, encode_responses, split_text, strip_end
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.generation.sampling import Distribution
from async_rlhf.learner.launch import rank_device
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.loading import check_vocabulary, load_policy, load_tokenizer
from async_rlhf.rewards.judge import Pair, PairwiseJudge
from async_rlhf.run.episodes import conversation
from async_rlhf.system.names import check_source
from async_rlhf.system.progress import progress_bar

__all__ = ["format_table", "run_evaluate", "side_by_side"]

logger = logging.getLogger(__name__)

HUMAN = "reference_response"
_SAMPLES, _TEXT = "samples.jsonl", "evaluation.txt"


@dataclass(slots=True)
class _Answers:
    """The answers of one model or of the human: one entry per prompt."""

    texts: list[str]
    ended: list[bool]
    rows: list[EncodedRow]
    source: str | None = None
    """Folder or hub name of the model."""
    scores: list[float] | None = None
    """Gold rewards, if there is a gold reward."""
    logprobs: list[float] = field(default_factory=list)
    """Of each response, in nats, under the distribution that it was drawn from."""
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """See :attr:`~async_rlhf.commands.generate.Generation.episode`; empty for plain answers."""
    played: dict[str, float] = field(default_factory=dict)
    """Means of episodes."""
    said: list[list[dict[str, Any]]] = field(default_factory=list)
    """See :attr:`~async_rlhf.commands.generate.Generation.said`; empty for texts."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer, including the stop token; of an episode, of all that the model wrote."""
        return [len(row.tokens) - row.start for row in self.rows]


@dataclass(slots=True)
class _Evaluation:
    """All answers that are compared, each list with one entry per prompt."""

    config: EvaluateConfig
    distribution: Distribution
    """How the models' answers were drawn."""
    lines: Sequence[Generation]
    """The prompts, as one model's lines."""
    dropped: int
    """Prompts that were too long."""
    answers: dict[str, _Answers]
    human: _Answers | None = None

    @property
    def everyone(self) -> dict[str, _Answers]:
        """The human, if there are such answers, and the models."""
        return ({HUMAN: self.human} if self.human is not None else {}) | self.answers

    @property
    def plays(self) -> bool:
        """Whether answers are episodes."""
        return any(one.episodes for one in self.answers.values())

    @property
    def clusters(self) -> list[str]:
        """Clusters of dependent answers: those to the same prompt, if the data repeats one."""
        return [line.query for line in self.lines]

    def gold(self, one: _Answers) -> dict[str, Any]:
        """The mean gold reward, if there is one."""
        if one.scores is None:
            return {}
        return {"gold_mean": statistics.clustered_mean_interval(one.scores, self.clusters)._asdict()}


def run_evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Have every model answer the same prompts with the same random numbers, judge the answers, and compare.

    Writes evaluation.json (the results, under "results"; also the marker that the evaluation is done), samples.jsonl
    (every prompt with every completion and its score), evaluation.txt (a table, and ``num_samples`` prompts side by
    side), with vl-convert evaluation.png, and the completions themselves in generations/, in ``config.output_dir``.

    Returns:
        {"reference": name, "prompts": n, "dropped": n, "reference_response": {"gold_mean"} or None,
        "models": {name: {...}}}; docs/commands/evaluate.md describes the values of each model.

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
    return results


def _evaluated(config: EvaluateConfig, models: Mapping[str, str], stage: Stage, ranks: Ranks) -> dict[str, Any]:
    """All ranks share sampling, scoring by a reward model and likelihoods; rank 0 does the rest."""
    device, folder = rank_device(config, ranks), stage.folder
    judge = pairwise = None
    if config.judge.url is None:  # first, so that errors show before anything is sampled; the engine needs the GPU
        judge = RewardJudge.of(config, torch.device("cpu"), ranks)
    elif ranks.is_main:
        pairwise = PairwiseJudge(config.judge, folder / "verdicts.jsonl")
    evaluation = _answers(config, models, folder, ranks)
    reference = config.reference or next(iter(evaluation.answers))
    right = f"must be one of the models: {', '.join(evaluation.answers)}"
    require(reference in evaluation.answers, "reference", reference, right)
    if judge is None and len(evaluation.everyone) < 2:
        raise ConfigError("judge.url: there is one model and no human response; must have something to compare it with")
    notes = []
    if judge is not None:
        judge.to(device)
        notes = _score(evaluation, judge)
    results: dict[str, Any] = {
        "reference": reference,
        "prompts": len(evaluation.lines),
        "dropped": evaluation.dropped,
        "reference_response": None if evaluation.human is None else evaluation.gold(evaluation.human),
        "models": ranks.broadcast("comparisons", lambda: _comparisons(evaluation, reference, pairwise)),
        "notes": notes,
    }
    if evaluation.plays:
        results["notes"] = [*notes, "KL and perplexities are of single answers, and left out here."]
        for name, one in evaluation.answers.items():
            results["models"][name] |= _about_lengths(one)
    else:
        _likelihoods(evaluation, results["models"], reference, device, Parallel(ranks))
    if ranks.is_main:
        _publish(config, stage, results, _sample_rows(evaluation))
    return results


def _comparisons(evaluation: _Evaluation, reference: str, pairwise: PairwiseJudge | None) -> dict[str, dict[str, Any]]:
    """By model, its gold reward, and how it compares with the human and with the reference."""
    found = {name: evaluation.gold(one) for name, one in evaluation.answers.items()}
    for name, one in evaluation.answers.items():
        for opponent in (HUMAN, reference):
            if opponent in evaluation.everyone and opponent != name:
                label = f"evaluate: {name} and {opponent}"
                found[name] |= _compared(opponent, evaluation, one, evaluation.everyone[opponent], pairwise, label)
    return found


def _publish(config: EvaluateConfig, stage: Stage, results: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Write and show the results."""
    shown = side_by_side(samples, config.num_samples)
    import_attribute(EVALUATION_PLOT)(results, stage.folder / "evaluation.png")
    text = f"{format_table(results)}\n\n{shown}"
    stage.publish_files({stage.folder / _SAMPLES: json_lines(samples), stage.folder / _TEXT: text}, results)
    logger.info("%s\n\n%s", format_table(results, shutil.get_terminal_size((WIDTH, 0)).columns), shown)
    if config.track and config.run is not None:
        log_to_trackers(Path(config.run), results, samples[: config.num_samples])


def _score(evaluation: _Evaluation, judge: RewardJudge) -> list[str]:
    """Score all answers; returns how the scores differ from those of training, in words."""
    config, lines, everyone = evaluation.config, evaluation.lines, evaluation.everyone
    try:
        penalties = training_penalties(one.source for one in evaluation.answers.values() if one.source is not None)
    except ConfigError:
        if config.penalties is not None:
            raise
        penalties = None
    for name, one in everyone.items():
        logger.info("evaluate: scoring %s", name)
        queries = [Rendered(line.query) if line.columns.get(MESSAGES) else line.query for line in lines]
        more = _conversations(lines, one)
        if one.episodes:
            more["metrics"] = [episode["metrics"] for episode in one.episodes]
        one.scores = [sum(episode["rewards"]) for episode in one.episodes]  # their own, to which others are added
        if judge.model is not None or config.reward_funcs:
            judged = judge(queries, [line.columns for line in lines], one.texts, one.ended, more)
            one.scores = [own + other for own, other in zip(one.scores or [0.0] * len(judged), judged, strict=True)]
        require(len(one.scores) > 0, "reward_funcs", [], "must be given, or a reward_model: no answer is an episode")
    if penalties is None:
        right = "must be null: no model is in the folder of a run with penalties, beside its run.yml"
        require(config.penalties is None, "penalties", config.penalties, right)
        return []
    penalised = {name: penalties.applied(one.scores or (), one.ended, one.lengths) for name, one in everyone.items()}
    if config.penalties is None:
        means = ", ".join(f"{name} {sum(penalised[name]) / len(lines):.3f}" for name in evaluation.answers)
        without = f"Scores here are without penalties; {penalties}"
        return [f"{without}. With that the means are: {means} (--penalties training)."]
    for name, one in everyone.items():
        one.scores = penalised[name]
    return [f"Scores here are those of training: {penalties}."]


def _conversations(lines: Sequence[Generation], one: _Answers) -> dict[str, list[Any]]:
    """See :func:`~async_rlhf.data.rendering.conversations`."""
    return as_columns([line.columns.get(MESSAGES) or () for line in lines], one.said) if one.said else {}


def _inputs(config: EvaluateConfig, models: Mapping[str, str]) -> dict[str, Source]:
    """The inputs that are read, to be compared by content."""
    inputs: dict[str, Source] = {"models": models, "data": config.data or None}
    keys = ("ref_model", "reward_model", "reward_funcs", "reward_tokenizer", "environment", "tools", "agent")
    inputs |= {key: getattr(config, key) for key in keys}
    inputs["judge.prompt_file"] = config.judge.prompt_file
    if config.generations is not None:  # not files that this command may write beside them
        inputs["generations"] = [str(path) for path in generation_files(Path(config.generations))]
    return inputs


def _answers(config: EvaluateConfig, models: Mapping[str, str], folder: Path, ranks: Ranks) -> _Evaluation:
    """The models' answers and the human ones."""
    if config.generations is not None:
        distribution, found = read_generations(Path(config.generations))
        found = {name: (source, lines[: config.max_prompts]) for name, (source, lines) in found.items()}
        dropped = 0
    else:
        _, dropped, sampled = generate(config, models, folder / "generations", ranks)
        distribution = Distribution(config.temperature, config.top_p, config.top_k)
        found = {name: (models[name], lines) for name, lines in sampled.items()}
    answers = {name: _model_answers(source, lines) for name, (source, lines) in found.items()}
    lines = next(iter(found.values()))[1]
    if len(lines) < 2:
        raise ConfigError(f"data: got {len(lines)} prompt; must be 2 at least, for intervals")
    right = "rows of one prompt; must be 2 prompts at least, for intervals"
    evaluation = _Evaluation(config, distribution, lines, dropped, answers)
    require(len(set(evaluation.clusters)) > 1, "data", len(lines), right)
    if not evaluation.plays and (tokenizer := _tokenizer(evaluation, models)) is not None:
        evaluation.human = _human_answers(lines, ChatTemplate(tokenizer, config.chat))
    return evaluation


def _said_in(lines: Sequence[Generation]) -> Sequence[Generation]:
    """All of them if one has messages, else none."""
    return lines if any(line.said is not None for line in lines) else ()


def _model_answers(source: str, lines: Sequence[Generation]) -> _Answers:
    return _Answers(
        texts=[line.completion for line in lines],
        ended=[line.finish_reason == "stop" for line in lines],
        rows=[EncodedRow(line.prompt_tokens + line.tokens, len(line.prompt_tokens)) for line in lines],
        source=source,
        logprobs=[sum(line.logprobs) for line in lines],
        episodes=[line.episode for line in lines if line.episode is not None],
        played=played(lines),
        said=[line.said or [{"role": "assistant", "content": line.completion}] for line in _said_in(lines)],
    )


def _tokenizer(evaluation: _Evaluation, models: Mapping[str, str]) -> PreTrainedTokenizerBase | None:
    """The models' tokenizer; for generations whose models are gone, that of ref_model, else None.

    Raises:
        ConfigError: ref_model has a different tokenizer from the models.
    """
    config, trust = evaluation.config, evaluation.config.trust_remote_code
    if config.generations is None:
        tokenizer = shared_tokenizer(models, trust)
        if config.ref_model is not None:
            check_vocabulary(tokenizer, load_tokenizer(config.ref_model, key="ref_model", trust=trust), "ref_model")
        return tokenizer
    if config.ref_model is not None:
        tokenizer = load_tokenizer(config.ref_model, key="ref_model", trust=trust)
        for line in evaluation.lines[:100]:
            tokens = line.tokens[:-1] if line.finish_reason == "stop" else line.tokens
            right = "must be a model with the tokenizer of those that sampled the generations"
            require(tokenizer.decode(list(tokens)) == line.completion, "ref_model", config.ref_model, right)
        return tokenizer
    for one in evaluation.answers.values():
        with suppress(ConfigError):
            return load_tokenizer(one.source or "", key="generations", trust=trust)
    logger.warning("generations: no tokenizer of the models is there any more; human responses are left out")
    return None


def _human_answers(lines: Sequence[Generation], chat: ChatTemplate) -> _Answers | None:
    """The human texts: `reference_response`, or `query_reference_response` without the query; None without both."""
    rows = [line.columns for line in lines]
    column = next((name for name in (HUMAN, TEXT) if any(row.get(name) is not None for row in rows)), None)
    if column is None:
        return None
    check_columns(rows, [column], "data")
    if column == HUMAN:
        texts = [str(row[column]) for row in rows]
    else:
        texts = [split_text({**line.columns, "query": line.query}, f"data: row {line.row + 1}")[1] for line in lines]
    texts = [strip_end(chat, text) for text in texts]
    encoded = zip(lines, encode_responses(chat, texts), strict=True)
    encoded_rows = [EncodedRow(line.prompt_tokens + response, len(line.prompt_tokens)) for line, response in encoded]
    renderer = Renderer(chat.tokenizer, (), chat)
    said = [
        [renderer.of_row(line.columns, f"data: row {line.row + 1}").read(text, line.query)]
        for line, text in zip(_said_in(lines), texts, strict=False)
    ]
    return _Answers(texts, [True] * len(texts), encoded_rows, said=said)


def _compared(
    opponent: str, evaluation: _Evaluation, ours: _Answers, theirs: _Answers, pairwise: PairwiseJudge | None, label: str
) -> dict[str, Any]:
    """Win-rates and the difference of scores against one opponent."""
    found: dict[str, Any] = {}
    if pairwise is not None:
        pairs = [Pair(line.query, a, b) for line, a, b in zip(evaluation.lines, ours.texts, theirs.texts, strict=True)]
        won, shares = pairwise.outcomes(pairs, label)
        found |= {f"{name}_vs_{opponent}": share for name, share in shares.items()}
    else:
        assert ours.scores is not None
        assert theirs.scores is not None
        won = statistics.outcomes(ours.scores, theirs.scores)
        difference = statistics.paired_difference(ours.scores, theirs.scores, evaluation.clusters)
        found[f"gold_difference_vs_{opponent}"] = difference._asdict()
    longer = [a - b for a, b in zip(ours.lengths, theirs.lengths, strict=True)]
    return {
        f"win_rate_vs_{opponent}": statistics.win_rate(won, evaluation.clusters)._asdict(),
        f"ties_vs_{opponent}": won.count(0.5) / len(won),
        f"length_controlled_win_rate_vs_{opponent}": statistics.length_controlled_win_rate(won, longer)._asdict(),
        **found,
    }


def _likelihoods(
    evaluation: _Evaluation, found: dict[str, dict[str, Any]], reference: str, device: torch.device, parallel: Parallel
) -> None:
    """Add the results that need models: KL to the reference, perplexities, and lengths. The ranks share the passes."""
    config, distribution, answers, human = (
        evaluation.config,
        evaluation.distribution,
        evaluation.answers,
        evaluation.human,
    )
    for name, one in answers.items():
        if config.generations is None:  # by the models themselves, without the sampling engine's rounding
            assert one.source is not None
            model = load_policy(one.source, device, key=f"models.{name}", trust=config.trust_remote_code)
            one.logprobs = _logprobs(model, one, config, distribution, parallel, f"log-probabilities of {name}")
            if human is not None:
                longest = max(len(row.tokens) for row in human.rows)
                limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or longest
                right = f"tokens of a prompt with its reference response; {name} has {limit} positions"
                require(longest <= limit, "data", longest, right)
                found[name]["perplexity"] = loss_and_perplexity(model, human.rows, config.batch_size, parallel)[1]
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
    for name, one in answers.items():
        if model is not None:
            reference_sums = _logprobs(model, one, config, whole, parallel, f"KL of {name} to the reference")
            kl = [ours - theirs for ours, theirs in zip(one.logprobs, reference_sums, strict=True)]
            found[name]["kl_to_reference"] = statistics.clustered_mean_interval(kl, evaluation.clusters)._asdict()
            if distribution.temperature != 1.0:
                label = f"perplexity of {name} under the reference"
                reference_sums = _logprobs(model, one, config, Distribution(1.0), parallel, label)
            nats = -torch.tensor(reference_sums, dtype=torch.float64)
            found[name]["perplexity_under_reference"] = (nats.sum() / sum(one.lengths)).exp().item()
            found[name]["ppl_original"] = original_perplexity(-nats, one.rows)
        found[name] |= _about_lengths(one)


def _about_lengths(one: _Answers) -> dict[str, float]:
    count = len(one.ended)
    return {"mean_length": sum(one.lengths) / count, "ended_share": sum(one.ended) / count, **one.played}


def _logprobs(
    model: Any, answers: _Answers, config: EvaluateConfig, distribution: Distribution, parallel: Parallel, label: str
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


def _episode(one: _Answers, i: int) -> dict[str, Any]:
    """What an episode's row has besides, and in place of the completion: the conversation, who said what."""
    if not one.episodes:
        return {}
    found = one.episodes[i]
    return {"completion": conversation(found["messages"], found["rewards"]), **found}


def _sample_rows(evaluation: _Evaluation) -> list[dict[str, Any]]:
    human = evaluation.human

    def score(one: _Answers, i: int) -> float | None:
        return None if one.scores is None else one.scores[i]

    return [
        {
            "query": line.query,
            "reference_response": None if human is None else human.texts[i],
            "reference_score": None if human is None else score(human, i),
            "models": {
                name: {"completion": one.texts[i], "score": score(one, i), "ended": one.ended[i], **_episode(one, i)}
                for name, one in evaluation.answers.items()
            },
        }
        for i, line in enumerate(evaluation.lines)
    ]
