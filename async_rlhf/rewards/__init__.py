"""Scoring completions: reward model, reward functions, penalties.

Named here are verifiable rewards: functions of completions and of the data's columns, without a model. Each is a
reward function; called with options, it returns the same reward function with those options:
``reward_funcs=[numeric_answer, length(maximum=80)]``, or in YAML ``async_rlhf.rewards:length(maximum=80)``.
"""

from async_rlhf.rewards.numeric import numeric_answer
from async_rlhf.rewards.text import distinct, exact_match, length, regex

__all__ = ["distinct", "exact_match", "length", "numeric_answer", "regex"]
