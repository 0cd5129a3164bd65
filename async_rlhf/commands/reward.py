"""A reward model from preference pairs, by the Bradley-Terry likelihood of the preferred completion; or from ratings.

B  pairs of a batch; their rows alternate: chosen, rejected, chosen, ...
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from async_rlhf.algorithms.supervised import PAIRS, RATINGS, pair_loss
from async_rlhf.commands.evaluation.likelihood import EncodedRow
from async_rlhf.commands.evaluation.statistics import wilson
from async_rlhf.commands.ratings import Scale, encode_ratings, evaluate_ratings, rating_rows, ratings_summary
from async_rlhf.commands.reward_scale import calibration, center_scores
from async_rlhf.commands.sft import divided, encode_rows, load_stage_rows
from async_rlhf.commands.stage import Stage
from async_rlhf.commands.stage_loop import Task, weighted_rows
from async_rlhf.commands.training import run_stage
from async_rlhf.config import ConfigError, RewardConfig
from async_rlhf.config.base import require
from async_rlhf.config.common import SCORE
from async_rlhf.data.formats import RowReader, first_words, has_ended
from async_rlhf.data.loading import Rows, columns_of, load_rows
from async_rlhf.data.ratings import is_rated, read_ratings, require_different
from async_rlhf.data.tokenizer import Part, begun, encode_parts, spelt, strip_end, text_start
from async_rlhf.data.views import Examples
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.adapters import add_adapters
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import longest_row
from async_rlhf.models.forward import score_rows
from async_rlhf.models.loading import load_tokenizer, new_reward_model
from async_rlhf.types import Experience

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Prompt + completion, as tokens, for both sides."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


def run_reward(config: RewardConfig) -> dict[str, Any]:
    """Train a reward model and save it with its tokenizer in ``config.output_dir``.

    Returns:
        train_loss, dropped (too long), score_offset (what ``center`` subtracted). With pairs also pairs, ties (both
        sides alike) and, on held-out pairs, the results of :func:`evaluate_pairs`; with ratings rows, rating_mean and
        rating_sd (a rating is rating_mean + rating_sd x score) and, on held-out rows, the results of
        :func:`~async_rlhf.commands.ratings.evaluate_ratings`.

    Raises:
        ConfigError: see the message.
    """
    inputs = {"train": config.train, "eval": config.eval, "model": config.model, "reference": config.reference}
    stage = Stage(Path(config.output_dir), "reward", config, inputs, owns_folder=True)
    return run_stage(stage, partial(_task, config))


def _task(config: RewardConfig, loaded: PreTrainedModel | None, now: datetime) -> Task:
    rows, heldout, rated = _read(config)
    trust = config.trust_remote_code
    tokenizer = load_tokenizer(config.model, trust=trust)
    model = loaded or new_reward_model(config.model, tokenizer, config.seed, trust=trust)
    longest = longest_row(model, config.max_length)
    chat = ChatTemplate(tokenizer, config.chat, now)
    reference = _reference(config, chat, longest)
    if config.lora.rank > 0 and loaded is None:
        add_adapters(model, config.lora, config.seed, "SEQ_CLS").score.requires_grad_(True)
    task, own_reference = (_ratings if rated else _pairs)(config, model, chat, longest, rows, heldout)

    def finish(parallel: Parallel) -> dict[str, Any]:
        zero, size = reference or own_reference, 2 * config.per_device_train_batch_size
        return {"score_offset": center_scores(model, zero, size, parallel) if config.center and zero else 0.0}

    def summary(results: dict[str, Any]) -> str:
        moved = f"; scores moved by {-results['score_offset']:.3f}" if results["score_offset"] else ""
        return task.summary(results) + moved

    return replace(task, finish=finish, summary=summary)


def _read(config: RewardConfig) -> tuple[Rows, Rows, bool]:
    """Training and held-out rows, and whether they are rated; checked before any model is loaded."""
    field = config.score_field
    rows, heldout = load_stage_rows(config, numbers=[field])
    rated = is_rated(rows, field)
    if rated:
        require_different(read_ratings(rows, field, "train"), field, "train")
        if heldout is not None:
            read_ratings(heldout, field, "eval")
        rule = "must be 0 with ratings, whose mean is the zero"
        weight = config.center_rewards_coefficient
        require(weight == 0, "center_rewards_coefficient", weight, rule)
    else:
        _require_pairs(rows, field)
    rows, heldout, _ = divided(config, rows, heldout)
    if rated:
        require_different(read_ratings(rows, field, "train"), field, "train, less what is held out")
    assert heldout is not None
    return rows, heldout, rated


def _require_pairs(rows: Rows, field: str) -> None:
    """Require the first row to be a pair, and no other column to be named for ratings."""
    columns = columns_of(rows[0])
    if "chosen" not in rows[0] and "rejected" not in rows[0]:
        rule = f"must have `chosen` and `rejected`, or a rating in {field!r} (score_field)"
        raise ConfigError(f"train: row 1 has {columns}; {rule}")
    require(field == SCORE, "score_field", field, "must be left out with pairs (`chosen` and `rejected`)")


def _pairs(
    config: RewardConfig, model: PreTrainedModel, chat: ChatTemplate, longest: int, rows: Rows, heldout: Rows
) -> tuple[Task, Sequence[tuple[int, ...]]]:
    """What is learnt from pairs, and the rows whose mean score is made 0 by default."""
    pairs, counts = encode_pairs(rows, chat, longest, "train")
    held, _ = encode_pairs(heldout, chat, longest, "eval")
    size, coefficient = config.per_device_train_batch_size, config.center_rewards_coefficient
    text = "on {eval_pairs} held-out pairs accuracy {eval_accuracy:.3f}, margin {eval_margin:.3f}, calibration error "
    task = Task(
        model,
        chat.tokenizer,
        replace(PAIRS, loss=partial(pair_loss, coefficient=coefficient)),
        pairs,
        rows=pair_rows,
        counts={"pairs": len(pairs), **counts},
        evaluate=lambda parallel: evaluate_pairs(model, held, size, parallel),
        summary=(text + "{eval_ece:.3f} (a perfect model's is {eval_ece_floor:.3f})").format_map,
    )
    return task, pairs.with_items(lambda pair: pair.chosen)


def _ratings(
    config: RewardConfig, model: PreTrainedModel, chat: ChatTemplate, longest: int, rows: Rows, heldout: Rows
) -> tuple[Task, Sequence[tuple[int, ...]]]:
    """The same for ratings, whose mean is 0 already."""
    rated, dropped = encode_ratings(rows, chat, config.score_field, longest, "train")
    held, _ = encode_ratings(heldout, chat, config.score_field, longest, "eval")
    require_different(rated.ratings, config.score_field, f"train, up to {longest} tokens")
    scale, size = Scale.of(rated.ratings), 2 * config.per_device_train_batch_size
    task = Task(
        model,
        chat.tokenizer,
        RATINGS,
        rated,
        rows=partial(rating_rows, scale=scale),
        counts={"rows": len(rated), "dropped": dropped, "rating_mean": scale.mean, "rating_sd": scale.sd},
        evaluate=lambda parallel: evaluate_ratings(model, held, scale, size, parallel),
        summary=ratings_summary,
    )
    return task, []


def _reference(config: RewardConfig, chat: ChatTemplate, longest: int) -> Sequence[tuple[int, ...]]:
    """The data whose mean score must be 0, as tokens; empty to use the training data."""
    if config.reference is None:
        return []
    rows = load_rows(config.reference, config.reference_split, key="reference")
    if config.prompt_words is not None:
        rows = first_words(rows, config.prompt_words, "reference")
    return encode_rows(rows, chat, False, longest, "reference", rated=True)[0].with_items(lambda row: row.tokens)


def pair_rows(pairs: Sequence[EncodedPair]) -> Experience:
    """Rows that alternate: chosen, rejected, chosen, ..."""
    rows = [EncodedRow(side, 0) for pair in pairs for side in (pair.chosen, pair.rejected)]
    return weighted_rows(rows, [1.0] * len(pairs), rows_per_unit=2)


def encode_pairs(
    rows: Rows, chat: ChatTemplate, longest: int, key: str
) -> tuple[Examples[EncodedPair], dict[str, float]]:
    """Pairs as tokens, made when they are asked for.

    Each side gets the token that ends an answer unless its finish reason is "length".

    Returns:
        The pairs, and how many were left out: `dropped` with a side of more than ``longest`` tokens, `ties` with
        both sides alike.

    Raises:
        ConfigError: a row is not a pair, or no pair is left.
    """
    reader, end = RowReader(chat.tokenizer, key, chat=chat), (chat.end,)
    start = text_start(chat.tokenizer)

    def read(row: Mapping[str, Any], number: int) -> Part:
        prompt, *sides = reader.preference(row, number)
        ended = tuple(has_ended(row, side, f"{key}: row {number}") for side in ("chosen", "rejected"))
        return Part((begun(start, prompt), *(spelt(chat.tokenizer, strip_end(chat, text)) for text in sides)), ended)

    (prompts, *sides), numbers, _ = encode_parts(chat.tokenizer, rows, read, key)
    ended = [number.astype(np.int8) for number in numbers]

    def pair(number: int) -> EncodedPair:
        prompt, both = prompts[number], zip(sides, ended, strict=True)
        return EncodedPair(*(prompt + side[number] + end * int(has_ended[number]) for side, has_ended in both))

    both = zip(sides, ended, strict=True)
    lengths = [prompts.lengths() + side.lengths() + has_ended for side, has_ended in both]
    different = lengths[0] != lengths[1]
    for number in np.flatnonzero(~different).tolist():  # only tokens of equal number can be the same
        candidate = pair(number)
        different[number] = candidate.chosen != candidate.rejected
    longer = np.maximum(*lengths)
    kept = Examples.of(pair, longer, different & (np.minimum(*lengths) > 0) & (longer <= longest))
    if not kept:
        raise ConfigError(f"max_length: got {longest}; no pair of {key} has two different sides that fit")
    count = int(np.count_nonzero(different))
    counts = {"dropped": count - len(kept), "ties": len(different) - count}
    if len(kept) < len(different):
        logger.warning(
            "%s: left out %d pairs longer than %d tokens, %d ties", key, counts["dropped"], longest, counts["ties"]
        )
    return kept, {name: float(count) for name, count in counts.items()}


def evaluate_pairs(
    model: PreTrainedModel, pairs: Sequence[EncodedPair], batch_size: int, parallel: Parallel = ALONE
) -> dict[str, Any]:
    """How well scores order held-out pairs. Equal scores count as half right. Every rank of ``parallel`` must call it.

    Returns:
        eval_pairs, eval_loss (nats per pair), eval_accuracy with its 95% interval (Wilson) eval_accuracy_low and
        eval_accuracy_high, eval_margin (mean of chosen less rejected), eval_ece, eval_ece_floor and calibration (see
        :func:`~async_rlhf.commands.reward_scale.calibration`), score_mean and score_sd over both sides.
    """
    model.eval()
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    scores_R2 = score_rows(model, sides, 2 * batch_size, parallel).double().view(-1, 2)
    margins_R = scores_R2[:, 0] - scores_R2[:, 1]
    accuracy = wilson((margins_R > 0).sum().item() + (margins_R == 0).sum().item() / 2, len(pairs))
    return {
        "eval_pairs": len(pairs),
        "eval_loss": -logsigmoid(margins_R).mean().item(),
        "eval_accuracy": accuracy.estimate,
        "eval_accuracy_low": accuracy.low,
        "eval_accuracy_high": accuracy.high,
        "eval_margin": margins_R.mean().item(),
        **calibration(margins_R),
        "score_mean": scores_R2.mean().item(),
        "score_sd": scores_R2.std(correction=1).item(),
    }
