"""The answers that an evaluation compares: those of models and of the human."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from async_rlhf.commands.evaluation import statistics
from async_rlhf.commands.evaluation.generations import Generation, played, read_generations
from async_rlhf.commands.evaluation.likelihood import EncodedRow
from async_rlhf.commands.generate import generate, shared_tokenizer
from async_rlhf.config import ConfigError, EvaluateConfig
from async_rlhf.config.base import require
from async_rlhf.data.loading import check_columns
from async_rlhf.data.rendering import Renderer
from async_rlhf.data.tokenizer import TEXT, Sampled, encode_responses, split_text, strip_end
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.generation.sampling import Distribution
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.loading import check_vocabulary, load_tokenizer

logger = logging.getLogger(__name__)

HUMAN = "reference_response"


@dataclass(slots=True)
class Answers:
    """The answers of one model or of the human: one entry per prompt."""

    texts: list[str]
    ended: list[bool]
    rows: list[EncodedRow]
    source: str | None = None
    """Folder or hub name of the model."""
    scores: list[float] | None = None
    """Rewards, unless a pairwise judge compares."""
    logprobs: list[float] = field(default_factory=list)
    """Of each response, in nats, under the distribution that it was drawn from."""
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """See :attr:`~async_rlhf.commands.evaluation.generations.Generation.episode`; empty for plain answers."""
    played: dict[str, float] = field(default_factory=dict)
    """Means of episodes."""
    said: list[list[dict[str, Any]]] = field(default_factory=list)
    """See :attr:`~async_rlhf.commands.evaluation.generations.Generation.said`; empty for texts."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer, including the stop token; of an episode, of all that the model wrote."""
        return [len(row.tokens) - row.start for row in self.rows]


@dataclass(slots=True)
class Evaluation:
    """All answers that are compared, each list with one entry per prompt."""

    config: EvaluateConfig
    distribution: Distribution
    """How the models' answers were drawn."""
    lines: Sequence[Generation]
    """The prompts, as one model's lines."""
    dropped: int
    """Prompts that were too long."""
    answers: dict[str, Answers]
    human: Answers | None = None

    @property
    def everyone(self) -> dict[str, Answers]:
        """The human, if there are such answers, and the models."""
        return ({HUMAN: self.human} if self.human is not None else {}) | self.answers

    @property
    def plays(self) -> bool:
        """Whether answers are episodes."""
        return any(answers.episodes for answers in self.answers.values())

    @property
    def clusters(self) -> list[str]:
        """Clusters of dependent answers: those to the same prompt, if the data repeats one; of games, those of the same
        row, as all may begin with one question.
        """
        return [line.query + (str(line.columns) if self.plays else "") for line in self.lines]

    def reward(self, answers: Answers) -> dict[str, Any]:
        """The mean reward, if there is one."""
        if answers.scores is None:
            return {}
        return {"reward_mean": statistics.clustered_mean_interval(answers.scores, self.clusters)._asdict()}


def collected(config: EvaluateConfig, models: Mapping[str, str], folder: Path, ranks: Ranks) -> Evaluation:
    """The models' answers and the human ones."""
    if config.generations is not None:
        distribution, generations = read_generations(Path(config.generations))
        generations = {name: (source, lines[: config.max_prompts]) for name, (source, lines) in generations.items()}
        dropped = 0
    else:
        _, dropped, sampled = generate(config, models, folder / "generations", ranks)
        distribution = Distribution(config.temperature, config.top_p, config.top_k)
        generations = {name: (models[name], lines) for name, lines in sampled.items()}
    answers = {name: _model_answers(source, lines) for name, (source, lines) in generations.items()}
    lines = next(iter(generations.values()))[1]
    if len(lines) < 2:
        raise ConfigError(f"data: got {len(lines)} prompt; must be 2 at least, for intervals")
    rule = "rows of one prompt; must be 2 prompts at least, for intervals"
    evaluation = Evaluation(config, distribution, lines, dropped, answers)
    require(len(set(evaluation.clusters)) > 1, "data", len(lines), rule)
    if not evaluation.plays and (tokenizer := _tokenizer(evaluation, models)) is not None:
        evaluation.human = human_answers(lines, ChatTemplate(tokenizer, config.chat))
    return evaluation


def _said_in(lines: Sequence[Generation]) -> Sequence[Generation]:
    """All of them if one has messages, else none."""
    return lines if any(line.said is not None for line in lines) else ()


def _model_answers(source: str, lines: Sequence[Generation]) -> Answers:
    return Answers(
        texts=[Sampled(line.completion, _written(line)) for line in lines],
        ended=[line.finish_reason == "stop" for line in lines],
        rows=[EncodedRow(line.prompt_tokens + line.tokens, len(line.prompt_tokens)) for line in lines],
        source=source,
        logprobs=[sum(line.logprobs) for line in lines],
        episodes=[line.episode for line in lines if line.episode is not None],
        played=played(lines),
        said=[line.said or [{"role": "assistant", "content": line.completion}] for line in _said_in(lines)],
    )


def _written(line: Generation) -> tuple[int, ...]:
    """Its tokens without the one that ended it."""
    return line.tokens[:-1] if line.finish_reason == "stop" else line.tokens


def _tokenizer(evaluation: Evaluation, models: Mapping[str, str]) -> PreTrainedTokenizerBase | None:
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
            rule = "must be a model with the tokenizer of those that sampled the generations"
            require(tokenizer.decode(list(_written(line))) == line.completion, "ref_model", config.ref_model, rule)
        return tokenizer
    for answers in evaluation.answers.values():
        with suppress(ConfigError):
            return load_tokenizer(answers.source or "", key="generations", trust=trust)
    logger.warning("generations: no tokenizer of the models is there any more; human responses are left out")
    return None


def human_answers(lines: Sequence[Generation], chat: ChatTemplate) -> Answers | None:
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
    return Answers(texts, [True] * len(texts), encoded_rows, said=said)
