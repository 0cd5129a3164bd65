"""Prompts that are drawn by what they have taught so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from async_rlhf.config import ConfigError
from async_rlhf.data.stream import PromptStream
from async_rlhf.types import Prompt, ScoredBatch

_DRAWS = 1 << 32
"""Where the random numbers of batches begin, behind those of the stream's epochs."""


class Curriculum:
    """A share of the prompts is drawn by their *spread*, the rest evenly, each time from all rows of a stream.

    The spread is the standard deviation of the scores of a prompt's completions. If they score 0 or 1 and a share p of
    them succeeds, it is sqrt(p (1 - p)): largest for a prompt that is solved half the time, 0 for one that is always
    solved or never, which teaches nothing (arXiv 2502.12272 draws by p (1 - p)). Each time that a prompt comes, its
    spread moves halfway to what is found. Of one that has not come yet the mean of the others is assumed.

    What a batch gets is a function of the seed, its number and the scores noted so far. So a run is exact if these are.

    Args:
        stream: has the rows, and the seed.
        share: in [0, 1), of the prompts that are drawn by their spread.
    """

    def __init__(self, stream: PromptStream, share: float) -> None:
        self.stream, self.share = stream, share
        self.spreads_N = np.full(len(stream), np.nan)
        """Of each prompt of the stream; NaN if it has not come yet."""
        self._drawn: dict[int, int] = {}
        """The prompts of draws whose scores are not noted yet, by their numbers in the stream."""

    @property
    def epoch_size(self) -> int | None:
        """Prompts to draw from."""
        return len(self.stream)

    def fingerprint(self) -> str:
        """That of the stream."""
        return self.stream.fingerprint()

    def prompt(self, draw: int) -> Prompt:
        """The prompt of a draw whose scores are not noted yet; of any other the stream's."""
        number = self._drawn.get(draw)
        return self.stream.prompt(draw) if number is None else self.stream.numbered(draw, number)

    def batch(self, index: int, size: int) -> Sequence[Prompt]:
        """The prompts of batch ``index``, which counts from 1, by the scores noted so far.

        A prompt with the probability q comes size x q times, rounded up or down at random (systematic sampling), so
        none comes twice unless its probability is above 1 / size.
        """
        random = np.random.Generator(np.random.Philox(key=[self.stream.seed, _DRAWS + index]))
        order_N = random.permutation(len(self.stream))
        ends_N = self.probabilities()[order_N].cumsum()
        points_P = (np.arange(size) + random.random()) / size * ends_N[-1]
        places_P = np.minimum(ends_N.searchsorted(points_P, side="right"), len(order_N) - 1)
        first = (index - 1) * size
        self._drawn.update(enumerate(order_N[places_P].tolist(), start=first))
        return [self.prompt(draw) for draw in range(first, first + size)]

    def probabilities(self) -> np.ndarray:
        """(N,): of each prompt of the stream to be the next."""
        count = len(self.spreads_N)
        weights_N = np.where(np.isnan(self.spreads_N), _mean(self.spreads_N), self.spreads_N)
        total = math.fsum(weights_N)
        if not total > 0:
            return np.full(count, 1 / count)
        return (1 - self.share) / count + self.share * weights_N / total

    def note(self, scored: ScoredBatch) -> None:
        """Note the scores of a batch. A prompt without all of its scores is as it was."""
        spreads_P = scored.scores_PK.double().numpy().std(axis=1)
        mean = _mean(spreads_P if np.isnan(self.spreads_N).all() else self.spreads_N)
        for group, spread in zip(scored.batch.groups, spreads_P.tolist(), strict=True):
            number = self._drawn.pop(group.prompt.draw, None)
            if number is not None and not math.isnan(spread):
                before = self.spreads_N[number]
                self.spreads_N[number] = ((mean if np.isnan(before) else before) + spread) / 2

    def state(self) -> dict[str, Any]:
        """The prompts that are under way, for checkpoints, as JSON; the spreads are a tensor of their own there."""
        return {"drawn": sorted(self._drawn.items())}

    def restore(self, state: Mapping[str, Any], spreads_N: np.ndarray) -> None:
        """Restore what a checkpoint has.

        Raises:
            ConfigError: it is of another number of prompts.
        """
        if len(spreads_N) != len(self.spreads_N):
            right = f"must have the {len(spreads_N)} that the checkpoint's curriculum knows"
            raise ConfigError(f"train_dataset: has {len(self.spreads_N)} prompts of the right length; {right}")
        self.spreads_N, self._drawn = spreads_N, dict(state["drawn"])


def _mean(spreads_N: np.ndarray) -> float:
    """Of those that are known; 0 if none is."""
    known = spreads_N[~np.isnan(spreads_N)]
    return math.fsum(known) / len(known) if len(known) else 0.0
