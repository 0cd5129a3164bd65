"""Best-of-K: supervised learning on the best of K samples."""

from __future__ import annotations

from dataclasses import replace

from async_rlhf.algorithms.policy import kl_loss, kl_penalties, penalty_needs
from async_rlhf.algorithms.record import Algorithm
from async_rlhf.config.base import configuration, key
from async_rlhf.config.online import KLConfig
from async_rlhf.config.policy import KLPenaltyConfig
from async_rlhf.types import Experience, LossOutput, PolicyOutput


@configuration
class OnlineBoKConfig(KLPenaltyConfig):
    """Best-of-K: supervised learning on the best of K samples (Stiennon et al., arXiv 2009.01325, as a trainer)."""

    kl = key(lambda: KLConfig(coef=0.0))

    def check(self) -> None:
        super().check()
        rule = "must be false: the best of K samples are no samples of the policy, and no weight makes them that"
        self.require(not self.kl.corrected, "kl.corrected", rule)
        self.require(self.samples_per_prompt >= 2, "samples_per_prompt", "must be at least 2")


def best_of_k(experience: Experience, config: OnlineBoKConfig) -> Experience:
    """The sample of each prompt with the best reward; none for a prompt whose samples are all equally good."""
    from async_rlhf.algorithms.preference import best_rows, differ

    rewards_B = experience.scores_B - kl_penalties(experience, config.kl).sum(dim=1)
    rewards_PK = rewards_B.view(-1, config.samples_per_prompt)
    return replace(experience.select(best_rows(rewards_PK)), loss_weights_U=differ(rewards_PK))


def best_of_k_loss(output: PolicyOutput, rows: Experience, config: OnlineBoKConfig) -> LossOutput:
    """Minus the log-probability of each sample, plus the KL penalty of its tokens if the penalty is in the loss."""
    logps_B = (output.logprobs_BT * rows.sampled_BT).sum(dim=1)
    losses_B = (kl_loss(output, rows, config.kl).sum(dim=1) - logps_B) * rows.loss_weights_U
    metrics = {"loss/policy_avg": losses_B, "logps/chosen": logps_B * rows.loss_weights_U}
    return LossOutput(losses_B.sum(), {name: values_B.detach().sum() for name, values_B in metrics.items()})


BEST_OF_K = Algorithm(
    "best_of_k", OnlineBoKConfig, best_of_k, best_of_k_loss, needs=penalty_needs, rows_per_prompt=lambda config: 1
)
