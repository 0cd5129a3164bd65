"""Batches that teach nothing, and completions without a reward: said while a run trains, and at its end."""

from __future__ import annotations

from async_rlhf.run.callbacks import OnlineTrainerState

IDLE = 10
"""Batches in a row without an optimiser step after which a run says so."""


def idle_warning(state: OnlineTrainerState) -> str | None:
    """What to say of so many batches without a step; None if they are fewer, or it has been said."""
    if state.idle_batches != IDLE:
        return None
    return f"WARNING: no optimiser step in the last {IDLE} batches, up to {state.global_step}: {_why(state)}"


def nothing_learnt(state: OnlineTrainerState) -> str:
    """That a run made no optimiser step, and why."""
    what = f"no optimiser step in all {state.global_step} batches: the policy is the one that the run started from"
    return f"{what}; {_why(state)}"


def unrewarded(state: OnlineTrainerState) -> str:
    """How many completions had no reward, by the cause; "" if all had one."""
    count = sum(state.unrewarded.values())
    causes = sorted(state.unrewarded.items(), key=lambda each: -each[1])
    told = ", ".join(f"{cause} ({number})" for cause, number in causes)
    return f"{count} of {state.completions} completions had no reward: {told}" if count else ""


def _why(state: OnlineTrainerState) -> str:
    missing = unrewarded(state)
    if missing and sum(state.unrewarded.values()) == state.completions:
        return missing
    same = "all completions of a prompt had the same score, which does not say which is better: see samples.jsonl, and "
    same += "take a finer reward, other prompts, more samples_per_prompt or a higher temperature"
    return f"{missing}; of the others {same}" if missing else same
