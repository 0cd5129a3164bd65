"""Reward functions of a worker that sees a share of each batch: rewards do not depend on the number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from async_rlhf.rewards.functions import Outcome, RewardError, RewardFunction, judge
from async_rlhf.system.random_state import capture, equal, seed_by


class SharedFunctions:
    """Reward functions that see a share of each batch.

    What they draw from the global random generators depends on the run's seed, the prompt and its completions: not on
    what else is in the share, on what was asked before, or on restarts. So functions that draw are called prompt by
    prompt.

    Args:
        functions: by name.
        seed: of the run.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], seed: int) -> None:
        self._functions, self._seed, self._draw = functions, seed, False

    def call(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        samples: int,
        timeout: float | None,
        skip: bool,
        retries: int = 0,
    ) -> list[Outcome]:
        """The rewards of all functions; without ``skip``, only up to the first that fails.

        Args:
            prompts: of each completion.
            completions: ``samples`` consecutive ones of each prompt.
            columns: the other columns of each completion's row.
            samples: completions of a prompt.
            timeout: seconds for all functions together.
            skip: go on behind a function that fails.
            retries: how often a call that raises is made again.
        """

        def judged(part: slice) -> list[Outcome]:
            seed_by(self._seed, prompts[part], completions[part])
            columns_here = {name: values[part] for name, values in columns.items()}
            outcomes = []
            for outcome in judge(self._functions, prompts[part], completions[part], columns_here, timeout, retries):
                outcomes.append(outcome)
                if outcome[2] is not None and not skip:
                    break
            return outcomes

        if not self._draw:
            outcomes, after = judged(slice(None)), capture()
            seed_by(self._seed, prompts, completions)
            self._draw = not equal(capture(), after)
            if not self._draw:
                return outcomes
        rewards: dict[str, list[float | None]] = {}
        errors: dict[str, RewardError | None] = {}
        for first in range(0, len(prompts), samples):
            for name, values, error in judged(slice(first, first + samples)):
                rewards.setdefault(name, []).extend(values)
                errors[name] = errors.get(name) or error
        return [(name, values, errors[name]) for name, values in rewards.items()]
