"""Learning from rows that are given: fine-tuning on responses, and rewards from pairs or ratings.

These are the algorithms of the commands ``sft`` and ``reward``, which online training cannot choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from async_rlhf.algorithms.record import Algorithm
from async_rlhf.config.online import OnlineConfig
from async_rlhf.types import Experience, LossOutput, PolicyOutput

if TYPE_CHECKING:
    from torch import Tensor


def _rows_as_they_are(experience: Experience, config: Any) -> Experience:
    return experience


def _of(loss_sum: Tensor) -> LossOutput:
    return LossOutput(loss_sum, {"loss": loss_sum.detach()})


def response_loss(output: PolicyOutput, rows: Experience, config: Any) -> LossOutput:
    """Cross-entropy in nats, summed over the tokens that ``sampled_BT`` marks. A row weighs as many."""
    return _of(-output.logprobs_BT.sum())


def pair_loss(scores_B: Tensor, rows: Experience, config: Any, coefficient: float = 0.0) -> LossOutput:
    """Bradley-Terry's loss in nats, -log sigmoid(score(chosen) - score(rejected)), summed over pairs.

    Args:
        scores_B: chosen, rejected, chosen, ...
        rows: the pairs.
        config: not used.
        coefficient: weight of the square of the sum of a pair's scores (Eisenstein et al., arXiv 2312.09244).
    """
    from torch.nn.functional import logsigmoid

    scores_U2 = scores_B.view(-1, 2)
    loss = -logsigmoid(scores_U2[:, 0] - scores_U2[:, 1]).sum()
    return _of(loss + coefficient * scores_U2.sum(dim=1).square().sum())


def rating_loss(scores_B: Tensor, rows: Experience, config: Any) -> LossOutput:
    """Squared errors, summed over rows, whose ``scores_B`` are what the model's scores should be.

    That is the likelihood of ratings with normal errors of one size.
    """
    return _of((scores_B - rows.scores_B).square().sum())


SFT = Algorithm("sft", OnlineConfig, _rows_as_they_are, response_loss, supervised=True)
PAIRS = Algorithm("pairs", OnlineConfig, _rows_as_they_are, pair_loss, rows_per_unit=2, supervised=True)
RATINGS = Algorithm("ratings", OnlineConfig, _rows_as_they_are, rating_loss, supervised=True)
