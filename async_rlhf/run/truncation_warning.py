"""Answers that are cut off, and what that costs: a penalty can become the task unnoticed."""

from __future__ import annotations

from async_rlhf.config import OnlineConfig

MANY = 0.3
"""A share of cut-off answers from which a run says so at its first batch."""


def no_room_warning(config: OnlineConfig, share: float, positions: int | None) -> str | None:
    """That many episodes end because no token is left for another turn; None if they are few.

    Args:
        config: of the run.
        share: of the first batch's episodes.
        positions: of the model, if it states them.
    """
    if share < MANY:
        return None
    room = "" if positions is None else f", of which the model leaves {positions - config.prompt_cap:,} beside a prompt"
    return (
        f"WARNING: {share:.0%} of the first batch's episodes ended for want of room: with what the environment says, "
        f"they may have {config.generation.longest_episode:,} tokens after the prompt (generation.episode_length{room})"
        ". Give them more room, or have the environment say less"
    )


def cut_off_warning(config: OnlineConfig, ended_share: float) -> str | None:
    """What many cut-off answers cost; None if they are few or cost nothing.

    Args:
        config: of the run.
        ended_share: share of the first batch's answers that ended by themselves.
    """
    cost = _cost(config)
    if cost is None or 1 - ended_share < MANY:
        return None
    return (
        f"WARNING: {1 - ended_share:.0%} of the first batch's answers are cut off at "
        f"{config.generation.response_length} tokens (generation.response_length); {cost}. The policy may learn to be "
        "brief before anything else: give answers more room, or change the penalty"
    )


def _cost(config: OnlineConfig) -> str | None:
    """What becomes of an answer that is cut off, in words."""
    value = config.penalty_reward_value
    if config.non_eos_penalty == "add":
        return f"{value:g} is added to their score (non_eos_penalty)" if value else None
    if config.non_eos_penalty:
        return f"they are scored {value:g}, whatever they say (non_eos_penalty)"
    return "they are not trained on (mask_truncated)" if getattr(config, "mask_truncated", False) else None
