"""The zero point of a reward model's scores, and the calibration of its margins."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.forward import score_rows

logger = logging.getLogger(__name__)

_BINS = 10
_DRAWS = 200


def center_scores(
    model: PreTrainedModel, rows: Sequence[tuple[int, ...]], batch_size: int, parallel: Parallel = ALONE
) -> float:
    """Move the model's score by a constant, so that its mean over ``rows`` is 0 (Stiennon et al., arXiv 2009.01325).

    The head of transformers' classification models has no bias, but the last layer normalisation has. Adding
    -mean w / |w|^2 to it, with w the head's weights, changes every score by -mean, and every program can still load
    the model.

    Args:
        model: a reward model; its bias is changed in place.
        rows: the reference data, prompt and response as tokens.
        batch_size: rows of one pass.
        parallel: how its weights are spread. Every rank must call it.

    Returns:
        What was subtracted from every score: 0, with a warning, if the model has no such bias (RMS normalisation).
    """
    mean = score_rows(model, rows, batch_size, parallel).double().mean().item()
    norm = next((m for m in reversed(list(model.base_model.modules())) if isinstance(m, nn.LayerNorm)), None)
    if norm is not None and norm.bias is not None:
        before = _whole(norm.bias, model, parallel)
        weights_H = _whole(model.score.weight, model, parallel)[0]
        _set(norm.bias, before - (mean * weights_H / weights_H.square().sum()).to(before), parallel)
        after = score_rows(model, rows, batch_size, parallel).double().mean().item()
        if abs(after) <= 1e-3 * max(1.0, abs(mean)):
            return mean - after
        _set(norm.bias, before, parallel)  # this normalisation is not the last operation before the head after all
    logger.warning(
        "center: %s has no bias before its head, and its scores keep their mean of %.4f; "
        "center_rewards_coefficient keeps it near 0 in training",
        type(model).__name__,
        mean,
    )
    return 0.0


def _whole(parameter: nn.Parameter, model: PreTrainedModel, parallel: Parallel) -> Tensor:
    """A copy of a parameter, unsharded, on every rank."""
    parallel.barrier("centring", model)
    with parallel.gathered([parameter]):
        return parallel.whole(parameter.data).clone()


@torch.no_grad()
def _set(parameter: nn.Parameter, value: Tensor, parallel: Parallel) -> None:
    if parallel.is_sharded:
        parallel.swap_parameter(parameter, value if parallel.ranks.is_main else None)
    else:
        parameter.copy_(value)


def calibration(margins_R: Tensor) -> dict[str, Any]:
    """Whether the model is right on a share p of the pairs that it decides with probability p.

    Args:
        margins_R: score(chosen) - score(rejected) of held-out pairs. The model prefers one side with probability
            sigmoid(|margin|) (Bradley-Terry), and is right where the margin is positive; half right at 0.

    Returns:
        `eval_ece`, the expected calibration error over bins of that probability (Guo et al., arXiv 1706.04599, eq. 3);
        `eval_ece_floor`, what it would be on average if the model were perfectly calibrated, for this many pairs; and
        `calibration`, for every bin with pairs: confidence, accuracy, pairs.
    """
    confidence_R = margins_R.double().abs().sigmoid()
    right_R = (margins_R > 0).double() + (margins_R == 0).double() / 2
    bins_R = ((confidence_R - 0.5) * 2 * _BINS).long().clamp(max=_BINS - 1)
    table, error = [], 0.0
    for number in range(_BINS):
        inside_R = bins_R == number
        if not inside_R.any():
            continue
        confidence, accuracy = confidence_R[inside_R].mean().item(), right_R[inside_R].mean().item()
        table.append({"confidence": confidence, "accuracy": accuracy, "pairs": int(inside_R.sum())})
        error += inside_R.sum().item() / len(margins_R) * abs(accuracy - confidence)
    return {"eval_ece": error, "eval_ece_floor": _floor(confidence_R, bins_R), "calibration": table}


def _floor(confidence_R: Tensor, bins_R: Tensor) -> float:
    """The mean calibration error of models that are right with just these probabilities, by simulation."""
    chance, total = torch.Generator().manual_seed(0), 0.0
    for _ in range(_DRAWS):
        right_R = torch.rand(len(confidence_R), generator=chance, dtype=torch.float64) < confidence_R
        total += torch.zeros(_BINS).double().index_add_(0, bins_R, right_R.double() - confidence_R).abs().sum().item()
    return total / _DRAWS / len(confidence_R)
