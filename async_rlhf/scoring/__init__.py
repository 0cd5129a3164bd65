"""Scoring completions: reward model, reward functions, penalties."""

from async_rlhf.scoring.functions import (
    RewardError,
    call_reward_function,
    call_reward_functions,
    load_reward_functions,
)
from async_rlhf.scoring.scorer import Scorer

__all__ = ["RewardError", "Scorer", "call_reward_function", "call_reward_functions", "load_reward_functions"]
