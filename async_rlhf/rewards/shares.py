"""What a reward worker says of its share of a batch: the same, however many workers there are."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from xxhash import xxh32

from async_rlhf.rewards.functions import RewardFunction, judge
from async_rlhf.system.random_state import capture, equal, seed_all

Judged = list[tuple[str, list[float | None], tuple[str, str, str] | None]]
"""For each function: its name, the rewards, and, if something is wrong with them, the message, its traceback, and the
cause."""


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
    ) -> Judged:
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

        def judged(part: slice) -> Judged:
            self._begin(prompts[part], completions[part])
            own = {name: values[part] for name, values in columns.items()}
            found: Judged = []
            given = self._functions, prompts[part], completions[part], own, timeout, retries
            for name, rewards, error in judge(*given):
                trace = traceback.format_exception(error.__cause__) if error is not None and error.__cause__ else []
                found.append((name, rewards, None if error is None else (str(error), "".join(trace), error.cause)))
                if error is not None and not skip:
                    break
            return found

        if not self._draw:
            found, after = judged(slice(None)), capture()
            self._begin(prompts, completions)
            self._draw = not equal(capture(), after)
            if not self._draw:
                return found
        rewards: dict[str, list[float | None]] = {}
        wrong: dict[str, tuple[str, str, str] | None] = {}
        for first in range(0, len(prompts), samples):
            for name, values, told in judged(slice(first, first + samples)):
                rewards.setdefault(name, []).extend(values)
                wrong[name] = wrong.get(name) or told
        return [(name, values, wrong[name]) for name, values in rewards.items()]

    def _begin(self, prompts: Sequence[str], completions: Sequence[str]) -> None:
        """Seed the global random generators for these completions."""
        text = repr((self._seed, prompts, completions))
        seed_all(xxh32(text.encode(errors="surrogatepass")).intdigest())
