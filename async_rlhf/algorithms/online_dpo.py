"""Online DPO and IPO: a preference loss on the best and the worst of K samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from async_rlhf.algorithms.record import Algorithm, Needs
from async_rlhf.config.base import configuration, key
from async_rlhf.config.online import IN_LOSS, OnlineConfig
from async_rlhf.types import Experience, LossOutput, PolicyOutput


@configuration
class OnlineDPOConfig(OnlineConfig):
    """Online DPO (arXiv 2402.04792) and IPO (arXiv 2310.12036) on the best and the worst of K samples."""

    beta: float = key(0.1, gt=0, main="training", **IN_LOSS)
    """Strength of the implicit KL penalty: smaller lets the policy move further. It applies to log-probabilities at
    generation.temperature, whose differences are larger than those at temperature 1."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """ "sigmoid" (DPO) or "ipo", which here takes sums over tokens, as its paper does, and not means: 1 / (2 beta) is a
    margin between whole completions, so choose beta smaller than for an implementation that takes means."""

    pair_weights: Literal["none", "wpo", "importance"] = "none"
    """How stale samples count: "none" takes all pairs alike; the others weigh a pair by the product of its completions'
    weights, without gradient. "importance": pi / mu of the completion. "wpo" (arXiv 2406.11827): the geometric mean of
    pi / mu over its tokens; the paper, which does not know mu, divides by what pi itself would have drawn."""
    pair_weight_cap: float = key(2.0, ge=1)
    """Upper bound of a completion's weight."""

    def check(self) -> None:
        super().check()
        self.require(self.samples_per_prompt >= 2, "samples_per_prompt", "must be at least 2")
        self.require_whole(self.pair_weights == "none", "pair_weights", '"none"')
        default = type(self).__dataclass_fields__["pair_weight_cap"].default
        used = self.pair_weights != "none" or self.pair_weight_cap == default
        self.require(used, "pair_weight_cap", 'must be left out with pair_weights "none"')


def best_and_worst(experience: Experience, config: OnlineDPOConfig) -> Experience:
    """The best and the worst scored sample of each prompt as a pair; of equal scores the first.

    Where all scores of a prompt are equal there is no preference: its pair has weight 0 and is not trained on.
    """
    from async_rlhf.algorithms.preference import best_and_worst_rows, differ

    scores_PK = experience.scores_B.view(-1, config.samples_per_prompt)
    rows_B = best_and_worst_rows(scores_PK)
    return replace(experience.select(rows_B), rows_per_unit=2, loss_weights_U=differ(scores_PK))


def online_dpo_loss(output: PolicyOutput, pairs: Experience, config: OnlineDPOConfig) -> LossOutput:
    """The preference loss of each pair, and metrics to monitor DPO."""
    import torch

    from async_rlhf.algorithms.preference import preference_loss, ranked_right, stale_pair_weights

    assert pairs.reference_logprobs_BT is not None
    sampled_BT = pairs.sampled_BT
    logps_B = (output.logprobs_BT * sampled_BT).sum(dim=1)
    reference_B = (pairs.reference_logprobs_BT * sampled_BT).sum(dim=1)
    ratios_B = logps_B - reference_B
    chosen_U, rejected_U = ratios_B[0::2], ratios_B[1::2]
    losses_U = preference_loss(chosen_U, rejected_U, config.beta, config.loss_type) * pairs.loss_weights_U
    rounded = torch.bfloat16 if config.in_bfloat16 else torch.float16 if config.fp16 else None
    metrics = {}
    if config.pair_weights != "none":
        log_ratios_BT = (output.logprobs_BT.detach() - pairs.behaviour_logprobs_BT) * sampled_BT
        loss_weights_U, capped_U = stale_pair_weights(
            log_ratios_BT, sampled_BT, config.pair_weights, config.pair_weight_cap
        )
        losses_U = losses_U * loss_weights_U
        metrics = {"policy/importance_weight": loss_weights_U, "policy/importance_capped": capped_U}
    metrics |= {
        "loss/policy_avg": losses_U,
        "rewards/chosen": config.beta * chosen_U,
        "rewards/rejected": config.beta * rejected_U,
        "rewards/accuracies": ranked_right(chosen_U - rejected_U, logps_B, reference_B, sampled_BT, rounded),
        "rewards/margins": config.beta * (chosen_U - rejected_U),
        "logps/chosen": logps_B[0::2],
        "logps/rejected": logps_B[1::2],
        "objective/scores_margin": pairs.scores_B[0::2] - pairs.scores_B[1::2],
    }
    sums = {name: (values_U.detach() * pairs.loss_weights_U).sum() for name, values_U in metrics.items()}
    return LossOutput(losses_U.sum(), sums)


ONLINE_DPO = Algorithm(
    "online_dpo",
    OnlineDPOConfig,
    best_and_worst,
    online_dpo_loss,
    needs=lambda config: Needs(reference=True),
    rows_per_prompt=lambda config: 2,
    rows_per_unit=2,
)
