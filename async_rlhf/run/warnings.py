"""What a run warns of as it trains: batches that teach nothing, answers cut off."""

from __future__ import annotations

from async_rlhf.config import OnlineConfig
from async_rlhf.run.callbacks import OnlineTrainerState

IDLE = 10
"""Batches in a row without an optimiser step after which a run says so."""


def idle_warning(state: OnlineTrainerState) -> str | None:
    """What to say of so many batches without a step; None if they are fewer, or it has been said."""
    if state.idle_batches != IDLE:
        return None
    return f"WARNING: no optimiser step in the last {IDLE} batches, up to {state.global_step}: {_why(state)}"


def tied_warning(config: OnlineConfig, state: OnlineTrainerState) -> str | None:
    """What to say of so many batches whose steps had nothing but the KL penalty; None as of :func:`idle_warning`."""
    penalty, baseline = config.kl_penalty, getattr(config, "baseline", "group")
    if state.tied_batches != IDLE or penalty is None or not penalty.coef or baseline != "group":
        return None
    return (
        f"WARNING: the last {IDLE} batches, up to {state.global_step}, have moved the policy by its KL penalty alone "
        f"(kl.coef {penalty.coef:g}), back to the reference: {_why(state)}"
    )


def nothing_learnt(state: OnlineTrainerState) -> str:
    """That a run made no optimiser step, and why."""
    what = f"no optimiser step in all {state.global_step} batches: the policy is the one that the run started from"
    return f"{what}; {_why(state)}"


def unrewarded(state: OnlineTrainerState) -> str:
    """How many completions had no reward, by the cause; "" if all had one."""
    count = sum(state.unrewarded.values())
    causes = sorted(state.unrewarded.items(), key=lambda each: -each[1])
    by_cause = ", ".join(f"{cause} ({number})" for cause, number in causes)
    return f"{count} of {state.completions} completions had no reward: {by_cause}" if count else ""


def _why(state: OnlineTrainerState) -> str:
    missing = unrewarded(state)
    if missing and sum(state.unrewarded.values()) == state.completions:
        return missing
    same = "all completions of a prompt had the same score, which does not say which is better: see samples.jsonl, and "
    same += "take a finer reward, other prompts, more samples_per_prompt or a higher temperature"
    return f"{missing}; of the others {same}" if missing else same


# Answers that are cut off, whose penalty can become the task unnoticed

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


def cut_off_episodes_warning(config: OnlineConfig, count: int, episodes: int) -> str | None:
    """That episodes end with an answer that was cut off; None if none does.

    Args:
        config: of the run.
        count: such episodes of the first batch.
        episodes: all of them.
    """
    if not count:
        return None
    return (
        f"WARNING: {count} of the first batch's {episodes} episodes ended with an answer that was cut off at "
        f"{config.generation.response_length} tokens (generation.response_length): nothing follows such an answer, "
        'where an endpoint may return it with finish_reason "length". Give answers more room'
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
