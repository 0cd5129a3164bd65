"""Online preference losses beyond DPO and IPO, on any pairs of a prompt's samples: one algorithm record.

    async-rlhf train --algorithm recipes/pairs/pairs.py:PAIRS --train.loss_type hinge ...

README.md beside this file has each loss as its keys. With the defaults it is online DPO, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from async_rlhf.algorithms.preference import best_and_worst_rows, ranked_right
from async_rlhf.algorithms.record import Algorithm, Needs
from async_rlhf.config import OnlineConfig
from async_rlhf.config.base import key, require
from async_rlhf.types import Experience, LossOutput, PolicyOutput


@dataclass(frozen=True)
class PairsConfig(OnlineConfig):
    """A preference loss on pairs of K samples."""

    beta: float = key(0.1, gt=0, main="training")
    """Scale of the margin h between the chosen and the rejected completion."""
    loss_type: Literal["sigmoid", "hinge"] = "sigmoid"
    """ "sigmoid" is -log sigmoid(beta h - target); "hinge" is max(0, 1 - (beta h - target)), as SLiC has it
    (arXiv 2305.10425)."""
    target: float = key(0.0, ge=0)
    """How far beta h has to be ahead: SimPO's gamma (arXiv 2405.14734)."""
    with_reference: bool = True
    """Margins between log pi / ref; False: between log pi."""
    per_token: bool = False
    """Means over a completion's tokens in place of sums."""
    flipped: float = key(0.0, ge=0, lt=0.5)
    """Share of preferences that are taken to be the wrong way round."""
    robust: bool = False
    """With ``flipped``, the unbiased loss (robust DPO, arXiv 2403.00409); False: the conservative one (cDPO)."""
    nll: float = key(0.0, ge=0)
    """Weight of the chosen completion's negative log-likelihood per token, which is added (RPO, arXiv 2404.19733)."""
    pairs: Literal["best_and_worst", "first_two", "all"] = "best_and_worst"
    """Of a prompt's K samples. "first_two" is a random pair; "all" has K (K - 1) / 2."""
    min_gap: float = key(0.0, ge=0)
    """Pairs whose scores differ by no more than this are not trained on."""

    def check(self) -> None:
        super().check()
        self.require(self.samples_per_prompt >= 2, "samples_per_prompt", "must be at least 2")
        require(self.flipped > 0 or not self.robust, "robust", True, "must be false with flipped 0")


def pairs_of(experience: Experience, config: PairsConfig) -> Experience:
    """The pairs, the better sample first; of equal scores the first. Pairs without a gap have weight 0."""
    scores_PK = experience.scores_B.view(-1, config.samples_per_prompt)
    if config.pairs == "best_and_worst":
        rows_B = best_and_worst_rows(scores_PK)
    else:
        which = list(combinations(range(config.samples_per_prompt if config.pairs == "all" else 2), 2))
        firsts_P = torch.arange(len(scores_PK)) * config.samples_per_prompt
        rows = []
        for i, j in which:
            better_P = torch.where(scores_PK[:, i] >= scores_PK[:, j], i, j)
            rows += [firsts_P + better_P, firsts_P + i + j - better_P]
        rows_B = torch.stack(rows, dim=1).flatten()
    gaps_U = experience.scores_B[rows_B[0::2]] - experience.scores_B[rows_B[1::2]]
    return replace(experience.select(rows_B), rows_per_unit=2, loss_weights_U=(gaps_U > config.min_gap).float())


def penalty(ahead_U: Tensor, config: PairsConfig) -> Tensor:
    """The loss of pairs that are ahead by so much, all of them taken to be the right way round."""
    ahead_U = ahead_U - config.target
    return F.relu(1 - ahead_U) if config.loss_type == "hinge" else -F.logsigmoid(ahead_U)


def pairs_loss(output: PolicyOutput, pairs: Experience, config: PairsConfig) -> LossOutput:
    """The loss of each pair, and metrics as online DPO has them."""
    sampled_BT = pairs.sampled_BT
    tokens_B = sampled_BT.sum(dim=1).clamp(min=1)
    logps_B = (output.logprobs_BT * sampled_BT).sum(dim=1)
    reference_B = torch.zeros_like(logps_B)
    if config.with_reference:
        assert pairs.reference_logprobs_BT is not None
        reference_B = (pairs.reference_logprobs_BT * sampled_BT).sum(dim=1)
    ratios_B = logps_B - reference_B
    if config.per_token:
        ratios_B = ratios_B / tokens_B
    chosen_U, rejected_U = ratios_B[0::2], ratios_B[1::2]
    ahead_U = config.beta * (chosen_U - rejected_U)
    losses_U = penalty(ahead_U, config)
    if config.flipped:
        wrong_U, share = penalty(-ahead_U, config), config.flipped
        losses_U = (1 - share) * losses_U + (-share if config.robust else share) * wrong_U
        losses_U = losses_U / (1 - 2 * share) if config.robust else losses_U
    if config.nll:
        losses_U = losses_U - config.nll * (logps_B / tokens_B)[0::2]
    losses_U = losses_U * pairs.loss_weights_U
    rounded = torch.bfloat16 if config.in_bfloat16 else torch.float16 if config.fp16 else None
    metrics = {
        "loss/policy_avg": losses_U,
        "rewards/chosen": config.beta * chosen_U,
        "rewards/rejected": config.beta * rejected_U,
        "rewards/accuracies": ranked_right(chosen_U - rejected_U, logps_B, reference_B, sampled_BT, rounded),
        "rewards/margins": ahead_U,
        "logps/chosen": logps_B[0::2],
        "logps/rejected": logps_B[1::2],
        "objective/scores_margin": pairs.scores_B[0::2] - pairs.scores_B[1::2],
    }
    sums = {name: (values_U.detach() * pairs.loss_weights_U).sum() for name, values_U in metrics.items()}
    return LossOutput(losses_U.sum(), sums)


def _rows(config: PairsConfig) -> int:
    samples = config.samples_per_prompt
    return samples * (samples - 1) if config.pairs == "all" else 2


PAIRS = Algorithm(
    "pairs",
    PairsConfig,
    pairs_of,
    pairs_loss,
    needs=lambda config: Needs(reference=config.with_reference),
    rows_per_prompt=_rows,
    rows_per_unit=2,
)
