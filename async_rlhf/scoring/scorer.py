"""From rollouts to scores: the reward model, the reward functions, and the penalty for not ending."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import OnlineConfig
from async_rlhf.data.tokenizer import decode_responses
from async_rlhf.forward import score_rows
from async_rlhf.scoring.functions import RewardError, RewardFunction, call_reward_function
from async_rlhf.types import Rollout, RolloutBatch, RolloutGroup, ScoredBatch


class Scorer:
    """The sum of a reward model and of reward functions, then the penalty.

    Args:
        tokenizer: of the policy.
        config: penalties and sizes.
        reward_model: reads the score at the last real token.
        reward_funcs: see :data:`~async_rlhf.scoring.functions.RewardFunction`.
        prompt_field: the column that holds the prompt's text; it is not passed on as a column.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: OnlineConfig,
        reward_model: PreTrainedModel | None = None,
        reward_funcs: Sequence[RewardFunction] = (),
        prompt_field: str = "query",
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.reward_model = reward_model
        self.reward_funcs = tuple(reward_funcs)
        self.prompt_field = prompt_field

    def __call__(self, batch: RolloutBatch) -> ScoredBatch:
        """Score every completion.

        Raises:
            RewardError: a reward is not a finite number, or a reward function failed.
        """
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        scores_R = torch.zeros(len(rollouts))
        if self.reward_model is not None:
            scores_R += self._model_scores(batch.groups)
        for function in self.reward_funcs:
            scores_R += torch.tensor(self._function_scores(function, batch.groups))
        if not torch.isfinite(scores_R).all():
            worst = int((~torch.isfinite(scores_R)).nonzero()[0])
            text = self.tokenizer.decode(list(rollouts[worst].tokens))
            raise RewardError(f"the reward of completion {text!r} is {scores_R[worst]}; must be a finite float32")
        ended_R = torch.tensor([rollout.finish_reason == "stop" for rollout in rollouts])
        if self.config.non_eos_penalty:
            scores_R = torch.where(ended_R, scores_R, torch.tensor(float(self.config.penalty_reward_value)))
        return ScoredBatch(batch, scores_R.view(len(batch.groups), -1), _metrics(scores_R, ended_R, rollouts))

    def _model_scores(self, groups: Sequence[RolloutGroup]) -> Tensor:
        assert self.reward_model is not None
        rows = [group.prompt.tokens + rollout.tokens for group in groups for rollout in group.rollouts]
        return score_rows(self.reward_model, rows, self.config.annotate_batch_size, self.config.bf16)

    def _function_scores(self, function: RewardFunction, groups: Sequence[RolloutGroup]) -> list[float]:
        samples = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        names = {name: None for prompt, _ in samples for name in prompt.columns if name != self.prompt_field}
        return call_reward_function(
            function,
            prompts=[str(prompt.columns[self.prompt_field]) for prompt, _ in samples],
            completions=decode_responses(self.tokenizer, [rollout for _, rollout in samples]),
            columns={name: [prompt.columns.get(name) for prompt, _ in samples] for name in names},
        )


def _metrics(scores_R: Tensor, ended_R: Tensor, rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(rollout.tokens) for rollout in rollouts]
    return {
        "objective/scores": scores_R.mean().item(),
        "objective/scores_std": scores_R.std(correction=0).item(),
        "val/num_eos_tokens": float(ended_R.sum()),
        "val/ended_share": ended_R.float().mean().item(),
        "val/response_length": sum(lengths) / len(lengths),
    }
