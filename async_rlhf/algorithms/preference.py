"""Which samples of a prompt are best and worst, and losses on such pairs: DPO and IPO."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def best_rows(scores_PK: Tensor) -> Tensor:
    """Row of the best sample of each prompt; of equal scores the first."""
    return scores_PK.argmax(dim=1) + torch.arange(len(scores_PK)) * scores_PK.shape[1]


def best_and_worst_rows(scores_PK: Tensor) -> Tensor:
    """(2P,): rows of the best and the worst sample of each prompt; of equal scores the first."""
    return torch.stack([best_rows(scores_PK), best_rows(-scores_PK)], dim=1).flatten()


def differ(scores_PK: Tensor) -> Tensor:
    """1.0 for each prompt whose samples did not all get the same score."""
    return (scores_PK.amax(dim=1) > scores_PK.amin(dim=1)).float()


def preference_loss(
    chosen_logratios_U: Tensor, rejected_logratios_U: Tensor, beta: float, loss_type: Literal["sigmoid", "ipo"]
) -> Tensor:
    """Loss of each pair, with h the margin log pi(y+)/ref(y+) - log pi(y-)/ref(y-).

    "sigmoid" is -log sigmoid(beta h): Rafailov et al., "Direct Preference Optimization", arXiv 2305.18290, eq. 7.
    "ipo" is (h - 1/(2 beta))^2: Azar et al., arXiv 2310.12036, eq. 17, with summed log-probabilities.

    Args:
        chosen_logratios_U: log pi - log ref of the preferred completion, summed over its response tokens.
        rejected_logratios_U: the same for the other completion.
        beta: strength of the implicit KL penalty.
        loss_type: "sigmoid" or "ipo".

    Returns:
        (U,), one loss for each pair.
    """
    margins_U = chosen_logratios_U - rejected_logratios_U
    if loss_type == "sigmoid":
        return -F.logsigmoid(beta * margins_U)
    return (margins_U - 1 / (2 * beta)).square()


def stale_pair_weights(
    log_ratios_BT: Tensor, sampled_BT: Tensor, kind: Literal["wpo", "importance"], cap: float
) -> tuple[Tensor, Tensor]:
    """How much each pair counts because of its staleness: the product of both completions' weights min(r, cap).

    "importance": r = pi / mu of the completion. "wpo": the geometric mean of pi / mu over its tokens, after Zhou et
    al., "WPO", arXiv 2406.11827, who divide by what the policy would have drawn, as mu is not known there.

    Args:
        log_ratios_BT: log pi - log mu, 0 where no token was sampled, without gradient.
        sampled_BT: 1 where one was.
        kind: of weight.
        cap: at least 1.

    Returns:
        (U,) weights, and (U,) the share of each pair's completions that are at the cap.
    """
    logs_B = log_ratios_BT.sum(dim=1)
    if kind == "wpo":
        logs_B = logs_B / sampled_BT.sum(dim=1).clamp(min=1)
    ratios_B = logs_B.exp()
    capped_B = (ratios_B > cap).to(ratios_B.dtype)
    weights_B = ratios_B.clamp(max=cap)
    return weights_B[0::2] * weights_B[1::2], (capped_B[0::2] + capped_B[1::2]) / 2


def ranked_right(
    margins_U: Tensor, logps_B: Tensor, reference_B: Tensor, mask_BT: Tensor, autocast: torch.dtype | None = None
) -> Tensor:
    """1 for a positive margin, 0 for a negative one, 1/2 for one that may be rounding, as all are at the first step.

    The rounding assumed is the float32 spacing at the sums that form the margin, plus the spacing at 1 for each token:
    log-probabilities near 0 inherit that much error from the logits. Under autocast each token has an error of the
    size of that type's spacing, other in each pass whose rows differ; independent, they grow with the root of their
    number.
    """
    tokens_B = mask_BT.sum(dim=1)
    sizes_B = logps_B.abs() + reference_B.abs() + tokens_B
    sizes_U, tokens_U = sizes_B[0::2] + sizes_B[1::2], (tokens_B[0::2] + tokens_B[1::2]).clamp(min=1)
    rounding_U = torch.finfo(torch.float32).eps * sizes_U
    if autocast is not None:
        rounding_U = rounding_U + torch.finfo(autocast).eps * sizes_U / (2 * tokens_U).sqrt()
    return (torch.where(margins_U.abs() <= rounding_U, 0.0, margins_U).sign() + 1) / 2
