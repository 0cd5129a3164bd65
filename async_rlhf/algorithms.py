"""The table of algorithms. Each is a record: how scores become credit, and a pure loss on tensors.

``credit`` takes the experience of all K samples of each prompt, K neighbouring rows a prompt and one row a unit, and
returns the rows to train on with what their loss needs. ``loss`` takes the policy's log-probabilities of some of those
rows and returns sums. Neither knows a model, an optimiser or the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from async_rlhf.config import OnlineConfig, OnlineDPOConfig
from async_rlhf.objectives.preference import preference_loss
from async_rlhf.types import Experience, LossOutput


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One objective.

    Args:
        name: as in the configuration.
        config: its configuration.
        credit: (experience of all samples, config) -> experience to train on.
        loss: (logprobs_BT of the policy, experience of the same rows, config) -> sums.
    """

    name: str
    config: type[OnlineConfig]
    credit: Callable[[Experience, Any], Experience]
    loss: Callable[[Tensor, Experience, Any], LossOutput]


def best_and_worst(experience: Experience, config: OnlineDPOConfig) -> Experience:
    """The best and the worst scored sample of each prompt as a pair; of equal scores the first.

    Where all scores of a prompt are equal there is no preference: its pair has weight 0 and is not trained on.
    """
    scores_PK = experience.scores_B.view(-1, config.samples_per_prompt)
    best_P, worst_P = scores_PK.argmax(dim=1), scores_PK.argmin(dim=1)
    first_row_P = torch.arange(len(scores_PK)) * config.samples_per_prompt
    rows_B = torch.stack([first_row_P + best_P, first_row_P + worst_P], dim=1).flatten()
    pairs = replace(experience.select(rows_B), rows_per_unit=2)
    return replace(pairs, weights_U=(scores_PK.amax(dim=1) > scores_PK.amin(dim=1)).float())


def online_dpo_loss(logprobs_BT: Tensor, pairs: Experience, config: OnlineDPOConfig) -> LossOutput:
    """The preference loss of each pair, and what DPO is watched by."""
    mask_BT = pairs.response_mask_BT
    logps_B = (logprobs_BT * mask_BT).sum(dim=1)
    ratios_B = logps_B - (pairs.reference_logprobs_BT * mask_BT).sum(dim=1)
    chosen_U, rejected_U = ratios_B[0::2], ratios_B[1::2]
    losses_U = preference_loss(chosen_U, rejected_U, config.beta, config.loss_type) * pairs.weights_U
    with torch.no_grad():
        metrics = {
            "loss/policy_avg": losses_U,
            "rewards/chosen": config.beta * chosen_U,
            "rewards/rejected": config.beta * rejected_U,
            "rewards/accuracies": (chosen_U > rejected_U).float(),
            "rewards/margins": config.beta * (chosen_U - rejected_U),
            "logps/chosen": logps_B[0::2],
            "logps/rejected": logps_B[1::2],
            "objective/scores_margin": pairs.scores_B[0::2] - pairs.scores_B[1::2],
        }
        sums = {name: (values_U * pairs.weights_U).sum() for name, values_U in metrics.items()}
    return LossOutput(losses_U.sum(), sums)


ALGORITHMS = {
    "online_dpo": Algorithm("online_dpo", OnlineDPOConfig, best_and_worst, online_dpo_loss),
}
