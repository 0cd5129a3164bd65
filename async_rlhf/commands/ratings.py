"""A reward model from ratings, by least squares; and pairs drawn from ratings.

B  rows of a batch   R  held-out rows
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.commands.evaluation.likelihood import EncodedRow
from async_rlhf.commands.evaluation.statistics import correlation_interval, pearson, spearman
from async_rlhf.commands.sft import encode_rows
from async_rlhf.commands.stage import Stage, json_lines
from async_rlhf.commands.stage_loop import weighted_rows
from async_rlhf.config import PairsConfig
from async_rlhf.config.base import require
from async_rlhf.data.formats import demonstration_parts, first_words
from async_rlhf.data.held_out import held_out_names
from async_rlhf.data.loading import Rows, load_rows
from async_rlhf.data.ratings import draw_pairs, read_ratings, require_different
from async_rlhf.data.views import Examples
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.chats import ChatTemplate, setting_of
from async_rlhf.models.forward import score_rows
from async_rlhf.types import Experience

logger = logging.getLogger(__name__)

_BINS = 10
_SHOWN = ("eval_r2", "eval_spearman", "eval_pearson")


class Scale(NamedTuple):
    """What the model learns of a rating: (rating - mean) / sd."""

    mean: float
    sd: float

    @classmethod
    def of(cls, ratings: np.ndarray) -> Scale:
        """Mean and standard deviation (of all ratings, not of a sample of more)."""
        values = torch.from_numpy(np.array(ratings))
        return cls(values.mean().item(), values.std(correction=0).item())


@dataclass(frozen=True, slots=True)
class EncodedRating:
    """Prompt + response, as tokens, and the rating in its own units."""

    tokens: tuple[int, ...]
    rating: float


class RatedRows(Examples[EncodedRating]):
    """Rated rows, each made when it is asked for."""

    ratings: np.ndarray
    """Of all of them, float64."""


def encode_ratings(rows: Rows, chat: ChatTemplate, field: str, longest: int, key: str) -> tuple[RatedRows, int]:
    """Rated rows as tokens, made when they are asked for, with the token that ends an answer unless `finish_reason` is
    "length"; and how many were dropped for having more than ``longest`` tokens.

    Raises:
        ConfigError: a row has no text, or every row is too long.
    """
    encoded, dropped = encode_rows(rows, chat, False, longest, key, rated=True)
    ratings = read_ratings(rows, field, key)
    kept = RatedRows(
        lambda row: EncodedRating(encoded.make(row).tokens, float(ratings[row])), encoded.rows, encoded.lengths
    )
    kept.ratings = ratings[kept.rows]
    return kept, dropped


def rating_rows(examples: Sequence[EncodedRating], scale: Scale) -> Experience:
    """Rows with what their scores are to be, in standard deviations.

    Otherwise the head would first have to learn the units of the ratings, and the learning rate that suits it would
    depend on them.
    """
    targets = [(row.rating - scale.mean) / scale.sd for row in examples]
    return weighted_rows([EncodedRow(row.tokens, 0) for row in examples], [1.0] * len(examples), targets)


def evaluate_ratings(
    model: PreTrainedModel, rows: Sequence[EncodedRating], scale: Scale, batch_size: int, parallel: Parallel = ALONE
) -> dict[str, Any]:
    """How well scores predict held-out ratings. Every rank of ``parallel`` must call it.

    Returns:
        eval_rows; eval_loss, the mean squared error in squared standard deviations of the training ratings; eval_rmse,
        the root of it in the ratings' own units; eval_r2, 1 - (squared errors) / (squared deviations of the held-out
        ratings from their mean); eval_pearson and eval_spearman with their 95% intervals; calibration and
        eval_calibration_error, see :func:`rating_calibration`. What is not defined is None: all but the errors if the
        ratings or the scores are all equal.
    """
    model.eval()
    scores_R = score_rows(model, [row.tokens for row in rows], batch_size, parallel).double()
    ratings_R = torch.tensor([row.rating for row in rows], dtype=torch.float64)
    predicted_R = scale.mean + scale.sd * scores_R
    squares = (predicted_R - ratings_R).square()
    spread = (ratings_R - ratings_R.mean()).square().sum().item()
    metrics: dict[str, Any] = {
        "eval_rows": len(rows),
        "eval_loss": squares.mean().item() / scale.sd**2,
        "eval_rmse": squares.mean().sqrt().item(),
        "eval_r2": None if spread == 0 else 1 - squares.sum().item() / spread,
    }
    for name, correlation, spearmans in (("eval_pearson", pearson, False), ("eval_spearman", spearman, True)):
        value = correlation(scores_R.tolist(), ratings_R.tolist())
        interval = None if value is None else correlation_interval(value, len(rows), spearmans)
        metrics |= {name: value, f"{name}_low": interval and interval.low, f"{name}_high": interval and interval.high}
    return {
        **metrics,
        **rating_calibration(predicted_R, ratings_R),
        "score_mean": scores_R.mean().item(),
        "score_sd": scores_R.std(correction=0).item(),
    }


def ratings_summary(results: Mapping[str, Any]) -> str:
    """The results of :func:`evaluate_ratings` in one line."""
    shown = {name: "undefined" if results[name] is None else f"{results[name]:.3f}" for name in _SHOWN}
    rest = f"R^2 {shown['eval_r2']}, Spearman {shown['eval_spearman']}, Pearson {shown['eval_pearson']}, error"
    errors = f"{results['eval_rmse']:.3g} of ratings with sd {results['rating_sd']:.3g}"
    return f"on {results['eval_rows']} held-out rows {rest} {errors}"


def rating_calibration(predicted_R: Tensor, ratings_R: Tensor) -> dict[str, Any]:
    """Whether rows that are predicted to have a rating have it on average.

    Args:
        predicted_R: the predictions, in the ratings' units.
        ratings_R: the ratings.

    Returns:
        `calibration`, for each tenth of the rows in the order of the predictions: predicted and actual (means), rows;
        `eval_calibration_error`, the mean of |predicted - actual| over the rows' tenths, in the ratings' units; and
        `eval_calibration_floor`, what it would be on average with perfect predictions, as tenths have few rows: with
        n rows and the standard deviation s of their residuals a tenth adds s sqrt(2 / (pi n)), its share of the rows
        times.
    """
    table, error, floor = [], 0.0, 0.0
    for part_R in torch.argsort(predicted_R, stable=True).tensor_split(min(_BINS, len(predicted_R))):
        predicted, actual = predicted_R[part_R].mean().item(), ratings_R[part_R].mean().item()
        table.append({"predicted": predicted, "actual": actual, "rows": len(part_R)})
        error += len(part_R) / len(predicted_R) * abs(predicted - actual)
        spread = (ratings_R[part_R] - predicted_R[part_R]).std().item() if len(part_R) > 1 else 0.0
        floor += len(part_R) / len(predicted_R) * spread * math.sqrt(2 / (math.pi * len(part_R)))
    return {"eval_calibration_error": error, "eval_calibration_floor": floor, "calibration": table}


def run_pairs_from_ratings(config: PairsConfig) -> dict[str, float]:
    """Draw pairs from rated rows, and write ``config.output``: one JSON object per line with `chosen`, `rejected`,
    `chosen_score`, `rejected_score` and, if the rows have prompts, `prompt`.

    Returns:
        rows, dropped (texts no longer than prompt_words), possible (pairs whose ratings differ enough), pairs, and
        score_margin (mean difference of the two ratings).

    Raises:
        ConfigError: see the message; it names row and value of a bad rating.
    """
    assert config.from_ratings is not None
    output, key, field = Path(config.output), "from_ratings", config.score_field
    inputs = {"from_ratings": config.from_ratings}
    stage = Stage(output.parent, "pairs", config, inputs, outputs=(output,), marker_name=output.name)
    if (results := stage.done()) is not None:
        return results
    rows = load_rows(config.from_ratings, config.split, numbers=[field], key=key)
    count = len(rows)
    read_ratings(rows, field, key)  # before rows are dropped, so that errors have their numbers
    if config.prompt_words is not None:
        rows = first_words(rows, config.prompt_words, key)
    ratings = read_ratings(rows, field, key).tolist()
    require_different(ratings, field, key)
    parts = [demonstration_parts(row, f"{key}: row {number}") for number, row in enumerate(rows, start=1)]
    drawn, possible = _drawn(_sides(rows, parts, config.eval_fraction), ratings, config)
    pairs = [_pair(better, worse, rows, parts, ratings) for better, worse in drawn]
    margins = [pair["chosen_score"] - pair["rejected_score"] for pair in pairs]
    counts = {"rows": len(rows), "dropped": count - len(rows), "possible": possible, "pairs": len(pairs)}
    logger.info("pairs: %d from %d rated rows, of %d that differ enough", len(pairs), len(rows), possible)
    results = {**counts, "score_margin": sum(margins) / len(margins)}
    stage.publish_files({output: json_lines(pairs)}, results)
    return results


def _sides(rows: Rows, parts: Sequence[tuple[Any, Any, str]], eval_fraction: float) -> list[list[list[int]]]:
    """Numbers of the rows that may be paired: those of one prompt, and of texts without one those on the same side of
    ``reward``'s split. That splits prompts by itself, so all groups with prompts are in the first list.
    """
    texts = [response for prompt, response, _ in parts if prompt == ""]
    held = held_out_names(texts, eval_fraction, "from_ratings") if texts else set()
    sides: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
    for number, (row, (prompt, response, _)) in enumerate(zip(rows, parts, strict=True)):
        side = sides[prompt == "" and response in held]
        about = json.dumps([prompt, setting_of(row, prompt)], default=str)
        side.setdefault(about, []).append(number)
    return [list(side.values()) for side in sides]


def _drawn(
    sides: Sequence[Sequence[Sequence[int]]], ratings: Sequence[float], config: PairsConfig
) -> tuple[list[tuple[int, int]], int]:
    """Pairs (better row, worse row), as many from each side as it has of the rows, and how many are possible."""
    pairs: list[tuple[int, int]] = []
    possible = 0
    for number, groups in enumerate(sides):
        share = sum(map(len, groups)) / len(ratings)
        count = round(share * (config.max_pairs or len(ratings)))
        drawn, there = draw_pairs(groups, ratings, config.margin, count, config.seed + number)
        pairs, possible = pairs + drawn, possible + there
    groups = [group for side in sides for group in side]
    most = max(max(ratings[i] for i in group) - min(ratings[i] for i in group) for group in groups)
    problem = f"the {len(groups)} prompts of {len(ratings)} rows have no two ratings that differ by more than {most:g}"
    if all(len(group) == 1 for group in groups):
        problem = f"each of the {len(groups)} prompts has one row, and a pair needs two"
    require(len(pairs) > 0, "margin", config.margin, f"{problem}; `reward` also learns from ratings as they are")
    return pairs, possible


def _pair(
    better: int, worse: int, rows: Rows, parts: Sequence[tuple[Any, Any, str]], ratings: Sequence[float]
) -> dict[str, Any]:
    prompt = parts[better][0]
    pair = {} if prompt == "" else {"prompt": prompt, **setting_of(rows[better], prompt)}
    pair |= {"chosen": parts[better][1], "rejected": parts[worse][1]}
    pair |= {"chosen_score": ratings[better], "rejected_score": ratings[worse]}
    for side, number in (("chosen", better), ("rejected", worse)):
        if rows[number].get("finish_reason") is not None:
            pair[f"{side}_finish_reason"] = rows[number]["finish_reason"]
    return pair
