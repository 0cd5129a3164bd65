"""What rewards and the reference policy add to a batch, computed beside training or in their turn.

    python benchmarks/waits_rewards.py [--json] [--batches 16]

The real trainer with a generator process. Models wait as on devices of their own (waiting.py), so that cores do not
matter, and the reward function waits for half of a batch's time, as a remote judge does. For each:

    ratio       wall / max(sampling, training) of a batch, rewards and reference not included; 1 is perfect
    bound       the same by the schedule alone: a batch passes through all while S + 1 batches are under way, so wall is
                at least (sampling + the longer of rewards and reference + training) / (S + 1)
    predicted   wall by async-rlhf plan, from the times of the run with both in their turn
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import waits
from workload import reward

from async_rlhf.rewards.scorer import Scorer

WARM_UP = 5
PROMPTS, RESPONSE_TOKENS, REWARD_SECONDS = 24, 24, 0.5
SMALLEST = {"batches": 7, "prompts": 2, "reward_seconds": 0.02}


def slow_reward(seconds: float) -> Callable[..., list[float]]:
    """A reward function that takes so long."""

    def slowly(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        time.sleep(seconds)
        return reward(prompts, completions)

    return slowly


def run(batches: int, prompts: int, reward_seconds: float, staleness: int, beside: bool) -> dict[str, float]:
    """Seconds of each phase of a batch, means over those after the warm-up."""
    options = {"staleness": staleness, "batches": batches, "per_device_train_batch_size": prompts}
    where = {} if beside else {"reference_device": "learner"}
    with patch.object(Scorer, "begin", Scorer.begin if beside else lambda *_: None):
        found = waits.waiting_run("online_dpo", RESPONSE_TOKENS, options | where, slow_reward(reward_seconds))
    return found.mean_times(WARM_UP)


def figures(mean: dict[str, float], frozen: float, staleness: int, predicted: float) -> dict[str, float]:
    """What is shown of a run, given the longer of the times that rewards and reference take."""
    sampling, training = mean["generate"], mean["train"]
    longer = max(sampling, training)
    bound = max(1.0, (sampling + frozen + training) / (staleness + 1) / longer)
    shown = {"wall": mean["batch"], "sampling": sampling, "training": training}
    shown |= {"score": mean["score"], "reference": mean["annotate"]}
    return {**shown, "ratio": mean["batch"] / longer, "bound": bound, "predicted": predicted}


def measure(
    batches: int = 16, prompts: int = PROMPTS, reward_seconds: float = REWARD_SECONDS
) -> dict[str, dict[str, float]]:
    """Beside training, and in turn."""
    found = {}
    for staleness in (1, 2):
        beside, in_turn = (run(batches, prompts, reward_seconds, staleness, each) for each in (True, False))
        frozen = max(reward_seconds, in_turn["annotate"])
        apart = waits.seconds_of({**in_turn, "annotate": 0.0, "batch": in_turn["batch"] - in_turn["annotate"]})
        for name, mean, seconds in (
            ("beside training", beside, replace(apart, rewards=frozen)),
            ("in their turn", in_turn, waits.seconds_of(in_turn, score=reward_seconds)),
        ):
            predicted = waits.predicted(seconds, staleness)
            found[f"rewards {name}, S = {staleness}"] = figures(mean, frozen, staleness, predicted)
    return found


if __name__ == "__main__":
    waits.main(__doc__, measure, SMALLEST)
